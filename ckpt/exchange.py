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


def over(group: Any = None) -> Exchange:
    """An exchange over a process group whose backend has CPU tensors (gloo), the default group if None."""

    def gather(data: bytes) -> list[bytes]:
        world = dist.get_world_size(group)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(lengths, torch.tensor([len(data)], dtype=torch.int64), group=group)
        longest = max(1, *(int(length) for length in lengths))
        mine = torch.zeros(longest, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
        dist.all_gather(parts, mine, group=group)
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    return gather
