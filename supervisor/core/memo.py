"""Remembering what was computed from parts of a view.

Views are immutable and share their unchanged parts, so "the same object" means "nothing changed": scans over thousands of
nodes are done once per change of the nodes, not once per event. The functions stay pure: same answer, less work.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import is_
from typing import Generic, TypeVar

T = TypeVar("T")
_KEPT = 8


class Memo(Generic[T]):
    """The last few results of one function. Holds its key objects, so that an identity is never reused."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[object, ...], Hashable, T]] = []

    def get(self, parts: tuple[object, ...], small: Hashable, make: Callable[[], T]) -> T:
        """The result for these `parts` (compared by identity, always as many of them) and `small` (compared by value); computed when
        it is not known."""
        for known, value, result in self._entries:
            if value == small and all(map(is_, known, parts)):
                return result
        result = make()
        self._entries.insert(0, (parts, small, result))
        del self._entries[_KEPT:]
        return result
