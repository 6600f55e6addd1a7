"""`regrow interval`: known answers, bounds and warnings in its JSON, and what nonsense gets."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

Regrow = Callable[..., tuple[int, Any, str]]
KNOWN = {entry["id"]: entry for entry in json.loads((Path(__file__).parents[1] / "data" / "known_answers.json").read_text())}
SEED = KNOWN["D-INTERVAL-1395"]["expected"]


@pytest.mark.parametrize("rate", list(SEED["T_star_h"]))
def test_seed_preset(regrow: Regrow, rate: str) -> None:
    code, document, _ = regrow("interval", "--failures-per-hour", rate, "--method", "seed")
    assert code == 0
    assert document["t_opt_hours"] == pytest.approx(SEED["T_star_h"][rate], rel=1e-3)
    assert document["expected_cost_at_t_opt"] == pytest.approx(SEED["E_at_T_star"][rate], rel=1e-3)
    assert document["warnings"]  # at these rates T* is over half the MTBF
    assert "MTBF" in document["warnings"][0]


def test_seed_curve_is_flat_around_its_minimum(regrow: Regrow) -> None:
    _, document, _ = regrow("interval", "--failures-per-hour", 0.5)
    costs = [point["cost"] for point in document["curve"]]
    assert min(costs) == pytest.approx(SEED["check_f_0_5"]["E_at_5_28"], rel=1e-3)
    assert document["p_no_failure_in_interval"] == pytest.approx(0.0713, rel=0.01)


def test_own_coefficients(regrow: Regrow) -> None:
    _, document, _ = regrow("interval", "--failures-per-hour", 0.1, "--a", 2, "--b", 5)
    assert document["t_opt_hours"] == pytest.approx(math.sqrt(5 / 0.2))


def test_interval_in_whole_steps_and_the_notice(regrow: Regrow) -> None:
    entry = KNOWN["D-INTERVAL-STEPS"]
    given, want = entry["inputs"], entry["expected"]
    flags = (
        "--mtbf-hours",
        168,
        "--save-seconds",
        40,
        "--step-seconds",
        given["iteration_s"],
        "--notice-seconds",
        given["grace"]["preempt_notice_s"],
    )
    code, document, _ = regrow("interval", *flags, "--method", "young")
    assert code == 0
    assert document["t_opt_hours"] * 3600 == pytest.approx(given["young_s"], rel=1e-3)
    assert document["steps"] == want["steps"]
    assert document["interval_seconds"] == want["steps"] * given["iteration_s"]
    assert document["notice"] == {"given_seconds": 120.0, "needed_seconds": want["needed_notice_s"], "fits": want["fits_preempt_notice"]}
    assert any("145 s needed" in warning for warning in document["warnings"])
    _, document, _ = regrow("interval", *flags[:-1], 145, "--method", "young")
    assert document["notice"]["fits"] is True
    assert not document["warnings"]


@pytest.mark.parametrize("method", ["young", "daly", "exact"])
def test_methods_agree_for_cheap_saves(regrow: Regrow, method: str) -> None:
    _, document, _ = regrow("interval", "--mtbf-hours", 1000, "--save-seconds", 10, "--method", method)
    assert document["method"] == method
    assert document["t_opt_hours"] * 3600 == pytest.approx(math.sqrt(2 * 10 * 3.6e6), rel=0.01)
    assert 0 < document["expected_cost_at_t_opt"] < 0.01


def test_mtbf_of_gpus_and_a_rate_of_one_cause(regrow: Regrow) -> None:
    entry = KNOWN["D-LAMBDA-SCALING"]
    for gpus, hours in entry["expected"]["mtbf_h"].items():
        _, document, _ = regrow("interval", "--gpus", gpus, "--rate-per-gpu-hour", 3e-6, "--save-seconds", 30)
        assert document["mtbf_hours"] == pytest.approx(hours, rel=0.01)
        assert any("6.6 times below" in warning for warning in document["warnings"])
    _, document, _ = regrow("interval", "--gpus", 16384, "--rate-per-gpu-hour", 1.973e-5, "--save-seconds", 30)
    assert document["mtbf_hours"] == pytest.approx(3.09, rel=0.01)
    assert not any("times below" in warning for warning in document["warnings"])


def test_no_failure_seen_is_not_an_infinite_mtbf(regrow: Regrow) -> None:
    code, document, _ = regrow("interval", "--observed-failures", 0, "--observed-hours", 1000, "--save-seconds", 30)
    assert code == 0
    assert 0 < document["t_opt_hours"] < 1000
    assert any("0.003 an hour with 95 %" in warning for warning in document["warnings"])


@pytest.mark.parametrize(
    ("flags", "rule", "seconds"),
    [
        (("--min-seconds", 9000), "min", 9000),
        (("--max-seconds", 600), "max", 600),
        (("--stall-seconds", 0.001), "write", 40),
        (("--stall-seconds", 0.001, "--checkpoint-gb", 1000, "--write-gb-per-second", 2), "bandwidth", 500),
        (("--max-lost-gpu-hours", 100, "--gpus", 1000), "lost_gpu_hours", 360),
    ],
)
def test_bounds(regrow: Regrow, flags: tuple[object, ...], rule: str, seconds: float) -> None:
    code, document, _ = regrow("interval", "--mtbf-hours", 168, "--save-seconds", 40, *flags)
    assert code == 0
    assert document["bounds"]["rule"] == rule
    assert document["interval_seconds"] == pytest.approx(seconds)


def test_only_a_tier_s_share_of_the_failures_counts(regrow: Regrow) -> None:
    flags = ("--mtbf-hours", 168, "--save-seconds", 40, "--method", "young")
    whole = regrow("interval", *flags)[1]["t_opt_hours"]
    quarter = regrow("interval", *flags, "--tier-share", 0.25)[1]["t_opt_hours"]
    assert quarter == pytest.approx(2 * whole)


def test_slow_recovery_and_little_storage_are_told(regrow: Regrow) -> None:
    flags = ("--mtbf-hours", 10, "--save-seconds", 5, "--restore-seconds", 1200, "--checkpoint-gb", 100, "--storage-gb", 250)
    _, document, _ = regrow("interval", *flags)
    text = " ".join(document["warnings"])
    assert "recovery takes" in text
    assert "keep at most 1" in text


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--failures-per-hour", 0),
        ("--failures-per-hour", -1),
        ("--failures-per-hour", "nan"),
        ("--mtbf-hours", "inf"),
        ("--mtbf-hours", -1, "--save-seconds", 40),
        ("--mtbf-hours", 0),
        ("--mtbf-hours", 5, "--failures-per-hour", 1),
        ("--mtbf-hours", 5, "--method", "guess"),
        ("--mtbf-hours", 5, "--method", "young"),
        ("--mtbf-hours", 5, "--method", "daly", "--save-seconds", 0),
        ("--mtbf-hours", 5, "--save-seconds", -4),
        ("--mtbf-hours", 5, "--save-seconds", "nan"),
        ("--mtbf-hours", 5, "--save-seconds", 4, "--step-seconds", "inf"),
        ("--mtbf-hours", 5, "--a", 0),
        ("--mtbf-hours", 5, "--b", -3),
        ("--mtbf-hours", 5, "--save-seconds", 4, "--method", "young", "--a", 4),
        ("--rate-per-gpu-hour", 3e-6),
        ("--gpus", 0, "--rate-per-gpu-hour", 3e-6),
        ("--gpus", 8),
        ("--mtbf-hours", "soon"),
        ("--mtbf-hours", 5, "--tier-share", 0),
        ("--mtbf-hours", 5, "--min-seconds", 100, "--max-seconds", 10),
        ("--observed-hours", 10),
        ("--mtbf-hours", 5, "--max-lost-gpu-hours", 10),
        ("--mtbf-hours", 1e-300, "--save-seconds", 1),
        ("--mtbf-hours", 1e300, "--save-seconds", 1),
    ],
)
def test_nonsense_is_refused_with_2(regrow: Regrow, flags: tuple[object, ...]) -> None:
    code, document, stderr = regrow("interval", *flags)
    assert code == 2
    assert stderr.strip()
    if document is not None:
        assert document["error"]["hint"]


def test_picture(regrow: Regrow, tmp_path: Path) -> None:
    target = tmp_path / "e.svg"
    assert regrow("interval", "--mtbf-hours", 24, "--save-seconds", 30, "--svg", target)[0] == 0
    root = ET.fromstring(target.read_text())
    texts = [node.text or "" for node in root if node.tag.endswith("text")]
    assert any(text.startswith("T* =") for text in texts)
    assert regrow("interval", "--mtbf-hours", 24, "--save-seconds", 30, "--svg", tmp_path / "no" / "e.svg")[0] == 1


def test_people_see_the_valley(regrow: Regrow, capsys: pytest.CaptureFixture[str]) -> None:
    from regrow.cli import interval

    _, document, _ = regrow("interval", "--mtbf-hours", 24, "--save-seconds", 30)
    interval._show(document)
    text = capsys.readouterr().out
    assert "T*" in text
    assert "MTBF 24 h" in text
    assert sum(line.count("*") for line in text.splitlines() if "|" in line) > 30


def test_each_tier_has_an_interval_of_its_own(regrow: Regrow) -> None:
    tiers = ("--tier", "memory:1:0.02:0.5", "--tier", "disk:0.4:0.02:20", "--tier", "storage:0.1:2:300")
    code, document, _ = regrow("interval", "--mtbf-hours", 3, "--save-seconds", 2, *tiers)
    assert code == 0
    memory, disk, storage = document["tiers"]
    assert memory["interval_seconds"] == pytest.approx(math.sqrt(2 * 0.02 * 3 * 3600))
    assert disk["interval_seconds"] == pytest.approx(math.sqrt(2 * 0.02 * 3 * 3600 / 0.4))
    assert (storage["interval_seconds"], storage["rule"]) == (pytest.approx(math.sqrt(2 * 2 * 3 * 3600 / 0.1)), "formula")
    for broken in ("disk", "disk:2:1:1", "disk:0.5:-1:1", "disk:a:b:c", "disk:0.5:1:nan"):
        assert regrow("interval", "--mtbf-hours", 3, "--save-seconds", 2, "--tier", broken)[0] == 2


def test_presets(regrow: Regrow) -> None:
    _, document, _ = regrow("interval", "--preset", "bloom")
    assert document["t_opt_hours"] * 3600 == pytest.approx(6956, rel=1e-3)
    assert document["steps"] == 66
    _, document, _ = regrow("interval", "--preset", "seed")
    assert document["t_opt_hours"] == pytest.approx(5.282, rel=1e-3)
    _, document, _ = regrow("interval", "--preset", "llama3", "--save-seconds", 30)
    assert document["mtbf_hours"] == pytest.approx(54 * 24 / 419, rel=1e-6)
    assert "2407.21783" in document["preset"]["source"]


def test_flags_win_over_a_preset(regrow: Regrow) -> None:
    _, document, _ = regrow("interval", "--preset", "bloom", "--failures-per-hour", 1, "--save-seconds", 10, "--method", "daly")
    assert (document["mtbf_hours"], document["method"]) == (1.0, "daly")
    assert document["coefficients"] == {"save_seconds": 10.0}
    code, document, _ = regrow("interval", "--preset", "llama3")
    assert (code, document["error"]["where"]) == (2, "--save-seconds")
    code, document, _ = regrow("interval", "--preset", "opt")
    assert (code, "bloom" in document["error"]["hint"]) == (2, True)


def test_a_hopeless_rate_is_told(regrow: Regrow) -> None:
    _, document, _ = regrow("interval", "--mtbf-hours", 1, "--save-seconds", 600, "--restore-seconds", 900)
    assert any("hardly advances" in warning for warning in document["warnings"])
    _, document, _ = regrow("interval", "--mtbf-hours", 24, "--save-seconds", 30, "--restore-seconds", 60)
    assert not document["warnings"]
