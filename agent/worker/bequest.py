"""What a worker holds, past the end of its process: into memory of the node's writer, and out of it in the successor.

The form is that of `live.Held`: data of the tensors side by side, then a head in JSON that says what they are. A digest covers all.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import xxhash

from regrow import wire
from regrow.agent.worker.live import Held
from regrow.ckpt.channel import WorkerChannel
from regrow.ckpt.layout import Box
from regrow.ckpt.protocol import Bequeath, Bequeathed, Bequest, HeldAll, Inherit, Inherited, Ready, ToProducer
from regrow.ckpt.rng import Streams
from regrow.errors import OperationalError

_log = logging.getLogger("regrow.worker")

LIMIT_SECONDS = 2.0
"""More than this no copy takes: whoever is to be killed is killed."""
BYTES_PER_SECOND = 1e9
"""Of allocation, copy and digest together, on the safe side: what a copy is expected to take is told to the agent."""
_ALIGNMENT = 64


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    sizes: tuple[int, ...]
    at: int


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    samples: int
    shard: str
    restored: wire.RestorePoint | None
    """What its generation began with: says which line of descent the state is of."""
    tensors: tuple[_Tensor, ...]
    schedules: list[Any]
    groups: list[Any]
    values: dict[str, Any]
    boxes: list[Box]
    streams: Streams


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Whose state it is, and where it goes."""

    writer: str
    """Path of the writer's socket."""
    slot: int
    spec: wire.GenerationSpec


def seconds_for(held: Held) -> float:
    """What leaving it is expected to take."""
    return sum(value.nbytes for value in held.tensors.values()) / BYTES_PER_SECOND


def leave(held: Held, place: Place, still: Callable[[], bool]) -> bool:
    """Copy it into the writer's memory. `still`: is nothing of it written to since? Asked after the copy: a torn state is void.

    Returns:
        Whether the successor can have it.
    """
    tensors, end = _laid_out(held)
    head = msgspec.json.encode(
        _Head(
            step=held.step,
            samples=held.samples,
            shard=held.shard,
            restored=place.spec.restore,
            tensors=tensors,
            schedules=held.schedules,
            groups=held.groups,
            values=held.values,
            boxes=held.boxes,
            streams=held.streams,
        )
    )
    num_bytes = end + len(head)
    try:
        with _writer_of(place) as channel:
            channel.send(Bequeath(job=place.spec.job, generation=place.spec.generation, slot=place.slot, num_bytes=num_bytes))
            memory = _granted(channel)
            if memory is None:
                return False
            digest = _fill(memory, held, tensors, end, head)
            if not still():
                _log.warning("state of step %d not left: it was written to while it was copied", held.step)
                return False
            channel.send(Bequeathed(step=held.step, head_bytes=len(head), digest=digest))
    except OperationalError as error:
        _log.info("state of step %d not left: %s", held.step, error.what)
        return False
    return True


def inherit(place: Place) -> Held | None:
    """What a worker of this place left, where it continues the restore point of this generation; None: nothing."""
    point = place.spec.restore
    try:
        with _writer_of(place) as channel:
            channel.send(Inherit(job=place.spec.job, slot=place.slot))
            found, memory = _received(channel)
    except OperationalError:
        return None
    if found is None or memory is None:
        return None
    if xxhash.xxh3_128_hexdigest(memory) != found.digest:
        _log.warning("state of step %d that was left is damaged", found.step)
        return None
    start = found.num_bytes - found.head_bytes
    head = msgspec.json.decode(memoryview(memory)[start:], type=_Head)
    if found.generation < place.spec.gasp or not _continues(head, found.generation, point, place.spec.generation):
        _log.info("state of step %d of generation %d is not of this line of descent", found.step, found.generation)
        return None
    return Held(
        step=head.step,
        samples=head.samples,
        shard=head.shard,
        tensors={one.name: _view(memory, one) for one in head.tensors},
        schedules=head.schedules,
        groups=head.groups,
        values=head.values,
        boxes=head.boxes,
        streams=head.streams,
    )


def inherited(place: Place) -> None:
    """It was taken up: this process holds the state now."""
    with contextlib.suppress(OperationalError), _writer_of(place) as channel:  # with the writer its memory is gone
        channel.send(Inherited(job=place.spec.job, slot=place.slot))


def _writer_of(place: Place) -> contextlib.closing[WorkerChannel]:
    return contextlib.closing(WorkerChannel(place.writer, timeout_seconds=LIMIT_SECONDS))


def _continues(head: _Head, generation: int, point: wire.RestorePoint | None, ours: int) -> bool:
    """Does a state of an earlier generation come after the leader's choice, and descend from it?"""
    if generation >= ours or head.step < (point.step if point is not None else 1):
        return False
    if point is None:
        return head.restored is None  # of a job that never had a checkpoint
    same = head.restored is not None and (head.restored.directory, head.restored.step) == (point.directory, point.step)
    return same or generation == point.generation


def _laid_out(held: Held) -> tuple[tuple[_Tensor, ...], int]:
    found: list[_Tensor] = []
    end = 0
    for name, value in held.tensors.items():
        found.append(_Tensor(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), end))
        end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(found), end


def _granted(channel: WorkerChannel) -> mmap.mmap | None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while lines := channel.wait(deadline):
        for line in lines:
            message = wire.decode(line, ToProducer)
            if not isinstance(message, Ready):
                _log.info("state not left: the writer refuses: %s", message)
                return None
            (handle,) = channel.take_handles(1)
            try:
                return mmap.mmap(handle, message.arena_bytes)
            finally:
                os.close(handle)
    return None


@torch.no_grad()
def _fill(memory: mmap.mmap, held: Held, tensors: tuple[_Tensor, ...], end: int, head: bytes) -> str:
    for one in tensors:
        value = held.tensors[one.name]
        if value.numel():
            _view(memory, one).copy_(value)
    memory[end:] = head
    return xxhash.xxh3_128_hexdigest(memory)


def _view(memory: mmap.mmap, one: _Tensor) -> torch.Tensor:
    dtype = getattr(torch, one.dtype)
    count = 1
    for size in one.sizes:
        count *= size
    if not count:
        return torch.empty(one.sizes, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=one.at).view(one.sizes)


def _received(channel: WorkerChannel) -> tuple[Bequest | None, mmap.mmap | None]:
    found: Bequest | None = None
    memory: mmap.mmap | None = None
    deadline = time.monotonic() + LIMIT_SECONDS
    while lines := channel.wait(deadline):
        for line in lines:
            message = wire.decode(line, ToProducer)
            if isinstance(message, HeldAll):
                return found, memory
            if isinstance(message, Bequest):
                (handle,) = channel.take_handles(1)
                try:  # a private mapping can be written to, which torch wants; nobody does
                    memory = mmap.mmap(handle, message.num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                finally:
                    os.close(handle)
                found = message
    return None, None
