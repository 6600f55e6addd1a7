"""The edges that a changed constant would move: units of the prior, thresholds of each warning, words of each reason."""

from __future__ import annotations

import math

import pytest

from regrow.ckpt import interval
from regrow.ckpt.interval import Bounds, Controller, Measured, Tier
from regrow.wire import CheckpointPolicy


def test_a_policy_gives_its_prior_by_the_hour_and_its_bounds_by_the_second() -> None:
    controller = Controller.of_policy(CheckpointPolicy(prior_failures_per_hour=36.0, min_interval_seconds=3.0, max_interval_seconds=50.0))
    made = controller.choose(Measured(stall_seconds=0.5))
    assert made.failures_per_second == pytest.approx(0.01)
    assert made.interval_seconds == pytest.approx(10.0)
    assert (made.lower_seconds, made.upper_seconds) == (3.0, 50.0)


@pytest.mark.parametrize(("cost", "daly"), [(0.02, 0.206889 - 0.02), (1.999, 2.887889 - 1.999), (2.0, 1.0)])
def test_daly_by_hand_up_to_the_place_where_its_formula_ends(cost: float, daly: float) -> None:
    assert interval.daly(cost, 1.0) == pytest.approx(daly, abs=1e-5)
    assert interval.daly(cost * 60.0, 60.0) == pytest.approx(60.0 * daly, abs=1e-3), "the unit of time does not matter"


@pytest.mark.parametrize(
    ("seconds", "mtbf", "measured", "words"),
    [
        (50.0, 100.0, Measured(), ["is 0.5 x the MTBF of 100 s"]),
        (49.9, 100.0, Measured(), []),
        (100.0, 1e9, Measured(detect_seconds=4.0, restore_seconds=6.1), ["recovery takes 10.1 s"]),
        (100.0, 1e9, Measured(detect_seconds=4.0, restore_seconds=6.0), []),
        (100.0, 1e9, Measured(write_seconds=100.1), ["a save needs 100 s to be durable, longer than the interval"]),
        (100.0, 1e9, Measured(write_seconds=100.0), []),
        (1e3, 1e9, Measured(step_seconds=5.0, stall_seconds=1.0, write_seconds=6.0, notice_seconds=10.9), ["11 s needed"]),
        (1e3, 1e9, Measured(step_seconds=5.0, stall_seconds=6.0, write_seconds=1.0, notice_seconds=10.9), ["11 s needed"]),
        (1e3, 1e9, Measured(step_seconds=5.0, stall_seconds=1.0, write_seconds=6.0, notice_seconds=11.0), []),
        (1e3, 1e9, Measured(step_seconds=5.0, stall_seconds=1.0, write_seconds=6.0), []),
    ],
)
def test_each_warning_starts_at_its_threshold(seconds: float, mtbf: float, measured: Measured, words: list[str]) -> None:
    found = interval.warnings(seconds, mtbf, measured)
    assert len(found) == len(words), found
    assert all(word in text for word, text in zip(words, found, strict=True)), found


@pytest.mark.parametrize(("mtbf", "text"), [(119.0, "119 s"), (120.0, "2 min"), (7199.0, "120 min"), (7200.0, "2 h"), (36000.0, "10 h")])
def test_times_are_told_in_the_unit_that_reads_best(mtbf: float, text: str) -> None:
    (warning,) = interval.warnings(mtbf, mtbf, Measured())
    assert f"the MTBF of {text}:" in warning
    assert f"interval of {text} is 1 x" in warning


@pytest.mark.parametrize(
    ("measured", "rate", "rule", "reason"),
    [
        (Measured(stall_seconds=0.5), 0.0, "max", "no failure rate is known, so only the bounds decide; the upper bound sets 900 s"),
        (Measured(), 0.1, "first_save", "no save was measured yet, so the first one is taken early"),
        (Measured(stall_seconds=0.5), 0.01, "formula", "sqrt(2 x 0.5 s stall x 100 s MTBF) = 10 s"),
        (
            Measured(stall_seconds=0.5, step_seconds=12.0),
            0.01,
            "step",
            "sqrt(2 x 0.5 s stall x 100 s MTBF) = 10 s; one training step sets 12 s; 1 step of 12 s",
        ),
        (
            Measured(stall_seconds=0.5, write_seconds=13.0, step_seconds=4.0),
            0.01,
            "write",
            "sqrt(2 x 0.5 s stall x 100 s MTBF) = 10 s; the time to make a save durable sets 13 s; 4 steps of 4 s",
        ),
    ],
)
def test_the_reason_tells_what_decided(measured: Measured, rate: float, rule: str, reason: str) -> None:
    made = Controller(Bounds(max_seconds=900.0)).choose_at(measured, rate)
    assert (made.rule, made.reason) == (rule, reason)


def test_a_formula_without_a_story_tells_itself() -> None:
    assert Controller().apply(12.5, Measured(stall_seconds=1.0), 0.001).reason == "the formula says 12.5 s"


def test_a_place_of_checkpoints_counts_only_the_failures_that_need_it() -> None:
    tiers = (
        Tier(name="memory", share=1.0, stall_seconds=0.02, write_seconds=0.0),
        Tier(name="disk", share=0.25, stall_seconds=0.02, write_seconds=2.0),
        Tier(name="shared", share=0.01, stall_seconds=0.02, write_seconds=300.0),
    )
    made = interval.tier_intervals(tiers, 0.01)
    assert {name: (tier.interval_seconds, tier.rule) for name, tier in made.items()} == {
        "memory": (pytest.approx(2.0), "formula"),
        "disk": (pytest.approx(4.0), "formula"),
        "shared": (pytest.approx(300.0), "write"),
    }
    assert interval.tier_intervals(tiers, 0.0)["disk"].interval_seconds == math.inf, "without failures nothing but a bound ends an interval"
    bounded = interval.tier_intervals(tiers, 0.01, Bounds(max_seconds=3.0))
    assert bounded["disk"].interval_seconds == 3.0


@pytest.mark.parametrize(("storage", "found"), [(40.0, 0), (39.9, 1), (0.0, 0)])
def test_the_checkpoint_that_is_being_written_needs_room_too(storage: float, found: int) -> None:
    assert len(interval.storage_warnings(10.0, storage, 3)) == found


def test_how_many_fit_is_told() -> None:
    (warning,) = interval.storage_warnings(10.0, 39.9, 3)
    assert "need 40 GB, 39.9 GB are there: keep at most 2" in warning
    (nothing,) = interval.storage_warnings(10.0, 5.0, 1)
    assert "keep at most 0" in nothing
