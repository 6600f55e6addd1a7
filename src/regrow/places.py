"""Where do two states differ, when of each there are only a few sums?

Let parts x_1, x_2, ... add up to X, and weighted with their numbers to Y = 1 x_1 + 2 x_2 + ... modulo 2^64. When one part alone differs
between two states, by d, then X differs by d and Y by n d, which gives its number n. When several differ, no small n fits (or, with a
probability of about the number of parts in 2^64, a wrong one does). So two words more than a digest tell the tensor, and two others the
block, without anybody sending the digests of all of them. Pure.
"""

from __future__ import annotations

BLOCK_WORDS = 16384
"""64-bit words of a block: four buffers of this size stay in a core's second-level cache."""
MASK = 0xFFFFFFFFFFFFFFFF
_BITS = 64
_MOST = 1 << 40
"""Higher numbers of parts than any state has."""


def locate(plain: int, weighted: int) -> int:
    """The number, from 1, of the only part that differs; 0: several do, or it cannot be told.

    Args:
        plain: difference of the sums, modulo 2^64.
        weighted: difference of the weighted sums, modulo 2^64.
    """
    if not plain:
        return 0
    shift = (plain & -plain).bit_length() - 1
    if weighted & ((1 << shift) - 1):
        return 0
    modulus = 1 << (_BITS - shift)
    number = (weighted >> shift) * pow(plain >> shift, -1, modulus) % modulus if modulus > 1 else 0
    return number if 0 < number < _MOST else 0


def block_text(number: int, num_bytes: int = 0) -> str:
    """Block `number` (from 1) of a tensor in words: which bytes of this rank's part of the tensor it has.

    Args:
        num_bytes: of this rank's part of the tensor; 0: not known, or the block cannot be one of it.
    """
    first = (number - 1) * 8 * BLOCK_WORDS
    end = number * 8 * BLOCK_WORDS
    if first < num_bytes:
        return f"block {number} (bytes {first} to {min(end, num_bytes) - 1})"
    return f"block {number} (from byte {first} on)"


def and_others(text: str, count: int) -> str:
    """`text`, and that `count` other tensors differ as well."""
    return f"{text}, and {count} other tensor{'s' if count > 1 else ''}" if count else text
