"""Repeated gradients on DP x TP x PP, and on unequal replicas: all agree, and the run is the run that never repeats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.launcher import Run

import regrow.demo

SCRIPT = str(Path(regrow.demo.__file__).with_name("train_gpt.py"))
STEPS = "10"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("nodes", "mesh"), [("4", "2x2x2"), ("3", "3x1x2"), ("2", "1x2x2")])
def test_every_step_is_repeated_on_a_mesh(launch: Callable[..., Run], nodes: str, mesh: str) -> None:
    common = ("--local", nodes, "--nproc-per-node", "2", "--mesh", mesh, "--global-batch", "16", "--micro-batch", "2", "--job", "gpt")
    run = launch(*common, SCRIPT, "--steps", STEPS, "--layers", "4", "--seq", "32", "--replay-rate", "1")
    assert run.wait() == 0, run.story()
    result = run.result()
    assert not result["incidents"]
    assert set(result["digest_checks"]) & {"replay_agree", "replay_diverged", "replay_skipped"} == {"replay_agree"}
    assert result["digest_checks"]["replay_agree"] == int(STEPS)
