"""Parts of the report beyond rates: MTTD and MTTR, survival by component and node, age, the interval that would have been best."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import msgspec
from scipy import stats

from regrow.ckpt import interval as theory
from regrow.supervisor.stats import rates, survival
from regrow.supervisor.stats.history import Failure

MOST_CURVES = 6
_AGE_BANDS = 3
_SMALL = 5


class SaveCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What saves and restarts cost, in seconds."""

    save_seconds: float
    """Time that training stands still for one save."""
    restore_seconds: float = 0.0
    used_seconds: float | None = None
    """The interval that was in use."""


def lost_gpu_hours(failures: list[Failure], gpus: int) -> dict[str, float]:
    """GPU-hours by category, the largest first."""
    found: collections.Counter[str] = collections.Counter()
    for failure in failures:
        found[failure.category or "unknown"] += failure.lost_seconds * (failure.gpus or gpus) / 3600  # type: ignore[assignment]
    return dict(found.most_common())


def durations(failures: list[Failure], gpus: int) -> dict[str, Any]:
    """MTTD and MTTR with tails, each incident counted once and weighted with the GPUs that stood still."""
    document: dict[str, Any] = {}
    for name in ("detect_seconds", "recover_seconds", "lost_seconds"):
        known = [(value, failure.gpus or gpus) for failure in failures if (value := getattr(failure, name)) is not None]
        if name == "lost_seconds":
            known = [(value, weight) for value, weight in known if value > 0]
        total = sum(weight for _, weight in known)
        weighted = sum(value * weight for value, weight in known) / total if total else None
        document[name.removesuffix("_seconds")] = survival.distribution([value for value, _ in known]) | {
            "gpu_weighted_mean_seconds": weighted
        }
    return document


def curves(failures: list[Failure], start: float, end: float, num_nodes: int, node_hours: dict[str, float] | None) -> dict[str, Any]:
    """Kaplan-Meier: time between failures of the job by component (the last gap censored), and time of a node to its first failure."""
    components = [name for name, _ in collections.Counter(failure.component or "unknown" for failure in failures).most_common(MOST_CURVES)]
    by_component = {
        name: msgspec.to_builtins(_gaps([f.at_hours for f in failures if (f.component or "unknown") == name], start, end))
        for name in components
    }
    return {"by_component": by_component, "first_failure_of_a_node": _nodes(failures, start, end, num_nodes, node_hours)}


def _gaps(hours: list[float], start: float, end: float) -> survival.Curve:
    times = rates.from_start(sorted(hours), start)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return survival.kaplan_meier([*gaps, end - times[-1]], [True] * len(gaps) + [False])


def _nodes(failures: list[Failure], start: float, end: float, num_nodes: int, node_hours: dict[str, float] | None) -> dict[str, Any] | None:
    first: dict[str, Failure] = {}
    for failure in failures:
        if failure.node:
            first.setdefault(failure.node, failure)
    if not first:
        return None
    aged = all(failure.node_age_hours is not None for failure in first.values())
    times = [max(0.0, (failure.node_age_hours or 0.0) if aged else failure.at_hours - start) for failure in first.values()]
    others = {name: hours for name, hours in (node_hours or {}).items() if name not in first}
    censored = list(others.values()) if node_hours else [end - start] * max(0, num_nodes - len(first))
    curve = survival.kaplan_meier([*times, *censored], [True] * len(times) + [False] * len(censored))
    scale = "node age" if aged else "time since the start of the observation"
    if aged and censored and not node_hours:
        scale += " (of nodes that did not fail only the time of observation is known)"
    return msgspec.to_builtins(curve) | {"scale": scale}


def by_age(failures: list[Failure], start: float, end: float, exposure: float) -> dict[str, Any]:
    """Rates in equal thirds of the observation, and whether the first differs from the rest (exact test on two Poisson counts)."""
    width = (end - start) / _AGE_BANDS
    counts = [0] * _AGE_BANDS
    for failure in failures:
        counts[min(_AGE_BANDS - 1, int((failure.at_hours - start) / width))] += 1
    bands: list[dict[str, Any]] = []
    for index, count in enumerate(counts):
        rate = rates.poisson_rate(count, exposure / _AGE_BANDS)
        hours = {"from_hours": start + index * width, "to_hours": start + (index + 1) * width, "count": count}
        bands.append(hours | {"rate_per_gpu_hour": rate.point, "lower95": rate.lower95, "upper95": rate.upper95})
    total = sum(counts)
    test: Any = stats.binomtest(counts[0], total, 1 / _AGE_BANDS) if total >= _SMALL else None
    p_value = float(test.pvalue) if test is not None else None
    verdict = "too few failures to tell"
    if p_value is not None and p_value >= 0.05:
        verdict = "the rate did not change with age"
    elif p_value is not None:
        verdict = "more at first: early failures" if counts[0] > total / _AGE_BANDS else "more later: wear, or a change in the fleet"
    return {"bands": bands, "p_value": p_value, "verdict": verdict}


def interval(rate: rates.Rate, gpus: int, costs: SaveCosts | None) -> dict[str, Any] | None:
    """The interval that would have been best at the rate that was seen, with the band that the rate's own interval leaves."""
    if costs is None or costs.save_seconds <= 0:
        return None
    per_second = {"point": rate.point, "at_upper95": rate.upper95, "at_lower95": rate.lower95}
    if rate.count == 0:
        per_second = {"point": rate.upper95_one_sided, "at_upper95": rate.upper95, "at_lower95": 0.0}
    best: dict[str, Any] = {}
    for name, value in per_second.items():
        best[name] = theory.exact(costs.save_seconds, 3600 / (value * gpus)) if value > 0 else None
    mtbf = 3600 / (per_second["point"] * gpus)

    def overhead(seconds: float) -> float:
        return theory.exponential_overhead(seconds, costs.save_seconds, mtbf, costs.restore_seconds)

    used = costs.used_seconds
    return {
        "best_seconds": best["point"],
        "best_seconds_at_upper_rate": best["at_upper95"],
        "best_seconds_at_lower_rate": best["at_lower95"],
        "overhead_at_best": overhead(best["point"]),
        "used_seconds": used,
        "overhead_at_used": overhead(used) if used else None,
        "save_seconds": costs.save_seconds,
        "restore_seconds": costs.restore_seconds,
        "method": "exact (Daly 2006 before its expansion), exponential failures",
        "note": "no failure was seen: from the upper bound of the rate" if rate.count == 0 else "",
    }
