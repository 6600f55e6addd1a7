"""Inputs of a micro-step to another replica and back: a ring over the data axis, on the control group."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from regrow.ckpt.rng import Streams
from regrow.ids import MeshShape

_LENGTH_TAG, _DATA_TAG = 7101, 7102


class _Part(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]


class _Header(msgspec.Struct, frozen=True):
    parts: tuple[_Part, ...]


class Ring:
    """This rank's place among the replicas of its position. Every rank calls `swap` with the same shift."""

    def __init__(self, rank: int, mesh: MeshShape, group: Any, device: torch.device) -> None:
        self._rank, self._mesh, self._group, self._device = rank, mesh, group, device

    def swap(self, inputs: tuple[Tensor, ...], randomness: Streams, shift: int) -> tuple[int, tuple[Tensor, ...], Streams]:
        """Give this rank's inputs to the replica `shift` places on, get those of the one `shift` places back.

        Returns: (whose they are, inputs, random streams to run them with).
        """
        size, world = self._mesh.replica_size, self._mesh.world_size
        to, owner = (self._rank + shift * size) % world, (self._rank - shift * size) % world
        device_state = randomness.cuda_state
        tensors = [*inputs, randomness.torch_state, *([device_state] if device_state is not None else [])]
        data = self._pass_on(_pack(tensors), to, owner)
        found = _unpack(data)
        mine = tuple(part.to(self._device) for part in found[: len(inputs)])
        states = [part.numpy().tobytes() for part in found[len(inputs) :]]
        return owner, mine, Streams(torch=states[0], cuda=states[1] if device_state is not None else None)

    def _pass_on(self, data: bytes, to: int, owner: int) -> bytes:
        mine, length = torch.frombuffer(bytearray(data), dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
        sent = dist.isend(torch.tensor([len(data)], dtype=torch.int64), to, group=self._group, tag=_LENGTH_TAG)
        dist.recv(length, owner, group=self._group, tag=_LENGTH_TAG)
        body = dist.isend(mine, to, group=self._group, tag=_DATA_TAG)
        theirs = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(theirs, owner, group=self._group, tag=_DATA_TAG)
        for work in (sent, body):
            if work is not None:
                work.wait()
        return theirs.numpy().tobytes()


def _pack(tensors: list[Tensor]) -> bytes:
    parts = tuple(_Part(str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in tensors)
    head = msgspec.msgpack.encode(_Header(parts))
    bodies = [one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for one in tensors]
    return len(head).to_bytes(4, "little") + head + b"".join(bodies)


def _unpack(data: bytes) -> list[Tensor]:
    begin = 4 + int.from_bytes(data[:4], "little")
    header = msgspec.msgpack.decode(data[4:begin], type=_Header)
    found: list[Tensor] = []
    for part in header.parts:
        dtype: torch.dtype = getattr(torch, part.dtype)
        size = int(np.prod(part.shape, dtype=np.int64)) * dtype.itemsize
        raw = torch.frombuffer(bytearray(data[begin : begin + size]), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
        found.append(raw.view(dtype).reshape(part.shape))
        begin += size
    return found
