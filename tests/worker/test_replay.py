"""Micro-steps that are repeated by real ranks: what is found, who is named, and that training does not notice."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.worker.conftest import FakeAgent, World, wait_for

from regrow import wire
from regrow.agent.worker import replay_judge as judging

NEVER = wire.CheckpointPolicy(min_interval_seconds=3600.0, max_interval_seconds=3600.0)


def verdicts(agent: FakeAgent, rank: int = 0) -> list[wire.ReplayVerdict]:
    return [line.replay for line in agent.of(wire.StepReport, rank) if line.replay is not None]


def ran(world: World, agent: FakeAgent, dp: int, **env: str) -> list[Any]:
    world.start("replayed.py", world_size=dp, env={"REGROW_CHAOS": "1", **env}, policy=NEVER)
    return world.wait()


@pytest.mark.parametrize("dp", [1, 3])
def test_healthy_ranks_agree_and_training_does_not_notice(world: World, agent: FakeAgent, dp: int) -> None:
    """Every step checked: same loss, state with running statistics, and random streams as never checked, to the bit."""
    checked = ran(world, agent, dp, RATE="1", STEPS="10")
    told = verdicts(agent)
    assert {one.verdict for one in told} == {"agree"}
    turns = [judging.sample(11, step, 1.0, 6 // dp) for step in range(1, 11)]
    assert [one.buddy for one in told] == [turn is not None and turn.buddy and dp > 1 for turn in turns]
    assert {result["repeated"] for result in checked} == {10}
    plain = [result | {"repeated": 10} for result in again(world, dp, RATE="0", STEPS="10")]
    assert plain == checked


def again(world: World, dp: int, **env: str) -> list[Any]:
    world.start("replayed.py", world_size=dp, generation=2, env=env, policy=NEVER)
    return world.wait(generation=2)


def order(world: World, agent: FakeAgent, rank: int, dp: int, steps: int, **inject: Any) -> list[Any]:
    """Start, hurt one rank, and wait for its end."""
    world.start(
        "replayed.py", world_size=dp, env={"REGROW_CHAOS": "1", "RATE": "1", "STEPS": str(steps), "STEP_SECONDS": "0.04"}, policy=NEVER
    )
    wait_for(lambda: len(agent.steps(rank)) >= 3, "steps")
    agent.send(rank, inject={"kind": "gemm", "bit": 30, "steps": steps, **inject})
    return world.wait()


def test_a_sick_matrix_unit_is_named_by_its_own_repetitions(world: World, agent: FakeAgent) -> None:
    """One of two ranks, wrong in half of its micro-steps: no replica can outvote the other, its own repetitions name it."""
    order(world, agent, 1, 2, 50, ratio=0.5)
    found = [one for one in verdicts(agent) if one.verdict == "diverged"]
    assert found
    assert {one.suspects for one in found} <= {(1,), ()}
    assert (1,) in {one.suspects for one in found}
    assert {rank for one in found for rank in one.once} <= {1}
    assert all(one.tensor for one in found if one.suspects and not one.buddy)


def test_a_unit_that_is_always_wrong_is_outvoted_by_two_replicas(world: World, agent: FakeAgent) -> None:
    """It repeats its own wrong result to the bit; only other devices can tell."""
    order(world, agent, 2, 3, 50, ratio=1.0)
    found = [one for one in verdicts(agent) if one.verdict == "diverged"]
    assert {one.suspects for one in found} == {(2,)}
    assert all(one.buddy for one in found)
    refused = [line.replay.verdict for line in agent.of(wire.StepReport, 0) if line.replay is not None and not line.replay.buddy]
    assert set(refused) == {"agree"}, "in place there is nothing to see"


def test_two_replicas_cannot_tell_who_is_always_wrong(world: World, agent: FakeAgent) -> None:
    order(world, agent, 1, 2, 50, ratio=1.0)
    found = [one for one in verdicts(agent) if one.verdict == "diverged"]
    assert {one.suspects for one in found} == {()}
    assert not any(one.repaired for one in found)
    assert "[0, 1]" in found[0].reason


def test_one_wrong_result_is_replaced_and_nobody_accused(world: World, agent: FakeAgent) -> None:
    """A single flip in a sampled micro-step: the repetitions agree, the right gradient is used, the end is that of a clean run."""
    world.start("replayed.py", world_size=2, env={"REGROW_CHAOS": "1", "RATE": "1", "STEPS": "12", "KIND": "flip_once"}, policy=NEVER)
    hurt = world.wait()
    found = [one for one in verdicts(agent) if one.verdict == "diverged"]
    assert [(one.suspects, one.once, one.repaired) for one in found] == [((), (1,), True)]
    clean = again(world, 2, RATE="0", STEPS="12")
    assert [result["state"] for result in hurt] == [result["state"] for result in clean]
    assert [result["log"] for result in hurt] == [result["log"] for result in clean]


def test_gradients_that_do_not_repeat_accuse_nobody(world: World, agent: FakeAgent) -> None:
    results = ran(world, agent, 2, RATE="1", KIND="noisy", STEPS="6")
    told = verdicts(agent)
    assert told[0].verdict == "skipped"
    assert "noise floor" in told[0].reason
    assert {one.verdict for one in told[1:]} == {"agree"}
    assert all(0 < result["floor"] < 1e-3 for result in results)


def test_a_nan_that_does_not_come_again_is_replaced(world: World, agent: FakeAgent) -> None:
    """Case K03: the first producer, before the reduction, by rank and tensor; and the sum is not poisoned."""
    results = ran(world, agent, 2, RATE="0.000001", KIND="nan", NAN_AT="3", NAN_RANK="1")
    (found,) = verdicts(agent, 1)
    assert (found.once, found.tensor, found.repaired) == ((1,), "0.weight", True)
    assert all(math.isfinite(entry["loss"]) for result in results for entry in result["log"])
    assert not any(line.nonfinite for line in agent.of(wire.StepReport))
    plain = again(world, 2, RATE="0")
    assert [result["state"] for result in results] == [result["state"] for result in plain]


def test_a_nan_that_comes_again_is_told_as_such(world: World, agent: FakeAgent) -> None:
    ran(world, agent, 2, RATE="0.000001", KIND="nan", NAN_AT="3", NAN_RANK="1", NAN_ALWAYS="1", STEPS="3")
    third = {line.rank: (line.nonfinite, line.nonfinite_again) for line in agent.of(wire.StepReport) if line.step == 3}
    assert third[1] == ("output of 3", True), "the operation that made it, not its victims"
    assert third[0] == ("loss", None) or third[0] == ("", None)
