"""What a step without a fault costs under Regrow, against torchrun: two systems of the same ranks that step in turn.

    .venv/bin/python benchmarks/overhead.py --json            # forty turns each, about four minutes on two idle cores
    .venv/bin/python benchmarks/overhead.py --quick --json    # sixteen turns each, two minutes
    .venv/bin/python benchmarks/overhead.py --quick --width 128 --batch 8 --pause 0.2 --json    # the CPU waits, as it does for a GPU

Plain data parallelism on two ranks, one on each of two agents, so that each rank has a core; steps of 16 ms here, of 0.23 s with --batch 8192. Both
systems stand all the time; a file says whose turn it is (a few seconds), and only steps that lie within a turn count. Under Regrow
`run.complete` publishes, agrees, reports and saves when its interval says so; torchrun's ranks only step.

overhead_ratio: median over pairs of neighbouring turns of (seconds a step under Regrow / under torchrun) - 1; must be below 0.01.
ci95: by resampling the pairs. daemon_cpu_share: CPU-seconds of agents, shims, writers, supervisor and etcd in a second, of one core.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recovery import OWN_MARK, Regrow, System, Torchrun, running

from regrow.processes import marked, stat_fields

RANKS = 2
LIMITS = {"overhead_ratio": 0.01}
EDGE_SECONDS = 0.3
"""At the beginning of a turn the other side may still be in its last step."""
RESAMPLES = 2000


def steps_within(system: System, begin: float, end: float) -> list[float]:
    """Seconds of each step of rank 0 that lies between two instants, CLOCK_MONOTONIC."""
    times = [int(line.split()[0]) / 1e9 for line in (system.log / "0.steps").read_text().splitlines()]
    inside = [at for at in times if begin <= at <= end]
    return [after - before for before, after in itertools.pairwise(inside)]


def daemons_cpu(system: System) -> float:
    """CPU-seconds so far of all processes of the system but its workers, and of what they started and waited for."""
    workers = {system.pid_of(rank) for rank in range(RANKS)}
    ticks = 0
    for pid in set(marked(OWN_MARK, system.mark)) - workers:
        with contextlib.suppress(OSError):  # a probe that just ended: its parent has its time
            ticks += sum(int(value) for value in stat_fields(pid)[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def confidence(ratios: list[float]) -> tuple[float, float]:
    """95 % of the medians of resampled pairs."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def take_turns(systems: dict[str, System], turn: Path, turns: int, seconds: float) -> list[dict[str, float]]:
    """Mean seconds a step of each system, pair by pair; who begins alternates."""
    pairs: list[dict[str, float]] = []
    for number in range(turns):
        pair: dict[str, float] = {}
        for name in sorted(systems, reverse=bool(number % 2)):
            give(turn, name)
            begin = time.monotonic() + EDGE_SECONDS
            time.sleep(EDGE_SECONDS + seconds)
            pair[name] = statistics.mean(steps_within(systems[name], begin, begin + seconds))
        pairs.append(pair)
    return pairs


def give(turn: Path, name: str) -> None:
    """Whole or not at all."""
    turn.with_suffix(".new").write_text(name, encoding="ascii")
    turn.with_suffix(".new").replace(turn)


def measure(root: Path, turns: int, seconds: float, deadline: float, size: tuple[str, ...]) -> dict[str, Any]:
    """Both systems, started one after the other."""
    turn = root / "turn"
    give(turn, "regrow")
    flags = ("--turn", f"{turn}:regrow", *size)
    waits = {"REGROW_POLICY_HANG_FLOOR_SECONDS": "300"}  # while it is the other's turn it makes no progress
    script = light(root / "regrow", flags)
    ours = Regrow(root / "regrow", deadline, "--global-batch", "64", script=script, nodes=RANKS, slots=1, **waits)
    with running(ours):
        started(ours)
        give(turn, "torchrun")
        flags = ("--turn", f"{turn}:torchrun", *size)
        with running(Torchrun(root / "torchrun", deadline, shared=False, nodes=RANKS, slots=1, flags=flags)) as theirs:
            started(theirs)
            cpu, began = daemons_cpu(ours), time.monotonic()
            pairs = take_turns({"regrow": ours, "torchrun": theirs}, turn, turns, seconds)
            share = (daemons_cpu(ours) - cpu) / (time.monotonic() - began)
    ratios = [pair["regrow"] / pair["torchrun"] - 1.0 for pair in pairs]
    low, high = confidence(ratios)
    return {
        "overhead_ratio": statistics.median(ratios),
        "ci95_low": low,
        "ci95_high": high,
        "daemon_cpu_share": share,
        "step_seconds": statistics.median(pair["torchrun"] for pair in pairs),
        "pairs": pairs,
    }


def light(folder: Path, flags: tuple[str, ...]) -> tuple[str, ...]:
    """The job's command line."""
    return (str(Path(__file__).parent / "jobs" / "light.py"), "--out", str(folder / "log"), *flags)


def started(system: System) -> None:
    """Until each rank took some steps."""
    system.until(lambda: len(system.last_steps(RANKS)) == RANKS and min(step for _, step in system.last_steps(RANKS)) > 5, "five steps")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns; ends within four minutes")
    parser.add_argument("--turns", type=int, default=0, help="pairs of turns (40, quick 16)")
    parser.add_argument("--turn-seconds", type=float, default=2.5)
    parser.add_argument("--width", type=int, default=2048, help="of the model")
    parser.add_argument("--batch", type=int, default=512, help="samples of a rank in a step")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of a step in which the CPU waits, as it does for a GPU")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    deadline = time.monotonic() + (225.0 if args.quick else 1800.0)
    root = Path(tempfile.mkdtemp(prefix="rg-"))
    try:
        size = ("--width", str(args.width), "--batch", str(args.batch), "--pause", str(args.pause))
        found = measure(root, args.turns or (16 if args.quick else 40), args.turn_seconds, deadline, size)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    pairs = found.pop("pairs")
    machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "platform": platform.platform(), "python": platform.python_version()}
    document = {"figures": found, "limits": LIMITS, "samples": {"pairs": pairs}, "machine": machine}
    print(json.dumps(document, indent=1) if args.json else "\n".join(f"{name:20} {value:.4g}" for name, value in found.items()))


if __name__ == "__main__":
    main()
