"""Snapshots that were never written: which of them all ranks together can restore, and the choice that all of them make alike.

A job may save into memory alone between its checkpoints on storage (docs/adr/0015-snapshots-in-memory.md). No record and no
store know of such a snapshot: it is whole when for each rank that made it some node has the file, own or copied, and it may be
restored when it continues what the leader chose.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

import msgspec

from regrow.ckpt.exchange import Exchange
from regrow.ckpt.manifest import PLAIN_VERSION, NodeManifest, Record
from regrow.ckpt.place import Place
from regrow.ckpt.protocol import Remembered
from regrow.ckpt.reshard import source_of
from regrow.ckpt.restoring import Opened
from regrow.ckpt.sinks import Sink
from regrow.wire import RestorePoint

log = logging.getLogger("regrow.ckpt.restore")


class Head(msgspec.Struct, frozen=True, order=True):
    """A rank's file of a snapshot, as short as can be."""

    generation: int
    step: int
    directory: str
    world_size: int
    rank: int
    digest: str


class Offer(msgspec.Struct, frozen=True):
    """What one node has."""

    node: str
    heads: tuple[Head, ...] = ()


class Choice(msgspec.Struct, frozen=True):
    """A snapshot that is whole: its directory, and for each of its ranks the nodes that have the file."""

    directory: str
    holders: tuple[tuple[str, ...], ...]


def choose(offers: Iterable[Offer]) -> Choice | None:
    """The newest whole snapshot: of the latest generation the latest step. Pure; the same on all ranks.

    A rank of which two nodes have different bytes makes its snapshot void.
    """
    found: dict[tuple[int, int, str, int], dict[int, dict[str, list[str]]]] = {}
    for offer in offers:
        for head in offer.heads:
            ranks = found.setdefault((head.generation, head.step, head.directory, head.world_size), {})
            ranks.setdefault(head.rank, {}).setdefault(head.digest, []).append(offer.node)
    for (_, _, directory, world_size), ranks in sorted(found.items(), reverse=True):
        if all(len(ranks.get(rank, {})) == 1 for rank in range(world_size)):
            holders = [next(iter(ranks[rank].values())) for rank in range(world_size)]
            return Choice(directory, tuple(tuple(sorted(set(nodes))) for nodes in holders))
    return None


def continues(one: Remembered, point: RestorePoint, generation: int) -> bool:
    """Whether a snapshot is what came after the leader's restore point, in an earlier generation than ours."""
    if one.generation >= generation:
        return False
    if one.generation == point.generation:
        return one.step > point.step
    return one.note.parent is not None and one.note.parent.record_digest == point.record_digest and one.step > point.step


@contextlib.contextmanager
def newest(exchange: Exchange, place: Place, sink: Sink, point: RestorePoint) -> Generator[Opened | None]:
    """The newest snapshot that the nodes of this generation have in memory, with the files that are in reach. Collective.

    Yields None, on all ranks alike, when there is none that continues `point`.
    """
    offered: list[Remembered] = []
    if place.rank == min(place.local_ranks):
        offered = [one for one in sink.recall() if continues(one, point, place.spec.generation)]
    offer = Offer(place.node, tuple(_head(one) for one in offered))
    choice = choose(msgspec.json.decode(data, type=Offer) for data in exchange(msgspec.json.encode(offer)))
    if choice is None:
        yield None
        return
    mine = [one for one in offered if one.directory == choice.directory and choice.holders[one.manifest.rank][0] == place.node]
    parts = [one for data in exchange(msgspec.json.encode(mine)) for one in msgspec.json.decode(data, type=list[Remembered])]
    opened = open_parts(parts, choice)
    memory = sink.borrow(opened.directory)
    try:
        yield msgspec.structs.replace(opened, memory=memory)
    finally:
        for handle in memory.values():
            os.close(handle)


def agree(exchange: Exchange, problem: str) -> str:
    """What went wrong on any rank; empty when nothing did on all. Collective."""
    return next(filter(None, (data.decode() for data in exchange(problem.encode()))), "")


def open_parts(parts: Sequence[Remembered], choice: Choice) -> Opened:
    """The snapshot as a checkpoint that was opened: its record says what the parts say together."""
    first = min(parts, key=lambda one: one.manifest.rank)
    facts = {key: value for one in parts for key, value in one.note.facts.items()}
    manifests = [
        NodeManifest(
            job=one.job,
            epoch=one.epoch,
            generation=one.generation,
            step=one.step,
            samples=one.note.samples,
            node=choice.holders[one.manifest.rank][0],
            world_size=one.note.world_size,
            ranks=(one.manifest,),
            parent=one.note.parent,
            buddy=choice.holders[one.manifest.rank][-1],
        )
        for one in sorted(parts, key=lambda one: one.manifest.rank)
    ]
    record = Record(
        version=PLAIN_VERSION,
        job=first.job,
        epoch=first.epoch,
        generation=first.generation,
        step=first.step,
        samples=first.note.samples,
        sequence=-1,
        mesh=first.note.mesh,
        world_size=first.note.world_size,
        parent=first.note.parent,
        num_bytes=sum(one.manifest.size_bytes for one in parts),
        facts=facts,
    )
    return Opened(Path(choice.directory), record, manifests, source_of(manifests))


def _head(one: Remembered) -> Head:
    return Head(one.generation, one.step, one.directory, one.note.world_size, one.manifest.rank, one.manifest.digest)
