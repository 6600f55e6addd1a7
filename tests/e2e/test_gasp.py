"""A warm restart in which survivors leave their state behind: as a user sees it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.launcher import Run
from tests.e2e.test_in_place import beyond, recovered, story
from tests.e2e.test_run import assert_like_twin
from tests.e2e.test_spare import TOY, lose_power

pytestmark = pytest.mark.timeout(400)
STEPS = 40


def start(launch: Callable[..., Run], tmp_path: Path, *flags: str) -> Run:
    sizes = ("--nproc-per-node", "2", "--global-batch", "8", "--job", "toy", "--no-in-place")
    return launch(*sizes, *flags, str(TOY), "--steps", str(STEPS), "--log", str(tmp_path / "log"))


def test_a_killed_worker_costs_no_finished_step(launch: Callable[..., Run], tmp_path: Path, twin: dict[int, float]) -> None:
    run = start(launch, tmp_path, "--local", "2")
    beyond(run, "toy", 5)
    assert run.inject("n1", "kill_worker", 3)["done"]
    incident = recovered(run, "toy", 0)
    assert (incident["rung"], incident["lost_steps"]) == ("warm_restart", 0), run.story()
    assert run.wait() == 0, run.story()
    found, restored = story(tmp_path)
    assert_like_twin(found, twin, STEPS)
    assert restored[1] >= incident["frontier"]
    assert run.result()["lost_steps"] == 0


@pytest.mark.soak
def test_a_lost_node_costs_no_finished_step(launch: Callable[..., Run], tmp_path: Path, twin: dict[int, float]) -> None:
    run = start(launch, tmp_path, "--local", "2", "--nnodes", "1:2")
    beyond(run, "toy", 5)
    assert lose_power(run, "n1") >= 3
    incident = recovered(run, "toy", 0)
    assert incident["lost_steps"] == 0, run.story()
    assert run.wait() == 0, run.story()
    assert_like_twin(story(tmp_path)[0], twin, STEPS)
