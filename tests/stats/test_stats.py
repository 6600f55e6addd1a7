"""Statistics against known answers."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.errors import ConfigurationError
from regrow.supervisor.stats import fits, history, rates, render, report

ROOT = Path(__file__).parents[2]
LLAMA3 = ROOT / "examples" / "llama3" / "failures.csv"


def test_no_failure_gives_an_upper_bound_and_never_an_infinite_mtbf() -> None:
    """Case K09."""
    rate = rates.poisson_rate(0, 1000.0)
    assert rate.point == 0.0
    assert rate.upper95_one_sided == pytest.approx(0.00299573, rel=1e-4)
    assert rate.upper95 == pytest.approx(0.00368888, rel=1e-4)
    assert 1 / rate.upper95_one_sided == pytest.approx(333.808, rel=1e-4)


def test_empty_history_has_bounds_and_says_so() -> None:
    document = report.build(history.History(failures=()), gpus=10, start_hours=0, end_hours=100)
    assert document["mtbf_hours"]["point"] is None
    assert document["mtbf_hours"]["lower95_one_sided"] == pytest.approx(33.3808, rel=1e-4)
    assert any("not 0" in warning for warning in document["warnings"])
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize(("count", "lower", "upper"), [(1, 0.0253, 5.572), (10, 4.795, 18.39), (100, 81.36, 121.6)])
def test_poisson_interval_is_garwoods(count: int, lower: float, upper: float) -> None:
    rate = rates.poisson_rate(count, 1.0)
    assert rate.lower95 == pytest.approx(lower, rel=1e-3)
    assert rate.upper95 == pytest.approx(upper, rel=1e-3)


def test_weibull_of_fixed_quantiles() -> None:
    gaps = json.loads((ROOT / "tests" / "data" / "weibull_60_quantiles.json").read_text())
    fit = fits.fit_weibull(gaps)
    assert fit is not None
    assert fit.shape == pytest.approx(1.0118, rel=5e-3)
    assert fit.scale_hours == pytest.approx(9.9908, rel=5e-3)
    assert (fit.shape_upper95 - fit.shape_lower95) / 3.92 == pytest.approx(0.102, rel=0.1)
    assert fit.verdict == "cannot reject exponential"


@pytest.mark.parametrize(("shape", "word"), [(0.6, "batches"), (1.8, "wear")])
def test_weibull_tells_batches_from_wear(shape: float, word: str) -> None:
    generator = random.Random(5)
    fit = fits.fit_weibull([generator.weibullvariate(10.0, shape) for _ in range(400)])
    assert fit is not None
    assert fit.shape_lower95 < shape < fit.shape_upper95
    assert word in fit.verdict


def test_weibull_bears_zero_gaps_and_censored_tails() -> None:
    fit = fits.fit_weibull([0.0, 1.0, 2.0, 3.0, 4.0], [50.0])
    assert fit is not None
    assert fit.num_zero_gaps == 1
    assert fit.scale_hours > 5.0
    assert fits.fit_weibull([0.0, 0.0, 0.0, 1.0]) is None


def test_equally_spaced_times_are_called_constructed_and_not_wear() -> None:
    fit = fits.fit_weibull([3.0] * 50 + [3.01] * 50)
    assert fit is not None
    assert "constructed" in fit.verdict


def test_batches_are_found_in_bunched_failures_and_not_in_a_poisson_process() -> None:
    generator = random.Random(11)
    even = sorted(generator.uniform(0, 1000) for _ in range(100))
    spread = rates.dispersion(even, 0, 1000)
    assert spread is not None
    assert not spread.over_dispersed
    bunched = sorted(start + 0.1 * index for start in range(0, 1000, 100) for index in range(10))
    spread = rates.dispersion(bunched, 0, 1000)
    assert spread is not None
    assert spread.over_dispersed
    assert len(spread.batches) == 10


def llama3(**arguments: object) -> dict[str, object]:
    return report.build(history.read(LLAMA3), gpus=16384, start_hours=0.0, end_hours=54 * 24.0, **arguments)


def test_llama3_counts_and_categories() -> None:
    document = llama3()
    failures = document["failures"]
    assert (failures["count"], failures["planned"], failures["all"]) == (419, 47, 466)
    assert failures["by_category"] == {"GPU": 268, "Dependency": 56, "Network": 35, "Unplanned Maintenance": 32, "Host": 21, "Unknown": 7}
    assert 100 * failures["share_by_category"]["GPU"] == pytest.approx(63.96, abs=0.05)
    assert 100 * failures["share_by_component"]["Faulty GPU"] == pytest.approx(35.32, abs=0.05)
    assert document["rate_per_gpu_hour"]["point"] == pytest.approx(419 / (16384 * 54 * 24))
    assert document["mtbf_hours"]["point"] == pytest.approx(3.093, rel=1e-3)
    assert sum(failures["share_by_category"].values()) == pytest.approx(1.0)


def test_llama3_printed_shares_are_contradicted_where_they_disagree() -> None:
    """Case K09."""
    shares = json.loads((LLAMA3.parent / "shares.json").read_text())
    warnings = [warning for warning in llama3(printed_shares=shares)["warnings"] if "share" in warning]
    assert len(warnings) == 2
    assert "Faulty GPU" in warnings[0]
    assert "35.3" in warnings[0]
    assert "94.9" in warnings[1]


def test_victims_are_not_counted_and_the_first_row_names_the_incident(tmp_path: Path) -> None:
    """Case K09."""
    file = tmp_path / "f.csv"
    file.write_text("at,node,component,incident,lost_seconds\n2.0,n1,nccl timeout,a,100\n1.9,n0,xid 79,a,50\n5,n2,disk,b,10\n")
    known = history.read(file)
    assert [failure.component for failure in known.failures] == ["xid 79", "disk"]
    assert known.failures[0].num_rows == 2
    assert known.failures[0].lost_seconds == 100


def test_instants_become_hours_since_the_first(tmp_path: Path) -> None:
    file = tmp_path / "f.csv"
    file.write_text("at\n2026-01-02T00:00:00Z\n2026-01-01T12:00:00+00:00\n")
    known = history.read(file)
    assert [failure.at_hours for failure in known.failures] == [0.0, 12.0]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("node\nn0\n", "column `at`"),
        ("", "column `at`"),
        ("at\nyesterday\n", "'yesterday'"),
        ("at\n1\n2026-01-01T00:00:00\n", "mixes"),
        ("at,lost_seconds\n1,-4\n", "-4"),
        ("at,lost_seconds\n1,much\n", "'much'"),
        ("at,planned\n1,perhaps\n", "'perhaps'"),
        ("at\ninf\n", "finite"),
    ],
)
def test_bad_files_name_what_is_wrong(tmp_path: Path, content: str, word: str) -> None:
    file = tmp_path / "f.csv"
    file.write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        history.read(file)
    assert word in caught.value.what


def test_unknown_columns_are_named(tmp_path: Path) -> None:
    file = tmp_path / "f.csv"
    file.write_text("at,colour\n1,red\n")
    assert "colour" in history.read(file).warnings[0]


@pytest.mark.parametrize(("start", "end"), [(10.0, 5.0), (5.0, 5.0), (0.0, 100.0)])
def test_windows_that_cannot_be(start: float, end: float) -> None:
    with pytest.raises(ConfigurationError):
        report.build(history.read(LLAMA3), gpus=16384, start_hours=start, end_hours=end)


def test_lemon_node_is_named_and_an_ordinary_one_is_not() -> None:
    failures = tuple(history.Failure(at_hours=float(hour), node="n7" if hour % 2 else f"n{hour}") for hour in range(1, 40))
    document = report.build(history.History(failures=failures), gpus=8 * 100, end_hours=50.0)
    assert [lemon["node"] for lemon in document["nodes"]["lemons"]] == ["n7"]


def test_page_escapes_what_comes_from_files() -> None:
    failures = (history.Failure(at_hours=1.0, component="<script>", category="<b>"),)
    page = render.page(report.build(history.History(failures=failures), gpus=8, end_hours=2.0), "<title>")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_command_line(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    argv = [sys.executable, "-m", "regrow", "report", str(LLAMA3), "--gpus", "16384", "--start", "0", "--end", "1296", "--html", str(page)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "419 unplanned" in done.stdout
    assert "<svg" in page.read_text()
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("extra", [["--gpus", "0"], ["--gpus", "8", "--start", "soon"], []])
def test_command_line_with_wrong_input(extra: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regrow", "report", str(LLAMA3), *extra, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["what"]
