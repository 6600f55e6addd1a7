"""A rank whose agent is gone may be lost: what it said last is no proof that it hangs, whatever the limits are."""

from __future__ import annotations

from world import POLICY, World, running

from regrow import wire
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e


def stall(world: World, *phases: str) -> None:
    """Nothing has moved for four seconds."""
    ranks = tuple(
        wire.RankProgress(rank=rank, started_step=4, applied_step=3, phase=phase, age_seconds=4.0) for rank, phase in enumerate(phases)
    )
    number = world.generation.number
    world.tell(e.ProgressStalled(at=world.now, job="j", generation=number, since=world.now - 4, limit_seconds=4, ranks=ranks))


def alone() -> World:
    """One member and a spare."""
    world = running("a", max_nodes=1, mesh=None)
    world.join("b")
    world.take()
    return world


def test_the_only_member_of_a_job_is_lost_and_does_not_hang() -> None:
    """Nobody is there who could lose it as a peer."""
    world = alone()
    world.lose("a")
    world.wait(4)
    stall(world, "step", "step")
    world.wait(2)
    assert not world.take(a.RecordGeneration), "its agent may come back with its workers"
    world.wait(POLICY.reconnect_seconds)
    assert world.generation.spec.nodes == ("b",)
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.node, incident.cause) == ("node_lost", "a", "infrastructure")
    assert not [record for record in world.view.quarantine.values() if "no progress" in record.reason]


def test_an_agent_that_comes_back_to_a_standing_worker_finds_a_hang() -> None:
    world = alone()
    world.lose("a")
    world.wait(4)
    stall(world, "step", "step")
    running_now = wire.RunningGeneration(job="j", generation=1, epoch=1, workers=world.generation.members["a"].workers)
    world.join("a", incarnation="a-2", running=running_now)
    world.wait(2)
    assert world.job.incidents[-1].kind == "hang"


def test_a_process_that_does_not_run_hangs_whoever_else_is_unheard() -> None:
    world = running("a", "b", "c", max_nodes=3)
    world.lose("c")
    world.wait(4)
    stall(world, "stopped", *["step"] * 5)
    world.wait(1)
    assert (world.job.incidents[0].kind, world.job.incidents[0].node) == ("hang", "a")


def test_a_rank_that_is_behind_because_it_is_not_heard_does_not_hang() -> None:
    world = running("a", "b", "c", max_nodes=3)
    world.lose("c")
    world.wait(4)
    words = [wire.RankProgress(rank=rank, started_step=4 - (rank == 5), applied_step=3, phase="step", age_seconds=4.0) for rank in range(6)]
    stalled = e.ProgressStalled(at=world.now, job="j", generation=1, since=world.now - 4, limit_seconds=4, ranks=tuple(words))
    world.tell(stalled)
    world.wait(POLICY.reconnect_seconds)
    assert (world.job.incidents[0].kind, world.job.incidents[0].node) == ("node_lost", "c")
