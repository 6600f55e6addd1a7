from __future__ import annotations

import msgspec
import pytest
from world import LOST_PEER, POLICY, World, hello, running

from regrow import wire
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e


def test_first_start_waits_for_all_nodes_then_for_a_while() -> None:
    world = World()
    world.join("a")
    world.submit(max_nodes=3)
    assert not world.take(a.RecordGeneration)
    assert "1 of 3 nodes" in world.reason
    world.join("b")
    assert not world.take(a.RecordGeneration)
    world.wait(POLICY.join_seconds + 0.1)
    assert world.generation.spec.nodes == ("a", "b")


def test_first_start_goes_at_once_when_all_are_there() -> None:
    world = World()
    world.join("a", "b")
    world.submit(max_nodes=2)
    assert world.generation.stage == "starting"
    assert world.generation.master_address == "a:99"
    assert [action.group_rank for action in world.take(a.StartMember)] == [0, 1]


def test_below_the_least_number_the_job_is_parked_and_goes_on_by_itself() -> None:
    world = running("a", "b", "c", min_nodes=3)
    world.lose("b")
    world.exit(0, exit_code=1, error=LOST_PEER)
    world.wait(1)
    assert "2 usable nodes, at least 3" in world.job.parked
    assert world.generation.stage == "ended"
    assert [action.node for action in world.take(a.StopWorkers)] == ["a", "c"]
    world.wait(60)
    assert not world.take(a.RecordGeneration)
    world.join("d")
    assert world.generation.spec.nodes == ("a", "d", "c")
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == 2
    assert not world.job.parked
    incident = world.job.incidents[-1]
    assert incident.generation_after == 2
    world.steps(3, 4)
    assert world.job.incidents[-1].closed
    assert len(world.job.ledger.charges) == 1


def test_survivors_keep_their_order_and_newcomers_come_last() -> None:
    world = running("a", "b", "c", "d")
    world.lose("b")
    world.exit(0, exit_code=1, error=LOST_PEER)
    world.wait(1)
    assert world.generation.spec.nodes == ("a", "c", "d")
    world.join("b")
    assert world.generation.spec.nodes == ("a", "c", "d")
    world.steps(3, 80)
    world.commit(world.job.frontier)
    assert world.generation.spec.nodes == ("a", "c", "d", "b")


def test_surplus_nodes_are_spares_and_take_over() -> None:
    world = running("a", "b", "c", max_nodes=2)
    assert world.generation.spec.nodes == ("a", "b")
    world.lose("a")
    world.exit(2, exit_code=1, error=LOST_PEER)
    ranks = [worker.rank for worker in world.generation.members["a"].workers]
    world.wait(1)
    assert world.generation.spec.nodes == ("c", "b"), "the spare has the place of the node that is gone"
    assert [worker.rank for worker in world.generation.members["c"].workers] == ranks
    assert world.job.incidents[-1].rung == "spare"


def test_silence_alone_loses_nobody_while_steps_complete() -> None:
    world = running("a", "b")
    world.tell(e.NodeSilent(at=world.now, node="b", last_heard_at=world.now - 2))
    for number in range(4, 40):
        world.step(number)
    assert world.generation.number == 1
    assert not world.job.incidents


def test_silence_and_no_progress_is_a_loss() -> None:
    world = running("a", "b")
    world.tell(e.NodeSilent(at=world.now, node="b", last_heard_at=world.now - 2))
    world.wait(10)
    assert world.generation.spec.nodes == ("a",)
    assert world.job.incidents[-1].kind == "node_lost"


def test_long_steps_are_waited_for() -> None:
    world = running("a", "b", steps=0, commit=None)
    for number in range(1, 6):
        world.step(number, seconds=30.0, after=30.0)
    world.tell(e.NodeSilent(at=world.now, node="b", last_heard_at=world.now - 2))
    world.wait(80)
    assert world.generation.number == 1
    world.wait(30)
    assert world.generation.number == 2


def test_all_silent_at_once_is_the_observers_fault() -> None:
    world = running("a", "b", "c")
    for name in ("a", "b", "c"):
        world.tell(e.NodeSilent(at=world.now, node=name, last_heard_at=world.now - 2))
    world.wait(300)
    assert world.generation.number == 1
    assert "observer" in world.reason
    for name in ("a", "b", "c"):
        world.tell(e.NodeHeard(at=world.now, node=name))
    world.step(4)
    assert world.generation.number == 1


def test_agent_restart_with_its_workers_costs_nothing() -> None:
    world = running("a", "b")
    world.lose("b")
    running_now = wire.RunningGeneration(job="j", epoch=1, generation=1, workers=world.generation.members["b"].workers)
    world.now += 1.0
    world.tell(e.NodeJoined(at=world.now, hello=hello("b", incarnation="b-2", highest_generation=1, running=running_now)))
    world.steps(4, 8)
    assert world.generation.number == 1
    assert not world.job.incidents


def test_agent_that_comes_back_without_its_workers_is_a_failure() -> None:
    world = running("a", "b")
    world.lose("b")
    world.tell(e.NodeJoined(at=world.now, hello=hello("b", incarnation="b-2", highest_generation=1)))
    world.wait(1)
    assert world.generation.number == 2
    assert world.generation.spec.nodes == ("a", "b")
    assert world.job.incidents[-1].kind == "returned_empty"
    assert world.job.incidents[-1].rung == "warm_restart"


def test_order_that_never_arrived_is_sent_again() -> None:
    world = World(answer=False)
    world.join("a", "b")
    world.submit(max_nodes=2)
    world.tell(e.GenerationRecorded(at=world.now, job="j", generation=1))
    assert len(world.take(a.StartMember)) == 2
    world.lose("b")
    world.tell(e.NodeJoined(at=world.now, hello=hello("b", incarnation="b-2")))
    assert [action.node for action in world.take(a.StartMember)] == ["b"]
    assert world.generation.number == 1


def test_old_workers_of_a_returning_node_are_stopped() -> None:
    world = running("a", "b")
    world.lose("b")
    world.exit(0, exit_code=1, error=LOST_PEER)
    world.wait(1)
    world.take()
    assert world.generation.spec.nodes == ("a",)
    old = wire.RunningGeneration(job="j", epoch=1, generation=1)
    world.tell(e.NodeJoined(at=world.now, hello=hello("b", highest_generation=1, running=old)))
    stops = world.take(a.StopWorkers)
    assert [(stop.node, stop.generation) for stop in stops] == [("b", 2)]


def test_burst_is_one_decision() -> None:
    world = running("a", "b", "c", "d")
    world.lose("b")
    world.now += 0.02
    world.lose("c")
    world.now += 0.02
    for rank in (0, 1, 6, 7):
        world.exit(rank, exit_code=1, error=LOST_PEER)
    assert not world.take(a.RecordGeneration)
    world.wait(1)
    records = world.take(a.RecordGeneration)
    assert [record.spec.nodes for record in records] == [("a", "d")]
    assert len(world.job.ledger.charges) == 1


def test_two_jobs_share_by_priority_and_keep_what_they_have() -> None:
    world = World()
    world.join("a", "b", "c")
    world.submit(max_nodes=2)
    world.steps(1, 3)
    world.tell(e.JobLoaded(at=world.now, spec=msgspec.structs.replace(world.job.spec, job="k", max_nodes=4, priority=5), submitted=True))
    world.wait(10)
    assert world.generation.spec.nodes == ("a", "b")
    other = world.view.jobs["k"].generation
    assert other is not None
    assert other.spec.nodes == ("c",)


@pytest.mark.parametrize(("lost", "mesh"), [(1, "dp=3,tp=1,pp=2"), (2, "dp=2,tp=1,pp=2")])
def test_smaller_mesh_keeps_the_batch(lost: int, mesh: str) -> None:
    from regrow.ids import MeshShape

    table = {8: MeshShape(dp=2, tp=2, pp=2), 6: MeshShape(dp=3, pp=2), 4: MeshShape(dp=2, pp=2)}
    world = running("a", "b", "c", "d", mesh=MeshShape(dp=2, tp=2, pp=2), mesh_table=table)
    for name in ("d", "c")[:lost]:
        world.lose(name)
    world.exit(0, exit_code=1, error=LOST_PEER)
    world.wait(1)
    assert str(world.generation.spec.mesh) == mesh
    assert sum(world.generation.spec.micro_batches) == 48


def test_no_legal_mesh_is_parked_with_the_reason() -> None:
    from regrow.ids import MeshShape

    world = running("a", "b", mesh=MeshShape(tp=4), model=None)
    world.lose("b")
    world.exit(0, exit_code=1, error=LOST_PEER)
    world.wait(1)
    assert "no legal mesh for 2 workers" in world.job.parked
