"""The other faults of the recovery table: a whole node, an agent, the supervisor, a stopped worker, growth; and by ranks.

    .venv/bin/python benchmarks/recovery_faults.py [--quick] [--only node,stop] --json

The light job of recovery.py on four agents with two workers each, survivors in place. Times are from the fault to the first
completed step beyond the frontier, by the ranks' own step files. node: everything of a node is killed, the job goes on with six
ranks; growth: it returns, `pause` is the longest time without a completed step meanwhile. stop: a worker gets SIGSTOP, the
hang limit is 1 s and is taken off. agent, supervisor: `steps_lost`, and the longest time without a completed step less
the usual one. ranks: a worker is killed among 2, 4, 8 and 16, in place and by the warm fork. silent: everything of a node is stopped (SIGSTOP), so
that its connections stand and say nothing, as those of a host that lost its network; the limit of 10 s is taken off. torchrun_node: an
agent of torchrun that does not host the store is killed with its workers, store unshared, tuned to notice at once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from recovery import NODES, SETTLE_SECONDS, SLOTS, OutOfTimeError, Regrow, System, Torchrun, running

from regrow.processes import MARK, marked
from regrow.supervisor.core.policy import Policy

HANG_SECONDS = 1.0
SILENCE_SECONDS = Policy().reconnect_seconds
"""So long progress excuses a host that says nothing (docs/failure-model.md): the decision is made when it is over."""
QUIET_SECONDS = 3.0
"""After a fault that must cost nothing, steps are watched for so long."""
SETTLE_STEPS = 15


def lines_of(system: System) -> dict[int, list[tuple[float, int]]]:
    """{rank: [(CLOCK_MONOTONIC seconds, step)]}"""
    found: dict[int, list[tuple[float, int]]] = {}
    for path in system.log.glob("*.steps"):
        pairs = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.stem)] = [(int(at) / 1e9, int(step)) for at, step in pairs]
    return found


def applied(system: System, ranks: int) -> list[int]:
    """The newest step of each of the first ranks."""
    lines = lines_of(system)
    return [lines[rank][-1][1] if lines.get(rank) else 0 for rank in range(ranks)]


def settle(system: Regrow, ranks: int) -> None:
    """Some steps of all these ranks from now on, and a checkpoint."""
    start, rested = max(applied(system, ranks)), time.monotonic() + SETTLE_SECONDS
    system.until(lambda: min(applied(system, ranks)) > start + SETTLE_STEPS and time.monotonic() > rested, "a training system")
    system.until(lambda: (system.job().get("checkpoint") or {}).get("step"), "a checkpoint")


def beyond(system: System, at: float, before: int, after: int) -> float:
    """Seconds from the fault until `after` ranks have all applied a step beyond what any of `before` ranks had."""
    frontier = max(step for rank in range(before) for when, step in lines_of(system)[rank] if when <= at)
    system.until(lambda: min(applied(system, after)) > frontier, "a step beyond the frontier")
    lines = lines_of(system)
    return max(next(when for when, step in lines[rank] if when > at and step > frontier) for rank in range(after)) - at


def longest_gap(system: Regrow, since: float, until: float) -> float:
    """Longest time without a step of rank 0."""
    times = [since, *(when for when, _ in lines_of(system)[0] if since < when < until), until]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def node_and_growth(system: Regrow) -> dict[str, dict[str, Any]]:
    """Lose a node, and grow back."""
    world = NODES * SLOTS
    settle(system, world)
    at = time.monotonic()
    system.kill_node("n2")
    found = {"node": {"seconds": beyond(system, at, world, world - SLOTS), "incident": system.incident(0)["phases"]}}
    began = time.monotonic()
    known = lines_of(system).get(world - 1, [])
    system.until(lambda: len(lines_of(system).get(world - 1, [])) > len(known) + 5, "eight ranks again")
    found["growth"] = {"pause": longest_gap(system, began, time.monotonic())}
    return found


def silent(system: Regrow) -> dict[str, Any]:
    """A node falls silent with all that runs on it; six ranks go on."""
    world = NODES * SLOTS
    settle(system, world)
    at = time.monotonic()
    for pid in marked(MARK, str(system.state_of("n2"))):
        os.kill(pid, signal.SIGSTOP)
    return {"seconds": beyond(system, at, world, world - SLOTS) - SILENCE_SECONDS, "incident": system.incident(0)["phases"]}


def torchrun_node(folder: Path, deadline: float) -> dict[str, Any]:
    """torchrun loses an agent and its workers, and goes on with three."""
    tuning = ("--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2", "--monitor-interval", "0.1")
    world = NODES * SLOTS
    with running(Torchrun(folder, deadline, shared=False, least=NODES - 1, tuning=tuning)) as system:
        system.until(lambda: min(applied(system, world)) > SETTLE_STEPS, "a training system")
        agents = [psutil.Process(process.pid) for process in system.processes]
        lost = next(agent for agent in reversed(agents) if not any(one.status == "LISTEN" for one in agent.net_connections("tcp")))
        workers = lost.children()
        at = time.monotonic()
        for process in (lost, *workers):
            process.kill()
        system.processes = [process for process in system.processes if process.pid != lost.pid]
        return {"seconds": beyond(system, at, world, world - SLOTS)}


def stop(system: Regrow) -> dict[str, Any]:
    """SIGSTOP of a worker in the middle of training."""
    world = NODES * SLOTS
    settle(system, world)
    at = time.monotonic()
    os.kill(system.pid_of(5), signal.SIGSTOP)
    return {"seconds": beyond(system, at, world, world) - HANG_SECONDS, "incident": system.incident(0)["phases"]}


def costs_nothing(system: Regrow, kill: Callable[[], None]) -> dict[str, Any]:
    """Kill a part of the control plane and watch the steps."""
    settle(system, NODES * SLOTS)
    before = time.monotonic()
    system.until(lambda: time.monotonic() > before + QUIET_SECONDS, "steps before")
    at = time.monotonic()
    kill()
    system.until(lambda: time.monotonic() > at + QUIET_SECONDS, "steps after")
    usual, then = longest_gap(system, before, at), longest_gap(system, at, at + QUIET_SECONDS)
    steps = [step for _, step in lines_of(system)[0]]
    return {"steps_lost": len(steps) - len(set(steps)), "usual_gap": usual, "gap": then, "seconds": max(0.0, then - usual)}


def processes(system: Regrow, word: str) -> list[int]:
    """Of this system, by command line."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(system.folder).encode() in (entry / "environ").read_bytes():
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found += [int(entry.name)] if word in line else []
    return found


def kill_all(system: Regrow, word: str) -> None:
    """SIGKILL, whoever has this in the command line."""
    for pid in processes(system, word)[:1]:
        os.kill(pid, signal.SIGKILL)


def by_ranks(root: Path, deadline: float, world: int, flag: str) -> float:
    """Median seconds of three kills among so many ranks."""
    nodes, slots = min(NODES, world), max(1, world // NODES)
    values: list[float] = []
    folder = root / f"{world}{flag[2:6]}"
    with running(Regrow(folder, deadline, "--global-batch", "64", flag, nodes=nodes, slots=slots)) as system:
        assert isinstance(system, Regrow)
        for _ in range(3):
            settle(system, world)
            at = time.monotonic()
            os.kill(system.pid_of(world - 1), signal.SIGKILL)
            values.append(beyond(system, at, world, world))
    return statistics.median(values)


def measure(name: str, root: Path, deadline: float, worlds: tuple[int, ...]) -> dict[str, Any]:
    """One row, in a system of its own."""
    if name == "ranks":
        return {
            name: {
                str(world): {flag[2:]: by_ranks(root, deadline, world, flag) for flag in ("--in-place", "--no-in-place")}
                for world in worlds
            }
        }
    if name == "torchrun_node":
        return {name: torchrun_node(root / name, deadline)}
    environment: dict[str, Any] = (
        {"REGROW_POLICY_HANG_FLOOR_SECONDS": str(HANG_SECONDS)} if name == "stop" else {"REGROW_POLICY_GROWTH_COOLDOWN_SECONDS": "3"}
    )
    with running(Regrow(root / name, deadline, "--global-batch", "64", "--in-place", **environment)) as system:
        assert isinstance(system, Regrow)
        if name == "node":
            return node_and_growth(system)
        if name in ("stop", "silent"):
            return {name: stop(system) if name == "stop" else silent(system)}
        word = "regrow agent --node n1" if name == "agent" else "regrow supervisor"
        return {name: costs_nothing(system, lambda: kill_all(system, word))}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 and 8 ranks only; ends within four minutes")
    parser.add_argument("--only", default="node,stop,agent,supervisor,silent,torchrun_node,ranks")
    parser.add_argument("--ranks", default="", help="numbers of ranks for the row ranks; by default 2,4,8,16, with --quick 2,8")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    deadline = time.monotonic() + (225.0 if args.quick else 1800.0)
    worlds = tuple(int(word) for word in (args.ranks or ("2,8" if args.quick else "2,4,8,16")).split(","))
    samples: dict[str, Any] = {}
    missing: dict[str, str] = {}
    root = Path(tempfile.mkdtemp(prefix="rg-"))
    try:
        for name in args.only.split(","):
            try:
                samples |= measure(name, root, deadline, worlds)
            except OutOfTimeError as error:
                missing[name] = str(error)
            sys.stderr.write(f"{name}: {samples.get(name, missing.get(name))}\n")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    figures = {f"{name}_seconds": row["seconds"] for name, row in samples.items() if "seconds" in row}
    figures |= {f"{name}_steps_lost": row["steps_lost"] for name, row in samples.items() if "steps_lost" in row}
    figures |= {"growth_pause_seconds": samples["growth"]["pause"]} if "growth" in samples else {}
    document = {
        "figures": figures,
        "limits": {"agent_steps_lost": 0, "supervisor_steps_lost": 0},
        "missing": missing,
        "samples": samples,
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg(), "platform": platform.platform(), "python": platform.python_version()},
    }
    print(json.dumps(document, indent=1) if args.json else "\n".join(f"{name:28} {value:.3g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
