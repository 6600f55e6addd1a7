"""Where in a job a process is, and what became of its saves."""

from __future__ import annotations

import msgspec

from regrow.wire import GenerationSpec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where in the job this process is."""

    spec: GenerationSpec
    rank: int
    node: str
    local_ranks: tuple[int, ...]
    """All ranks of this node, this one included."""
    folder: str
    """The job's checkpoint folder, absolute."""


class SaveCounts(msgspec.Struct):
    """What became of the saves of this process. Seconds are of the newest one."""

    snapshots: int = 0
    skipped: int = 0
    failed: int = 0
    durable: int = 0
    not_durable: int = 0
    stall_seconds: float = 0.0
    write_seconds: float = 0.0
    last_reason: str = ""
