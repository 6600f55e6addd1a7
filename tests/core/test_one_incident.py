"""One incident is one charge, the newest checkpoint is the one that is loaded, an operator's word reaches the agent."""

from __future__ import annotations

from world import POLICY, PROGRAM, World, running

from regrow import wire
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core import ledger, quarantine

CUDA = "Traceback (most recent call last):\nRuntimeError: CUDA error: uncorrectable ECC error encountered"
BROKEN = wire.HealthVerdict(state="unhealthy", action="reset", reason="XID 48", device_uuids=("GPU-b-0",))


def bad_news(world: World, node: str = "b", verdict: wire.HealthVerdict = BROKEN) -> None:
    world.tell(e.NodeHealth(at=world.now, node=node, verdict=verdict))


def test_node_that_turns_unhealthy_after_the_decision_is_the_same_incident() -> None:
    world = running("a", "b", "c")
    world.exit(2, exit_code=1, error=CUDA)
    world.wait(POLICY.coalesce_seconds + 0.01)
    assert [charge.cause for charge in world.job.ledger.charges] == ["program"]
    world.now += 0.05
    bad_news(world)
    world.wait(POLICY.save_seconds + 1)
    assert world.generation.spec.nodes == ("a", "c")
    assert [(charge.cause, charge.incident) for charge in world.job.ledger.charges] == [("infrastructure", "j-g1")]
    assert world.generation.spec.restart_count == 1
    incident = world.job.incidents[-1]
    assert len(world.job.incidents) == 1
    assert (incident.id, incident.cause, incident.node, incident.generation_after) == ("j-g1", "infrastructure", "b", 3)
    world.step(3)
    world.step(4)
    assert world.job.incidents[-1].recovered_at == world.now


def test_host_that_dies_after_its_worker_is_the_same_incident() -> None:
    world = running("a", "b", "c")
    world.exit(2, signal=9)
    world.wait(POLICY.coalesce_seconds + 0.01)
    world.lose("b")
    world.wait(POLICY.reconnect_seconds + 10)
    assert world.generation.spec.nodes == ("a", "c")
    assert [charge.cause for charge in world.job.ledger.charges] == ["infrastructure"]


def test_bad_news_after_the_recovery_or_of_another_node_is_another_incident() -> None:
    world = running("a", "b", "c")
    world.exit(2, signal=9)
    world.wait(1)
    bad_news(world, "c", wire.HealthVerdict(state="unhealthy", action="reset", reason="XID 48", device_uuids=("GPU-c-0",)))
    world.wait(POLICY.save_seconds + 1)
    assert len(world.job.ledger.charges) == 2
    world.steps(3, 6)
    world.exit(2, signal=9)
    world.wait(1)
    world.steps(3, 9)
    bad_news(world)
    world.wait(POLICY.save_seconds + 1)
    assert [charge.cause for charge in world.job.ledger.charges] == ["unknown", "infrastructure", "unknown", "infrastructure"]


def test_program_that_fails_again_and_again_is_charged_each_time() -> None:
    world = running("a", "b")
    for _ in range(2):
        world.exit(0, exit_code=1, error=PROGRAM)
        world.wait(1)
    assert world.job.outcome is not None
    assert len(world.job.ledger.charges) == 2


def late_commit(*, tainted: bool = False) -> World:
    """A checkpoint of step 3 is committed while generation 2 is being recorded with step 2 to restore."""
    world = running("a", "b", "c", "d")
    world.answer = False
    if tainted:
        world.tell(e.AtRestMismatch(at=world.now, job="j", generation=1, rank=7, step=4, tensor="optimizer.w.exp_avg"))
    else:
        world.exit(7, signal=9)
    world.wait(1)
    assert world.generation.stage == "recording"
    restore = world.generation.spec.restore
    assert (restore.step if restore is not None else 0) == (0 if tainted else 2)
    world.tell(e.CheckpointMoved(at=world.now, job="j", generation=1, step=3, state="committed", directory="/ckpt/step-3-g1"))
    world.take()
    world.answer = True
    world.tell(e.GenerationRecorded(at=world.now, job="j", generation=2))
    return world


def test_checkpoint_committed_before_the_record_is_loaded() -> None:
    world = late_commit()
    assert world.generation.number == 3
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == 3
    started = world.take(a.StartMember)
    assert {action.generation for action in started} == {3}
    assert len(world.job.ledger.charges) == 1
    assert world.job.unstarted == 0
    assert world.job.incidents[-1].generation_after == 3
    assert world.job.incidents[-1].restored_step == 3


def test_checkpoint_of_a_tainted_generation_committed_before_the_record_is_ruled_out() -> None:
    world = late_commit(tainted=True)
    assert world.generation.number == 2
    assert world.job.checkpoints[3].damaged.startswith("written after state diverged")
    assert [action.step for action in world.take(a.SetCheckpoint)] == [3]


def test_clear_reaches_what_the_agent_holds() -> None:
    world = running("a", "b", "c")
    held = wire.HealthVerdict(state="unhealthy", action="replace", reason="XID 64", device_uuids=("GPU-b-0",))
    bad_news(world, verdict=held)
    world.wait(POLICY.save_seconds + 1)
    assert world.view.quarantine["GPU-b-0"].state == "quarantined"
    world.take()
    world.tell(e.NodeCommandGiven(at=world.now, node="b", command="clear"))
    assert [action.node for action in world.take(a.ClearHealth)] == ["b"]
    assert world.view.quarantine["GPU-b-0"].state == "probation"
    world.wait(1)
    assert world.view.quarantine["GPU-b-0"].state == "probation", "the agent has not answered yet"
    bad_news(world, verdict=wire.HealthVerdict(state="healthy"))
    assert quarantine.blocked(world.view, world.view.nodes["b"]) is None
    assert not world.take(a.ClearHealth)


def test_clear_of_what_still_holds_ends_in_quarantine_again() -> None:
    world = running("a", "b", "c")
    bad_news(world)
    world.wait(POLICY.save_seconds + 1)
    world.tell(e.NodeCommandGiven(at=world.now, node="b", command="clear"))
    world.wait(1)
    bad_news(world)
    assert world.view.quarantine["GPU-b-0"].state == "quarantined"
    assert world.view.quarantine["GPU-b-0"].strikes == 2


def test_clear_waits_for_an_agent_that_is_away() -> None:
    world = running("a", "b", "c")
    bad_news(world)
    world.wait(POLICY.save_seconds + 1)
    world.lose("b")
    world.take()
    world.tell(e.NodeCommandGiven(at=world.now, node="b", command="clear"))
    assert not world.take(a.ClearHealth)
    world.join("b", health=BROKEN)
    assert [action.node for action in world.take(a.ClearHealth)] == ["b"]


def test_moved_charge_counts_once_and_for_its_new_cause() -> None:
    world = running("a", "b", max_restarts=1)
    world.exit(2, signal=9)
    world.wait(1)
    bad_news(world)
    world.wait(POLICY.save_seconds + 1)
    counted = ledger.counted(world.job.ledger, POLICY, world.now, "unknown")
    assert not counted
    world.steps(3, 5)
    world.exit(0, signal=9)
    world.wait(1)
    assert world.job.outcome is None
