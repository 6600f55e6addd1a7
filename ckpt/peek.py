"""Has Python's random stream moved? A look at the words of its Mersenne twister where they lie.

`random.getstate()` makes 624 integers, a tenth of a millisecond in a process that does something else in between: too much for every step
of a training run whose stream mostly rests. What a copy of the words costs is below a microsecond. Whether they are where they are looked
for is found out once, against what the interpreter says itself; where they are not, nothing is remembered and every capture is a whole one.
(NumPy's stream is not looked at like this: the half of a pair of normal numbers that it keeps does not lie among its words.)
"""

from __future__ import annotations

import ctypes
import platform
import random
import struct

NUM_WORDS = 624
_BYTES = 4 * (NUM_WORDS + 1)
_INDEX_FIRST = struct.Struct(f"<i{NUM_WORDS}I")

PythonState = tuple[int, tuple[int, ...], float | None]


class PythonStream:
    """Python's global stream (CPython: index, then words, behind the object's head)."""

    def __init__(self) -> None:
        self._address = 0
        self._seen = b""
        self._state: PythonState | None = None
        generator = getattr(random.random, "__self__", None)
        if platform.python_implementation() != "CPython" or not isinstance(generator, random.Random):
            return
        head = object.__basicsize__
        if random.Random.__mro__[1].__basicsize__ < head + _BYTES:
            return
        self._generator = generator
        index, *words = _INDEX_FIRST.unpack(ctypes.string_at(id(generator) + head, _BYTES))
        if (*words, index) == random.getstate()[1]:
            self._address = id(generator) + head

    @property
    def looks(self) -> bool:
        """False: the words are not where they are looked for, each capture is a whole one."""
        return bool(self._address)

    def state(self) -> PythonState:
        """As `random.getstate()`."""
        if not self._address:
            return random.getstate()  # pyright: ignore[reportReturnType] - a tuple of any in typeshed
        now = ctypes.string_at(self._address, _BYTES)
        known = self._state
        if known is None or now != self._seen or self._generator.gauss_next != known[2]:  # pyright: ignore[reportAttributeAccessIssue]
            known = random.getstate()  # pyright: ignore[reportAssignmentType]
            self._seen, self._state = now, known
        return known
