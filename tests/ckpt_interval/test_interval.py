"""Optimal intervals: known answers, agreement of the formulas, and the controller's bounds and reasons."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.ckpt import interval
from regrow.ckpt.interval import Bounds, Controller, Measured
from regrow.errors import ConfigurationError


@given(st.floats(1e-6, 10.0), st.floats(0.01, 100.0), st.floats(0.01, 1000.0))
def test_linear_optimum_is_a_minimum(rate: float, a: float, b: float) -> None:
    best = interval.linear_optimum(rate, a, b)
    lowest = interval.linear_cost(best, rate, a, b)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert interval.linear_cost(best * factor, rate, a, b) > lowest


@given(st.floats(1e-6, 20.0))
def test_exact_is_a_minimum_of_the_exponential_model(ratio: float) -> None:
    best = interval.exact(ratio, 1.0)
    lowest = interval.exponential_overhead(best, ratio, 1.0)
    for factor in (0.8, 1.25):
        assert interval.exponential_overhead(best * factor, ratio, 1.0) >= lowest * (1 - 1e-9)


def test_the_formulas_agree_where_saves_are_cheap() -> None:
    cost, mtbf = 1.0, 1e6
    assert interval.daly(cost, mtbf) == pytest.approx(interval.exact(cost, mtbf), rel=1e-5)
    assert interval.young(cost, mtbf) == pytest.approx(interval.exact(cost, mtbf), rel=2e-3)
    assert interval.linear_optimum(1 / mtbf, 0.5, cost) == pytest.approx(interval.young(cost, mtbf))


def test_daly_where_saving_costs_more_than_the_mtbf() -> None:
    assert interval.daly(5.0, 2.0) == 2.0


def test_posterior_moves_from_prior_to_data() -> None:
    assert interval.posterior_rate(0, 0.0, 0.01) == pytest.approx(0.01)
    assert interval.posterior_rate(1000, 1e4, 0.01) == pytest.approx(0.1, rel=0.02)
    assert 0.0 < interval.posterior_rate(0, 1000.0, 0.0) < 3 / 1000.0
    assert interval.posterior_rate(0, 0.0, 0.0) == 0.0


MEASURED = Measured(stall_seconds=0.5, write_seconds=4.0, restore_seconds=6.0, detect_seconds=2.0, step_seconds=1.5)


def test_the_controller_follows_the_formula_in_whole_steps() -> None:
    made = Controller().choose_at(MEASURED, 1 / 3600)
    assert made.optimum_seconds == pytest.approx(60.0)
    assert made.interval_seconds == pytest.approx(60.0)
    assert (made.steps, made.rule) == (40, "formula")
    assert made.overhead_ratio == pytest.approx(0.5 / 60 + (30 + 4 + 6 + 2) / 3600)
    assert "60" in made.reason


@pytest.mark.parametrize(
    ("bounds", "measured", "rate", "rule", "seconds"),
    [
        (Bounds(min_seconds=120.0), MEASURED, 1 / 3600, "min", 120.0),
        (Bounds(max_seconds=30.0), MEASURED, 1 / 3600, "max", 30.0),
        (Bounds(), Measured(stall_seconds=1e-4, write_seconds=40.0), 1 / 3600, "write", 40.0),
        (Bounds(write_bytes_per_second=1e6), Measured(stall_seconds=0.1, checkpoint_bytes=1e9), 1 / 3600, "bandwidth", 1000.0),
        (Bounds(max_lost_gpu_hours=10.0, gpus=3600), Measured(stall_seconds=1.0), 1 / 3600, "lost_gpu_hours", 10.0),
        (Bounds(), Measured(stall_seconds=1e-6, step_seconds=7.0), 1 / 3600, "step", 7.0),
        (Bounds(max_seconds=900.0), MEASURED, 0.0, "max", 900.0),
        (Bounds(max_seconds=10.0), Measured(stall_seconds=1.0, write_seconds=40.0), 1 / 3600, "write", 40.0),
        (Bounds(), Measured(step_seconds=2.0), 1 / 3600, "step", 2.0),
    ],
)
def test_bounds(bounds: Bounds, measured: Measured, rate: float, rule: str, seconds: float) -> None:
    made = Controller(bounds).choose_at(measured, rate)
    assert (made.rule, made.interval_seconds) == (rule, pytest.approx(seconds))


@given(st.floats(0.0, 100.0), st.floats(0.0, 100.0), st.floats(0.01, 100.0), st.floats(0.0, 1.0))
def test_never_shorter_than_a_write_and_always_finite(stall: float, write: float, step: float, rate: float) -> None:
    made = Controller(Bounds(max_seconds=600.0)).choose_at(Measured(stall_seconds=stall, write_seconds=write, step_seconds=step), rate)
    assert math.isfinite(made.interval_seconds)
    assert made.interval_seconds >= write * (1 - 1e-9)
    assert made.interval_seconds == pytest.approx(made.steps * step)


def test_contradicting_bounds_are_told() -> None:
    made = Controller(Bounds(max_seconds=10.0)).choose_at(Measured(stall_seconds=1.0, write_seconds=40.0), 1 / 3600)
    assert any("the longer one is kept" in warning for warning in made.warnings)


def test_more_failures_mean_shorter_intervals() -> None:
    controller = Controller(prior_failures_per_second=1 / 86400)
    quiet = controller.choose(MEASURED, failures=0, exposure_seconds=3600.0)
    stormy = controller.choose(MEASURED, failures=6, exposure_seconds=3600.0)
    assert stormy.interval_seconds < quiet.interval_seconds


def test_warnings_name_their_numbers() -> None:
    slow = Measured(stall_seconds=40.0, write_seconds=40.0, restore_seconds=900.0, step_seconds=105.0, notice_seconds=120.0)
    text = " | ".join(interval.warnings(3600.0, 7000.0, slow))
    assert "145 s needed" in text
    assert "MTBF" in text
    assert "recovery takes" in text
    assert interval.warnings(100.0, 1e9, Measured(stall_seconds=1.0)) == []


@pytest.mark.parametrize(
    "bounds", [Bounds(max_seconds=0.0), Bounds(min_seconds=-1.0), Bounds(min_seconds=20.0, max_seconds=10.0), Bounds(max_seconds=math.nan)]
)
def test_nonsense_bounds(bounds: Bounds) -> None:
    with pytest.raises(ConfigurationError):
        Controller(bounds)
