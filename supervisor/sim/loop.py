"""Virtual time: a heap of what is to happen. Ties are settled by the order of scheduling, so a run is a function of its seed."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Entry:
    """Something scheduled; `cancel` makes it a no-op."""

    __slots__ = ("at", "call", "seq")

    def __init__(self, at: float, seq: int, call: Callable[[], None]) -> None:
        self.at = at
        self.seq = seq
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Do not call."""
        self.call = None

    def __lt__(self, other: Entry) -> bool:
        return (self.at, self.seq) < (other.at, other.seq)


class Loop:
    """The event heap. Times in seconds since the start of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[Entry] = []
        self._seq = 0

    def at(self, when: float, call: Callable[[], None]) -> Entry:
        """Call at `when`, or now when that is past."""
        entry = Entry(max(when, self.now), self._seq, call)
        self._seq += 1
        heapq.heappush(self._heap, entry)
        return entry

    def after(self, seconds: float, call: Callable[[], None]) -> Entry:
        """Call after `seconds`."""
        return self.at(self.now + seconds, call)

    def run(self, until: float) -> None:
        """Let everything happen up to and including `until`."""
        while self._heap and self._heap[0].at <= until:
            entry = heapq.heappop(self._heap)
            if entry.call is None:
                continue
            self.now = entry.at
            self.num_events += 1
            entry.call()
        self.now = max(self.now, until)
