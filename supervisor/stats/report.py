"""The post-mortem report of a failure history: a plain document (see design: `report --json`) that renderers show."""

from __future__ import annotations

import collections
import itertools
import math
from typing import Any

from regrow.errors import ConfigurationError
from regrow.supervisor.stats import fits, more, rates
from regrow.supervisor.stats.history import Failure, History
from regrow.supervisor.stats.more import SaveCosts

SMALL_SAMPLE = 10
"""Fewer failures than this: intervals are wide, shares are anecdotes."""

LEMON_SHARE = 3.0
"""A node with this many times the expected failures, and significantly so, is a lemon."""


def build(
    history: History,
    *,
    gpus: int,
    start_hours: float | None = None,
    end_hours: float | None = None,
    gpus_per_node: int = 8,
    price_per_gpu_hour: float = 0.0,
    printed_shares: dict[str, float] | None = None,
    exposure_gpu_hours: float | None = None,
    node_hours: dict[str, float] | None = None,
    costs: SaveCosts | None = None,
) -> dict[str, Any]:
    """Statistics of `history` over an observation of `gpus` GPUs from start to end.

    Args:
        exposure_gpu_hours: GPU-hours observed, when nodes came and went; default gpus x window.
        node_hours: observed hours of each node, failed or not; default: all nodes over the whole window.
        costs: what saves cost, for the interval that would have been best.

    Raises:
        ConfigurationError: no GPUs, end before start, or failures outside the window.
    """
    start, end = _window(history.failures, start_hours, end_hours)
    if gpus < 1 or gpus_per_node < 1:
        raise ConfigurationError(f"{gpus} GPUs, {gpus_per_node} a node: both must be at least 1", where="--gpus, --gpus-per-node")
    exposure = exposure_gpu_hours or gpus * (end - start)
    unplanned = [failure for failure in history.failures if not failure.planned]
    rate = rates.poisson_rate(len(unplanned), exposure)
    num_nodes = len(node_hours) if node_hours else max(1, gpus // gpus_per_node)
    weibull = _weibull(unplanned, start, end)
    spread = rates.dispersion([failure.at_hours for failure in unplanned], start, end)
    lost_hours = sum(failure.lost_seconds for failure in history.failures) / 3600
    warnings = [*history.warnings, *_warnings(history.failures, unplanned, rate, weibull, spread, lost_hours, end - start)]
    warnings += _window_warnings(history, start_hours, end_hours)
    warnings += _share_warnings(unplanned, printed_shares or {})
    return {
        "exposure_gpu_hours": exposure,
        "window_hours": {"start": start, "end": end},
        "gpus": gpus,
        "failures": _failures(history.failures, unplanned, gpus),
        "rate_per_gpu_hour": {
            "point": rate.point,
            "lower95": rate.lower95,
            "upper95": rate.upper95,
            "upper95_one_sided": rate.upper95_one_sided,
            "scope": "all causes, per GPU",
        },
        "mtbf_hours": _mtbf(rate, gpus),
        "weibull": _weibull_document(weibull),
        "dispersion": _dispersion_document(spread),
        "goodput": _goodput(history.failures, end - start, gpus, price_per_gpu_hour, exposure),
        "nodes": _nodes(unplanned, num_nodes),
        "projection": _projection(rate),
        "durations": more.durations(unplanned, gpus),
        "survival": more.curves(unplanned, start, end, num_nodes, node_hours),
        "age": more.by_age(unplanned, start, end, exposure),
        "interval": more.interval(rate, gpus, costs),
        "incidents": [_incident(failure) for failure in history.failures],
        "warnings": warnings,
    }


def _window(failures: tuple[Failure, ...], start: float | None, end: float | None) -> tuple[float, float]:
    first = failures[0].at_hours if failures else 0.0
    last = failures[-1].at_hours if failures else 0.0
    start = min(0.0, first) if start is None else start
    end = last if end is None else end
    if not (math.isfinite(start) and math.isfinite(end)) or end <= start:
        raise ConfigurationError(
            f"the window from {start:g} to {end:g} hours is empty", where="--start, --end", hint="give the observation's hours or instants"
        )
    outside = [failure for failure in failures if not start <= failure.at_hours <= end]
    if outside:
        raise ConfigurationError(
            f"{len(outside)} failures lie outside {start:g} to {end:g} hours, the first at {outside[0].at_hours:g}",
            where="--start, --end",
            hint="widen the window: exposure and failures must be of the same time",
        )
    return start, end


def _failures(every: tuple[Failure, ...], unplanned: list[Failure], gpus: int) -> dict[str, Any]:
    def by(key: str, weight: bool) -> dict[str, float]:
        counts: collections.Counter[str] = collections.Counter()
        for failure in unplanned:
            counts[getattr(failure, key) or "unknown"] += failure.lost_seconds if weight else 1  # type: ignore[assignment]
        return dict(counts.most_common())

    count = len(unplanned)
    return {
        "count": count,
        "unplanned": count,
        "planned": len(every) - count,
        "all": len(every),
        "by_category": by("category", weight=False),
        "share_by_category": {name: number / count for name, number in by("category", weight=False).items()},
        "by_component": by("component", weight=False),
        "share_by_component": {name: number / count for name, number in by("component", weight=False).items()},
        "lost_seconds_by_category": by("category", weight=True),
        "lost_gpu_hours_by_category": more.lost_gpu_hours(unplanned, gpus),
        "victim_rows": sum(failure.num_rows - 1 for failure in every),
    }


def _weibull(unplanned: list[Failure], start: float, end: float) -> fits.WeibullFit | None:
    times = rates.from_start([failure.at_hours for failure in unplanned], start)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return fits.fit_weibull(gaps, [end - times[-1]])


def _weibull_document(fit: fits.WeibullFit | None) -> dict[str, Any]:
    if fit is None:
        return {"shape": None, "scale_hours": None, "n": 0, "verdict": "too few failures to fit"}
    return {
        "shape": fit.shape,
        "scale_hours": fit.scale_hours,
        "n": fit.n,
        "shape_lower95": fit.shape_lower95,
        "shape_upper95": fit.shape_upper95,
        "p_exponential": fit.p_exponential,
        "verdict": fit.verdict,
        "estimator": fit.estimator,
        "num_censored": fit.num_censored,
        "num_zero_gaps": fit.num_zero_gaps,
    }


def _dispersion_document(spread: rates.Dispersion | None) -> dict[str, Any] | None:
    if spread is None:
        return None
    return {
        "index": spread.index,
        "p_value": spread.p_value,
        "window_hours": spread.window_hours,
        "over_dispersed": spread.over_dispersed,
        "batches": [{"first_hours": first, "last_hours": last, "count": count} for first, last, count in spread.batches],
    }


def _mtbf(rate: rates.Rate, gpus: int) -> dict[str, Any]:
    """Of the job, in hours: null where it is not bounded."""
    inverse = {"point": rate.point, "upper95": rate.lower95, "lower95": rate.upper95, "lower95_one_sided": rate.upper95_one_sided}
    document: dict[str, Any] = {name: 1 / (value * gpus) if value > 0 else None for name, value in inverse.items()}
    return {**document, "scope": f"job of {gpus} GPUs, all causes"}


def _goodput(every: tuple[Failure, ...], span_hours: float, gpus: int, price: float, exposure: float) -> dict[str, Any]:
    lost_hours = sum(failure.lost_seconds for failure in every) / 3600
    lost_gpu_hours = sum(failure.lost_seconds * (failure.gpus or gpus) for failure in every) / 3600
    known = lost_hours > 0
    return {
        "ettr": max(0.0, 1 - lost_hours / span_hours) if known else None,
        "lost_hours": lost_hours,
        "lost_gpu_hours": lost_gpu_hours,
        "lost_share_of_exposure": lost_gpu_hours / exposure if known else None,
        "cost": lost_gpu_hours * price if price else None,
        "price_per_gpu_hour": price or None,
        "note": "ETTR from lost_seconds of the incidents" if known else "no lost_seconds in the input: goodput cannot be stated",
    }


def _nodes(unplanned: list[Failure], num_nodes: int) -> dict[str, Any]:
    """Lemon nodes: significantly more failures than a fair share (Poisson tail, corrected for the number of nodes)."""
    from scipy import stats

    counts = collections.Counter(failure.node for failure in unplanned if failure.node)
    expected = sum(counts.values()) / num_nodes
    lemons = [
        {"node": node, "count": count, "expected": expected}
        for node, count in counts.most_common()
        if count >= 2 and count > LEMON_SHARE * expected and float(stats.poisson.sf(count - 1, expected)) * num_nodes < 0.05
    ]
    return {"with_failures": len(counts), "expected_per_node": expected, "lemons": lemons}


def _projection(rate: rates.Rate) -> list[dict[str, Any]]:
    """MTBF at other sizes, if failures scale with GPUs: a series model, which switches and storage do not follow."""
    worst = rate.upper95 if rate.count else rate.upper95_one_sided
    return [
        {
            "gpus": gpus,
            "mtbf_hours": 1 / (rate.point * gpus) if rate.count else None,
            "mtbf_lower95_hours": 1 / (worst * gpus),
            "p_no_failure_24h": rates.probability_of_none(rate.point or worst, 24 * gpus),
        }
        for gpus in (8, 512, 1024, 8192, 16384, 131072)
    ]


def _incident(failure: Failure) -> dict[str, Any]:
    return {
        "at_hours": failure.at_hours,
        "node": failure.node,
        "component": failure.component,
        "category": failure.category,
        "planned": failure.planned,
        "incident": failure.incident,
        "lost_seconds": failure.lost_seconds,
        "detect_seconds": failure.detect_seconds,
        "recover_seconds": failure.recover_seconds,
        "victim_rows": failure.num_rows - 1,
    }


def _warnings(
    every: tuple[Failure, ...],
    unplanned: list[Failure],
    rate: rates.Rate,
    weibull: fits.WeibullFit | None,
    spread: rates.Dispersion | None,
    lost_hours: float,
    span_hours: float,
) -> list[str]:
    found: list[str] = []
    if not unplanned:
        found.append(
            f"no unplanned failure in {rate.exposure:g} GPU-hours: the rate is not 0, "
            f"but at most {rate.upper95_one_sided:.3g} per GPU-hour (95 %)"
        )
    elif len(unplanned) < SMALL_SAMPLE:
        found.append(
            f"only {len(unplanned)} unplanned failure{'s' if len(unplanned) > 1 else ''}: intervals are wide and shares say little"
        )
    if len(every) > len(unplanned):
        found.append(f"{len(every) - len(unplanned)} planned stops are not in the rate")
    if spread is not None and spread.over_dispersed:
        found.append(
            f"failures come in batches (variance {spread.index:.1f} x the mean, p {spread.p_value:.1g}): fix machines first; "
            "an interval from the mean rate is wrong in both directions"
        )
    if weibull is not None and weibull.p_exponential < 0.05:
        found.append(f"Weibull shape {weibull.shape:.2f}: {weibull.verdict}")
    if lost_hours > span_hours:
        found.append(f"lost time of {lost_hours:.1f} h is longer than the window of {span_hours:.1f} h: incidents overlap or rows repeat")
    return found


def _window_warnings(history: History, start: float | None, end: float | None) -> list[str]:
    """A window that the failures themselves bound holds one failure more than its length says."""
    if not history.failures:
        return []
    begins = start is None and bool(history.start_at)
    what = [name for name, guessed in (("begins with the first", begins), ("ends with the last", end is None)) if guessed]
    flags = [name for name, guessed in (("--start", begins), ("--end", end is None)) if guessed]
    if not what:
        return []
    return [f"the window {' and '.join(what)} failure, so the rate is too high: give {' and '.join(flags)} of the observation"]


def _share_warnings(unplanned: list[Failure], printed: dict[str, float]) -> list[str]:
    """Shares given with the data (percent by component) that its own counts contradict."""
    counts = collections.Counter(failure.component for failure in unplanned)
    total = sum(counts.values())
    found: list[str] = []
    for component, percent in printed.items():
        derived = 100 * counts[component] / total if total else 0.0
        if abs(derived - percent) > 0.051 + 1e-9:
            found.append(f"{component}: the given share of {percent:.1f} % disagrees with {counts[component]} of {total} = {derived:.1f} %")
    if printed and abs(sum(printed.values()) - 100) > 0.5:
        found.append(f"the given shares sum to {sum(printed.values()):.1f} %, not 100 %")
    return found
