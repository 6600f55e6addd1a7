"""How long evaluations, saves and restores of a job took: what their limits are learned from. Edge state, by this host's clock."""

from __future__ import annotations

from collections import deque

from regrow import wire
from regrow.supervisor.core.hang import STOPPED
from regrow.supervisor.core.hang_limits import PHASES

_KEPT = 16
"""Of each phase: what took longer before that is forgotten."""


class PhaseTimes:
    """Of one job, over its generations. A phase that is cut off by the end of its generation teaches nothing."""

    def __init__(self) -> None:
        self._generation = -1
        self._entered: dict[int, tuple[str, float]] = {}
        self._took: dict[str, deque[float]] = {phase: deque(maxlen=_KEPT) for phase in PHASES}

    def words(self, generation: int, progress: tuple[wire.RankProgress, ...], now: float) -> None:
        """Take a beat's words; phases that are shorter than a beat are seen by chance."""
        if generation != self._generation:
            self._generation, self._entered = generation, {}
        for word in progress:
            phase, since = self._entered.get(word.rank, ("", now))
            if word.phase == phase or word.phase in STOPPED:
                continue
            if phase in PHASES:
                self._took[phase].append(now - since)
            self._entered[word.rank] = (word.phase, now)

    def took(self, phase: str, seconds: float) -> None:
        """Somebody measured it."""
        self._took[phase].append(seconds)

    def longest(self) -> dict[str, float]:
        """{phase: seconds} of those that were seen to end."""
        return {phase: max(times) for phase, times in self._took.items() if times}
