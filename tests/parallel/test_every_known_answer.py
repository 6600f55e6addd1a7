"""Entries of tests/data/known_answers.json that other commands than `plan` answer, formulas through the JSON, and a check that
no entry was left out."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Regrow = Callable[..., tuple[int, Any, str]]
DATA = Path(__file__).parents[1] / "data"
KNOWN = {entry["id"]: entry for entry in json.loads((DATA / "known_answers.json").read_text())}
BIG = ("--gpu-memory-gb", 1e6)
COLUMNS = "at,node,component,category,planned,incident,lost_seconds\n"


def close(value: float, tolerance: float = 0.01) -> Any:
    return pytest.approx(value, rel=tolerance)


def test_no_entry_is_left_out() -> None:
    """Each id is used by a test of this folder."""
    named = {
        name
        for page in Path(__file__).parent.glob("test_*known_answer*.py")
        for name in re.findall(r'KNOWN\["([A-Z0-9-]+)"\]', page.read_text())
    }
    assert named == set(KNOWN)


def test_the_installed_command_answers() -> None:
    """The same document comes from the command that a user types, alone on its standard output."""
    command = Path(sys.executable).with_name("regrow")
    words = (
        "plan",
        "--params",
        "7e9",
        "--nodes",
        "1",
        "--dp",
        "8",
        "--tp",
        "1",
        "--pp",
        "1",
        "--zero",
        "1",
        "--global-batch",
        "8",
        "--json",
    )
    done = subprocess.run([command, *words, "--gpu-memory-gb", "1000"], capture_output=True, text=True, timeout=120, check=True)
    used = json.loads(done.stdout)["best"]["memory_bytes"]
    assert (used["weights"] + used["gradients"] + used["optimizer"]) / 1e9 == close(KNOWN["D-ZERO"]["expected"]["gb"][0]["zero1"], 0.005)


@pytest.mark.parametrize("ranks", list(KNOWN["D-ALLREDUCE"]["expected"]["factor"]))
def test_all_reduce_of_any_group(regrow: Regrow, ranks: str) -> None:
    """S = 1e9 bytes are the gradients of half a billion parameters; DDP reduces them, ZeRO-1 scatters and gathers."""
    entry = KNOWN["D-ALLREDUCE"]
    size, count = entry["inputs"]["S_bytes"], int(ranks)
    nodes = ("--nodes", 1, "--gpus-per-node", count) if count < 8 else ("--nodes", count // 8)
    flags = ("--params", size / 2, *nodes, "--dp", count, "--tp", 1, "--pp", 1, "--global-batch", count, *BIG)
    _, plain, _ = regrow("plan", *flags, "--zero", 0)
    _, first, _ = regrow("plan", *flags, "--zero", 1)
    assert plain["best"]["comm_bytes"]["dp"] == close(entry["expected"]["factor"][ranks] * size, 1e-6)
    assert first["best"]["comm_detail"]["dp_gradients_only"] == close(
        entry["expected"]["reduce_scatter_or_all_gather_factor"][ranks] * size, 1e-6
    )
    assert first["best"]["comm_bytes"]["dp"] == plain["best"]["comm_bytes"]["dp"]


@pytest.mark.parametrize("index", range(4))
def test_shares_of_a_small_dimension(regrow: Regrow, index: int) -> None:
    entry = KNOWN["D-RESHARD-ZERO-SIZE"]
    case, want = entry["inputs"]["cases"][index], entry["expected"]["sizes"][index]
    shape = ("--layers", 1, "--hidden", case["n"], "--heads", 1, "--vocab", 64, "--seq", 8)
    ranks = case["ranks"]
    flags = ("--nodes", 1, "--gpus-per-node", ranks, "--dp", ranks, "--tp", 1, "--pp", 1, "--zero", 3, "--global-batch", ranks)
    _, document, _ = regrow("plan", *shape, *flags)
    detail = document["best"]["memory_detail"]
    assert [size for size, count in detail["shard_rows"]["hidden"] for _ in range(count)] == want
    assert sum(want) == case["n"]
    assert f"hidden {case['n']} over {ranks}" in detail["uneven_shards"]


def test_the_cap_of_a_batch_holds(regrow: Regrow) -> None:
    """100 samples, micro-batches 8, 10, 12: their common multiple 120 would be over the cap; 10 divides it."""
    given = KNOWN["D-ELASTIC-BATCH"]["inputs"]["b"]
    shape = ("--layers", 16, "--hidden", 4096, "--heads", 32, "--vocab", 32000, "--seq", 2048, "--nodes", 1)
    sizes = ",".join(map(str, given["micro"]))
    code, document, _ = regrow("plan", *shape, "--global-batch", given["max_train_batch"], "--micro-batch", sizes)
    assert code == 0
    best = document["best"]
    assert best["micro_batch"] == 10
    assert sum(best["micro_batches"]) * 10 == given["max_train_batch"] <= KNOWN["D-ELASTIC-BATCH"]["expected"]["b"]["must_not_exceed"]


def test_seed_interval(regrow: Regrow) -> None:
    entry = KNOWN["D-INTERVAL-1395"]
    a, b = entry["inputs"]["coefficients"]
    for rate, hours in entry["expected"]["T_star_h"].items():
        for more in ((), ("--a", a, "--b", b)):
            code, document, _ = regrow("interval", "--failures-per-hour", rate, "--method", "seed", *more)
            assert code == 0
            assert document["t_opt_hours"] == close(hours)
            assert document["expected_cost_at_t_opt"] == close(entry["expected"]["E_at_T_star"][rate])
            assert any("MTBF" in warning for warning in document["warnings"])


def test_seed_cost_at_other_intervals(regrow: Regrow) -> None:
    entry = KNOWN["D-INTERVAL-1395"]["expected"]["check_f_0_5"]
    _, document, _ = regrow("interval", "--failures-per-hour", 0.5, "--method", "seed")
    points = [(point["hours"], point["cost"]) for point in document["curve"]]
    for hours, cost in ((5.0, entry["E_at_5"]), (6.0, entry["E_at_6"])):
        (x0, y0), (x1, y1) = next(pair for pair in itertools.pairwise(points) if pair[0][0] <= hours <= pair[1][0])
        assert y0 + (y1 - y0) * (hours - x0) / (x1 - x0) == close(cost)


def test_interval_in_whole_steps(regrow: Regrow) -> None:
    entry = KNOWN["D-INTERVAL-STEPS"]
    grace = entry["inputs"]["grace"]
    times = (
        "--save-seconds",
        grace["save_s"],
        "--step-seconds",
        entry["inputs"]["iteration_s"],
        "--notice-seconds",
        grace["preempt_notice_s"],
    )
    _, document, _ = regrow("interval", "--mtbf-hours", 168, *times, "--method", "young")
    assert document["t_opt_hours"] * 3600 == close(entry["inputs"]["young_s"], 1e-3)
    assert document["steps"] == entry["expected"]["steps"]
    assert document["notice"]["needed_seconds"] == entry["expected"]["needed_notice_s"]
    assert document["notice"]["fits"] is entry["expected"]["fits_preempt_notice"]


def test_llama3_table(regrow: Regrow, tmp_path: Path) -> None:
    entry = KNOWN["D-LLAMA3-TABLE"]
    given, want = entry["inputs"], entry["expected"]
    hours = given["days"] * 24
    rows = [(component, category, 0) for component, category, count, _ in given["rows"] for _ in range(count)]
    rows += [("Planned", "Planned", 1)] * given["planned"]
    table, shares = tmp_path / "llama3.csv", tmp_path / "shares.json"
    lines = [
        f"{hours * (at + 1) / len(rows):.4f},n{at % 2048},{name},{kind},{planned},i{at},0\n"
        for at, (name, kind, planned) in enumerate(rows)
    ]
    table.write_text(COLUMNS + "".join(lines))
    shares.write_text(json.dumps({name: printed for name, _, _, printed in given["rows"]}))
    flags = ("--gpus", given["gpus"], "--start", 0, "--end", hours, "--gpus-per-node", given["gpus_per_node"], "--shares", shares)
    code, document, _ = regrow("report", table, *flags)
    assert code == 0
    failures = document["failures"]
    assert (failures["unplanned"], failures["planned"]) == (want["sum_of_counts"], given["planned"])
    assert {name: failures["by_category"][name] for name in want["category_counts"]} == want["category_counts"]
    told = [warning for warning in document["warnings"] if any(name in warning for name, *_ in given["rows"])]
    assert len(told) == len(want["rows_whose_printed_pct_disagrees_with_count"])
    assert want["rows_whose_printed_pct_disagrees_with_count"][0] in told[0]
    assert f"{want['faulty_gpu_pct_by_count']:.1f}" in told[0]


def test_no_failure_seen_is_a_bound(regrow: Regrow, tmp_path: Path) -> None:
    entry = KNOWN["D-SYN-ZERO"]
    table = tmp_path / "none.csv"
    table.write_text(COLUMNS)
    hours = entry["inputs"]["gpu_hours"] / 8
    code, document, _ = regrow("report", table, "--gpus", 8, "--start", 0, "--end", hours)
    assert code == 0
    rate = document["rate_per_gpu_hour"]
    assert document["exposure_gpu_hours"] == entry["inputs"]["gpu_hours"]
    assert (rate["point"], rate["upper95"]) == (0.0, close(entry["expected"]["two_sided_upper975"]))
    assert entry["expected"]["one_sided_upper95"] == close(rate["upper95_one_sided"])
    assert document["mtbf_hours"]["point"] is None
    _, document, _ = regrow("interval", "--observed-failures", 0, "--observed-hours", entry["inputs"]["gpu_hours"], "--save-seconds", 30)
    assert 0 < document["t_opt_hours"] < 1e6
    assert any(f"{entry['expected']['mtbf_lower_bound_h_one_sided95']:.4g}" in warning for warning in document["warnings"])


def test_weibull_fit(regrow: Regrow, tmp_path: Path) -> None:
    entry = KNOWN["D-SYN-WEIBULL-100"]
    table = tmp_path / "gaps.csv"
    at = list(itertools.accumulate(entry["inputs"]["interarrival_h"]))
    table.write_text(COLUMNS + "".join(f"{hours:.6f},n{index},GPU,GPU,0,i{index},0\n" for index, hours in enumerate(at)))
    _, document, _ = regrow("report", table, "--gpus", 8, "--start", 0, "--end", at[-1])
    found, want = document["weibull"], entry["expected"]
    assert found["n"] == len(at)
    assert found["shape"] == close(want["mle_shape"], 0.005)
    assert found["scale_hours"] == close(want["mle_scale_h"], 0.005)
