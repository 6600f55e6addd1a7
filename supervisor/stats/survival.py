"""Kaplan-Meier curves with right-censoring, and the distribution of times with its tail."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from scipy import stats

_Z95 = float(stats.norm.ppf(0.975))
TAILS = (0.5, 0.9, 0.95, 0.99)


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Share of units without a failure after some hours, with pointwise 95 % bounds (log-log, Greenwood's variance)."""

    hours: tuple[float, ...]
    """Times of failures, ascending."""
    survival: tuple[float, ...]
    lower95: tuple[float, ...]
    upper95: tuple[float, ...]
    num_units: int
    num_failures: int
    median_hours: float | None
    """First time at which half have failed; None when that was not seen."""
    last_hours: float = 0.0
    """Longest time that a unit was observed: so far the curve reaches."""


def kaplan_meier(durations: list[float], failed: list[bool]) -> Curve:
    """The product-limit estimate (Kaplan and Meier 1958).

    Args:
        durations: hours observed of each unit, >= 0.
        failed: True when the unit failed then, False when the observation ended (right-censored).

    Raises:
        ValueError: the two lists differ in length, or a duration is negative.
    """
    if len(durations) != len(failed) or any(hours < 0 for hours in durations):
        raise ValueError("durations must be >= 0 and as many as the flags")
    hours: list[float] = []
    survival: list[float] = []
    lower: list[float] = []
    upper: list[float] = []
    left, share, variance = len(durations), 1.0, 0.0
    order = sorted(zip(durations, failed, strict=True))
    index = 0
    while index < len(order):
        at = order[index][0]
        same = [flag for time, flag in order[index:] if time == at]
        died = sum(same)
        if died:
            share *= 1 - died / left
            variance += died / (left * (left - died)) if left > died else math.inf
            low, high = _bounds(share, variance)
            hours.append(at)
            survival.append(share)
            lower.append(low)
            upper.append(high)
        left -= len(same)
        index += len(same)
    median = next((at for at, value in zip(hours, survival, strict=True) if value <= 0.5), None)
    return Curve(
        hours=tuple(hours),
        survival=tuple(survival),
        lower95=tuple(lower),
        upper95=tuple(upper),
        num_units=len(durations),
        num_failures=sum(failed),
        median_hours=median,
        last_hours=max(durations, default=0.0),
    )


def _bounds(share: float, variance: float) -> tuple[float, float]:
    if share <= 0.0 or share >= 1.0 or not math.isfinite(variance):
        return (0.0, 0.0) if share <= 0 else (share, share)
    spread = _Z95 * math.sqrt(variance) / abs(math.log(share))
    return share ** math.exp(spread), share ** math.exp(-spread)


def distribution(seconds: list[float]) -> dict[str, Any]:
    """Count, mean, quantiles and maximum of times in seconds; a quantile that fewer than 1 / (1 - q) values carry is null."""
    if not seconds:
        return {"n": 0, "mean_seconds": None, "max_seconds": None} | {_name(q): None for q in TAILS}
    values = np.asarray(sorted(seconds), dtype=float)
    known = {_name(q): float(np.quantile(values, q)) if len(values) * (1 - q) >= 1 - 1e-9 else None for q in TAILS}
    return {"n": len(seconds), "mean_seconds": float(values.mean()), "max_seconds": float(values[-1])} | known


def _name(quantile: float) -> str:
    return f"p{round(100 * quantile)}_seconds"
