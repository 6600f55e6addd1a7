"""Rates from counts and exposure, with exact intervals; and the signs that failures come in batches."""

from __future__ import annotations

import math

import msgspec
from scipy import stats


class Rate(msgspec.Struct, frozen=True):
    """Events per unit of exposure, with the exact two-sided 95 % Poisson interval."""

    point: float
    lower95: float
    upper95: float
    upper95_one_sided: float
    """The bound to quote when nothing was seen: 3 / exposure, about."""
    count: int
    exposure: float


def poisson_rate(count: int, exposure: float) -> Rate:
    """Exact (Garwood 1936) interval: chi-square quantiles; zero events give rate 0 with an upper bound, never MTBF infinity.

    Args:
        count: events seen.
        exposure: for example GPU-hours; greater than 0.
    """
    if exposure <= 0 or count < 0:
        raise ValueError(f"a rate needs exposure > 0 and count >= 0, not {exposure} and {count}")
    lower = 0.5 * float(stats.chi2.ppf(0.025, 2 * count)) if count else 0.0
    upper = 0.5 * float(stats.chi2.ppf(0.975, 2 * count + 2))
    one_sided = 0.5 * float(stats.chi2.ppf(0.95, 2 * count + 2))
    return Rate(count / exposure, lower / exposure, upper / exposure, one_sided / exposure, count, exposure)


def from_start(hours: list[float], start: float) -> list[float]:
    """The ascending instants between which gaps are taken: from the start on, unless a failure is where the observation begins."""
    return hours if hours and hours[0] == start else [start, *hours]


class Dispersion(msgspec.Struct, frozen=True):
    """Are failures more bunched than a Poisson process would be?"""

    index: float
    """Variance over mean of counts per window; 1 for a Poisson process."""
    p_value: float
    """Chance of an index this high under a Poisson process (chi-square dispersion test, one-sided)."""
    window_hours: float
    num_windows: int
    batches: tuple[tuple[float, float, int], ...]
    """(first hour, last hour, number) of runs of failures much closer than the mean gap."""

    @property
    def over_dispersed(self) -> bool:
        """Batches are statistically certain: fix machines first."""
        return self.p_value < 0.01 and self.index > 1.5


def dispersion(hours: list[float], start_hours: float, end_hours: float) -> Dispersion | None:
    """Dispersion of events over [start, end] in windows that expect five events each; None for fewer than ten events."""
    span = end_hours - start_hours
    if len(hours) < 10 or span <= 0:
        return None
    num_windows = max(2, len(hours) // 5)
    width = span / num_windows
    counts = [0] * num_windows
    for hour in hours:
        counts[min(num_windows - 1, max(0, int((hour - start_hours) / width)))] += 1
    mean = len(hours) / num_windows
    squares = sum((count - mean) ** 2 for count in counts)
    index = squares / (num_windows - 1) / mean
    p_value = float(stats.chi2.sf(squares / mean, num_windows - 1))
    return Dispersion(index, p_value, width, num_windows, _batches(sorted(hours), span / len(hours)))


def _batches(hours: list[float], mean_gap: float) -> tuple[tuple[float, float, int], ...]:
    """Runs of at least three events with gaps under a tenth of the mean gap."""
    runs: list[list[float]] = []
    for hour in hours:
        if runs and hour - runs[-1][-1] < mean_gap / 10:
            runs[-1].append(hour)
        else:
            runs.append([hour])
    return tuple((run[0], run[-1], len(run)) for run in runs if len(run) >= 3)


def probability_of_none(rate: float, exposure: float) -> float:
    """P(no event) of a Poisson process: exp(-rate x exposure)."""
    return math.exp(-rate * exposure)
