"""A job keeps its nodes unless preempted by policy: who gives up what, when, and at whose cost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from world import World, spec

from regrow.ids import MeshShape
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core import preempt
from regrow.supervisor.core.policy import Policy

ON = Policy(preemption=True)
WAIT = ON.preempt_after_seconds


def submit(world: World, job: str, **changes: Any) -> None:
    values: dict[str, Any] = {"mesh": None, "max_nodes": 8} | changes
    world.tell(e.JobLoaded(at=world.now, spec=spec(job=job, **values), submitted=True))
    world.wait(ON.join_seconds + 0.1)


def members(world: World, job: str) -> tuple[str, ...]:
    generation = world.view.jobs[job].generation
    return generation.spec.nodes if generation is not None and generation.stage != "ended" else ()


def trains(world: World, job: str, step: int = 1) -> None:
    generation = world.view.jobs[job].generation
    assert generation is not None
    world.now += 1.0
    world.tell(e.StepsCompleted(at=world.now, job=job, generation=generation.number, step=step, step_seconds=1.0))


def cluster(*jobs: tuple[str, dict[str, Any]], nodes: str = "abcdef", policy: Policy = ON) -> World:
    """Jobs that train, one after the other submitted, on these nodes."""
    world = World(policy)
    world.join(*nodes)
    for name, changes in jobs:
        submit(world, name, **changes)
        trains(world, name)
    world.take()
    return world


LOW = ("low", {"priority": 0, "max_nodes": 6})
YOUNG = ("young", {"priority": 0, "max_nodes": 3})
OLD = ("old", {"priority": 0, "max_nodes": 3})


@pytest.mark.parametrize(
    ("running", "wants", "claimed"),
    [
        ([LOW], {"priority": 5, "min_nodes": 2}, {"f": "low", "e": "low"}),  # the highest ranks, as many as needed at least
        ([LOW], {"priority": 0, "min_nodes": 2}, {}),  # of the same priority nobody gives up anything
        ([LOW], {"priority": -1, "min_nodes": 2}, {}),
        ([LOW], {"priority": 5, "min_nodes": 7}, {}),  # would not be enough: nothing is broken for it
        ([("low", {"max_nodes": 6, "min_nodes": 5})], {"priority": 5, "min_nodes": 1}, {"f": "low"}),  # above its own least number
        (
            [("low", {"max_nodes": 6, "min_nodes": 5})],
            {"priority": 5, "min_nodes": 2},
            dict.fromkeys("abcdef", "low"),
        ),  # a job that cannot shrink goes as a whole
        ([OLD, YOUNG], {"priority": 5, "min_nodes": 2}, {"f": "young", "e": "young"}),  # the youngest first
        ([OLD, YOUNG], {"priority": 5, "min_nodes": 3}, {"f": "young", "e": "young", "c": "old"}),  # what can be spared before whole jobs
        ([OLD, ("better", {"priority": 3, "max_nodes": 3})], {"priority": 5, "min_nodes": 2}, {"c": "old", "b": "old"}),  # the lowest first
        ([("low", {"max_nodes": 4})], {"priority": 5, "min_nodes": 3}, {"d": "low"}),  # free ones before anybody's
    ],
)
def test_who_gives_up_what(running: list[tuple[str, dict[str, Any]]], wants: dict[str, Any], claimed: dict[str, str]) -> None:
    world = cluster(*running)
    world.tell(e.JobLoaded(at=world.now, spec=spec(job="high", mesh=None, max_nodes=8, **wants), submitted=True))
    found = preempt.claims(world.view, ON, world.now + WAIT)
    assert {name: claim.holder for name, claim in found.nodes.items()} == claimed
    off = msgspec.structs.replace(ON, preemption=False)
    assert preempt.claims(world.view, off, world.now + WAIT) == preempt.NOTHING


def test_off_by_default() -> None:
    assert not Policy().preemption
    world = cluster(LOW, policy=Policy())
    submit(world, "high", priority=9, min_nodes=2)
    world.wait(10 * WAIT)
    assert len(members(world, "low")) == 6
    assert "0 usable nodes, at least 2 needed" in world.view.jobs["high"].parked


def test_it_waits_then_the_lower_job_saves_shrinks_and_is_not_charged() -> None:
    world = cluster(LOW)
    submit(world, "high", priority=5, min_nodes=2, max_nodes=2)
    world.wait(WAIT - ON.join_seconds - 1)
    assert not world.take(a.AskSave)
    world.wait(1)
    (save,) = world.take(a.AskSave)
    assert (save.job, save.purpose) == ("low", "drain")
    assert "e preempted by high (priority 5 over 0); f preempted by high (priority 5 over 0)" in save.reason
    world.tell(
        e.CheckpointMoved(at=world.now, job="low", generation=1, step=1, state="committed", directory="/ckpt/step-1-g1"),
    )
    world.wait(ON.join_seconds + 0.1)
    assert members(world, "low") == ("a", "b", "c", "d")
    assert members(world, "high") == ("e", "f")
    low = world.view.jobs["low"]
    assert not low.ledger.charges
    assert [(item.kind, item.cause, item.restored_step) for item in low.incidents] == [("preempted", "planned", 1)]
    trains(world, "low", 2)
    trains(world, "high", 1)
    world.wait(ON.growth_cooldown_seconds + 1)
    assert members(world, "high") == ("e", "f"), "the lower one does not take them back"


def test_whole_job_is_parked_and_goes_on_when_the_other_is_done() -> None:
    world = cluster(("low", {"max_nodes": 6, "min_nodes": 5}))
    submit(world, "high", priority=5, min_nodes=2, max_nodes=2)
    world.wait(WAIT + ON.save_seconds + 5)
    assert members(world, "high") == ("a", "b")
    assert "4 usable nodes, at least 5 needed" in world.view.jobs["low"].parked
    world.take()
    world.tell(e.CommandGiven(at=world.now, job="high", command="stop"))
    world.wait(ON.stop_seconds + ON.join_seconds)
    assert len(members(world, "low")) == 6
    assert not world.view.jobs["low"].ledger.charges


def test_nodes_come_by_themselves_and_nobody_is_preempted() -> None:
    world = cluster(LOW)
    submit(world, "high", priority=5, min_nodes=2, max_nodes=2)
    world.join("g", "h")
    world.wait(WAIT + 5)
    assert members(world, "high") == ("g", "h")
    assert len(members(world, "low")) == 6


def test_free_nodes_wait_with_the_job_that_comes_first() -> None:
    """One free node of the two that it needs: the lower job does not grow onto it meanwhile."""
    world = cluster(("low", {"max_nodes": 6}), nodes="abc")
    submit(world, "high", priority=5, min_nodes=2, max_nodes=2)
    world.join("d")
    found = preempt.claims(world.view, ON, world.now + WAIT)
    assert found.kept == {"d": "high"}
    assert found.denied("low") == {"c", "d"}
    assert found.denied("high") == frozenset()


def test_a_job_that_no_node_would_help_holds_up_nobody() -> None:
    table = {2: MeshShape(dp=2)}
    world = cluster(("low", {"max_nodes": 6}), nodes="abc")
    submit(world, "high", priority=5, min_nodes=2, max_nodes=2, nproc_per_node=1, mesh_table=table, mesh=MeshShape(dp=8, pp=4))
    assert preempt.claims(world.view, ON, world.now + WAIT).nodes
    job = msgspec.structs.replace(world.view.jobs["high"], parked="no legal mesh for 2 workers on 2 nodes")
    view = msgspec.structs.replace(world.view, jobs=world.view.jobs | {"high": job})
    assert preempt.claims(view, ON, world.now + WAIT) == preempt.Claims()
