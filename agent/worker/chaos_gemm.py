"""A sick matrix unit on order: one bit of a matrix product's output flips, now and then or always."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = frozenset((torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default))


class SickProducts(TorchDispatchMode):
    """While it is entered, the first matrix product has one wrong bit.

    Args:
        bit: of the element, from the lowest; taken modulo the element's width.
        place: draws which element; the same draw gives the same one.
    """

    def __init__(self, bit: int, place: random.Random) -> None:
        super().__init__()
        self._bit = bit
        self._place = place
        self.num_flipped = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _PRODUCTS and not self.num_flipped and isinstance(out, Tensor) and out.numel():
            flat = out.detach().view(-1) if out.is_contiguous() else out.detach().reshape(-1)
            width = flat.element_size()
            element = self._place.randrange(flat.numel())
            raw = flat[element : element + 1].view(torch.uint8)
            place = self._bit % (8 * width)
            raw[place // 8] ^= 1 << place % 8
            self.num_flipped += 1
        return out
