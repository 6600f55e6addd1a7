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
LANES = 4
"""Neighbouring elements of the last axis that share a word: activations and their parts are cut in multiples of it."""
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
        if full_shape[-1] % LANES:
            raise ValueError(f"the last axis of {tuple(full_shape)} is not a multiple of {LANES}")
        self.p = p
        self.site = site
        self.full_shape = tuple(full_shape)
        self.split = split
        self.offset = 0
        self._dropped = round(p * _LEVELS)
        self._site_word = _signed(_mix_int((site + 1) * _GOLDEN))
        self._counters: dict[tuple[tuple[int, ...], tuple[int, ...], torch.device], Tensor] = {}

    def set_shard(self, offset: int) -> None:
        """This rank's activation starts at `offset` on axis 0 of the full one. Set once, when the mesh is applied."""
        self.offset = offset
        self._counters.clear()

    def forward(self, x: Tensor, key: Tensor | None) -> Tensor:
        """Drop elements of x [batch, *local shape] by key [batch].

        Raises:
            ValueError: no key in training mode, or a local shape that does not fit into the full one.
        """
        if not self.active:
            return x
        if key is None:
            raise ValueError(f"dropout at site {self.site} has no sample keys")
        return x * self.mask(key, tuple(x.shape[1:]), (self.offset, *[0] * (x.dim() - 2)), dtype=x.dtype)

    @property
    def active(self) -> bool:
        """Whether anything is dropped: in training mode, with p above 0."""
        return self.training and self._dropped > 0

    def mask(self, key: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        """What elements of a block of the full activation are multiplied by: 0, or the inverse of the keep probability.

        Args:
            key: [batch], from `sample_keys`.
            shape, offsets: of the block, per axis without the batch; size and offset of the last one are multiples of 4.

        Raises:
            ValueError: a block that does not lie in the full activation.
        """
        words = _mix_(key ^ self._site_word).view(-1, *[1] * len(shape)) + self._counter(shape, offsets, key.device)
        lanes = _mix_(words).view(torch.int16)
        keep = (lanes >= self._dropped - _LEVELS // 2).to(dtype)
        return keep.mul_(_LEVELS / (_LEVELS - self._dropped))

    def _counter(self, shape: tuple[int, ...], offsets: tuple[int, ...], device: torch.device) -> Tensor:
        counter = self._counters.get((shape, offsets, device))
        if counter is None:
            counter = self._counters[(shape, offsets, device)] = self._build_counter(shape, offsets, device)
        return counter

    def _build_counter(self, shape: tuple[int, ...], offsets: tuple[int, ...], device: torch.device) -> Tensor:
        fits = all(offset + size <= full for offset, size, full in zip(offsets, shape, self.full_shape, strict=False))
        if len(shape) != len(self.full_shape) or not fits or shape[-1] % LANES or offsets[-1] % LANES:
            raise ValueError(f"activation {shape} at offsets {offsets} is no part of {self.full_shape} (site {self.site})")
        strides = [math.prod(self.full_shape[axis + 1 :]) // LANES for axis in range(len(shape) - 1)]
        words = torch.arange(offsets[-1] // LANES, (offsets[-1] + shape[-1]) // LANES, dtype=torch.int64, device=device)
        for offset, size, stride in zip(reversed(offsets[:-1]), reversed(shape[:-1]), reversed(strides), strict=True):
            places = torch.arange(offset, offset + size, dtype=torch.int64, device=device) * stride
            words = places.view(-1, *[1] * words.dim()) + words
        return (words + 1) * _signed(_GOLDEN)

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site}, full_shape={self.full_shape}, split={self.split}, offset={self.offset}"


def place_on_mesh(model: nn.Module, *, tp: int = 1, tp_index: int = 0, cp: int = 1, cp_index: int = 0, sequence_parallel: bool) -> None:
    """Tell every KeyedDropout of `model` which part of its activation this rank holds (torch.chunk's split).

    Context parallelism cuts the sequence first; sequence parallelism cuts a rank's part of it again.
    """
    for module in model.modules():
        if not isinstance(module, KeyedDropout):
            continue
        full = module.full_shape[0]
        if module.split == "sequence":
            part = -(-full // cp)
            inner = -(-part // tp) * tp_index if sequence_parallel else 0
            module.set_shard(min(part * cp_index + inner, full))
        else:
            module.set_shard(min(tp_index * -(-full // tp), full))
