"""Shared-memory arenas: owned by the writer, filled by workers, each the exact image of one rank's file."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from regrow.ckpt import hugepages
from regrow.ckpt.budget import Budget
from regrow.ckpt.protocol import Remembered

_SLACK_BYTES = 1 << 20


class Arena:
    """Shared memory, mapped here. The pages are allocated when it is made, so that a save never faults them in."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_closed = False
        self._closing = threading.Lock()
        self.handle = hugepages.open_memory()
        try:
            self.memory = hugepages.allocate(self.handle, num_bytes)
        except BaseException:
            os.close(self.handle)
            raise

    def share(self) -> int:
        """A descriptor of its own for a reader, who closes it; -1 when the arena is closed."""
        with self._closing:
            return -1 if self.is_closed else os.dup(self.handle)

    def close(self) -> None:
        """Give the memory back (once no worker maps it either)."""
        with self._closing:
            self.is_closed = True
            os.close(self.handle)
        with contextlib.suppress(BufferError):  # a view is still held: the mapping goes with it
            self.memory.close()


class Contents:
    """Which files lie in arenas, also in those that nobody uses any more: a restart on the same node reads them from memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arenas: dict[Path, tuple[Arena, int]] = {}
        self._remembered: dict[Path, Remembered] = {}

    def put(self, path: Path, arena: Arena, num_bytes: int, remembered: Remembered | None = None) -> None:
        """An arena is the image of a file that is on storage; with `remembered`: of one that nobody wrote."""
        self.forget(arena)
        with self._lock:
            self._arenas[path] = (arena, num_bytes)
            if remembered is not None:
                self._remembered[path] = remembered

    def forget(self, arena: Arena) -> None:
        """An arena is about to hold something else."""
        with self._lock:
            self._arenas = {path: held for path, held in self._arenas.items() if held[0] is not arena and not held[0].is_closed}
            self._remembered = {path: one for path, one in self._remembered.items() if path in self._arenas}

    def remembered(self, job: str) -> list[Remembered]:
        """Snapshots of a job that are here and were not written."""
        with self._lock:
            return [one for path, one in self._remembered.items() if one.job == job and not self._arenas[path][0].is_closed]

    def place_of(self, arena: Arena) -> tuple[int, str]:
        """(step, file's name) of the snapshot in an arena that was not written; step -1: none."""
        with self._lock:
            for path, (held, _) in self._arenas.items():
                if held is arena and path in self._remembered:
                    return self._remembered[path].step, path.name
        return -1, ""

    def of(self, directory: Path) -> list[tuple[str, Arena, int]]:
        """(name, arena, bytes) of the files of a directory."""
        with self._lock:
            return [(path.name, *held) for path, held in self._arenas.items() if path.parent == directory and not held[0].is_closed]

    def open(self, path: Path) -> int:
        """A descriptor of the arena that holds a file, -1 when none does. The caller closes it; what it reads may be another file's."""
        with self._lock:
            held = self._arenas.get(path)
        return held[0].share() if held is not None else -1


class ArenaPool:
    """Arenas of dead generations are used again by the next: allocating fresh pages costs more than a save."""

    def __init__(self, budget: Budget | None = None) -> None:
        """`budget`: of the memory that new arenas may take; default: what the node has to spare."""
        self._budget = budget or Budget()
        self._lock = threading.Lock()
        self._free: list[Arena] = []
        self.num_arenas = 0
        self.total_bytes = 0

    def take(self, num_bytes: int, prefer: Callable[[Arena], bool] | None = None) -> Arena:
        """A free arena of at least this size, made if need be. Free ones that do not fit are given up first.

        `prefer`: of those that fit, which to take.

        Raises:
            OSError: no memory, `NoMemoryError` when that is known before any is taken.
        """
        reused = self.reuse(num_bytes, prefer)
        if reused is not None:
            return reused
        with self._lock:
            for old in self._free:
                self.num_arenas -= 1
                self.total_bytes -= old.num_bytes
                old.close()
            self._free.clear()
        with self._budget.taking(num_bytes, lambda: self.total_bytes):
            arena = Arena(num_bytes)
            with self._lock:  # before others look at what is left
                self.num_arenas += 1
                self.total_bytes += arena.num_bytes
        return arena

    def reuse(self, num_bytes: int, prefer: Callable[[Arena], bool] | None = None) -> Arena | None:
        """A free arena of about this size, None when there is none."""
        with self._lock:
            fitting = [arena for arena in self._free if num_bytes <= arena.num_bytes <= num_bytes * 3 // 2 + _SLACK_BYTES]
            if not fitting:
                return None
            arena = min(fitting, key=lambda one: (prefer is not None and not prefer(one), one.num_bytes))
            self._free.remove(arena)
            return arena

    def give(self, arena: Arena) -> None:
        """Take an arena back that nobody fills any more."""
        with self._lock:
            self._free.append(arena)
