"""Are intervals as sure as they say, and verdicts as rarely wrong? Asked of many simulated histories with known truth."""

from __future__ import annotations

import random
from typing import Any

import pytest

from regrow.supervisor.stats import fits, history, rates, report, survival

pytestmark = pytest.mark.soak
TRIES = 600


def poisson(generator: random.Random, rate: float, end: float) -> list[float]:
    """Instants of a Poisson process on [0, end]."""
    found: list[float] = []
    now = generator.expovariate(rate)
    while now < end:
        found.append(now)
        now += generator.expovariate(rate)
    return found


@pytest.mark.parametrize("mean", [0.5, 3.0, 30.0])
def test_the_exact_interval_holds_the_true_rate_in_95_of_100(mean: float) -> None:
    generator = random.Random(1)
    held = 0
    for _ in range(TRIES):
        rate = rates.poisson_rate(len(poisson(generator, mean, 1.0)), 1.0)
        held += rate.lower95 <= mean <= rate.upper95
    assert held / TRIES >= 0.95 - 2 * (0.05 * 0.95 / TRIES) ** 0.5, "an exact interval is never too narrow"


@pytest.mark.parametrize("shape", [0.7, 1.0, 1.5])
def test_the_interval_of_a_censored_weibull_shape_holds_it(shape: float) -> None:
    generator = random.Random(2)
    held = said = 0
    for _ in range(TRIES):
        pairs = [(generator.weibullvariate(10.0, shape), generator.uniform(5.0, 40.0)) for _ in range(60)]
        observed = [time for time, limit in pairs if time <= limit]
        fit = fits.fit_weibull(observed, [limit for time, limit in pairs if time > limit])
        assert fit is not None
        held += fit.shape_lower95 <= shape <= fit.shape_upper95
        said += fit.p_exponential < 0.05
    assert 0.92 <= held / TRIES <= 0.98
    assert (said / TRIES <= 0.08) if shape == 1.0 else (said / TRIES >= 0.6)


def test_bounds_of_a_kaplan_meier_curve_hold_the_truth() -> None:
    generator = random.Random(3)
    held = 0
    for _ in range(TRIES):
        pairs = [(generator.expovariate(0.1), generator.uniform(2.0, 30.0)) for _ in range(60)]
        curve = survival.kaplan_meier([min(pair) for pair in pairs], [time <= limit for time, limit in pairs])
        at = max(index for index, hour in enumerate(curve.hours) if hour <= 7.0)
        held += curve.lower95[at] <= 2.718281828 ** (-0.7) <= curve.upper95[at]
    assert 0.92 <= held / TRIES <= 0.98


def test_even_failures_are_rarely_called_batches_early_or_lemons() -> None:
    generator = random.Random(4)
    wrong = {"batches": 0, "age": 0, "lemons": 0}
    for _ in range(TRIES):
        hours = poisson(generator, 0.1, 1000.0)
        known = history.History(
            failures=tuple(history.Failure(at_hours=hour, node=f"n{generator.randrange(100)}") for hour in hours)
        )  # fmt: skip
        document = report.build(known, gpus=800, end_hours=1000.0)
        wrong["batches"] += bool(document["dispersion"] and document["dispersion"]["over_dispersed"])
        wrong["age"] += document["age"]["p_value"] is not None and document["age"]["p_value"] < 0.05
        wrong["lemons"] += bool(document["nodes"]["lemons"])
    shares = {name: count / TRIES for name, count in wrong.items()}
    assert shares["batches"] <= 0.02, shares
    assert shares["age"] <= 0.07, shares
    assert shares["lemons"] <= 0.06, shares


def test_a_lemon_a_batch_and_a_bad_first_week_are_found() -> None:
    generator = random.Random(5)
    found = {"lemon": 0, "batches": 0, "age": 0}
    tries = 100
    for _ in range(tries):
        even = poisson(generator, 0.1, 1000.0)
        bad = [history.Failure(at_hours=hour, node="n7") for hour in poisson(generator, 0.012, 1000.0)]
        rest = [history.Failure(at_hours=hour, node=f"n{generator.randrange(100)}") for hour in even]
        lemons = _build([*bad, *rest])["nodes"]["lemons"]
        found["lemon"] += [item["node"] for item in lemons] == ["n7"]
        bursts = [history.Failure(at_hours=hour + 0.1 * index) for hour in poisson(generator, 0.02, 990.0) for index in range(5)]
        spread = _build(bursts)["dispersion"]
        found["batches"] += bool(spread and spread["over_dispersed"])
        early = [history.Failure(at_hours=hour) for hour in (*even, *poisson(generator, 0.15, 300.0))]
        found["age"] += "early" in _build(early)["age"]["verdict"]
    assert found["lemon"] >= 85, found
    assert found["batches"] >= 80, found
    assert found["age"] >= 85, found


def _build(failures: list[history.Failure]) -> dict[str, Any]:
    ordered = tuple(sorted(failures, key=lambda failure: failure.at_hours))
    return report.build(history.History(failures=ordered), gpus=800, end_hours=1000.0)
