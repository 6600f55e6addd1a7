"""Which rank has become slower than the others, since when and by how much. Pure; state of one generation.

Each rank's own compute time before synchronisation is compared with the median over the ranks at the same step, in units of
the noise (the rank's own, at least the ranks' median one), and summed by a one-sided CUSUM (Page 1954): S = max(0, S + min(z, CLIP) - SLACK), alarm at S > LIMIT.
A rank that was always slower (a bigger pipeline stage) has that in its baseline. The lower quartile is watched the same way:
when it rises, all are slow.

With normal noise the mean number of rank-steps between false alarms is about exp(2 SLACK (LIMIT + 1.166)) / (2 SLACK^2)
(Siegmund 1985), and a shift of d noise widths is found after about LIMIT / (d - SLACK) steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

WARM_UP_STEPS = 64
"""Steps from which baseline and noise are estimated."""
SLACK = 1.5
"""Half of the shift that is to be found, in noise widths."""
LIMIT = 20.0
CLIP = 4.0
"""A single step, however slow, adds no more than this less the slack: garbage collection is no straggler."""
NOISE_FLOOR = 0.005
"""Noise is taken for at least this share of the median compute time: smaller differences cost nothing."""
CLEAR_STEPS = 16
CLEAR_BELOW = 1.0
_FORGET = 0.01
_MAD_TO_SIGMA = 1.4826
_OPEN_STEPS = 64

Values = npt.NDArray[np.float64]


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that computes longer than it did, measured against the others; rank -1: all of them."""

    rank: int
    since_step: int
    seen_step: int
    excess_ratio: float
    """By how much longer, as a share of the median compute time."""

    @property
    def text(self) -> str:
        """For people."""
        who = f"rank {self.rank} is" if self.rank >= 0 else "all ranks are"
        return f"{who} slower by {100 * self.excess_ratio:.1f} % of the compute time since step {self.since_step}"


class _Cusum:
    """One-sided CUSUM of several series side by side."""

    def __init__(self, count: int) -> None:
        self.sums = np.zeros(count)
        self.since = np.zeros(count, dtype=np.int64)
        self.center = np.zeros(count)
        self.noise = np.ones(count)
        self.alarmed = np.zeros(count, dtype=bool)
        self.smooth = np.zeros(count)

    def learn(self, history: Values, floor: float) -> None:
        """Baseline and noise from rows of steps."""
        self.center = np.median(history, axis=0)
        away = history - self.center
        width = _MAD_TO_SIGMA * np.median(np.abs(away), axis=0)
        width = np.std(np.clip(away, -3 * width, 3 * width), axis=0)  # as robust, and a third of the samples less uncertain
        self.noise = np.maximum(np.maximum(width, np.median(width)), floor)

    def step(self, values: Values, step: int) -> tuple[list[int], list[int]]:
        """(series that alarm now, alarmed series that are back to normal)."""
        away = values - self.center
        scores = away / self.noise
        self.since[self.sums == 0.0] = step
        self.sums = np.maximum(0.0, self.sums + np.minimum(scores, CLIP) - SLACK)
        self.smooth += (scores - self.smooth) / CLEAR_STEPS
        fresh = (self.sums > LIMIT) & ~self.alarmed
        alarms, back = [], []
        if fresh.any() or self.alarmed.any():
            self.smooth[fresh] = scores[fresh]
            gone = self.alarmed & (self.smooth < CLEAR_BELOW)
            self.alarmed = (self.alarmed | fresh) & ~gone
            self.sums[gone] = 0.0
            alarms, back = np.nonzero(fresh)[0].tolist(), np.nonzero(gone)[0].tolist()
        quiet = (self.sums == 0.0) & ~self.alarmed
        self.center += np.where(quiet, _FORGET * np.minimum(np.maximum(away, -self.noise), self.noise), 0.0)
        return alarms, back


class Stragglers:
    """Fed with own compute times by rank and step; holds who is slow now."""

    def __init__(self) -> None:
        self._open: dict[int, dict[int, float]] = {}
        self._done = -1
        self._ranks: tuple[int, ...] = ()
        self._history: list[Values] = []
        self._each: _Cusum | None = None
        self._all = _Cusum(1)
        self._scale = 0.0
        self.current: dict[int, Straggler] = {}
        """By rank; -1: all are slow."""

    def report(self, step: int, compute_seconds: Mapping[int, float]) -> list[Straggler]:
        """Own compute of some ranks in a step. Returns stragglers that were not known before. A step is judged when reports of
        the step after the next come: by then all of its own are here."""
        if step <= self._done:
            return []
        self._open.setdefault(step, {}).update(compute_seconds)
        found: list[Straggler] = []
        for old in sorted(self._open):
            if old <= step - 2 or len(self._open) > _OPEN_STEPS:
                found += self._judge(old, self._open.pop(old))
                self._done = max(self._done, old)
        return found

    def _judge(self, step: int, values: dict[int, float]) -> list[Straggler]:
        if not values or len(values) < len(self._ranks):  # reports were lost: a step of some ranks says nothing about the others
            return []
        ranks = tuple(sorted(values))
        if ranks != self._ranks:
            self._ranks, self._history, self._each = ranks, [], None
            self.current.clear()
        row = np.array([values[rank] for rank in ranks])
        ordered = np.sort(row)
        median = _median(ordered)
        if not math.isfinite(median) or median <= 0.0:
            return []
        if self._each is None:
            self._warm_up(row)
            return []
        slow, over = self._each.step(row - median, step)
        for index in over:
            self.current.pop(ranks[index], None)
        found = [self._told(ranks[index], self._each, index, step, row[index] - median) for index in slow] if len(ranks) > 1 else []
        low = _low(ordered)
        every, gone = self._all.step(np.array([low]), step)
        if gone:
            self.current.pop(-1, None)
        if every:
            found.append(self._told(-1, self._all, 0, step, low))
        return found

    def _told(self, rank: int, cusum: _Cusum, index: int, step: int, value: Any) -> Straggler:
        excess = float(value - cusum.center[index]) / self._scale
        found = Straggler(rank=rank, since_step=int(cusum.since[index]), seen_step=step, excess_ratio=excess)
        self.current[rank] = found
        return found

    def _warm_up(self, row: Values) -> None:
        self._history.append(row)
        if len(self._history) < WARM_UP_STEPS:
            return
        history = np.array(self._history)
        medians = np.median(history, axis=1)
        self._scale = float(np.median(medians))
        self._each, self._all = _Cusum(len(self._ranks)), _Cusum(1)
        self._each.learn(history - medians[:, None], NOISE_FLOOR * self._scale)
        self._all.learn(np.array([[_low(np.sort(row))] for row in history]), NOISE_FLOOR * self._scale)
        self._history = []


def _median(ordered: Values) -> float:
    """Of sorted values. This module's work is done at each step, and NumPy's own takes ten times as long for a few ranks."""
    middle = len(ordered) // 2
    return float(ordered[middle]) if len(ordered) % 2 else float(ordered[middle - 1] + ordered[middle]) / 2


def _low(ordered: Values) -> float:
    """The lower quartile over the ranks, from sorted values: slow ones do not move it."""
    return float(ordered[(len(ordered) - 1) // 4])
