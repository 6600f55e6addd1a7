"""How the ranks of one generation spend a step: from their own reports, smoothed. Edge state, for metrics only."""

from __future__ import annotations

import statistics
from typing import Literal

from regrow import wire

_SMOOTH = 0.8
"""Weight of the past in the running mean of each rank."""
_EXPOSED = 1.0 / 3.0
_FULL = 0.9
"""Limits of the walls, those of the planner (`regrow.parallel.cost.wall`): a third of the step exposed, a tenth of memory left."""

Wall = Literal["memory", "compute", "communication"]


class Pace:
    """Own compute and step time by rank."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._compute: dict[int, float] = {}
        self._step: dict[int, float] = {}
        self._memory: dict[str, float] = {}

    def stepped(self, message: wire.NodeSteps) -> None:
        """Reports of one node of one step; those of an earlier generation are passed over."""
        if message.generation != self.generation:
            return
        for report in message.reports:
            if report.step_seconds > 0:
                self._step[report.rank] = _mean(self._step.get(report.rank), report.step_seconds)
                self._compute[report.rank] = _mean(self._compute.get(report.rank), min(report.compute_seconds, report.step_seconds))

    def memory(self, node: str, beat: wire.Beat) -> None:
        """Memory in use on a node's fullest GPU."""
        if beat.generation == self.generation and beat.memory_ratio > 0:
            self._memory[node] = beat.memory_ratio

    @property
    def num_ranks(self) -> int:
        """Ranks that have reported."""
        return len(self._compute)

    def compute(self) -> tuple[float, float, float] | None:
        """(min, median, max) of own compute over the ranks, seconds; None before the first report."""
        values = self._compute.values()
        return (min(values), statistics.median(values), max(values)) if values else None

    def slowest(self) -> int | None:
        """The rank that computes longest."""
        return max(self._compute, key=lambda rank: self._compute[rank]) if self._compute else None

    def one_worker_seconds(self, world_size: int) -> float | None:
        """t1 by own compute: all of it, one after the other, without communication. None until every rank has reported.

        Work that tensor parallelism repeats on each rank counts as often as it is done, so this is an upper bound of t1.
        """
        return sum(self._compute.values()) if world_size and len(self._compute) == world_size else None

    def exposed(self) -> float | None:
        """Share of the step in which the busiest rank does not compute: communication, waiting, bubble. None before reports."""
        if not self._compute:
            return None
        step = statistics.median(self._step.values())
        return min(1.0, max(0.0, 1.0 - max(self._compute.values()) / step))

    def memory_ratio(self) -> float | None:
        """Memory in use on the fullest GPU; None where there is no GPU."""
        return max(self._memory.values(), default=None)

    def wall(self) -> Wall | None:
        """Which of the three walls bounds the step, measured."""
        exposed, memory = self.exposed(), self.memory_ratio()
        if exposed is None:
            return None
        if exposed > _EXPOSED:
            return "communication"
        return "memory" if memory is not None and memory > _FULL else "compute"


def _mean(before: float | None, value: float) -> float:
    return value if before is None else _SMOOTH * before + (1.0 - _SMOOTH) * value
