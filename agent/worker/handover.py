"""The state of survivors on another mesh: every part that a rank needs is carried from whoever holds it, memory to memory.

The parts that ranks hold are boxes of whole tensors (`ckpt.flatten`), those that they need are too, so a change of DP, TP, PP
or sharding is cutting boxes: what a checkpoint does on storage. All ranks see all boxes and make the same plan; nobody is
asked, nothing is written. One message for each pair of ranks, with a digest.
"""

from __future__ import annotations

import math
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
    """Who gives what to whom, the same on all ranks."""

    step: int
    samples: int
    first: int
    """The lowest rank that holds the step: schedules and random streams are its."""
    parts: tuple[Part, ...]


def plan(catalogs: list[Catalog], oldest: int) -> Plan | None:
    """The newest step of which every needed element is held by somebody; None: the disk.

    Args:
        catalogs: in rank order.
        oldest: step of the checkpoint; what is older in memory is of no use.
    """
    for step in sorted({catalog.step for catalog in catalogs if catalog.step >= max(oldest, 1)}, reverse=True):
        holders: dict[str, dict[Box, list[int]]] = {}
        ranks = [rank for rank, catalog in enumerate(catalogs) if catalog.step == step]
        for rank in ranks:
            for box in catalogs[rank].holds:
                holders.setdefault(box.name, {}).setdefault(box, []).append(rank)
        parts = _cover(catalogs, holders)
        if parts is not None:
            samples = max(catalogs[rank].samples for rank in ranks)
            return Plan(step=step, samples=samples, first=ranks[0], parts=tuple(sorted(parts)))
    return None


def _cover(catalogs: list[Catalog], holders: dict[str, dict[Box, list[int]]]) -> list[Part] | None:
    """Parts that fill every needed box; None when a box cannot be filled. Work is spread over those that hold the same."""
    given = [0] * len(catalogs)
    parts: list[Part] = []
    for taker, catalog in enumerate(catalogs):
        for box in catalog.needs:
            missing = math.prod(box.sizes)
            for held, ranks in holders.get(box.name.partition("#")[0], {}).items():
                common = _common(held, box) if missing else None
                if common is None or (held.dtype, held.shape) != (box.dtype, box.shape):
                    continue
                giver = taker if taker in ranks else min(ranks, key=lambda rank: (given[rank], rank))
                volume = math.prod(common[1])
                given[giver] += 0 if giver == taker else volume
                missing -= volume
                parts.append(Part(giver, taker, held, box, *common))
            if missing:
                return None
    return parts


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
