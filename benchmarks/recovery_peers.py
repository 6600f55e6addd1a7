"""Other systems that recover, on the light job of recovery.py: kill of a worker among eight, to the first step beyond the frontier.

    python -m venv /tmp/ft && /tmp/ft/bin/pip install torch torchft
    python -m venv /tmp/nv && /tmp/nv/bin/pip install torch nvidia-resiliency-ext
    python -m venv /tmp/lm && /tmp/lm/bin/pip install torch lm-resiliency
    .venv/bin/python benchmarks/recovery_peers.py --torchft /tmp/ft/bin/python --nvrx /tmp/nv/bin/python --lm /tmp/lm/bin/python --json

Each rank is a process of its own. torchft: eight replica groups of one rank, a lighthouse that takes a replica for gone after
`--heartbeat` seconds without a beat; seven survivors go on. nvidia-resiliency-ext: `inprocess.Wrapper` with its own intervals; seven go
on. lm-resiliency: torchrun with `--rdzv-backend=lm_resiliency`, four agents; all eight are started anew. Nobody starts a new worker for
the first two: what is measured is when the others go on. A step counts when all that go on have applied it. `--own shipped`: torchrun with
the store that its workers share with it; `--own preloaded`: torchrun's agent with workers forked from a server that has done the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recovery import JOBS, NODES, SLOTS, VICTIM, OutOfTimeError, System, Torchrun, running

WORLD = NODES * SLOTS
SETTLE_STEPS = 15
CLOSE_SECONDS = 15.0
PEERS = ("torchft", "nvrx", "lm")
OWN = ("shipped", "preloaded")
"""torchrun of this interpreter: as shipped, and with workers forked from a server that has everything imported."""


def free_port() -> int:
    """For servers of others that want a number."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks(System):
    """Eight ranks by hand, and a store that outlives them."""

    def __init__(self, folder: Path, deadline: float, peer: str, python: str, heartbeat: float) -> None:
        super().__init__(folder, deadline)
        store, master, light = free_port(), free_port(), free_port()
        serve = f"import time, torch.distributed as d; s = d.TCPStore('127.0.0.1', {store}, None, True, wait_for_workers=False); time.sleep(1e6)"
        self.spawn(sys.executable, "-c", serve)
        if peer == "torchft":
            lighthouse = str(Path(python).with_name("torchft_lighthouse"))
            self.spawn(
                *(lighthouse, "--bind", f"[::]:{light}", "--min_replicas", "2", "--join_timeout_ms", "1000", "--quorum_tick_ms", "100"),
                *("--heartbeat_timeout_ms", str(int(heartbeat * 1000))),
            )
        for rank in range(WORLD):
            self.spawn(
                *(python, str(JOBS / "light_peers.py"), "--peer", peer, "--store", str(store), "--out", str(self.log)),
                RANK=str(rank),
                WORLD_SIZE=str(WORLD),
                LOCAL_RANK=str(rank),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(master),
                TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{light}",
            )
        self.survivors = [rank for rank in range(WORLD) if rank != VICTIM]

    def kill(self) -> None:
        """The victim; its end is no surprise."""
        os.kill(self.pid_of(VICTIM), signal.SIGKILL)
        self.processes = [process for process in self.processes if process.pid != self.pid_of(VICTIM)]


class LmResiliency(System):
    """torchrun with its rendezvous; the victim is one of its eight workers."""

    def __init__(self, folder: Path, deadline: float, python: str) -> None:
        super().__init__(folder, deadline)
        port = free_port()
        for _ in range(NODES):
            self.spawn(
                *(python, "-m", "torch.distributed.run", "--nnodes", str(NODES), "--nproc-per-node", str(SLOTS), "--max-restarts", "20"),
                *("--rdzv-backend", "lm_resiliency", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "benchmark"),
                *("--rdzv-conf", f"store_type=tcp,lm_resiliency_restart_context_path={folder / 'context.json'}"),
                *(str(JOBS / "light.py"), "--plain", "--out", str(self.log)),
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            )


class Preloaded(System):
    """Four agents of torchrun whose workers are forked with the imports done; the store is not shared, as in the fair baseline."""

    def __init__(self, folder: Path, deadline: float) -> None:
        super().__init__(folder, deadline)
        endpoint = f"127.0.0.1:{free_port()}"
        for _ in range(NODES):
            self.spawn(
                *(sys.executable, str(JOBS / "preloaded.py"), endpoint, str(NODES), str(SLOTS)),
                *(str(JOBS / "light.py"), "--plain", "--out", str(self.log)),
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            )

    def close(self) -> None:
        """Ask first: killed at once, multiprocessing leaves its semaphores in /dev/shm."""
        for process in self.processes:
            process.terminate()
        end = time.monotonic() + CLOSE_SECONDS
        while time.monotonic() < end and any(process.poll() is None for process in self.processes):
            time.sleep(0.05)
        super().close()


def steps_of(system: System, rank: int) -> list[tuple[float, int]]:
    """(CLOCK_MONOTONIC seconds, step) of a rank."""
    path = system.log / f"{rank}.steps"
    pairs = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
    return [(int(at) / 1e9, int(step)) for at, step in pairs]


def recover(system: System) -> float:
    """Seconds from the kill to the first step beyond what any rank had applied."""
    going_on = system.survivors if isinstance(system, Ranks) else list(range(WORLD))
    newest = lambda rank: (steps_of(system, rank) or [(0.0, 0)])[-1][1]  # noqa: E731
    system.until(lambda: min(newest(rank) for rank in range(WORLD)) > SETTLE_STEPS, "a training system")
    at = time.monotonic()
    if isinstance(system, Ranks):
        system.kill()
    else:
        os.kill(system.pid_of(VICTIM), signal.SIGKILL)
    frontier = max(step for rank in range(WORLD) for when, step in steps_of(system, rank) if when <= at)
    system.until(lambda: min(newest(rank) for rank in going_on) > frontier, "a step beyond the frontier")
    return max(next(when for when, step in steps_of(system, rank) if when > at and step > frontier) for rank in going_on) - at


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer in PEERS:
        parser.add_argument(f"--{peer}", default="", metavar="PYTHON", help=f"an interpreter that has {peer}")
    parser.add_argument("--own", default="", help=f"comma-separated, of this interpreter: {', '.join(OWN)}")
    parser.add_argument("--heartbeat", type=float, default=1.0, help="seconds after which torchft's lighthouse takes a replica for gone")
    parser.add_argument("--limit", type=float, default=80.0, help="seconds for each system")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    own = tuple(word for word in args.own.split(",") if word)
    samples: dict[str, list[float]] = {peer: [] for peer in (*PEERS, *own)}
    missing: dict[str, str] = {peer: "no interpreter given" for peer in PEERS if not getattr(args, peer)}
    root = Path(tempfile.mkdtemp(prefix="rg-"))
    try:
        for number in range(args.repeats):
            for peer in samples:
                if peer not in missing:
                    measure(peer, root / f"{peer}{number}", args, samples, missing)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    document: dict[str, Any] = {
        "figures": {f"{peer}_seconds": statistics.median(values) for peer, values in samples.items() if values},
        "limits": {},
        "missing": missing,
        "samples": samples,
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg(), "platform": platform.platform(), "python": platform.python_version()},
    }
    print(json.dumps(document, indent=1) if args.json else document["figures"] | missing)


def start(peer: str, folder: Path, deadline: float, args: argparse.Namespace) -> System:
    """One system by its name."""
    if peer == "shipped":
        return Torchrun(folder, deadline, shared=True)
    if peer == "preloaded":
        return Preloaded(folder, deadline)
    python = getattr(args, peer)
    return LmResiliency(folder, deadline, python) if peer == "lm" else Ranks(folder, deadline, peer, python, args.heartbeat)


def measure(peer: str, folder: Path, args: argparse.Namespace, samples: dict[str, list[float]], missing: dict[str, str]) -> None:
    """One system, one kill. What does not recover is not tried again."""
    deadline = time.monotonic() + args.limit
    system = start(peer, folder, deadline, args)
    try:
        with running(system):
            samples[peer].append(recover(system))
    except OutOfTimeError as error:
        missing[peer] = str(error)
        for path in sorted(folder.glob("out*.log")):
            sys.stderr.write(f"--- {peer} {path.name}\n{path.read_text(errors='replace')[-600:]}\n")
    sys.stderr.write(f"{peer}: {samples[peer]} {missing.get(peer, '')}\n")


if __name__ == "__main__":
    main()
