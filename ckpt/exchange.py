"""All ranks learn what all ranks have to say: once a generation, never per save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Exchange = Callable[[bytes], list[bytes]]
"""Gives each rank's bytes to all, in rank order."""


def alone(data: bytes) -> list[bytes]:
    """The exchange of a world of one."""
    return [data]


class GroupExchange:
    """An exchange over a process group whose backend has CPU tensors (gloo); it also carries tensors between two of its ranks."""

    def __init__(self, group: Any = None) -> None:
        """The default group if None."""
        self._group = group

    def __call__(self, data: bytes) -> list[bytes]:
        """Collective."""
        world = dist.get_world_size(self._group)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(lengths, torch.tensor([len(data)], dtype=torch.int64), group=self._group)
        longest = max(1, *(int(length) for length in lengths))
        mine = torch.zeros(longest, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
        dist.all_gather(parts, mine, group=self._group)
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def send(self, data: torch.Tensor, rank: int) -> dist.Work:
        """Begin to send a CPU tensor to a rank of the group, which has to `receive` it; it must not change until it was waited for."""
        return _begun(dist.isend(data, group=self._group, group_dst=rank))

    def receive(self, data: torch.Tensor, rank: int) -> dist.Work:
        """Begin to fill a CPU tensor with what a rank of the group sends."""
        return _begun(dist.irecv(data, group=self._group, group_src=rank))


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


def over(group: Any = None) -> Exchange:
    """An exchange over a process group whose backend has CPU tensors (gloo), the default group if None."""
    return GroupExchange(group)
