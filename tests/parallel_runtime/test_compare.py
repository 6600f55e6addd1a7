"""The comparison of a run with its twin: passes what is right, catches each thing that a restore can leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regrow.demo.compare import compare, compare_state, judge_controls, state_tolerances
from regrow.demo.lineage import read_final, read_lineage
from regrow.errors import OperationalError

SMALL = ("--layers", "2", "--hidden", "48", "--seq", "48", "--seed", "5", "--samples", "48")
STEPS = 9


@pytest.fixture(scope="module")
def twins(ranks: Any) -> dict[str, Any]:
    """A twin with controls after step 5, which is in the second epoch, and a second mesh."""
    arguments = (*SMALL, "--steps", str(STEPS))
    return ranks.run(
        [ranks.training("twin", "1x1x1", *arguments, "--controls", "5"), ranks.training("second", "1x2x1", *arguments)],
    )


@pytest.fixture(scope="module")
def twin(twins: dict[str, Any]) -> Path:
    """The twin's folder."""
    return twins["twin"].ok()


def test_a_run_equals_itself(twin: Path, twins: dict[str, Any]) -> None:
    tolerances = state_tolerances(twin, twins["second"].ok())
    assert len(tolerances) == len(read_final(twin))
    assert all(value < 1e-3 for value in tolerances.values()), max(tolerances.items(), key=lambda item: item[1])
    comparison = compare(twin, twin, last_step=STEPS, tolerances=tolerances)
    assert comparison.passed, comparison.failed
    assert comparison.steps == STEPS


def test_every_omission_is_caught_and_nothing_else(twin: Path) -> None:
    controls = {control.omitted: control for control in judge_controls(twin / "controls", twin)}
    assert set(controls) == {"", "optimizer", "learning_rate", "rng", "position", "weights", "dropout_key"}
    assert all(control.passed for control in controls.values()), controls
    assert controls[""].loss_deviation == 0.0
    assert "rng" in controls["rng"].caught_by
    assert "learning_rate" in controls["learning_rate"].caught_by
    assert {"sample_order", "position"} <= set(controls["position"].caught_by)
    for omitted in ("optimizer", "learning_rate", "position", "weights", "dropout_key"):
        assert controls[omitted].loss_deviation > 1e-5, omitted


def write_log(folder: Path, lines: list[dict[str, Any]], *, generation: int, rank: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"g{generation:06d}-a000-r{rank:05d}.jsonl").write_text(text)


def start(restored: int, mesh: str = "dp=1,tp=1,pp=1", *, world: int = 1, replica: int = 0) -> dict[str, Any]:
    return {
        "kind": "start", "restored": restored, "mesh": mesh, "rank": 0, "world_size": world,
        "coordinates": {"dp": replica, "pp": 0, "tp": 0}, "num_samples": 12, "global_batch": 4,
    }  # fmt: skip


def step(number: int, **changed: Any) -> dict[str, Any]:
    first = (number - 1) * 4
    return {
        "kind": "step", "step": number, "loss": 5.0 - number / 10, "grad_norm": 1.0, "tokens": 40, "learning_rate": number / 1000,
        "first": first, "samples": [(first + index) % 12 for index in range(4)], "draw": {"torch": number / 7},
    } | changed  # fmt: skip


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """A written twin of six steps."""
    write_log(tmp_path / "twin", [start(0), *(step(number) for number in range(1, 7))], generation=1)
    return tmp_path / "twin"


def test_lost_steps_do_not_count_and_the_lineage_that_survived_does(tmp_path: Path, reference: Path) -> None:
    run = tmp_path / "run"
    damaged = [step(4, loss=9.0), step(5, loss=9.9)]
    write_log(run, [start(0), *(step(number) for number in range(1, 4)), *damaged], generation=1)
    write_log(run, [start(3), *(step(number) for number in range(4, 7))], generation=2)
    comparison = compare(run, reference, last_step=6)
    assert comparison.passed, comparison.checks
    assert comparison.lost_steps == 2
    assert comparison.steps == 6


def test_a_generation_that_never_formed_leaves_no_trace(tmp_path: Path, reference: Path) -> None:
    run = tmp_path / "run"
    write_log(run, [start(0), *(step(number) for number in range(1, 4))], generation=1)
    write_log(run, [start(1, "dp=2,tp=1,pp=1", world=2)], generation=2)
    write_log(run, [start(3), *(step(number) for number in range(4, 7))], generation=3)
    assert compare(run, reference, last_step=6).passed


def test_a_torn_last_line_is_a_step_that_was_not_completed(tmp_path: Path, reference: Path) -> None:
    run = tmp_path / "run"
    write_log(run, [start(0), *(step(number) for number in range(1, 4))], generation=1)
    path = next(run.glob("g*"))
    path.write_text(path.read_text() + json.dumps(step(4))[:50])
    write_log(run, [start(3), *(step(number) for number in range(4, 7))], generation=2)
    assert compare(run, reference, last_step=6).passed
    path.write_text(path.read_text() + "\n" + json.dumps(step(5)) + "\n")
    with pytest.raises(OperationalError, match="line 5 is not JSON"):
        read_lineage(run)


@pytest.mark.parametrize(
    ("changed", "caught"),
    [
        ({"loss": 4.5 * (1 + 3e-6)}, "loss"),
        ({"loss": float("nan")}, "loss"),
        ({"learning_rate": 0.005000001}, "learning_rate"),
        ({"samples": [5, 4, 6, 7]}, "sample_order"),
        ({"first": 12}, "exactly_once"),
        ({"tokens": 41}, "tokens"),
        ({"draw": {"torch": 1 / 7}}, "rng"),
    ],
)
def test_one_wrong_value_is_caught(tmp_path: Path, reference: Path, changed: dict[str, Any], caught: str) -> None:
    run = tmp_path / "run"
    lines = [start(0), *(step(number, **(changed if number == 5 else {})) for number in range(1, 7))]
    write_log(run, lines, generation=1)
    assert caught in compare(run, reference, last_step=6).failed


def test_one_rank_with_another_loss_is_caught(tmp_path: Path, reference: Path) -> None:
    run = tmp_path / "run"
    for rank in (0, 1):
        lines = [
            start(0, "dp=2,tp=1,pp=1", world=2, replica=rank),
            *(
                step(number, first=(number - 1) * 4 + 2 * rank, samples=step(number)["samples"][2 * rank :][:2], loss=5.0 - number / 10 - rank / 100)
                for number in range(1, 7)
            ),
        ]  # fmt: skip
        write_log(run, lines, generation=1, rank=rank)
    assert compare(run, reference, last_step=6).failed == ("loss",)


def test_after_a_reshard_draws_are_new_but_never_repeat(tmp_path: Path, reference: Path) -> None:
    for name, offset, passed in (("derived", 0.5, True), ("seeded-again", -3 / 7, False)):
        run = tmp_path / name
        write_log(run, [start(0), *(step(number) for number in range(1, 4))], generation=1)
        again = [step(number, draw={"torch": number / 7 + offset}) for number in range(4, 7)]
        write_log(run, [start(3, "dp=1,tp=1,pp=1,cp=1"), *again], generation=2)
        assert ("rng" not in compare(run, reference, last_step=6).failed) is passed, name


def test_missing_steps_fail(tmp_path: Path, reference: Path) -> None:
    run = tmp_path / "run"
    write_log(run, [start(0), *(step(number) for number in range(1, 6))], generation=1)
    assert "steps" in compare(run, reference, last_step=6).failed
    with pytest.raises(OperationalError, match="no step logs"):
        compare(tmp_path / "nowhere", reference, last_step=6)


def test_final_state_is_judged_by_tensor(twin: Path) -> None:
    state = read_final(twin)
    name = "model.layers.1.attention.query.weight"
    moved = state | {name: state[name] * np.float32(1.001)}
    check = compare_state(moved, state, dict.fromkeys(state, 1e-4))
    assert not check.passed
    assert name in check.detail
    broken = state | {name: np.full_like(state[name], np.nan)}
    assert not compare_state(broken, state, dict.fromkeys(state, 1e-4)).passed
    assert not compare_state({key: value for key, value in state.items() if key != name}, state, {}).passed
