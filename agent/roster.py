"""The shim's book of generations, workers and stores: which process is whose, and how each ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from regrow.agent.protocol import GenerationState, StoreState, WorkerState


def start_time(pid: int) -> int:
    """Field 22 of /proc/<pid>/stat, clock ticks since boot; 0 when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def process_state(pid: int) -> str:
    """State letter of a process (R, S, D, T, t, Z ...); empty when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def children_of(pid: int) -> list[int]:
    """Pids of the direct children of a process, zombies included."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if int(text.rpartition(")")[2].split()[1]) == pid:
            found.append(int(entry.name))
    return found


class Roster:
    """Generations by (job, generation), each with its process group."""

    def __init__(self) -> None:
        self._generations: dict[tuple[str, int], GenerationState] = {}
        self._groups: dict[tuple[str, int], int] = {}
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
        """Enter a generation whose processes were started in process group `group`."""
        key = (state.job, state.generation)
        self._generations[key] = state
        self._groups[key] = group
        for worker in state.workers:
            self._by_pid[worker.pid] = key

    def owner(self, pid: int) -> GenerationState | None:
        """The generation of a worker's pid that was not reaped yet."""
        key = self._by_pid.get(pid)
        return self._generations[key] if key is not None else None

    def is_last(self, pid: int) -> bool:
        """True when no other worker of the pid's generation is alive."""
        state = self.owner(pid)
        return state is not None and all(worker.status is not None or worker.pid == pid for worker in state.workers)

    def group_of(self, pid: int) -> int:
        """Process group of a worker's generation."""
        return self._groups[self._by_pid[pid]]

    def ended(self, pid: int, status: int) -> tuple[GenerationState, WorkerState]:
        """Record how a worker ended; its pid means nothing from now on."""
        key = self._by_pid.pop(pid)
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
        """Signal the group of a generation that has live workers, and mark them as torn down. Returns their pids."""
        key = (state.job, state.generation)
        alive = [worker.pid for worker in state.workers if worker.status is None]
        if not alive:
            return []
        workers = tuple(msgspec.structs.replace(worker, torn_down=worker.torn_down or worker.status is None) for worker in state.workers)
        self._generations[key] = msgspec.structs.replace(state, workers=workers)
        signal_group(self._groups[key], number)
        return alive

    def forget(self, job: str, generation: int) -> None:
        """Drop ended generations of the job up to this one."""
        for state in self.up_to(job, generation):
            if all(worker.status is not None for worker in state.workers):
                del self._generations[(state.job, state.generation)]
                del self._groups[(state.job, state.generation)]

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
