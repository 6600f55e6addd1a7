"""Remembering what was computed from parts of a view.

Views are immutable and share their unchanged parts, so "the same object" means "nothing changed": scans over thousands of
nodes are done once per change of the nodes, not once per event. The functions stay pure: same answer, less work.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from itertools import compress
from operator import is_, is_not
from typing import Generic, TypeVar

T = TypeVar("T")
V = TypeVar("V")
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


class Changes(Generic[V]):
    """What differs in a map of thousands from the last look at it, found without a line of Python for each of them."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self.values: list[V] = []
        """Those of the last look."""

    def look(self, items: Mapping[str, V]) -> list[int] | None:
        """Places, in the map's order, of the values that are other objects now; None: other names or another order."""
        names, values = list(items), list(items.values())
        found = list(compress(range(len(values)), map(is_not, values, self.values))) if names == self._names else None
        self._names, self.values = names, values
        return found


class Scan(Generic[V]):
    """The values of a map that fulfil a condition, in the map's order: only those that changed since the last look are asked."""

    def __init__(self, condition: Callable[[V], bool]) -> None:
        self._condition = condition
        self._changes: Changes[V] = Changes()
        self._items: Mapping[str, V] | None = None
        self._places: set[int] = set()
        self._found: tuple[V, ...] = ()

    def get(self, items: Mapping[str, V]) -> tuple[V, ...]:
        """Those that fulfil it."""
        if items is self._items:
            return self._found
        changed = self._changes.look(items)
        values = self._changes.values
        if changed is None:
            self._places = {place for place, value in enumerate(values) if self._condition(value)}
        else:
            self._places.difference_update(changed)
            self._places.update(place for place in changed if self._condition(values[place]))
        self._items, self._found = items, tuple(values[place] for place in sorted(self._places))
        return self._found
