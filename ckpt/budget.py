"""How much memory of this node the writer may take: what the host and its control groups have to spare, asked before pages are touched.

Memory that is not there is no error on Linux but the end of some process, chosen by the kernel. So it is asked for first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Generator
from pathlib import Path

from regrow.errors import ConfigurationError

LIMIT_VARIABLE = "REGROW_CHECKPOINT_MEMORY_BYTES"
"""Most that arenas and copies of other nodes' files may take on this node together; without it what is to spare."""
_SPARE_FRACTION = 0.05
_MOST_SPARE_BYTES = 4 << 30
"""So much of the node's memory is left alone, and at most this."""


class NoMemoryError(OSError):
    """The node has not so much memory to spare."""

    def __init__(self, num_bytes: int, spare_bytes: int) -> None:
        """Bytes that were wanted, and that are there."""
        super().__init__(errno.ENOMEM, f"{num_bytes / 1e9:.3g} GB wanted, {spare_bytes / 1e9:.3g} GB to spare")


class Budget:
    """Lets several threads take memory at once without taking the same bytes twice."""

    def __init__(self, available: Callable[[], int] | None = None, limit_bytes: int | None = None) -> None:
        """`available`: bytes that can be taken now, default `spare_memory`; `limit_bytes`: of all that is held, default `LIMIT_VARIABLE`."""
        self._available = available or spare_memory
        self._limit = given_limit() if limit_bytes is None else limit_bytes
        self._changed = threading.Condition()
        self._taking = 0

    @contextlib.contextmanager
    def taking(self, num_bytes: int, held: Callable[[], int]) -> Generator[None]:
        """Within it so many bytes are allocated. Waits while others allocate and it is not clear whether enough is left.

        `held`: bytes that were taken before and are not given back.

        Raises:
            NoMemoryError: there is not so much.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._taking or num_bytes <= self._spare(held()))
            spare = self._spare(held())
            if num_bytes > spare:
                raise NoMemoryError(num_bytes, spare)
            self._taking += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._taking -= num_bytes
                self._changed.notify_all()

    def _spare(self, held: int) -> int:
        spare = self._available() - self._taking
        return spare if self._limit is None else min(spare, self._limit - held - self._taking)


def given_limit() -> int | None:
    """What `LIMIT_VARIABLE` says; None: nothing.

    Raises:
        ConfigurationError: it is no number of bytes.
    """
    text = os.environ.get(LIMIT_VARIABLE, "")
    if text and not text.isdigit():
        raise ConfigurationError(f"{text!r} is no number of bytes", where=LIMIT_VARIABLE, hint="write digits alone, or leave it out")
    return int(text) if text else None


def spare_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken now: of the host and of this process's control group, less a reserve. `root`: where proc and sys are."""
    meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines())
    total, available = (int(meminfo[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for limit, current in _group_limits(root):
        total = min(total, limit)
        available = min(available, limit - current)
    return max(0, available - min(_MOST_SPARE_BYTES, int(total * _SPARE_FRACTION)))


def _group_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, in use without what the page cache would give back) of the control groups (version 2) above this process that have one."""
    found: list[tuple[int, int]] = []
    try:
        line = next(line for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines() if line.startswith("0::"))
        group = root / "sys/fs/cgroup" / line[3:].lstrip("/")
        for folder in (group, *group.parents):
            if folder == root / "sys/fs":
                break
            limit = folder / "memory.max"
            if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()) != "max":
                found.append((int(text), int((folder / "memory.current").read_text(encoding="ascii")) - _cached(folder)))
    except (OSError, StopIteration, ValueError):
        return found
    return found


def _cached(folder: Path) -> int:
    """Bytes of files that a group's page cache holds; shared memory is not among them."""
    lines = (line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    return sum(int(value) for name, value in lines if name in ("active_file", "inactive_file"))
