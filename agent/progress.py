"""Progress words: what each local rank is doing, in shared memory, readable while the rank is stopped or blocked.

One file a generation and node, one slot of `SLOT_BYTES` a local rank. The writer is the training process, the reader is
the agent. No lock: the sequence is odd while a word is being written, and each field is one aligned 8-byte word.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

import msgspec

SLOT_BYTES = 128
PHASES = ("start", "import", "rendezvous", "model", "restore", "first_step", "step", "eval", "save", "finished")
"""Phases in the order of a worker's life; the word holds the index."""

_FIELDS = struct.Struct("<6q")  # generation, started_step, applied_step, phase, changed_at_ns, pid
_SEQUENCE = struct.Struct("<q")
_READ_ATTEMPTS = 16


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One progress word. Steps are -1 while there is none; `sequence` 0 means that nothing was ever published."""

    slot: int
    generation: int = 0
    started_step: int = -1
    applied_step: int = -1
    phase: str = "start"
    sequence: int = 0
    changed_at_ns: int = 0
    """CLOCK_MONOTONIC of the last change, nanoseconds; the agent compares it with its own reading on the same host."""
    pid: int = 0

    def age_seconds(self, now_ns: int | None = None) -> float:
        """Seconds since the word changed, 0 when nothing was published."""
        if not self.changed_at_ns:
            return 0.0
        return max(0.0, ((time.monotonic_ns() if now_ns is None else now_ns) - self.changed_at_ns) / 1e9)


def create_progress(path: str | Path, num_slots: int) -> None:
    """Make an empty file with `num_slots` slots; an older file of that name is replaced."""
    target = Path(path)
    fresh = target.with_name(target.name + ".new")
    fresh.write_bytes(bytes(num_slots * SLOT_BYTES))
    fresh.replace(target)


def parse_location(text: str) -> tuple[str, int]:
    """Split the value of REGROW_PROGRESS, ``<path>:<slot>``.

    Raises:
        ValueError: not of that form.
    """
    path, separator, slot = text.rpartition(":")
    if not separator or not path or not slot.isdigit():
        raise ValueError(f"REGROW_PROGRESS={text!r} is not <path>:<slot>")
    return path, int(slot)


class ProgressWriter:
    """The one writer of one slot. Keeps a mapping open; a publish is a few stores, no system call."""

    def __init__(self, path: str | Path, slot: int, *, generation: int | None = None) -> None:
        """Open slot `slot` of the file (made, or made longer, when needed).

        `generation` None takes REGROW_GENERATION from the environment, 0 without it.
        """
        self._offset = slot * SLOT_BYTES
        needed = self._offset + SLOT_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, needed)  # longer, never shorter: the ranks of a node may come here at once
            self._map = mmap.mmap(descriptor, needed)
        finally:
            os.close(descriptor)
        self._generation = int(os.environ.get("REGROW_GENERATION", "0")) if generation is None else generation
        self._phase = "start"
        self._started = -1
        self._applied = -1
        (sequence,) = _SEQUENCE.unpack_from(self._map, self._offset)
        self._sequence = sequence + (sequence & 1)

    @classmethod
    def from_environment(cls) -> ProgressWriter | None:
        """The writer that REGROW_PROGRESS names; None when this process is not supervised."""
        text = os.environ.get("REGROW_PROGRESS", "")
        return cls(*parse_location(text)) if text else None

    @property
    def phase(self) -> str:
        """The phase last published."""
        return self._phase

    def publish(self, *, phase: str | None = None, started_step: int | None = None, applied_step: int | None = None) -> None:
        """Set what is given and stamp the change.

        Raises:
            ValueError: unknown phase.
        """
        if phase is not None:
            if phase not in PHASES:
                raise ValueError(f"phase {phase!r} is not one of {', '.join(PHASES)}")
            self._phase = phase
        if started_step is not None:
            self._started = started_step
        if applied_step is not None:
            self._applied = applied_step
        index = PHASES.index(self._phase)
        offset = self._offset
        _SEQUENCE.pack_into(self._map, offset, self._sequence + 1)
        _FIELDS.pack_into(self._map, offset + 8, self._generation, self._started, self._applied, index, time.monotonic_ns(), os.getpid())
        self._sequence += 2
        _SEQUENCE.pack_into(self._map, offset, self._sequence)

    def close(self) -> None:
        """Unmap. The last word stays in the file."""
        self._map.close()


def read_progress(path: str | Path) -> list[Progress]:
    """All slots of the file, by slot number; an empty list when there is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        num_slots = os.fstat(descriptor).st_size // SLOT_BYTES
        return [_read_slot(descriptor, slot) for slot in range(num_slots)]
    finally:
        os.close(descriptor)


def _read_slot(descriptor: int, slot: int) -> Progress:
    offset = slot * SLOT_BYTES
    data = b""
    for _ in range(_READ_ATTEMPTS):
        data = os.pread(descriptor, 8 + _FIELDS.size, offset)
        before = _SEQUENCE.unpack_from(data)[0]
        after = _SEQUENCE.unpack(os.pread(descriptor, 8, offset))[0]
        if before == after and not before & 1:
            break
    # A writer that was stopped or killed between its two stamps leaves an odd sequence: each field is whole all the same.
    sequence = _SEQUENCE.unpack_from(data)[0]
    if sequence == 0:
        return Progress(slot=slot)
    generation, started, applied, phase, changed, pid = _FIELDS.unpack_from(data, 8)
    name = PHASES[phase] if 0 <= phase < len(PHASES) else "start"
    return Progress(
        slot=slot,
        generation=generation,
        started_step=started,
        applied_step=applied,
        phase=name,
        sequence=sequence,
        changed_at_ns=changed,
        pid=pid,
    )
