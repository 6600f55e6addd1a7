"""A start that takes too long: who is behind the others is left out, and out for longer when it happens again (case A11)."""

from __future__ import annotations

import pytest
from world import POLICY, STARTED, World, running

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e

LIMIT = POLICY.start_seconds


def record(world: World, phases: dict[str, int]) -> None:
    """The pending generation is recorded and its members pass so many phases of a start."""
    number = world.generation.number
    for node in phases:
        world.tell(e.SpareStoreChanged(at=world.now, node=node, address=f"{node}:{number}"))
    world.tell(e.GenerationRecorded(at=world.now, job="j", generation=number))
    for node, count in phases.items():
        for phase in STARTED[:count]:
            world.tell(world.phase_event(node, phase, job="j", generation=number))


def failing_start(phases: dict[str, int]) -> World:
    """A worker of a running job is killed; the next generation's members pass these numbers of phases and no further."""
    world = running("a", "b", "c")
    world.answer = False
    world.exit(0, signal=9)
    world.wait(1)
    assert world.generation.number == 2
    record(world, phases)
    world.take()
    return world


@pytest.mark.parametrize(
    ("phases", "members"),
    [
        ({"a": 5, "b": 5, "c": 4}, ("a", "b")),  # it has not restored
        ({"a": 5, "b": 3, "c": 3}, ("a",)),
        ({"a": 5, "b": 5, "c": 5}, ("a", "b", "c")),  # all wait for each other: nobody is singled out
        ({"a": 4, "b": 4, "c": 4}, ("a", "b", "c")),
    ],
)
def test_a11_who_is_behind_is_left_out(phases: dict[str, int], members: tuple[str, ...]) -> None:
    world = failing_start(phases)
    world.wait(LIMIT + 1)
    assert world.generation.number == 3
    assert world.generation.spec.nodes == members
    assert world.job.outcome is None


def test_a11_with_a_lost_node_the_others_that_wait_for_it_are_not_blamed() -> None:
    world = failing_start({"a": 4, "b": 4, "c": 3})
    world.now += LIMIT - 5
    world.tell(e.NodeSilent(at=world.now, node="c", last_heard_at=world.now - 2))
    world.wait(POLICY.reconnect_seconds + 1)
    assert world.generation.spec.nodes == ("a", "b")
    assert not world.take(a.SetQuarantine)


def test_a11_a_newcomer_that_never_catches_up_is_not_taken_for_ever() -> None:
    world = running("a", "b", max_nodes=3)
    world.answer = False
    world.join("c")
    attempts = 0
    step = 3
    for _ in range(40):
        world.now += 30.0
        step += 1
        world.tell(e.StepsCompleted(at=world.now, job="j", generation=world.generation.number, step=step, step_seconds=1.0))
        if world.take(a.AskSave):
            world.commit(step)
        if world.generation.stage == "recording":
            names = world.generation.spec.nodes
            record(world, {name: 4 if name == "c" else 5 for name in names})
            if "c" in names:
                attempts += 1
                world.wait(LIMIT + 1)
                record(world, {"a": 5, "b": 5})
    assert attempts == 3, "twice, and once more after the cool-down, which doubles"
    assert world.generation.spec.nodes == ("a", "b")
    (held,) = world.view.quarantine.values()
    assert (held.node, held.state, held.strikes) == ("c", "quarantined", 2)
    assert held.until == held.since + 2 * POLICY.quarantine_seconds
    assert "has not completed a first step in time while others did" in held.reason
