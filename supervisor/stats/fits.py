"""Weibull fits of times between failures: maximum likelihood, right-censored tail included, with a test against exponential."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

TOO_REGULAR = 10.0
"""No machine fails by the clock: a shape above this says that the times were not measured."""


class WeibullFit(msgspec.Struct, frozen=True):
    """Shape below 1: failures follow failures. Shape 1: memoryless. Above 1: wear."""

    shape: float
    scale_hours: float
    shape_lower95: float
    shape_upper95: float
    p_exponential: float
    """p-value of the likelihood-ratio test against shape 1."""
    n: int
    num_censored: int
    estimator: str = "maximum likelihood"
    num_zero_gaps: int = 0
    """Gaps of zero length, taken as half the smallest positive one: log(0) is not defined."""

    @property
    def verdict(self) -> str:
        """In words."""
        if self.p_exponential >= 0.05:
            return "cannot reject exponential"
        if self.shape > TOO_REGULAR:
            return "gaps are nearly equal: these times look constructed or rounded, not observed"
        return "failures come in batches (shape below 1)" if self.shape < 1 else "wear (shape above 1)"


def fit_weibull(gaps_hours: list[float], censored_hours: list[float] | None = None) -> WeibullFit | None:
    """Fit times between failures; None for fewer than three.

    The likelihood of n gaps x and censored times c is prod f(x) prod S(c) with S(t) = exp(-(t/scale)^shape); for a given
    shape the scale has a closed form, so one equation in the shape remains.

    Args:
        gaps_hours: observed gaps, >= 0.
        censored_hours: times without a failure at the end of observation, >= 0.
    """
    if len(gaps_hours) < 3:
        return None
    observed = np.asarray(gaps_hours, dtype=float)
    positive = observed[observed > 0]
    if len(positive) < 3:
        return None
    zeros = int((observed <= 0).sum())
    observed = np.where(observed > 0, observed, positive.min() / 2)
    censored = np.asarray([c for c in censored_hours or [] if c > 0], dtype=float)
    best: Any = optimize.minimize_scalar(
        lambda log_shape: -_profile(math.exp(log_shape), observed, censored), bounds=(math.log(0.02), math.log(50)), method="bounded"
    )
    shape = math.exp(float(best["x"]))
    top = _profile(shape, observed, censored)
    ratio = max(0.0, 2 * (top - _profile(1.0, observed, censored)))
    lower, upper = (_edge(shape, top, observed, censored, side) for side in (-1, 1))
    return WeibullFit(
        shape,
        _scale(shape, observed, censored),
        lower,
        upper,
        float(stats.chi2.sf(ratio, 1)),
        len(observed),
        len(censored),
        num_zero_gaps=zeros,
    )


def _scale(shape: float, observed: NDArray[np.float64], censored: NDArray[np.float64]) -> float:
    return math.exp(_log_scale(shape, observed, censored))


def _log_scale(shape: float, observed: NDArray[np.float64], censored: NDArray[np.float64]) -> float:
    """Logarithm of the best scale: the scale itself overflows at the small shapes that the search for an interval visits."""
    largest = float(max(observed.max(), censored.max(initial=0.0)))
    total = float(((observed / largest) ** shape).sum() + ((censored / largest) ** shape).sum())
    return math.log(largest) + math.log(total / len(observed)) / shape


def _profile(shape: float, observed: NDArray[np.float64], censored: NDArray[np.float64]) -> float:
    """Log-likelihood with the scale at its best for this shape."""
    n = len(observed)
    return n * math.log(shape) - n * shape * _log_scale(shape, observed, censored) + (shape - 1) * float(np.log(observed).sum()) - n


def _edge(shape: float, top: float, observed: NDArray[np.float64], censored: NDArray[np.float64], side: int) -> float:
    """Where the profile likelihood falls by 1.92 (95 %)."""
    drop = float(stats.chi2.ppf(0.95, 1)) / 2
    far = shape * (1000.0**side)
    if _profile(far, observed, censored) > top - drop:
        return far
    low, high = min(shape, far), max(shape, far)
    root: Any = optimize.brentq(lambda s: _profile(s, observed, censored) - (top - drop), low, high)
    return float(root)
