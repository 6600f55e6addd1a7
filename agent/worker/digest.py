"""A 64-bit digest of tensors that is exact in any order of summation and catches every change of one word.

Each 64-bit word w at place j of block c of a tensor adds, modulo 2^64,

    C_c * B_j * fold29(M * fold32(A_j * w))        fold_s(x) = x xor (x >> s), logical shift

with A_j, B_j, C_c and M odd and keyed. Every factor is a bijection of w, so a change of one word always changes the sum.
The folds make it non-linear and carry the top bits down (a multiplication only carries up), so pairs of changes that cancel
in a position-weighted sum (swap of x and -x, two flipped top bits) cancel here with a probability of about 2^-61 over the
key. The sum has no order: threads, blocks and reduction trees do not matter. A tensor's digest is a bijection of its sum
and length, and the total is the sum of the tensors' digests, each times an odd number keyed by its name, type and shape.

On CPU tensors NumPy does the arithmetic in place on the tensor's own memory; elsewhere torch does the same on int64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from regrow.agent.worker.data import mix
from regrow.places import BLOCK_WORDS, MASK, and_others, block_text, locate

Words = npt.NDArray[np.uint64]

SMALL_WORDS = 2048
"""Tensors of up to so many words are gathered and digested together: a call costs more than their arithmetic."""
_NUMPY_TYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FOLD_FIRST = np.uint64(32)
_FOLD_SECOND = np.uint64(29)


class Digests(msgspec.Struct, frozen=True):
    """Digests of named tensors at one moment."""

    names: tuple[str, ...]
    values: Words
    """One per name."""
    total: int
    sums: Words
    """One per name: the sum over its blocks that the value is made of."""
    weighted: Words
    """One per name: the same sum with each block's part times its number, from 1: two of a kind tell which block differs."""
    sizes: tuple[int, ...]
    """One per name: bytes of this rank's part."""

    @property
    def text(self) -> str:
        """The total as 16 hex digits."""
        return f"{self.total:016x}"

    def first_difference(self, other: Digests) -> str:
        """Name of the first tensor whose digest is another, or that only one side has, where in it, and how many others; empty when all
        agree."""
        if self.names != other.names:
            known = dict(zip(other.names, other.values.tolist(), strict=True))
            for name, value in zip(self.names, self.values.tolist(), strict=True):
                if known.get(name) != value:
                    return name
            return next((name for name in other.names if name not in set(self.names)), "")
        different = np.nonzero(self.values != other.values)[0]
        if not different.size:
            return ""
        first = int(different[0])
        sums, weighted = (
            int(mine[first]) - int(theirs[first]) for mine, theirs in ((self.sums, other.sums), (self.weighted, other.weighted))
        )
        block = locate(sums & MASK, weighted & MASK)
        text = f"{self.names[first]}, {block_text(block, self.sizes[first])}" if block else self.names[first]
        return and_others(text, different.size - 1)


class Digester:
    """Computes digests under one key. Keeps its buffers; not for use from two threads at once.

    Args:
        key: any integer; the same on all ranks that compare.
    """

    def __init__(self, key: int) -> None:
        seed = mix(np.array([key & MASK], dtype=np.uint64))
        self._seed = int(seed[0])
        self._first = _odd_stream(self._seed ^ 0x1, BLOCK_WORDS)
        self._second = _odd_stream(self._seed ^ 0x2, BLOCK_WORDS)
        self._blocks = _odd_stream(self._seed ^ 0x3, 64)
        self._middle = int(_odd_stream(self._seed ^ 0x4, 1)[0])
        self._work = np.empty(BLOCK_WORDS, dtype=np.uint64)
        self._shifted = np.empty(BLOCK_WORDS, dtype=np.uint64)
        self._name_keys: dict[tuple[str, torch.dtype, torch.Size], int] = {}
        self._gatherings: dict[tuple[int, ...], _Gathering] = {}
        self._device_tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def tensor(self, tensor: torch.Tensor) -> int:
        """The digest of one tensor's bytes (a DTensor's local shard), whatever its type, shape and layout."""
        local = local_part(tensor)
        return int(_finish([self.sums(local)[0]], [local.numel() * local.element_size()])[0])

    def digest(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Digests:
        """Digests of named tensors. Names must be unique; their order does not change the total."""
        names: list[str] = []
        sums: list[tuple[int, int]] = []
        sizes: list[int] = []
        keys: list[int] = []
        small: list[tuple[Words, bytes]] = []
        places: list[int] = []
        for name, tensor in tensors:
            local = local_part(tensor)
            names.append(name)
            keys.append(self._name_key(name, local))
            sizes.append(local.numel() * local.element_size())
            if local.device.type == "cpu" and sizes[-1] <= 8 * SMALL_WORDS:
                small.append(_words(local))
                places.append(len(sums))
                sums.append((0, 0))
            else:
                sums.append(self.sums(local))
        for place, found in zip(places, self._sum_small(small), strict=True):
            sums[place] = (found, found)  # one block, number 1
        plain, weighted = (np.array(column, dtype=np.uint64) for column in (zip(*sums, strict=True) if sums else ((), ())))
        values = _finish(plain.tolist(), sizes)
        return Digests(tuple(names), values, _dot(values, np.array(keys, dtype=np.uint64)), plain, weighted, tuple(sizes))

    def keyed(self, tensors: Iterable[tuple[str, torch.Tensor]], found: Digests) -> Words:
        """What each tensor adds to the total of `found`, which was taken of the same tensors."""
        return found.values * np.array([self._name_key(name, local_part(tensor)) for name, tensor in tensors], dtype=np.uint64)

    def sums(self, local: torch.Tensor) -> tuple[int, int]:
        """The sum over the blocks of a plain tensor, and the one weighted with their numbers. Equal for equal bytes."""
        return self._sum_words(*_words(local)) if local.device.type == "cpu" else self.sum_in_torch(local)

    def _over_blocks(self, sums: Sequence[int]) -> tuple[int, int]:
        parts = np.array(sums, dtype=np.uint64) * self._block_factors(len(sums))
        return int(parts.sum()), _dot(parts, np.arange(1, len(sums) + 1, dtype=np.uint64))

    # --- NumPy on the tensor's memory -------------------------------------------------------------------------

    def _sum_words(self, words: Words, tail: bytes) -> tuple[int, int]:
        sums = [self._sum_block(words[begin : begin + BLOCK_WORDS]) for begin in range(0, words.size, BLOCK_WORDS)] or [0]
        if tail:
            place = words.size % BLOCK_WORDS
            if place == 0 and words.size:
                sums.append(0)
            sums[-1] = (sums[-1] + self._sum_at(np.frombuffer(tail.ljust(8, b"\0"), dtype=np.uint64), place)) & MASK
        return self._over_blocks(sums)

    def _sum_block(self, words: Words) -> int:
        return self._sum_at(words, 0)

    def _sum_at(self, words: Words, place: int) -> int:
        """The words' part of a block's sum, the first of them at `place`."""
        count = words.size
        work = self._mixed(words, self._first[place : place + count], self._work[:count], self._shifted[:count])
        return _dot(work, self._second[place : place + count])

    def _mixed(self, words: Words, factors: Words, work: Words, shifted: Words) -> Words:
        np.multiply(words, factors, out=work)
        np.right_shift(work, _FOLD_FIRST, out=shifted)
        np.bitwise_xor(work, shifted, out=work)
        np.multiply(work, np.uint64(self._middle), out=work)
        np.right_shift(work, _FOLD_SECOND, out=shifted)
        return np.bitwise_xor(work, shifted, out=work)

    def _sum_small(self, entries: Sequence[tuple[Words, bytes]]) -> list[int]:
        """Sums of small tensors (one block each, so C_0 is their only block factor), a gathering at a time."""
        sums: list[int] = []
        for group in _groups(entries):
            sizes = tuple(words.size + bool(tail) for words, tail in group)
            gathering = self._gatherings.get(sizes)
            if gathering is None:
                gathering = self._gatherings[sizes] = _Gathering(sizes, self._first, self._second)
            sums += gathering.sums(group, self)
        factor = int(self._block_factors(1)[0])
        return [value * factor & MASK for value in sums]

    def mixed_products(self, words: Words, first: Words, second: Words) -> Words:
        """B_j * fold(M * fold(A_j * w)) of gathered words, in the work buffer."""
        count = words.size
        work = self._mixed(words, first, self._work[:count], self._shifted[:count])
        return np.multiply(work, second, out=work)

    def _block_factors(self, count: int) -> Words:
        if count > self._blocks.size:
            self._blocks = _odd_stream(self._seed ^ 0x3, 1 << (count - 1).bit_length())
        return self._blocks[:count]

    # --- torch, for tensors on a device -----------------------------------------------------------------------

    def sum_in_torch(self, local: torch.Tensor) -> tuple[int, int]:
        """The same sums with torch operations on int64, on the tensor's device."""
        raw = local.detach().contiguous().view(-1).view(torch.uint8)
        padded = -(-raw.numel() // 8) * 8
        if padded != raw.numel():
            raw = torch.cat((raw, raw.new_zeros(padded - raw.numel())))
        words = raw.view(torch.int64)
        first, second = self._tables_on(local.device)
        sums = [self._sum_block_in_torch(block, first, second) for block in words.split(BLOCK_WORDS)]
        return self._over_blocks([value & MASK for value in (torch.stack(sums).tolist() if sums else [0])])

    def _sum_block_in_torch(self, block: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        work = block * first[: block.numel()]
        work.bitwise_xor_((work >> 32).bitwise_and_((1 << 32) - 1))
        work.mul_(_signed(self._middle))
        work.bitwise_xor_((work >> 29).bitwise_and_((1 << 35) - 1))
        return work.mul_(second[: block.numel()]).sum()

    def _tables_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        tables = self._device_tables.get(device)
        if tables is None:
            first, second = (torch.from_numpy(table.view(np.int64)).to(device) for table in (self._first, self._second))
            tables = self._device_tables[device] = (first, second)
        return tables

    def _name_key(self, name: str, local: torch.Tensor) -> int:
        """An odd number for a name, type and local shape under this key."""
        entry = (name, local.dtype, local.shape)
        key = self._name_keys.get(entry)
        if key is None:
            text = f"{self._seed:016x}\0{name}\0{local.dtype}\0{tuple(local.shape)}".encode()
            key = self._name_keys[entry] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1
        return key


class _Gathering:
    """Buffer and factor tables for a group of small tensors of given sizes in words, each of which starts a block."""

    def __init__(self, sizes: tuple[int, ...], first: Words, second: Words) -> None:
        self._sizes = sizes
        self._filled = np.nonzero(np.array(sizes))[0]
        self._starts = np.concatenate(([0], np.cumsum(sizes)))[:-1]
        self._words = np.zeros(sum(sizes), dtype=np.uint64)
        self._first = np.concatenate([first[:size] for size in sizes])
        self._second = np.concatenate([second[:size] for size in sizes])

    def sums(self, group: Sequence[tuple[Words, bytes]], digester: Digester) -> list[int]:
        """Sum of each tensor, 0 for empty ones."""
        for (words, tail), start in zip(group, self._starts.tolist(), strict=True):
            end = start + words.size
            self._words[start:end] = words
            if tail:
                self._words[end] = int.from_bytes(tail, "little")
        found = np.zeros(len(self._sizes), dtype=np.uint64)
        if self._filled.size:
            products = digester.mixed_products(self._words, self._first, self._second)
            found[self._filled] = np.add.reduceat(products, self._starts[self._filled])
        return found.tolist()


def _groups(entries: Sequence[tuple[Words, bytes]]) -> list[list[tuple[Words, bytes]]]:
    groups: list[list[tuple[Words, bytes]]] = []
    room = 0
    for entry in entries:
        size = entry[0].size + bool(entry[1])
        if size > room or not groups:
            groups.append([])
            room = BLOCK_WORDS
        groups[-1].append(entry)
        room -= size
    return groups


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lives on this rank: a DTensor's local shard, else the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return cast("torch.Tensor", to_local()) if to_local is not None else tensor


def _words(local: torch.Tensor) -> tuple[Words, bytes]:
    """The bytes of a CPU tensor as 64-bit words, and the up to seven bytes that are left. No copy when contiguous."""
    plain = local.detach().contiguous()
    if plain.dtype in _NUMPY_TYPES and not plain.numel() * plain.element_size() & 7:
        return plain.numpy().reshape(-1).view(np.uint64), b""
    flat: npt.NDArray[Any] = plain.view(-1).view(torch.uint8).numpy()
    whole = flat.size // 8 * 8
    return flat[:whole].view(np.uint64), flat[whole:].tobytes()


def _finish(sums: Sequence[int], sizes: Sequence[int]) -> Words:
    """Digests from sums and lengths in bytes: a bijection of the sum for a given length."""
    return mix((np.array(sums, dtype=np.uint64) ^ np.array(sizes, dtype=np.uint64)) + _GOLDEN)


def _odd_stream(seed: int, count: int) -> Words:
    """Keyed odd numbers: splitmix64 of a counter, lowest bit set."""
    counter = np.arange(1, count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return mix(mix(np.array([seed & MASK], dtype=np.uint64)) + counter * _GOLDEN) | np.uint64(1)


def _dot(left: Words, right: Words) -> int:
    return int(np.dot(left, right))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
