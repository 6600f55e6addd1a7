"""The shim's book of generations, workers and stores: which process is whose, and how each ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from regrow.agent.protocol import GenerationState, StoreState, WorkerState
from regrow.processes import stat_fields


def start_time(pid: int) -> int:
    """Field 22 of /proc/<pid>/stat, clock ticks since boot; 0 when there is no such process."""
    try:
        return int(stat_fields(pid)[19])
    except OSError:
        return 0


def process_state(pid: int) -> str:
    """State letter of a process (R, S, D, T, t, Z ...); empty when there is no such process."""
    try:
        return stat_fields(pid)[0]
    except OSError:
        return ""


def is_all_dead(pid: int) -> bool:
    """Whether every thread of a process has ended, though nobody has taken its status: one that is stuck in the kernel holds devices."""
    try:
        threads = [entry.name for entry in Path(f"/proc/{pid}/task").iterdir()]
        return all(stat_fields(int(thread))[0] in "ZX" for thread in threads)
    except OSError:
        return False


def cpu_seconds(pid: int) -> float | None:
    """User and system time that all threads of a process have used, in seconds; None when there is no such process."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    """Pids of the direct children of a process, zombies included."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int(stat_fields(int(entry.name))[1])
        except OSError:
            continue
        if parent == pid:
            found.append(int(entry.name))
    return found


class Roster:
    """Generations by (job, generation), and the process group of each worker: one that was kept over a change of
    generation stays in the group that it was started in."""

    def __init__(self) -> None:
        self._generations: dict[tuple[str, int], GenerationState] = {}
        self._groups: dict[int, int] = {}
        self._by_pid: dict[int, tuple[str, int]] = {}
        self.stores: dict[int, StoreState] = {}

    @property
    def generations(self) -> tuple[GenerationState, ...]:
        """All generations that were not forgotten, oldest first."""
        return tuple(self._generations[key] for key in sorted(self._generations))

    def get(self, job: str, generation: int) -> GenerationState | None:
        """One generation."""
        return self._generations.get((job, generation))

    def add(self, state: GenerationState, group: int) -> None:
        """Enter a generation; processes that were not known before were started in process group `group`."""
        key = (state.job, state.generation)
        self._generations[key] = state
        for worker in state.workers:
            self._groups.setdefault(worker.pid, group)
            self._by_pid[worker.pid] = key

    def release(self, job: str, keep: dict[int, int]) -> dict[int, WorkerState]:
        """Take the live workers out of the generations of a job: {rank: worker} of those in `keep`; the rest is killed."""
        wanted = {pid: rank for rank, pid in keep.items()}
        kept: dict[int, WorkerState] = {}
        others: list[int] = []
        for key, state in self._generations.items():
            if key[0] != job:
                continue
            for worker in state.workers:
                if worker.status is None and worker.pid in wanted and not worker.torn_down:
                    kept[wanted[worker.pid]] = worker
                elif worker.status is None:
                    others.append(worker.pid)
            left = tuple(worker for worker in state.workers if worker.status is not None)
            self._generations[key] = msgspec.structs.replace(state, workers=left)
        for pid in (*others, *(worker.pid for worker in kept.values())):
            self._by_pid.pop(pid, None)
        self._kill(others)
        return kept

    def replace(self, job: str, generation: int, made: tuple[WorkerState, ...], group: int) -> None:
        """Put new workers in the places of their ranks, and kill those that had them; their ends are nobody's."""
        key = (job, generation)
        state = self._generations[key]
        fresh = {worker.rank: worker for worker in made}
        old = [worker.pid for worker in state.workers if worker.rank in fresh and worker.status is None]
        for pid in old:
            self._by_pid.pop(pid, None)
        workers = tuple(fresh.get(worker.rank, worker) for worker in state.workers)
        self.add(msgspec.structs.replace(state, workers=workers), group)
        self._kill(old)

    def _kill(self, pids: list[int]) -> None:
        """SIGKILL children that were not reaped yet, so their pids are theirs."""
        for pid in pids:
            self._groups.pop(pid, None)
            os.kill(pid, signal.SIGKILL)

    def owner(self, pid: int) -> GenerationState | None:
        """The generation of a worker's pid that was not reaped yet."""
        key = self._by_pid.get(pid)
        return self._generations[key] if key is not None else None

    def is_last(self, pid: int) -> bool:
        """True when no other worker of the pid's process group is alive."""
        return pid in self._by_pid and all(other == pid or self._groups[other] != self._groups[pid] for other in self._by_pid)

    def group_of(self, pid: int) -> int:
        """Process group of a worker."""
        return self._groups[pid]

    def ended(self, pid: int, status: int) -> tuple[GenerationState, WorkerState]:
        """Record how a worker ended; its pid means nothing from now on."""
        key = self._by_pid.pop(pid)
        self._groups.pop(pid, None)
        state = self._generations[key]
        made: WorkerState | None = None
        workers: list[WorkerState] = []
        for worker in state.workers:
            if worker.pid == pid and worker.status is None:
                worker = made = msgspec.structs.replace(worker, status=status)
            workers.append(worker)
        assert made is not None
        self._generations[key] = state = msgspec.structs.replace(state, workers=tuple(workers))
        return state, made

    def up_to(self, job: str, generation: int) -> list[GenerationState]:
        """Generations of a job (all jobs when empty) with this number or a lower one."""
        return [state for (name, number), state in self._generations.items() if (not job or name == job) and number <= generation]

    def signal(self, state: GenerationState, number: int) -> list[int]:
        """Signal the groups of a generation that has live workers, and mark them as torn down. Returns their pids."""
        key = (state.job, state.generation)
        alive = [worker.pid for worker in state.workers if worker.status is None]
        if not alive:
            return []
        workers = tuple(msgspec.structs.replace(worker, torn_down=worker.torn_down or worker.status is None) for worker in state.workers)
        self._generations[key] = msgspec.structs.replace(state, workers=workers)
        for group in sorted({self._groups[pid] for pid in alive}):
            signal_group(group, number)
        return alive

    def torn_down(self) -> list[int]:
        """Pids of workers that were signalled and whose end is not known."""
        return [
            worker.pid for state in self._generations.values() for worker in state.workers if worker.torn_down and worker.status is None
        ]

    def forget(self, job: str, generation: int) -> None:
        """Drop ended generations of the job up to this one."""
        for state in self.up_to(job, generation):
            if all(worker.status is not None for worker in state.workers):
                del self._generations[(state.job, state.generation)]

    @property
    def spare(self) -> StoreState | None:
        """The store that nobody has used."""
        return next((store for store in self.stores.values() if not store.generation), None)

    def store_at(self, address: str) -> StoreState | None:
        """The store of that address."""
        return next((store for store in self.stores.values() if store.address == address), None)

    def alive(self) -> list[int]:
        """Pids of all live workers."""
        return list(self._by_pid)


def signal_group(group: int, number: int) -> None:
    """Signal a process group; one that is gone is no error. A stopped group is continued when the signal is not SIGKILL."""
    try:
        os.killpg(group, number)
        if number != signal.SIGKILL:
            os.killpg(group, signal.SIGCONT)
    except ProcessLookupError:
        return
