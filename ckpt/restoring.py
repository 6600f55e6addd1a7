"""Finds, checks and compares the checkpoint that a generation restores, before any live byte is touched."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from regrow.ckpt import differences, flatten, perrank
from regrow.ckpt.catalog import set_aside_reason
from regrow.ckpt.differences import ACCEPT_VARIABLE, FieldDifference
from regrow.ckpt.envelope import ITEM_BYTES
from regrow.ckpt.exchange import Exchange, GroupExchange
from regrow.ckpt.flatten import Item
from regrow.ckpt.layout import Box
from regrow.ckpt.loading import Loaded, load_items, threads_of
from regrow.ckpt.manifest import DamagedCheckpointError, NodeManifest, Record, read_manifests, read_record
from regrow.ckpt.place import Place
from regrow.ckpt.protocol import CELL_BYTES, Wanted
from regrow.ckpt.reshard import Source, blocks_of, byte_runs, compare_names, pieces, source_of
from regrow.ckpt.sharing import ReadOnce, Sharing, Unit, plan_units
from regrow.ckpt.sinks import Sink
from regrow.errors import OperationalError
from regrow.wire import GenerationSpec, RestorePoint

log = logging.getLogger("regrow.ckpt.restore")
VISIBLE_SECONDS = 5.0
"""How long attributes of network file systems are commonly cached, and a little more."""
_LOOK_SECONDS = 0.05


class Opened(msgspec.Struct, frozen=True):
    """A checkpoint whose record and manifests are as committed."""

    directory: Path
    record: Record
    manifests: list[NodeManifest]
    source: Source
    memory: dict[str, int] = {}
    """Descriptors of files that are in this node's memory, of a snapshot that is on no storage. The caller's."""

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
        load_items(self.directory, self.source, [flatten.item_of(name, value) for name, value in made.items()], memory=self.memory)
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


class Together(msgspec.Struct, frozen=True):
    """What is known of all ranks that restore together."""

    exchange: Exchange
    place: Place
    held: list[list[Box]]
    """What each rank needs."""
    read_once: ReadOnce = "measured"


def load(
    opened: Opened, items: Mapping[str, Item], copies: Sequence[Item], sink: Sink, alone: Collection[str], together: Together
) -> Loaded:
    """Fill the live tensors of this rank: from this node's arenas where they still hold the files, else from the memory of other
    nodes, else from storage; what replicas on several nodes need, by one of them for all where that is faster.

    Args:
        opened: The checkpoint.
        items: This rank's tensors by name.
        copies: More tensors under names of `items`.
        sink: Has the arenas of this node.
        alone: Names of tensors whose part no other process of this node reads.
        together: All ranks; they call this together.

    Raises:
        DamagedCheckpointError: bytes are not what was committed.
        OperationalError: a tensor has another shape or type.
    """
    shared = [item for item in (*items.values(), *copies) if _is_shared(item.box.name)]
    memory = opened.memory or sink.borrow(opened.directory)
    wanted = elsewhere(opened, shared, memory)
    peers = sink.gather(opened.directory, wanted, stored=opened.record.sequence >= 0) if wanted else {}

    held = peers | memory
    is_here = all(rank.file in held for manifest in opened.manifests for rank in manifest.ranks)
    threads = threads_of(len(together.place.local_ranks), waits=not is_here)

    def read(wanted: Sequence[Item]) -> Loaded:
        others = peers.keys() - memory.keys()
        return load_items(opened.directory, opened.source, wanted, threads=threads, memory=held, peers=others, alone=alone)

    started = time.monotonic()
    try:
        units = _units(opened, together)
        cost = Loaded(0, 0)
        if units and isinstance(together.exchange, GroupExchange):
            cost = Sharing(together.exchange, together.place.rank, together.read_once, read).run(units, dict(items))
            by_others = {unit.box.name for unit in units if together.place.rank in (unit.giver, *unit.takers)}
            shared = [item for item in shared if item.box.name not in by_others or item is not items[item.box.name]]
        cost = cost.plus(read(shared))
    finally:
        for handle in (*(() if opened.memory else memory.values()), *peers.values()):
            os.close(handle)
    if not (cost.bytes_from_memory or cost.bytes_from_peers or cost.bytes_from_ranks):
        sink.storage_read = (cost.bytes_read, time.monotonic() - started)
    log.info(
        "restored step=%d bytes_needed=%d %s",
        opened.record.step,
        cost.bytes_needed,
        " ".join(f"{name}={value}" for name, value in cost.sources().items()),
    )
    return cost


def _units(opened: Opened, together: Together) -> list[Unit]:
    """What ranks read for each other. The same on all ranks; with peer memory nothing: that is read before storage."""
    if together.read_once == "never" or len(together.place.spec.nodes) < 2 or any(manifest.buddy for manifest in opened.manifests):
        return []
    nodes = [data.decode() for data in together.exchange(together.place.node.encode())]
    return plan_units([[box for box in boxes if _is_shared(box.name)] for boxes in together.held], nodes)


def elsewhere(opened: Opened, items: Sequence[Item], here: Collection[str]) -> list[Wanted]:
    """Parts of files that this rank needs, that are not in this node's memory, and that another node may have in its memory.

    Args:
        opened: The checkpoint. Its manifests name the buddies; a job without peer memory has none.
        items: What is needed.
        here: Names of files that are in memory here.
    """
    holders = {rank.file: (manifest.node, manifest.buddy) for manifest in opened.manifests if manifest.buddy for rank in manifest.ranks}
    if not holders:
        return []
    sizes = {rank.file: rank.size_bytes for manifest in opened.manifests for rank in manifest.ranks}
    cells: dict[str, set[int]] = {}
    block = opened.source.block_bytes
    for piece in (piece for item in items if all(item.box.sizes) for piece in pieces(opened.source, item.box)):
        if piece.file in here or piece.file not in holders:
            continue
        found = cells.setdefault(piece.file, set())
        for number in blocks_of(byte_runs(piece, ITEM_BYTES[piece.chunk.dtype]), block):
            start = piece.chunk.at + number * block
            end = piece.chunk.at + min((number + 1) * block, piece.chunk.nbytes)
            found.update(range(start // CELL_BYTES, (end - 1) // CELL_BYTES + 1))
    return [
        Wanted(name=name, size_bytes=sizes[name], holders=holders[name], cells=tuple(sorted(found)))
        for name, found in sorted(cells.items())
    ]


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
