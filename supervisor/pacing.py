"""Token buckets by name, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

MAX_NAMES = 4_096
"""Over it the name that was longest unused is forgotten."""


class Buckets:
    """A bucket for each name: `burst` at once, then `per_second`."""

    def __init__(self, clock: Callable[[], float], *, burst: int, per_second: float) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._burst = burst
        self._per_second = per_second
        self._level: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def _now(self, name: str) -> float:
        level, at = self._level.get(name, (float(self._burst), self._clock()))
        return min(float(self._burst), level + (self._clock() - at) * self._per_second)

    def peek(self, name: str) -> float:
        """Seconds until one may be taken; 0: now."""
        level = self._now(name)
        return 0.0 if level >= 1.0 else (1.0 - level) / self._per_second

    def take(self, name: str) -> float:
        """Take one, or say how many seconds to wait."""
        pause = self.peek(name)
        if not pause:
            self._level[name] = (self._now(name) - 1.0, self._clock())
            self._level.move_to_end(name)
            while len(self._level) > MAX_NAMES:
                self._level.popitem(last=False)
        return pause
