"""The in-place rung: when it is taken, what is behind it, and that work which survivors held in memory is not lost."""

from __future__ import annotations

from tests.core.world import STARTED, killed_after_six_steps, running

from regrow import wire
from regrow.supervisor.core import events as e
from regrow.supervisor.core import plan_form


def test_a_job_that_did_not_ask_for_it_restarts_warm() -> None:
    world = running("a", "b")
    world.exit(0, signal=9)
    world.wait(1)
    assert not world.generation.spec.in_place
    assert world.job.incidents[-1].rung == "warm_restart"


def test_survivors_go_on_and_their_steps_are_not_lost() -> None:
    world, start = killed_after_six_steps(in_place=True)
    assert world.generation.spec.in_place
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == start
    incident = world.job.incidents[-1]
    assert (incident.rung, incident.frontier) == ("in_place", start + 6)
    lost = world.job.effort.lost_steps
    world.step(start + 7)
    incident = world.job.incidents[-1]
    assert incident.closed
    assert incident.restored_step == start + 6
    assert world.job.effort.lost_steps == lost - 6
    assert not world.job.outcome, "a first step beyond the checkpoint is no sign of a state that was not taken up"


def test_what_the_disk_gave_back_is_still_lost_work() -> None:
    world, start = killed_after_six_steps(in_place=True)
    lost = world.job.effort.lost_steps
    world.step(start + 1)
    assert world.job.effort.lost_steps == lost
    assert world.job.incidents[-1].restored_step == start


def test_behind_a_change_that_failed_is_the_fork() -> None:
    world = running("a", "b", in_place=True)
    world.exit(0, signal=9)
    world.wait(1)
    assert world.generation.spec.in_place
    world.exit(1, signal=9)
    world.wait(30)
    assert world.generation.number == 3
    assert not world.generation.spec.in_place
    assert world.job.incidents[-1].rung == "warm_restart"


def test_a_first_step_before_the_checkpoint_is_fatal_in_place_too() -> None:
    world = running("a", "b", in_place=True)
    start = world.job.frontier
    world.commit(start)
    world.steps(start + 1, start + 3)
    world.exit(0, signal=9)
    world.wait(1)
    world.step(start)
    world.wait(1)
    assert world.job.outcome is not None
    assert "was not taken up" in world.job.outcome.reason


def test_a_script_that_cannot_change_over_restarts_warm_and_is_not_called_in_place() -> None:
    world = running("a", "b", in_place=True)
    world.phases = STARTED
    world.exit(0, signal=9)
    world.wait(1)
    world.steps(world.job.frontier + 1, world.job.frontier + 2)
    assert world.job.incidents[-1].rung == "in_place"
    world.exit(0, signal=9)
    world.wait(1)
    assert not world.generation.spec.in_place, "no node of this generation said that its workers can"
    assert world.job.incidents[-1].rung == "warm_restart"


def test_a_state_that_is_not_trusted_is_not_gone_on_with() -> None:
    """Replicas disagree: survivors hold the newest state and it may be the wrong one, so all are forked anew from the disk."""
    world = running("a", "b", "c", "d", in_place=True)
    start = world.job.frontier
    world.commit(start)
    world.steps(start + 1, start + 3)
    number = world.generation.number
    digests = {rank: "bb" if rank == 5 else "aa" for rank in range(8)}
    world.tell(e.DigestsReported(at=world.now, job="j", generation=number, step=start + 3, digests=digests))
    world.wait(1)
    assert world.generation.number == number + 1
    assert not world.generation.spec.in_place
    assert world.job.incidents[-1].kind == "sdc"
    assert world.job.incidents[-1].rung != "in_place"


def test_survivors_that_wait_tell_of_the_node_that_is_gone() -> None:
    """They do not end, as they would in a warm restart: their word stands for it, and the closed connection is not excused."""
    world = running("a", "b", in_place=True)
    number = world.generation.number
    world.lose("b")
    world.wait(0.5)
    assert world.generation.number == number, "an agent may have died alone"
    world.tell(world.phase_event("a", wire.LOST_PEER_PHASE, job="j", generation=number))
    world.wait(0.2)
    assert world.job.incidents[-1].kind == "node_lost"
    assert world.job.incidents[-1].node == "b"


def test_what_killed_workers_left_may_be_taken_up_since_the_last_generation_that_trained() -> None:
    world = running("a", "b")
    first = world.generation.number
    world.exit(0, signal=9)
    world.wait(1)
    assert world.generation.spec.gasp == first
    world.exit(1, signal=9)
    world.wait(30)
    assert world.generation.number == first + 2
    assert world.generation.spec.gasp == first, "the one in between took no step: the states of the first are still the newest"


def test_what_was_left_before_somebody_went_back_on_purpose_is_refused_for_good() -> None:
    world = running("a", "b", "c", "d")
    start, number = world.job.frontier, world.generation.number
    world.commit(start)
    world.steps(start + 1, start + 3)
    digests = {rank: "bb" if rank == 5 else "aa" for rank in range(8)}
    world.tell(e.DigestsReported(at=world.now, job="j", generation=number, step=start + 3, digests=digests))
    world.wait(1)
    assert world.generation.number == number + 1
    assert world.generation.spec.gasp == 0
    assert world.generation.first_step_at is None
    assert plan_form.left_since(world.generation) == number + 1, "not what the damaged one left, though this one took no step"
