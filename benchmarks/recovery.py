"""Recovery figures: from a fault to the first completed step beyond the frontier, against torchrun and the floor of the run.

    .venv/bin/python benchmarks/recovery.py --json            # five repeats, about fifteen minutes on two idle cores
    .venv/bin/python benchmarks/recovery.py --quick --json    # ends within four minutes; what had no time is null, with the reason

Eight ranks on four agents of one machine, a worker killed with SIGKILL. Peers run in turn in the same run: torchrun as
shipped, and torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, the fair baseline (its workers else read stale addresses in
the agents' store, pytorch issue 135712). Both load a checkpoint of the very last step, so they compute nothing twice. The
floor is what processes need that are there already: destroy the group, make it anew, load, take a step.

torchrun_over_warm_fork, torchrun_over_in_place: median recovery of torchrun (unshared) over that of the rung; warm_memory: the warm
fork with snapshots in memory (--memory-interval 0.1) between checkpoints every two seconds.
warm_fork_over_floor, in_place_over_floor: median recovery of the rung over the floor. heavy_steps: the 3D example loses a
node; seconds to the first new step on the smaller mesh, in steps of the mesh before. cpu_seconds: of all processes of a
system from the fault to the new step. phases: what the supervisor says of its own recoveries, with CPU-seconds of the system
by phase (sampled every 50 ms).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Self

from regrow.processes import MARK, kill_marked, marked, stat_fields

NODES, SLOTS = 4, 2
OWN_MARK = "REGROW_BENCHMARK"
LIMITS = {
    "torchrun_over_warm_fork": 20.0,
    "torchrun_over_in_place": 25.0,
    "warm_fork_over_floor": 3.0,
    "in_place_over_floor": 3.0,
    "heavy_steps": 3.5,
}
JOBS = Path(__file__).parent / "jobs"
VICTIM = 5
SETTLE_SECONDS = 3.0
"""Faults are at least so far apart: what a launcher prepares for the next one, it has prepared."""
QUICK_SECONDS = 225.0
SYSTEMS = ("torchrun_unshared", "warm_fork", "warm_memory", "in_place", "heavy", "torchrun_shipped")


class OutOfTimeError(Exception):
    """The time of the run is used up before this was measured."""


class System:
    """A launcher with eight ranks of the light job, and what can be seen from outside."""

    def __init__(self, folder: Path, deadline: float) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.log.mkdir(parents=True)
        self.deadline = deadline
        self.mark = str(folder)
        self.processes: list[subprocess.Popen[bytes]] = []

    def spawn(self, *argv: str, **environment: str) -> None:
        """Start a process of this system."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", OWN_MARK: self.mark, **environment}
        with (self.folder / f"out{len(self.processes)}.log").open("wb") as log:
            self.processes.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=self.folder))

    def close(self) -> None:
        """Kill everything that is left of it."""
        for process in self.processes:
            process.kill()
            process.wait()
        kill_marked(OWN_MARK, self.mark)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Poll every 10 ms."""
        while True:
            found = condition()
            if found:
                return found
            ended = [process.returncode for process in self.processes if process.poll() is not None]
            if ended:
                tail = (self.folder / "out0.log").read_text(errors="replace")[-500:]
                raise OutOfTimeError(f"{what} was not reached: the launcher ended with {ended[0]}: {tail}")
            if time.monotonic() > self.deadline:
                raise OutOfTimeError(f"{what} was not reached in the time that was left")
            time.sleep(0.01)

    def last_steps(self, num_ranks: int) -> list[tuple[int, int]]:
        """(monotonic ns, step) of the newest line of each rank."""
        found: list[tuple[int, int]] = []
        for rank in range(num_ranks):
            with contextlib.suppress(OSError, IndexError, ValueError):
                tail = (self.log / f"{rank}.steps").read_bytes()[-64:].rpartition(b"\n")[0].splitlines()[-1].split()
                found.append((int(tail[0]), int(tail[1])))
        return found

    def completed(self) -> int:
        """The highest step that all ranks have applied; 0 for none."""
        steps = self.last_steps(NODES * SLOTS)
        return min(step for _, step in steps) if len(steps) == NODES * SLOTS else 0

    def first_beyond(self, frontier: int, after_ns: int) -> float:
        """When the first step beyond the frontier was complete, CLOCK_MONOTONIC seconds."""
        times: list[int] = []
        for rank in range(NODES * SLOTS):
            lines = (line.split() for line in (self.log / f"{rank}.steps").read_text().splitlines())
            times.append(next(int(at) for at, step in lines if int(at) > after_ns and int(step) > frontier))
        return max(times) / 1e9

    def pid_of(self, rank: int) -> int:
        """Pid of a rank, as it told."""
        return int((self.log / f"{rank}.pid").read_text())


class Cpu:
    """CPU-seconds of all processes of a system, sampled in a thread while it is entered."""

    def __init__(self, mark: str, period_seconds: float = 0.05) -> None:
        self._mark = mark
        self._period = period_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._highest = 0.0
        self.samples: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        self.samples.append((time.monotonic(), self._total()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.samples.append((time.monotonic(), self._total()))

    def at(self, instant: float) -> float:
        """CPU-seconds used until an instant, interpolated."""
        before = max((item for item in self.samples if item[0] <= instant), default=self.samples[0])
        after = min((item for item in self.samples if item[0] >= instant), default=self.samples[-1])
        if after[0] <= before[0]:
            return before[1]
        return before[1] + (after[1] - before[1]) * (instant - before[0]) / (after[0] - before[0])

    def _sample(self) -> None:
        while not self._over.wait(self._period):
            self.samples.append((time.monotonic(), self._total()))

    def _total(self) -> float:
        """Of live processes and their reaped children: nothing is lost when a worker is killed and waited for."""
        ticks = 0
        for pid in marked(OWN_MARK, self._mark):
            with contextlib.suppress(OSError):
                ticks += sum(int(value) for value in stat_fields(pid)[11:15])
        self._highest = max(self._highest, ticks / os.sysconf("SC_CLK_TCK"))  # a zombie that nobody waited for yet is not seen
        return self._highest


class Torchrun(System):
    """Four agents of torchrun with c10d rendezvous."""

    def __init__(
        self,
        folder: Path,
        deadline: float,
        *,
        shared: bool,
        floors: int = 0,
        nodes: int = NODES,
        least: int = 0,
        slots: int = SLOTS,
        tuning: tuple[str, ...] = (),
        flags: tuple[str, ...] = (),
    ) -> None:
        """`least`: nodes that it goes on with; 0: all. `tuning`: more flags of torchrun; `flags`: of the job."""
        super().__init__(folder, deadline)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for _ in range(nodes):
            self.spawn(
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{least or nodes}:{nodes}", "--nproc-per-node", str(slots)),
                *("--max-restarts", "20", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "benchmark"),
                *(*tuning, str(JOBS / "light.py"), "--plain", "--out", str(self.log), "--floors", str(floors), *flags),
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0" if shared else "1",
            )


class Regrow(System):
    """`regrow run --local`."""

    def __init__(
        self,
        folder: Path,
        deadline: float,
        *flags: str,
        script: tuple[str, ...] = (),
        nodes: int = NODES,
        slots: int = SLOTS,
        **environment: str,
    ) -> None:
        super().__init__(folder, deadline)
        script = script or (str(JOBS / "light.py"), "--out", str(self.log))
        self.root = folder / "r"
        self.spawn(
            *(sys.executable, "-m", "regrow", "run", "--local", str(nodes), "--nproc-per-node", str(slots), "--run-dir", str(self.root)),
            *("--plain", "--job", "benchmark", *flags, *script),
            **environment,
        )

    def job(self) -> dict[str, Any]:
        """The job's document; empty while nobody answers."""
        try:
            address = json.loads((self.root / "supervisor" / "supervisor.json").read_text())["http"]
            with urllib.request.urlopen(f"http://{address}/v1/jobs/benchmark", timeout=5) as answer:
                return json.load(answer)
        except (OSError, ValueError, KeyError):
            return {}

    def incident(self, number: int) -> dict[str, Any]:
        """The incident of that number once it is over."""
        return self.until(
            lambda: next((item for item in self.job().get("incidents", [])[number : number + 1] if item["recovered"]), None),
            "the end of the incident",
        )

    def kill_node(self, name: str) -> None:
        """Everything of a node: agent, shim, workers, writer."""
        kill_marked(MARK, str(self.state_of(name)))

    def state_of(self, name: str) -> Path:
        """A node's state folder, which marks its processes."""
        return next(path for path in self._states() if path.name == name)

    def _states(self) -> list[Path]:
        found: set[Path] = set()
        for pid in marked(OWN_MARK, self.mark):
            with contextlib.suppress(OSError):
                for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if item.startswith(f"{MARK}=".encode()):
                        found.add(Path(item.decode().partition("=")[2]))
        return sorted(found)


def recover(system: System, settle_steps: int = 15) -> dict[str, Any]:
    """Let it train, kill a worker, wait for the first completed step beyond the frontier."""
    start, rested = system.completed(), time.monotonic() + SETTLE_SECONDS
    system.until(lambda: system.completed() > start + settle_steps and time.monotonic() > rested, "a training system")
    num_incidents = len(system.job().get("incidents", [])) if isinstance(system, Regrow) else 0
    with Cpu(system.mark) as cpu:
        at = time.monotonic_ns()
        os.kill(system.pid_of(VICTIM), signal.SIGKILL)
        frontier = max(step for _, step in system.last_steps(NODES * SLOTS))
        system.until(lambda: system.completed() > frontier, "a step beyond the frontier")
        over = system.first_beyond(frontier, at)
    found: dict[str, Any] = {"seconds": over - at / 1e9, "cpu_seconds": cpu.at(over) - cpu.at(at / 1e9)}
    if isinstance(system, Regrow):
        incident = system.incident(num_incidents)
        found |= {"rung": incident["rung"], "phases": incident["phases"], "incident_seconds": incident["seconds"]}
        found["cpu_phases"] = {}
        instant = incident["at"] - (time.time() - time.monotonic())  # the supervisor's instants are seconds since 1970
        for name, seconds in incident["phases"].items():
            found["cpu_phases"][name] = cpu.at(instant + seconds) - cpu.at(instant)
            instant += seconds
    return found


@contextlib.contextmanager
def running(system: System) -> Generator[System]:
    """Ends it, whatever happens."""
    try:
        yield system
    finally:
        system.close()


def measure_heavy(folder: Path, deadline: float) -> dict[str, Any]:
    """The 3D example loses a node and goes on re-sharded."""
    script = ("-m", "regrow.demo.train_gpt", "--steps", "100000", "--hidden", "240", "--seq", "192", "--layers", "4", "--samples", "256")
    flags = ("--mesh", "2x2x2", "--meshes", "8:2x2x2 6:3x2x1 4:2x2x1", "--global-batch", "16", "--micro-batch", "2")
    with running(Regrow(folder, deadline, *flags, "--in-place", script=script)) as system:
        assert isinstance(system, Regrow)
        system.until(
            lambda: (system.job().get("checkpoint") or {}).get("step") and (system.job().get("step") or 0) >= 8, "eight heavy steps"
        )
        before = system.job()
        began = time.monotonic()
        frontier = before["step"]
        system.kill_node("n2")
        incident = system.incident(0)
        over = time.monotonic()
        return {
            "step_seconds": before["step_seconds"],
            "seconds": incident["seconds"],
            "wall_seconds": over - began,
            "steps_lost": incident["lost_steps"],
            "frontier": frontier,
            "rung": incident["rung"],
            "mesh": system.job().get("mesh"),
            "phases": incident["phases"],
        }


def figures_of(samples: dict[str, list[dict[str, Any]]], floors: list[float], heavy: list[dict[str, Any]]) -> dict[str, float | None]:
    """Ratios of medians; None where one side was not measured."""

    def median(name: str) -> float | None:
        values = [item["seconds"] for item in samples.get(name, []) if item.get("seconds") is not None]
        return statistics.median(values) if values else None

    def ratio(over: float | None, under: float | None) -> float | None:
        return over / under if over is not None and under else None

    floor = statistics.median(floors) if floors else None
    torchrun, warm, in_place = median("torchrun_unshared"), median("warm_fork"), median("in_place")
    memory = median("warm_memory")
    steps = [item["seconds"] / item["step_seconds"] for item in heavy if item.get("step_seconds")]
    return {
        "torchrun_over_warm_fork": ratio(torchrun, warm),
        "torchrun_over_in_place": ratio(torchrun, in_place),
        "warm_fork_over_floor": ratio(warm, floor),
        "in_place_over_floor": ratio(in_place, floor),
        "torchrun_over_warm_memory": ratio(torchrun, memory),
        "warm_memory_over_floor": ratio(memory, floor),
        "heavy_steps": statistics.median(steps) if steps else None,
        "torchrun_seconds": torchrun,
        "warm_fork_seconds": warm,
        "warm_fork_max_seconds": max((item["seconds"] for item in samples.get("warm_fork", [])), default=None),
        "warm_memory_seconds": memory,
        "in_place_seconds": in_place,
        "in_place_max_seconds": max((item["seconds"] for item in samples.get("in_place", [])), default=None),
        "floor_seconds": floor,
    }


def main() -> None:
    """Measure in turn and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round; ends within four minutes")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of the full run")
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(SYSTEMS)}")
    parser.add_argument("--kills", type=int, default=5, help="faults a round in each Regrow system")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended, too
    end = time.monotonic() + (QUICK_SECONDS if args.quick else 3600.0 * 6)
    samples: dict[str, list[dict[str, Any]]] = {}
    floors: list[float] = []
    heavy: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    root = Path(tempfile.mkdtemp(prefix="rg-"))
    wanted = [word for word in args.only.split(",") if word] or list(SYSTEMS)
    try:
        for number in range(1 if args.quick else args.repeats):
            for name in wanted:
                folder = root / f"{name[:12]}{number}"
                began = time.monotonic()
                try:
                    one_round(name, folder, end, args, samples, floors, heavy)
                except OutOfTimeError as error:
                    missing[name] = str(error)
                sys.stderr.write(f"round {number} {name}: {time.monotonic() - began:.1f} s {missing.get(name, '')}\n")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    figures = figures_of(samples, floors, heavy)
    document = {
        "figures": figures,
        "limits": LIMITS,
        "missing": {**missing, **{name: "its rung or peer was not measured" for name, value in figures.items() if value is None}},
        "samples": {**samples, "floor": floors, "heavy": heavy},
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg(), "platform": platform.platform(), "python": platform.python_version()},
    }
    if args.json:
        print(json.dumps(document, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:28} {'-' if value is None else f'{value:.3g}'}" + (f"  (must {LIMITS[name]:g})" if name in LIMITS else ""))


def one_round(
    name: str,
    folder: Path,
    end: float,
    args: argparse.Namespace,
    samples: dict[str, list[dict[str, Any]]],
    floors: list[float],
    heavy: list[dict[str, Any]],
) -> None:
    """One system, started, broken and ended."""
    if name == "heavy":
        heavy.append(measure_heavy(folder, end))
        return
    book = samples.setdefault(name, [])
    if name == "torchrun_shipped":
        limit = min(end, time.monotonic() + 120.0)
        with running(Torchrun(folder, limit, shared=True)) as system:
            try:
                book.append(recover(system))
            except OutOfTimeError as error:
                if system.completed() > 0:  # it trained and did not come back
                    book.append({"seconds": None, "recovered": False, "why": str(error)})
                raise
        return
    if name == "torchrun_unshared":
        with running(Torchrun(folder, end, shared=False, floors=5)) as system:
            book.append(recover(system))
            floors.extend(json.loads((system.log / "floor.json").read_text()))
        return
    flags = {"in_place": ("--in-place",), "warm_memory": ("--no-in-place", "--memory-interval", "0.1")}.get(name, ("--no-in-place",))
    script = (str(JOBS / "light.py"), "--out", str(folder / "log"), *(("--saves", "2") if name == "warm_memory" else ()))
    with running(Regrow(folder, end, "--global-batch", "64", *flags, script=script)) as system:
        for _ in range(args.kills):
            book.append(recover(system))


if __name__ == "__main__":
    main()
