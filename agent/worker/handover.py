"""The state of survivors on another mesh: every part that a rank needs is carried from whoever holds it, memory to memory.

The parts that ranks hold are boxes of whole tensors (`ckpt.flatten`), those that they need are too, so a change of DP, TP, PP
or sharding is cutting boxes: what a checkpoint does on storage. All ranks see all boxes and make the same plan; nobody is
asked, nothing is written. One message for each pair of ranks, with a digest.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash

from regrow.ckpt.layout import Box
from regrow.errors import OperationalError

MOST_BOXES = 400_000
"""Over all ranks; with more, telling all boxes to all ranks takes longer than reading the checkpoint."""
_DIGEST_BYTES = 8


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank holds of a completed step, and what it needs."""

    step: int = -1
    samples: int = 0
    holds: tuple[Box, ...] = ()
    needs: tuple[Box, ...] = ()
    schedules: list[Any] = []
    groups: list[Any] = []
    values: dict[str, Any] = {}
    random: Any = None
    """State of torch's generator, of which the streams of the new mesh are derived."""


class Part(msgspec.Struct, frozen=True, order=True):
    """A region that one rank gives to another, which may be itself. Names are those on either side."""

    giver: int
    taker: int
    source: Box
    target: Box
    start: tuple[int, ...]
    """In the whole tensor, elements."""
    sizes: tuple[int, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Who gives what to whom, the same on all ranks; of `parts` those that concern one rank, where one was asked for."""

    step: int
    samples: int
    first: int
    """The lowest rank that holds the step: schedules and random streams are its."""
    parts: tuple[Part, ...]
    receivers: dict[int, int]
    """{rank that gets something from another one: the first that it gets it from}."""


def filled(catalogs: list[Catalog], needs: list[str], has: list[str]) -> list[Catalog]:
    """What ranks did not say because a lower one says the very same: of replicas only the first tells its boxes.

    Args:
        catalogs: in rank order.
        needs: digests of the boxes that ranks need, in rank order.
        has: of those that they hold; empty: nothing.
    """
    return [
        msgspec.structs.replace(
            catalog,
            needs=catalogs[needs.index(needs[rank])].needs,
            holds=catalogs[has.index(has[rank])].holds if has[rank] else (),
        )
        for rank, catalog in enumerate(catalogs)
    ]


def plan(catalogs: list[Catalog], oldest: int, rank: int | None = None) -> Plan | None:
    """The newest step of which every needed element is held by somebody; None: the disk.

    Args:
        catalogs: in rank order.
        oldest: step of the checkpoint; what is older in memory is of no use.
        rank: only the parts that it gives or takes are listed; None: all.
    """
    for step in sorted({catalog.step for catalog in catalogs if catalog.step >= max(oldest, 1)}, reverse=True):
        ranks = [one for one, catalog in enumerate(catalogs) if catalog.step == step]
        holders: dict[Box, list[int]] = {}
        for holds, holding in _alike([(one, catalogs[one].holds) for one in ranks]):
            for box in holds:
                holders.setdefault(box, []).extend(holding)
        receivers: dict[int, int] = {}
        parts = _cover(catalogs, holders, rank, receivers)
        if parts is not None:
            samples = max(catalogs[one].samples for one in ranks)
            return Plan(step=step, samples=samples, first=ranks[0], parts=tuple(parts), receivers=receivers)
    return None


def _alike(found: list[tuple[int, tuple[Box, ...]]]) -> list[tuple[tuple[Box, ...], list[int]]]:
    """Ranks with the very same list of boxes (`filled` made it one object), together: replicas are gone through once."""
    groups: dict[int, tuple[tuple[Box, ...], list[int]]] = {}
    for rank, boxes in found:
        groups.setdefault(id(boxes), (boxes, []))[1].append(rank)
    return list(groups.values())


def _cover(catalogs: list[Catalog], holders: dict[Box, list[int]], rank: int | None, receivers: dict[int, int]) -> list[Part] | None:
    """Parts that fill every needed box; None when a box cannot be filled. Work is spread over those that hold the same."""
    index = _Index(holders)
    having = {box: frozenset(ranks) for box, ranks in holders.items()}
    given = [0] * len(catalogs)
    parts: list[Part] = []
    for needs, takers in _alike([(one, catalog.needs) for one, catalog in enumerate(catalogs)]):
        for box in needs:
            found = index.sources(box)
            if found is None:
                return None
            for held, start, sizes in found:
                ranks, own, volume = holders[held], having[held], math.prod(sizes)
                for taker in takers:
                    giver = taker
                    if taker not in own:
                        giver = min(ranks, key=given.__getitem__)
                        given[giver] += volume
                        receivers.setdefault(taker, giver)
                    if rank is None or rank in (giver, taker):
                        parts.append(Part(giver, taker, held, box, start, sizes))
    return parts


class _Index:
    """Held boxes by tensor, in the order of their offsets along the axis that they are cut on."""

    def __init__(self, holders: Iterable[Box]) -> None:
        by_name: dict[str, list[Box]] = {}
        for box in holders:
            by_name.setdefault(box.name, []).append(box)
        self._rows = {name: _Row.of(boxes) for name, boxes in by_name.items()}

    def sources(self, box: Box) -> list[tuple[Box, tuple[int, ...], tuple[int, ...]]] | None:
        """(held box, start, sizes) of what fills a needed box; None: not all of it is held."""
        missing = math.prod(box.sizes)
        if not missing:
            return []
        row = self._rows.get(box.name.partition("#")[0])
        found: list[tuple[Box, tuple[int, ...], tuple[int, ...]]] = []
        for held in row.near(box) if row is not None else ():
            common = _common(held, box) if (held.dtype, held.shape) == (box.dtype, box.shape) else None
            if common is not None:
                found.append((held, *common))
                missing -= math.prod(common[1])
        return None if missing else found


class _Row(msgspec.Struct, frozen=True):
    """The boxes of one tensor."""

    axis: int
    """-1: a scalar, or not cut."""
    boxes: list[Box]
    starts: list[int]
    longest: int

    @classmethod
    def of(cls, boxes: list[Box]) -> _Row:
        """Sort them."""
        axis = next((axis for axis, offsets in enumerate(zip(*(box.offsets for box in boxes), strict=False)) if len(set(offsets)) > 1), -1)
        if axis < 0:
            return cls(axis, boxes, [], 0)
        boxes = sorted(boxes, key=lambda box: box.offsets[axis])
        return cls(axis, boxes, [box.offsets[axis] for box in boxes], max(box.sizes[axis] for box in boxes))

    def near(self, box: Box) -> list[Box]:
        """Those that may have something of `box`."""
        if self.axis < 0 or self.axis >= len(box.offsets):
            return self.boxes
        start = box.offsets[self.axis]
        return self.boxes[bisect_right(self.starts, start - self.longest) : bisect_left(self.starts, start + box.sizes[self.axis])]


def _common(one: Box, other: Box) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Start and sizes of what two boxes of the same tensor share; None: nothing."""
    start = tuple(map(max, one.offsets, other.offsets))
    ends = (min(a + m, b + n) for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True))
    sizes = tuple(end - begin for begin, end in zip(start, ends, strict=True))
    return (start, sizes) if all(size > 0 for size in sizes) else None


def carry(plan: Plan, rank: int, held: dict[str, torch.Tensor], local: dict[str, torch.Tensor], group: Any) -> int:
    """Fill `local` from `held`, this rank's own and that of others. Collective. Returns the bytes that came from other ranks.

    Raises:
        OperationalError: what came is not what was sent.
    """
    coming: dict[int, list[Part]] = {}
    going: dict[int, list[Part]] = {}
    for part in plan.parts:
        if part.giver == part.taker == rank:
            _region(local[part.target.name], part, part.target).copy_(_region(held[part.source.name], part, part.source))
        elif part.taker == rank:
            coming.setdefault(part.giver, []).append(part)
        elif part.giver == rank:
            going.setdefault(part.taker, []).append(part)
    buffers = {giver: torch.empty(sum(map(_nbytes, parts)) + _DIGEST_BYTES, dtype=torch.uint8) for giver, parts in coming.items()}
    messages = {taker: _pack(parts, held) for taker, parts in going.items()}
    works = [dist.irecv(buffer, giver, group=group) for giver, buffer in buffers.items()]
    works += [dist.isend(message, taker, group=group) for taker, message in messages.items()]
    for work in works:
        assert work is not None
        work.wait()
    for giver, parts in coming.items():
        _unpack(buffers[giver], parts, local, giver)
    return sum(buffer.numel() for buffer in buffers.values())


def _region(value: torch.Tensor, part: Part, box: Box) -> torch.Tensor:
    """The part within the tensor that holds `box`."""
    for axis, (start, offset, size) in enumerate(zip(part.start, box.offsets, part.sizes, strict=True)):
        value = value.narrow(axis, start - offset, size)
    return value


def _nbytes(part: Part) -> int:
    return math.prod(part.sizes) * (part.source.nbytes // max(1, math.prod(part.source.sizes)))


def _pack(parts: list[Part], held: dict[str, torch.Tensor]) -> torch.Tensor:
    pieces = [_region(held[part.source.name], part, part.source).cpu().contiguous().reshape(-1).view(torch.uint8) for part in parts]
    data = torch.cat(pieces)
    digest = xxhash.xxh3_64_digest(data.numpy().data)
    return torch.cat([data, torch.frombuffer(bytearray(digest), dtype=torch.uint8)])


def _unpack(buffer: torch.Tensor, parts: list[Part], local: dict[str, torch.Tensor], giver: int) -> None:
    data = buffer[:-_DIGEST_BYTES]
    if xxhash.xxh3_64_digest(data.numpy().data) != buffer[-_DIGEST_BYTES:].numpy().tobytes():
        raise OperationalError(f"state from the memory of rank {giver} is not what was sent", hint="the checkpoint is taken instead")
    at = 0
    for part in parts:
        size = _nbytes(part)
        target = _region(local[part.target.name], part, part.target)
        target.copy_(data[at : at + size].clone().view(target.dtype).view(part.sizes))
        at += size
