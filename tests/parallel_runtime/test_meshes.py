"""The loss curve does not know the mesh: dropout on, unequal micro-batches, every kind of split."""

from __future__ import annotations

from typing import Any

import pytest

from regrow.demo.compare import compare, compare_state, state_tolerances
from regrow.demo.lineage import read_final, read_lineage

SMALL = ("--layers", "3", "--hidden", "48", "--heads", "6", "--seq", "48", "--seed", "3", "--samples", "96")
STEPS = 4
MESHES = ("2x2x2", "3x2x1", "1x2x3")
SOAK_STEPS = 30
WRONG = {
    "no_sequence_offset": "1x2x1",
    "local_sample_index": "2x1x1",
    "rank_generator": "2x1x1",
}


@pytest.fixture(scope="module")
def runs(ranks: Any) -> dict[str, Any]:
    """One process, the meshes, and the faulty ones."""
    steps = ("--steps", str(STEPS))
    jobs = [ranks.training(mesh, mesh, *SMALL, *steps) for mesh in ("1x1x1", *MESHES)]
    jobs.append(ranks.training("3x1x1-zero3", "3x1x1", *SMALL, *steps, "--zero", "3"))
    jobs += [ranks.training(name, mesh, *SMALL, *steps, call=f"wrong:{name}") for name, mesh in WRONG.items()]
    return ranks.run(jobs)


@pytest.mark.parametrize("mesh", [*MESHES, "3x1x1-zero3"])
def test_same_losses_as_one_process(runs: dict[str, Any], mesh: str) -> None:
    comparison = compare(runs[mesh].ok(), runs["1x1x1"].ok(), last_step=STEPS)
    failed = [check for check in comparison.checks if not check.passed]
    assert not failed, failed


def test_state_within_the_tolerance_of_two_other_meshes(runs: dict[str, Any]) -> None:
    tolerances = state_tolerances(runs["1x1x1"].ok(), runs["1x2x3"].ok())
    assert max(tolerances.values()) < 1e-3
    check = compare_state(read_final(runs["2x2x2"].ok()), read_final(runs["1x1x1"].ok()), tolerances)
    assert check.passed, check


def test_replicas_run_unequal_micro_batches(runs: dict[str, Any]) -> None:
    step = read_lineage(runs["3x2x1"].ok()).steps[1]
    assert len(step.samples) == 16  # 3 + 3 + 2 micro-batches of 2
    assert len({step.tokens for step in read_lineage(runs["3x2x1"].ok()).steps.values()}) > 1, "no batch has a masked target"


@pytest.mark.parametrize("fault", WRONG)
def test_faulty_dropout_is_caught(runs: dict[str, Any], fault: str) -> None:
    comparison = compare(runs[fault].ok(), runs["1x1x1"].ok(), last_step=STEPS)
    loss = next(check for check in comparison.checks if check.name == "loss")
    assert loss.worst > 1e-5, loss


@pytest.mark.soak
def test_the_demo_itself_over_thirty_steps(ranks: Any) -> None:
    arguments = ("--steps", str(SOAK_STEPS), "--seed", "0")
    done = ranks.run([ranks.training(mesh, mesh, *arguments) for mesh in ("1x1x1", *MESHES, "5x1x1")])
    for mesh in (*MESHES, "5x1x1"):
        comparison = compare(done[mesh].ok(), done["1x1x1"].ok(), last_step=SOAK_STEPS)
        assert comparison.passed, (mesh, comparison.checks)
        assert next(check for check in comparison.checks if check.name == "loss").worst < 2e-7
