"""Writes that no version counter counts: through `tensor.data`, through NumPy, by a kernel of the user's own.

Codebooks that a forward pass moves by `embed.data.copy_(...)` are the common case: the state would be that of half a step, and the
step that is computed again would move them twice. Buffers are compared whole; parameters, which such code writes as wholes
(renormed, clamped), at a few places each, so that a step pays for their number and not for their size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash

from regrow.ckpt import flatten

_WINDOW_BYTES = 256
_NUM_WINDOWS = 3


class Marks:
    """What the tensors of a model hold, at a boundary and later. On CPUs only: those of GPUs are left to their version counters.

    Args:
        tensors: parameters, of which windows are looked at, and buffers, looked at whole. Where the elements of one do not lie
            side by side in memory it is left out.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._views = [view for value in tensors for view in _views(value)]

    def take(self) -> int:
        """64 bits of what is there now."""
        state = xxhash.xxh3_64()
        for view in self._views:
            state.update(view)
        return state.intdigest()


def _views(value: torch.Tensor) -> list[memoryview]:
    """Windows onto a tensor's own memory, which they keep alive."""
    local = flatten.local_of(value)
    if local.device.type != "cpu" or not local.numel():
        return []
    span = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    if span != local.numel():
        return []
    data = local.as_strided((span,), (1,)).view(torch.uint8)
    if not isinstance(value, torch.nn.Parameter) or data.numel() <= _NUM_WINDOWS * _WINDOW_BYTES:
        return [data.numpy().data]
    gap = (data.numel() - _WINDOW_BYTES) // (_NUM_WINDOWS - 1)
    return [data[at * gap : at * gap + _WINDOW_BYTES].numpy().data for at in range(_NUM_WINDOWS)]
