"""The fences of a node on disk: read at start, written with fsync before anything that they guard."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from regrow.agent.health.boot import boot_id
from regrow.agent.machine import Fences
from regrow.agent.roster import process_state, start_time
from regrow.errors import OperationalError
from regrow.syncing import sync_directory


def load(path: Path) -> Fences:
    """The fences; none when the file does not exist.

    Raises:
        OperationalError: the file is damaged: starting without it could revive an old generation.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Fences()
    try:
        return msgspec.json.decode(data, type=Fences)
    except msgspec.DecodeError as error:
        raise OperationalError(
            f"is damaged: {error}", where=str(path), hint="move it away only when no worker of this node can be alive"
        ) from error


def save(path: Path, fences: Fences) -> Fences:
    """Write and sync. Marks of processes that cannot be killed get their start times and this boot."""
    if fences.unusable and not fences.unusable_boot:
        pids = {pid: start_time(pid) for pid in fences.unusable_pids}
        fences = msgspec.structs.replace(fences, unusable_boot=boot_id(), unusable_pids=pids)
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        file.write(msgspec.json.encode(fences))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_directory(path.parent)
    return fences


def still_unusable(fences: Fences) -> bool:
    """Whether a process that could not be killed is still there (same boot, same pid, same start)."""
    if not fences.unusable or (fences.unusable_boot and fences.unusable_boot != boot_id()):
        return False
    return any(start_time(pid) == started and process_state(pid) not in ("", "Z", "X") for pid, started in fences.unusable_pids.items())


def usable_again(fences: Fences) -> Fences:
    """Without the mark."""
    return msgspec.structs.replace(fences, unusable="", unusable_boot="", unusable_pids={})
