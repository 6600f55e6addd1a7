"""Read once: what several nodes need is read from shared storage by one rank, which sends it to the others.

Replicas hold equal boxes. Each box (large ones cut) is given to one of its ranks, so that all of them together read one copy; the
rest comes over the group of the exchange (gloo), with a digest. Whether that is faster than that everybody reads for itself is
measured on the first megabytes of each restore: a page cache or an arena is faster than any network.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
import xxhash

from regrow.ckpt.exchange import GroupExchange
from regrow.ckpt.flatten import Item
from regrow.ckpt.layout import Box, split
from regrow.ckpt.loading import Loaded, memory_of
from regrow.ckpt.manifest import DamagedCheckpointError
from regrow.errors import OperationalError, RegrowError

ReadOnce = Literal["measured", "always", "never"]
PROBE_BYTES = 8 << 20
"""What each rank reads and sends before it is decided how to go on."""
BATCH_BYTES = 32 << 20
"""Of one message: small tensors go together, and one message is in memory twice."""
TURN_BYTES = 256 << 20
"""Of all messages that are under way at once."""
_SMALLEST_PART = 4 << 20
_DIGEST_BYTES = 16
log = logging.getLogger("regrow.ckpt.sharing")


class Unit(msgspec.Struct, frozen=True, order=True):
    """A box that one rank reads and others get from it."""

    giver: int
    box: Box
    takers: tuple[int, ...]


class Batch(msgspec.Struct, frozen=True):
    """Units of one message."""

    giver: int
    takers: tuple[int, ...]
    units: tuple[Unit, ...]

    @property
    def nbytes(self) -> int:
        """Of all units."""
        return sum(unit.box.nbytes for unit in self.units)

    def places(self) -> Iterator[tuple[int, Unit]]:
        """Where in the message each unit begins."""
        at = 0
        for unit in self.units:
            yield at, unit
            at += unit.box.nbytes


class Told(msgspec.Struct, frozen=True):
    """What each rank tells all others after it has read."""

    read_seconds: float = 0.0
    read_bytes: int = 0
    carry_seconds: float = 0.0
    carried_bytes: int = 0
    problem: str = ""
    is_damage: bool = False


def plan_units(held: Sequence[Sequence[Box]], nodes: Sequence[str]) -> list[Unit]:
    """Who reads what for whom, the same on all ranks.

    Args:
        held: For each rank the boxes that it needs.
        nodes: For each rank its node. Ranks of one node alone share a page cache: for them there is nothing to do.
    """
    ranks_of: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            if box.nbytes:
                ranks_of.setdefault(box, []).append(rank)
    groups: dict[tuple[int, ...], list[Box]] = {}
    for box, ranks in ranks_of.items():
        group = tuple(sorted(set(ranks)))
        if len({nodes[rank] for rank in group}) > 1:
            groups.setdefault(group, []).append(box)
    loads = [0] * len(held)
    units: list[Unit] = []
    for group, boxes in sorted(groups.items()):
        limit = max(_SMALLEST_PART, sum(box.nbytes for box in boxes) // (4 * len(group)))
        parts = [part for box in boxes for part in split(box, limit)]
        for part in sorted(parts, key=lambda one: (-one.nbytes, one)):
            giver = min(group, key=lambda rank: (loads[rank], rank))
            loads[giver] += part.nbytes
            units.append(Unit(giver, part, tuple(rank for rank in group if rank != giver)))
    return sorted(units)


def first_units(units: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
    """Of each giver the units of its first `PROBE_BYTES`, and all others."""
    given: dict[int, int] = {}
    first: list[Unit] = []
    rest: list[Unit] = []
    for unit in units:
        (first if given.get(unit.giver, 0) < PROBE_BYTES else rest).append(unit)
        given[unit.giver] = given.get(unit.giver, 0) + unit.box.nbytes
    return first, rest


class Sharing:
    """One restore of one rank. Collective: all ranks of the exchange go through the same calls."""

    def __init__(self, exchange: GroupExchange, rank: int, how: ReadOnce, load: Callable[[list[Item]], Loaded]) -> None:
        """`load` fills items from where this rank reads, verified."""
        self._exchange = exchange
        self._rank = rank
        self._how: ReadOnce = how
        self._load = load
        self._cost = Loaded(0, 0)

    def run(self, units: Sequence[Unit], items: dict[str, Item]) -> Loaded:
        """Fill all parts of `items` that are in units.

        Raises:
            DamagedCheckpointError: a rank found bytes that are not what was committed, or what came is not what was sent.
            OperationalError: another rank could not read.
        """
        first, rest = first_units(units)
        probe = self._read(first, items)
        seconds, num_bytes = self._carry(first, items)
        if not rest:
            return self._cost
        answers = self._tell(msgspec.structs.replace(probe, carry_seconds=seconds, carried_bytes=num_bytes))
        if self._how == "always" or (self._how == "measured" and is_sharing_faster(answers)):
            self._read(rest, items)
            self._carry(rest, items)
        else:
            self._add(self._load([_part(items, unit.box) for unit in rest if self._rank in (unit.giver, *unit.takers)]))
        return self._cost

    def _read(self, units: Sequence[Unit], items: dict[str, Item]) -> Told:
        """Read this rank's own units, and hear whether all could read theirs."""
        mine = [_part(items, unit.box) for unit in units if unit.giver == self._rank]
        started = time.monotonic()
        problem, is_damage = "", False
        try:
            self._add(self._load(mine))
        except RegrowError as error:
            problem, is_damage = f"rank {self._rank}: {error.where}: {error.what}", isinstance(error, DamagedCheckpointError)
        except OSError as error:
            problem = f"rank {self._rank}: {error}"
        told = Told(time.monotonic() - started, sum(item.box.nbytes for item in mine), problem=problem, is_damage=is_damage)
        for answer in self._tell(told):
            if answer.problem:
                kind = DamagedCheckpointError if answer.is_damage else OperationalError
                raise kind(answer.problem, hint="use an older checkpoint" if answer.is_damage else "")
        return told

    def _tell(self, told: Told) -> list[Told]:
        return [msgspec.json.decode(data, type=Told) for data in self._exchange(msgspec.json.encode(told))]

    def _carry(self, units: Sequence[Unit], items: dict[str, Item]) -> tuple[float, int]:
        """Send and receive; seconds and bytes received."""
        started = time.monotonic()
        num_bytes = 0
        for turn in _turns(units):
            sends = [self._send(one, items) for one in turn if one.giver == self._rank]
            for message, work, batch in [self._receive(one) for one in turn if self._rank in one.takers]:
                work.wait()
                _unpack(message, batch, items)
                num_bytes += message.numel() - _DIGEST_BYTES
            for _, works in sends:
                for work in works:
                    work.wait()
        self._add(Loaded(num_bytes, 0, bytes_from_ranks=num_bytes))
        return time.monotonic() - started, num_bytes

    def _send(self, batch: Batch, items: dict[str, Item]) -> tuple[torch.Tensor, list[dist.Work]]:
        message = torch.empty(batch.nbytes + _DIGEST_BYTES, dtype=torch.uint8)
        for at, unit in batch.places():
            part = _part(items, unit.box).local
            message[at : at + unit.box.nbytes] = part.cpu().contiguous().flatten().view(torch.uint8)
        message[batch.nbytes :] = _digest(message[: batch.nbytes])
        return message, [self._exchange.send(message, taker) for taker in batch.takers]

    def _receive(self, batch: Batch) -> tuple[torch.Tensor, dist.Work, Batch]:
        message = torch.empty(batch.nbytes + _DIGEST_BYTES, dtype=torch.uint8)
        return message, self._exchange.receive(message, batch.giver), batch

    def _add(self, more: Loaded) -> None:
        self._cost = self._cost.plus(more)


def is_sharing_faster(answers: Sequence[Told]) -> bool:
    """Whether a byte costs less from another rank than from where it is read, over all ranks, as measured while all read and sent."""
    read_bytes, carried = sum(one.read_bytes for one in answers), sum(one.carried_bytes for one in answers)
    if not read_bytes or not carried:
        return False
    read = sum(one.read_seconds for one in answers) / read_bytes
    carry = sum(one.carry_seconds for one in answers) / carried
    log.info("read once: reading %.3f ns a byte, from ranks %.3f ns a byte", read * 1e9, carry * 1e9)
    return carry < read


def _unpack(message: torch.Tensor, batch: Batch, items: dict[str, Item]) -> None:
    if not torch.equal(_digest(message[: batch.nbytes]), message[batch.nbytes :]):
        what = f"what rank {batch.giver} sent is not what came"
        raise OperationalError(what, where=batch.units[0].box.name, hint="look at the network between the nodes")
    for at, unit in batch.places():
        part = _part(items, unit.box).local
        part.copy_(message[at : at + unit.box.nbytes].clone().view(part.dtype).view(part.shape))


def _turns(units: Sequence[Unit]) -> Iterator[list[Batch]]:
    """Messages that are under way together: one of each giver, so that all send at once, `TURN_BYTES` in all or a single one."""
    turns: dict[tuple[int, tuple[int, ...]], list[list[Unit]]] = {}
    for unit in units:
        batches = turns.setdefault((unit.giver, unit.takers), [[]])
        if batches[-1] and sum(one.box.nbytes for one in batches[-1]) + unit.box.nbytes > BATCH_BYTES:
            batches.append([])
        batches[-1].append(unit)
    for turn in range(max((len(batches) for batches in turns.values()), default=0)):
        together: list[Batch] = []
        for (giver, takers), batches in sorted(turns.items()):
            if turn < len(batches):
                one = Batch(giver, takers, tuple(batches[turn]))
                if together and sum(other.nbytes for other in together) + one.nbytes > TURN_BYTES:
                    yield together
                    together = []
                together.append(one)
        yield together


def _part(items: dict[str, Item], box: Box) -> Item:
    """The part of a live tensor that is a box within its own."""
    whole = items[box.name]
    part = whole.local
    for axis, (at, size, held) in enumerate(zip(box.offsets, box.sizes, whole.box.offsets, strict=True)):
        part = part.narrow(axis, at - held, size)
    return Item(box, part)


def _digest(data: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(xxhash.xxh3_128_digest(memory_of(data))), dtype=torch.uint8)
