"""Finds, checks and compares the checkpoint that a generation restores, before any live byte is touched."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from regrow.ckpt import differences, flatten, perrank
from regrow.ckpt.catalog import set_aside_reason
from regrow.ckpt.differences import FieldDifference
from regrow.ckpt.flatten import Item
from regrow.ckpt.loading import Loaded, load_items
from regrow.ckpt.manifest import DamagedCheckpointError, NodeManifest, Record, read_manifests, read_record
from regrow.ckpt.reshard import Source, compare_names, source_of
from regrow.ckpt.sinks import Sink
from regrow.errors import OperationalError
from regrow.wire import GenerationSpec, RestorePoint

log = logging.getLogger("regrow.ckpt.restore")
ACCEPT_VARIABLE = "REGROW_ACCEPT"
VISIBLE_SECONDS = 5.0
"""How long attributes of network file systems are commonly cached, and a little more."""
_LOOK_SECONDS = 0.05


class Opened(msgspec.Struct, frozen=True):
    """A checkpoint whose record and manifests are as committed."""

    directory: Path
    record: Record
    manifests: list[NodeManifest]
    source: Source

    @property
    def private(self) -> dict[int, dict[str, Any]]:
        """Private state by rank."""
        return {rank.rank: rank.private for manifest in self.manifests for rank in manifest.ranks}

    def groups(self) -> list[dict[str, Any]]:
        """What the optimizers of all ranks were launched with."""
        return [group for one in self.private.values() for group in one.get("launched", [])]

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Whole stored tensors in new memory, verified."""
        made: dict[str, torch.Tensor] = {}
        for name in names:
            box = self.source.box(name)
            made[name] = torch.empty(box.shape, dtype=getattr(torch, box.dtype))
        load_items(self.directory, self.source, [flatten.item_of(name, value) for name, value in made.items()])
        return made


def open_point(folder: str, point: RestorePoint) -> Opened:
    """Read record and manifests of the checkpoint that was decided on.

    Raises:
        DamagedCheckpointError: it is not there, not as committed, or another one.
    """
    directory = Path(folder) / point.directory
    record = _await_record(directory)
    if point.record_digest and record.digest != point.record_digest:
        raise DamagedCheckpointError("is not the checkpoint that was decided on (record digest differs)", where=str(directory))
    reason = set_aside_reason(directory)
    if reason:
        raise DamagedCheckpointError(reason, where=str(directory), hint="an older checkpoint is taken")
    manifests = read_manifests(directory, record)
    return Opened(directory, record, manifests, source_of(manifests))


def _await_record(directory: Path) -> Record:
    """Somebody else saw this record: a network file system may show it here a little later."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while True:
        try:
            return read_record(directory)
        except FileNotFoundError as error:
            if time.monotonic() >= deadline:
                raise DamagedCheckpointError(
                    f"has no record, also {VISIBLE_SECONDS:.0f} s later: it is not a checkpoint", where=str(directory)
                ) from error
        time.sleep(_LOOK_SECONDS)


def check_names(opened: Opened, names: Collection[str]) -> None:
    """The checkpoint must hold what the ranks of the generation hold together, and nothing else.

    Raises:
        OperationalError: lists the names that are missing on either side.
    """
    missing, unexpected = compare_names(filter(_is_shared, opened.source.tensors), filter(_is_shared, names))
    if missing or unexpected:
        raise OperationalError(
            _names_differ(missing, unexpected), where=str(opened.directory), hint="the model or optimizer is another one"
        )


def load(opened: Opened, items: Sequence[Item], sink: Sink) -> Loaded:
    """Fill the live tensors of this rank, from this node's arenas where they still hold the files, else from storage.

    Raises:
        DamagedCheckpointError: bytes are not what was committed.
        OperationalError: a tensor has another shape or type.
    """
    shared = [item for item in items if _is_shared(item.box.name)]
    memory = sink.borrow(opened.directory)
    try:
        cost = load_items(opened.directory, opened.source, shared, memory=memory)
    finally:
        for handle in memory.values():
            os.close(handle)
    log.info(
        "restored step=%d bytes_needed=%d bytes_read=%d bytes_from_memory=%d",
        opened.record.step,
        cost.bytes_needed,
        cost.bytes_read,
        cost.bytes_from_memory,
    )
    return cost


def _is_shared(name: str) -> bool:
    return not name.startswith(perrank.PREFIX)


def _names_differ(missing: list[str], unexpected: list[str]) -> str:
    parts: list[str] = []
    for what, names in (("missing in the checkpoint", missing), ("in the checkpoint but not in the state", unexpected)):
        if names:
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            parts.append(f"{what}: {', '.join(names[:10])}{more}")
    return "; ".join(parts)


def compare(
    opened: Opened, facts: dict[str, Any], groups: list[dict[str, Any]], spec: GenerationSpec, accept: Collection[str]
) -> list[FieldDifference]:
    """What differs between this launch and the checkpoint; each is logged.

    Raises:
        ConfigurationError: a difference needs a flag that was not given.
    """
    record = opened.record
    saved = differences.fields_of(record.facts, mesh=record.mesh, world_size=record.world_size)
    now = differences.fields_of(facts, mesh=spec.mesh, world_size=spec.world_size)
    found = differences.compare(saved, now, accept) + differences.compare_groups(opened.groups(), groups, accept)
    for one in found:
        log.warning("launch differs from the checkpoint: %s", one)
    differences.refuse(found)
    return found


def accepted(given: Collection[str]) -> frozenset[str]:
    """Flags from the call and from REGROW_ACCEPT."""
    return frozenset(given) | frozenset(filter(None, os.environ.get(ACCEPT_VARIABLE, "").split(",")))
