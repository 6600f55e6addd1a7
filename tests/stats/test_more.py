"""Survival against lifelines, durations, interval, columns, the checked-in report."""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from regrow.ckpt import interval as theory
from regrow.errors import ConfigurationError
from regrow.supervisor.stats import fits, history, more, rates, render, report, source, survival

ROOT = Path(__file__).parents[2]


def _lifelines() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what lifelines imports
        import lifelines
    return lifelines


def _censored(seed: int, num: int) -> tuple[list[float], list[bool]]:
    generator = random.Random(seed)
    times = [(round(generator.weibullvariate(10, 0.8), 1) + 0.1, generator.uniform(0, 25)) for _ in range(num)]
    return [min(pair) for pair in times], [failed <= limit for failed, limit in times]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kaplan_meier_is_that_of_lifelines(seed: int) -> None:
    durations, failed = _censored(seed, 60)
    curve = survival.kaplan_meier(durations, failed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitter = _lifelines().KaplanMeierFitter().fit(durations, failed)  # type: ignore[attr-defined]
        bounds = fitter.confidence_interval_
    for hour, share, low, high in zip(curve.hours, curve.survival, curve.lower95, curve.upper95, strict=True):
        assert share == pytest.approx(float(fitter.predict(hour)), abs=1e-12)
        row = bounds.loc[bounds.index.asof(hour)]
        if 0 < share < 1:
            assert (low, high) == pytest.approx(tuple(row), abs=1e-9)
    assert curve.median_hours == fitter.median_survival_time_


@pytest.mark.parametrize("seed", [4, 5])
def test_weibull_with_censoring_is_that_of_lifelines(seed: int) -> None:
    durations, failed = _censored(seed, 80)
    observed = [hours for hours, flag in zip(durations, failed, strict=True) if flag]
    fit = fits.fit_weibull(observed, [hours for hours, flag in zip(durations, failed, strict=True) if not flag])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitter = _lifelines().WeibullFitter().fit(durations, failed)  # type: ignore[attr-defined]
    assert fit is not None
    assert fit.shape == pytest.approx(fitter.rho_, rel=2e-3)
    assert fit.scale_hours == pytest.approx(fitter.lambda_, rel=2e-3)


def test_kaplan_meier_by_hand_and_at_its_ends() -> None:
    curve = survival.kaplan_meier([1, 2, 2, 3], [True, True, False, True])
    assert curve.hours == (1, 2, 3)
    assert curve.survival == pytest.approx((0.75, 0.5, 0.0))
    assert curve.median_hours == 2
    nothing = survival.kaplan_meier([5.0, 5.0], [False, False])
    assert (nothing.hours, nothing.median_hours) == ((), None)
    with pytest.raises(ValueError):
        survival.kaplan_meier([1.0], [True, False])


def test_a_tail_that_few_values_cannot_carry_is_not_stated() -> None:
    few = survival.distribution([1.0, 2.0, 3.0])
    assert few["p50_seconds"] == 2.0
    assert few["p90_seconds"] is None
    assert few["max_seconds"] == 3.0
    many = survival.distribution([float(value) for value in range(100)])
    assert many["p99_seconds"] == pytest.approx(98.01)


def _history(tmp_path: Path, text: str) -> history.History:
    file = tmp_path / "f.csv"
    file.write_text(text)
    return history.read(file)


def test_count_and_gpu_weighting_stand_side_by_side(tmp_path: Path) -> None:
    known = _history(
        tmp_path,
        "at,category,lost_seconds,detect_seconds,recover_seconds,gpus\n1,a,60,10,50,8\n2,b,600,100,500,800\n3,a,60,10,50,8\n",
    )
    document = report.build(known, gpus=800, end_hours=10.0, price_per_gpu_hour=2.0)
    detect = document["durations"]["detect"]
    assert detect["mean_seconds"] == pytest.approx(40.0)
    assert detect["gpu_weighted_mean_seconds"] == pytest.approx((10 * 16 + 100 * 800) / 816)
    assert document["failures"]["by_category"] == {"a": 2, "b": 1}
    assert list(document["failures"]["lost_gpu_hours_by_category"]) == ["b", "a"]
    lost = (60 * 8 * 2 + 600 * 800) / 3600
    assert document["goodput"]["lost_gpu_hours"] == pytest.approx(lost)
    assert document["goodput"]["cost"] == pytest.approx(2 * lost)


def test_the_interval_that_would_have_been_best() -> None:
    rate = rates.poisson_rate(100, 100 * 800.0)
    best = more.interval(rate, 8, more.SaveCosts(save_seconds=5, restore_seconds=20, used_seconds=3600))
    assert best is not None
    mtbf = 100 * 3600
    assert best["best_seconds"] == pytest.approx(theory.exact(5, mtbf))
    assert best["best_seconds_at_upper_rate"] < best["best_seconds"] < best["best_seconds_at_lower_rate"]
    assert best["overhead_at_used"] > best["overhead_at_best"]
    assert more.interval(rate, 8, None) is None
    unseen = more.interval(rates.poisson_rate(0, 1000.0), 8, more.SaveCosts(save_seconds=5))
    assert unseen is not None
    assert unseen["best_seconds_at_lower_rate"] is None
    assert "no failure" in unseen["note"]


def test_early_failures_are_told_from_a_constant_rate(tmp_path: Path) -> None:
    early = _history(tmp_path, "at,node\n" + "".join(f"{index * 0.5},n{index}\n" for index in range(30)) + "80,n99\n")
    document = report.build(early, gpus=800, end_hours=90.0)
    assert "early" in document["age"]["verdict"]
    even = _history(tmp_path, "at,node\n" + "".join(f"{index * 3},n{index}\n" for index in range(30)))
    assert "did not change" in report.build(even, gpus=800, end_hours=90.0)["age"]["verdict"]


def test_nodes_that_did_not_fail_are_censored(tmp_path: Path) -> None:
    known = _history(tmp_path, "at,node\n10,n1\n20,n2\n30,n1\n")
    curve = report.build(known, gpus=80, end_hours=100.0)["survival"]["first_failure_of_a_node"]
    assert (curve["num_units"], curve["num_failures"]) == (10, 2)
    assert curve["survival"] == pytest.approx((0.9, 0.8))


@pytest.mark.parametrize("column", ["detect_seconds", "recover_seconds", "node_age_hours", "gpus"])
def test_new_columns_are_checked(tmp_path: Path, column: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        _history(tmp_path, f"at,{column}\n1,-1\n")
    assert column in caught.value.what


def test_sources_that_are_none(tmp_path: Path) -> None:
    broken = tmp_path / "j.sqlite"
    broken.write_bytes(b"SQLite format 3\0" + b"x" * 100)
    for path in (tmp_path / "nothing", tmp_path, broken):
        with pytest.raises(ConfigurationError):
            source.load(path)
    with pytest.raises(ConfigurationError) as caught:
        source.of_entries([], job="", name="x")
    assert "0 jobs" in caught.value.what


def test_the_checked_in_report_is_what_the_command_prints(tmp_path: Path) -> None:
    made = tmp_path / "report.md"
    argv = "examples/llama3/failures.csv --gpus 16384 --start 0 --end 1296 --shares examples/llama3/shares.json --save-seconds 60"
    done = subprocess.run(
        [sys.executable, "-m", "regrow", "report", *argv.split(), "--markdown", str(made)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = made.read_text()
    assert text == (ROOT / "examples" / "llama3" / "report.md").read_text()
    assert "Faulty GPU: the given share of 30.1 % disagrees with 148 of 419 = 35.3 %" in text
    assert "94.9 %, not 100 %" in text


def test_markdown_cells_are_escaped() -> None:
    known = history.History(failures=(history.Failure(at_hours=1.0, category="a|<b>", component="c"),))
    text = render.markdown(report.build(known, gpus=8, end_hours=2.0))
    assert "a\\|&lt;b>" in text
