"""Clocks as a port, so that everything that waits can be driven by a test or by the simulator."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Three clocks, each for one purpose. Wall clocks of two hosts are never compared."""

    def monotonic(self) -> float:
        """Seconds for durations inside one process (CLOCK_MONOTONIC)."""
        ...

    def boottime(self) -> float:
        """Seconds that go on during suspend (CLOCK_BOOTTIME): for a leader's own term."""
        ...

    def wall(self) -> float:
        """Unix seconds, for people and archives only."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def boottime(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to; all three readings move together."""

    def __init__(self, start: float = 1_000.0, wall_start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall_start - start

    def monotonic(self) -> float:
        return self._now

    def boottime(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    def advance(self, seconds: float) -> None:
        """Move forward. Negative steps are refused: monotonic clocks do not go back."""
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self._now += seconds
