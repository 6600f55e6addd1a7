"""Statistics worked out on paper: a changed sign, bound or degree of freedom moves one of these numbers."""

from __future__ import annotations

from typing import Any

import pytest
from scipy import stats

from regrow.supervisor.stats import fits, more, rates
from regrow.supervisor.stats.history import Failure


def test_dispersion_of_twenty_failures_in_four_windows() -> None:
    """Counts 11, 3, 3, 3 about a mean of 5: squares 36 + 3 x 4 = 48; index 48 / 3 / 5; chi-square 48 / 5 with 3 degrees of freedom."""
    hours = [1 + 2 * index for index in range(11)] + [25 + window * 25 + 6 * index + 3 for window in range(3) for index in range(3)]
    spread = rates.dispersion([float(hour) for hour in hours], 0.0, 100.0)
    assert spread is not None
    assert (spread.num_windows, spread.window_hours) == (4, 25.0)
    assert spread.index == pytest.approx(3.2)
    assert spread.p_value == pytest.approx(0.0222909831)
    assert not spread.over_dispersed, "p is above 0.01: not certain, however large the index"
    assert spread.batches == ()


def test_a_batch_is_three_failures_with_gaps_under_a_tenth_of_the_mean_gap() -> None:
    """Mean gap 10 h: 1 h is not under a tenth of it, 0.9 h is."""
    apart = [float(hour) for hour in range(5, 65, 10)]
    at_the_bound = [70.0, 71.0, 72.0, 73.0]
    wide = rates.dispersion([*apart, *at_the_bound], 0.0, 100.0)
    close = rates.dispersion([*apart, 70.0, 70.9, 71.8, 95.0], 0.0, 100.0)
    pair = rates.dispersion([*apart, 70.0, 70.9, 90.0, 90.9], 0.0, 100.0)
    assert wide is not None
    assert close is not None
    assert pair is not None
    assert wide.batches == ()
    assert close.batches == ((70.0, pytest.approx(71.8), 3),)
    assert pair.batches == ()


def test_the_test_against_exponential_is_the_likelihood_ratio_of_scipys_fits() -> None:
    gaps = [0.3, 0.5, 1.1, 2.0, 2.2, 3.9, 7.5, 8.0, 21.0, 40.0]
    fit = fits.fit_weibull(gaps)
    assert fit is not None
    shape, _, scale = stats.weibull_min.fit(gaps, floc=0)
    free = stats.weibull_min.logpdf(gaps, shape, scale=scale).sum()
    bound = stats.expon.logpdf(gaps, scale=sum(gaps) / len(gaps)).sum()
    assert fit.p_exponential == pytest.approx(stats.chi2.sf(2 * (free - bound), 1), rel=1e-3)
    for edge in (fit.shape_lower95, fit.shape_upper95):
        best_scale = (sum(gap**edge for gap in gaps) / len(gaps)) ** (1 / edge)
        lower = stats.weibull_min.logpdf(gaps, edge, scale=best_scale).sum()
        assert free - lower == pytest.approx(stats.chi2.ppf(0.95, 1) / 2, rel=1e-3)


def _failed(at: float, node: str = "", age: float | None = None, component: str = "gpu") -> Failure:
    return Failure(at_hours=at, node=node, component=component, node_age_hours=age)


def test_gaps_of_a_component_begin_at_the_start_and_the_last_is_open() -> None:
    """From hour 2 to 102: gaps 8, 20, 10, 20 and an open one of 42. After 8: 4/5; 10: 3/5; 20 twice of three: 1/5."""
    failures = [_failed(10), _failed(30), _failed(40), _failed(60)]
    curve: dict[str, Any] = more.curves(failures, 2.0, 102.0, 0, None)["by_component"]["gpu"]
    assert curve["hours"] == pytest.approx([8.0, 10.0, 20.0])
    assert curve["survival"] == pytest.approx([0.8, 0.6, 0.2])
    assert (curve["num_units"], curve["num_failures"], curve["last_hours"]) == (5, 4, 42.0)


def test_at_most_six_components_have_a_curve_and_the_most_frequent_do() -> None:
    failures = [_failed(float(at), component=name) for at, name in enumerate("abcdefg" + "bcdefg", start=1)]
    assert set(more.curves(failures, 0.0, 20.0, 0, None)["by_component"]) == set("bcdefg")


@pytest.mark.parametrize(
    ("failures", "node_hours", "hours", "units", "scale"),
    [
        ([_failed(12, "a"), _failed(40, "a"), _failed(62, "b")], None, [10.0, 60.0], 4, "time since the start of the observation"),
        ([_failed(12, "a", 300.0), _failed(62, "b")], None, [10.0, 60.0], 4, "time since the start of the observation"),
        ([_failed(12, "a", 300.0), _failed(40), _failed(62, "b", 70.0)], {"a": 9.0, "b": 9.0, "c": 500.0}, [70.0, 300.0], 3, "node age"),
        (
            [_failed(12, "a", 50.0), _failed(20, "a", 58.0), _failed(62, "b", 70.0)],
            None,
            [50.0, 70.0],
            4,
            "node age (of nodes that did not fail only the time of observation is known)",
        ),
    ],
)
def test_a_node_counts_once_on_one_scale(
    failures: list[Failure], node_hours: dict[str, float] | None, hours: list[float], units: int, scale: str
) -> None:
    """Ages and times of observation are never on one curve: ages only where every node that failed has one."""
    curve = more.curves(failures, 2.0, 102.0, 4, node_hours)["first_failure_of_a_node"]
    assert curve["hours"] == pytest.approx(hours)
    assert (curve["num_units"], curve["num_failures"], curve["scale"]) == (units, 2, scale)


def test_no_node_is_named() -> None:
    assert more.curves([_failed(5)], 0.0, 10.0, 4, None)["first_failure_of_a_node"] is None
