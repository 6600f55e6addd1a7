"""The command's contract: keys, exit codes before anything runs, one document."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest


def regrow(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "regrow", "simulate", *words], capture_output=True, text=True, timeout=120, check=False)


def test_json_has_the_contract_and_comparison_is_a_table(tmp_path: Path) -> None:
    picture = tmp_path / "lost.svg"
    done = regrow(
        "--nodes", "16", "--days", "3", "--rate-per-gpu-hour", "0.001", "--seeds", "2", "--compare", "--svg", str(picture), "--json"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document["goodput"]) == {"p5", "p50", "p95"}
    assert {"ettr", "lost_seconds_by_phase", "failures", "policy", "seeds", "warnings"} <= set(document)
    assert document["seeds"] == 2
    assert [row["policy"] for row in document["compare"]] == ["fixed-world", "dp-shrink", "replan", "spares:1", "spares:2"]
    drawn = ET.fromstring(picture.read_text())  # our own; a file of its own has to be XML
    texts = [found.text for found in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text is not None and text.startswith("fixed-world") for text in texts)
    assert {"lost_work", "spares"} <= set(texts)


def test_below_the_target_the_phase_is_named() -> None:
    done = regrow("--nodes", "16", "--days", "2", "--rate-per-gpu-hour", "0.004", "--seeds", "1")
    assert done.returncode == 0, done.stderr
    assert "is below 97%" in done.stdout
    assert "by cause" in done.stdout
    assert "  GPU " in done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--nodes", "0"), "--nodes"),
        (("--days", "nan"), "--days"),
        (("--policy", "hope"), "--policy"),
        (("--seeds", "0"), "--seeds"),
        (("--trace", "/no/such.csv"), "/no/such.csv"),
        (("--mesh", "dp=3,tp=1,pp=9999"), "--mesh"),
        (("--rate-per-gpu-hour", "-1"), "--rate-per-gpu-hour"),
        (("--trace", "llama3", "--chaos"), "--trace"),
        (("--rack-share", "0.5"), "--rack-size"),
        (("--leader", "--nodes", "64"), "--nodes"),
        (("--group", "8"), "--leader"),
        (("--against", "x", "--measure", "y", "--days", "3"), "--days"),
        (("--compare", "--policy", "replan"), "--policy"),
        (("--compare", "--journal", "x.jsonl"), "--journal"),
        (("--curves", "x.html", "--compare"), "--compare"),
    ],
)
def test_wrong_input_is_exit_2(words: tuple[str, ...], named: str) -> None:
    done = regrow(*words)
    assert done.returncode == 2
    assert named in done.stderr
    assert not done.stdout


def test_curves_are_a_grid_and_a_page(tmp_path: Path) -> None:
    page = tmp_path / "curves.html"
    done = regrow("--nodes", "4", "--days", "0.1", "--rate-per-gpu-hour", "0.01", "--seeds", "1", "--curves", str(page), "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["curves"]
    assert len(rows) == 36
    assert len({row["failures_per_day"] for row in rows}) == 4
    assert page.read_text().count("<svg") == 3
    refused = regrow("--trace", "llama3", "--curves", str(page))
    assert refused.returncode == 2
    assert "--curves" in refused.stderr
