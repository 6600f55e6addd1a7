"""Dropout whose mask depends on the data and not on the mesh.

The mask of a sample is a pure function of (seed, step, global sample index, site, element index in the full tensor),
so any split of batch, layers, heads or sequence draws the same mask, and a recomputed forward pass sees it again.
Bits come from splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), run on
int64 tensors, whose multiplication wraps around as required. One 64-bit word gives four 16-bit lanes, so four neighbouring
elements of the last axis share a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
_LANES = 4
_LEVELS = 1 << 16

PLACES_PER_LAYER = 8
"""Sites of one layer: site = global layer index * PLACES_PER_LAYER + place."""


def _signed(word: int) -> int:
    """A 64-bit word as the Python integer that torch's int64 can hold."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def _mix_int(word: int) -> int:
    word &= _WORD
    word = ((word ^ (word >> 30)) * _MIX_A) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_B) & _WORD
    return word ^ (word >> 31)


def _mix_(word: Tensor) -> Tensor:
    """splitmix64's finaliser, in place on int64. torch's >> is arithmetic: the mask makes it logical."""
    for shift, factor in ((30, _MIX_A), (27, _MIX_B), (31, None)):
        word.bitwise_xor_((word >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            word.mul_(_signed(factor))
    return word


def sample_keys(seed: int, step: int, samples: Tensor) -> Tensor:
    """One int64 key per sample: pass it as a keyword of the forward pass, where pipelining splits it with the batch.

    Args:
        seed: of the run.
        step: number of the optimizer step that consumes the samples.
        samples: *global* sample indices, int64, shape [batch].
    """
    base = _mix_int(_mix_int(seed + _GOLDEN) ^ _mix_int(step * _GOLDEN + 1))
    return _mix_((samples.to(torch.int64) + 1) * _signed(_GOLDEN) + _signed(base))


class KeyedDropout(nn.Module):
    """Dropout with a mask keyed by `sample_keys`; identity in eval mode or at p = 0.

    Args:
        p: probability of zero, quantised to 1/65536; survivors are scaled by the quantised keep probability.
        site: number of this dropout in the whole model, layer * PLACES_PER_LAYER + place.
        full_shape: shape of the full activation without the batch axis; the last axis is a multiple of 4.
        split: which activations tensor parallelism cuts along axis 0 of `full_shape`: "sequence" ones (cut only under
            sequence parallelism) or "heads".
    """

    def __init__(self, p: float, site: int, full_shape: Sequence[int], split: Literal["sequence", "heads"] = "sequence") -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout probability {p} is outside [0, 1)")
        if full_shape[-1] % _LANES:
            raise ValueError(f"the last axis of {tuple(full_shape)} is not a multiple of {_LANES}")
        self.p = p
        self.site = site
        self.full_shape = tuple(full_shape)
        self.split = split
        self.offset = 0
        self._dropped = round(p * _LEVELS)
        self._site_word = _signed(_mix_int((site + 1) * _GOLDEN))
        self._counters: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    def set_shard(self, offset: int) -> None:
        """This rank's activation starts at `offset` on axis 0 of the full one. Set once, when the mesh is applied."""
        self.offset = offset
        self._counters.clear()

    def forward(self, x: Tensor, key: Tensor | None) -> Tensor:
        """Drop elements of x [batch, *local shape] by key [batch].

        Raises:
            ValueError: no key in training mode, or a local shape that does not fit into the full one.
        """
        if not self.training or self._dropped == 0:
            return x
        if key is None:
            raise ValueError(f"dropout at site {self.site} has no sample keys")
        words = _mix_(key ^ self._site_word).view(-1, *[1] * (x.dim() - 1)) + self._counter(x)
        lanes = _mix_(words).view(torch.int16)
        keep = (lanes >= self._dropped - _LEVELS // 2).to(x.dtype)
        return x * keep.mul_(_LEVELS / (_LEVELS - self._dropped))

    def _counter(self, x: Tensor) -> Tensor:
        shape = tuple(x.shape[1:])
        counter = self._counters.get((shape, x.device))
        if counter is None:
            counter = self._counters[(shape, x.device)] = self._build_counter(shape, x.device)
        return counter

    def _build_counter(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        if shape[1:] != self.full_shape[1:] or self.offset + shape[0] > self.full_shape[0]:
            raise ValueError(f"activation {shape} at offset {self.offset} is no part of {self.full_shape} (site {self.site})")
        row = math.prod(shape[1:])
        start, count = self.offset * row // _LANES, math.prod(shape) // _LANES
        words = (torch.arange(start, start + count, dtype=torch.int64, device=device) + 1) * _signed(_GOLDEN)
        return words.view(*shape[:-1], shape[-1] // _LANES)

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site}, full_shape={self.full_shape}, split={self.split}, offset={self.offset}"


def place_on_mesh(model: nn.Module, *, tp: int, tp_index: int, sequence_parallel: bool) -> None:
    """Tell every KeyedDropout of `model` which part of its activation this rank holds (torch.chunk's split)."""
    for module in model.modules():
        if isinstance(module, KeyedDropout):
            cut = tp > 1 and (sequence_parallel or module.split == "heads")
            size = -(-module.full_shape[0] // tp)
            module.set_shard(min(tp_index * size, module.full_shape[0]) if cut else 0)
