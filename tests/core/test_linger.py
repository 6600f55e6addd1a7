from __future__ import annotations

from world import POLICY, running

from regrow import wire
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e


def left(*ranks: int) -> tuple[wire.RankProgress, ...]:
    return tuple(wire.RankProgress(rank=rank, started_step=-1, applied_step=-1, phase="", age_seconds=0.0) for rank in ranks)


def test_a_rank_that_does_not_end_costs_a_restart_and_no_hardware_its_name() -> None:
    world = running("a", "b", steps=0, commit=None, mesh=None, global_batch=0, checkpoint=wire.CheckpointPolicy(), knows_regrow=False)
    for rank in (0, 1, 2):
        world.exit(rank, exit_code=0, last_step=-1)
    world.wait(40)
    assert world.generation.number == 1
    assert world.job.outcome is None
    world.tell(
        e.ProgressStalled(at=world.now, job="j", generation=1, since=world.now - 30, limit_seconds=30, ranks=left(3), lingering=True)
    )
    world.wait(POLICY.stacks_seconds + 0.2)
    assert len(world.take(a.AskStacks)) == 1
    assert world.generation.number == 2
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.rank, incident.node) == ("hang", 3, "")
    assert "rank 3 of b does not end after the program's end" in incident.text
    assert not world.view.quarantine


def test_one_that_works_again_is_left_alone() -> None:
    world = running("a", "b", steps=0, commit=None, mesh=None, global_batch=0, checkpoint=wire.CheckpointPolicy(), knows_regrow=False)
    for rank in (0, 1, 2):
        world.exit(rank, exit_code=0, last_step=-1)
    world.tell(e.ProgressStalled(at=world.now, job="j", generation=1, since=world.now, limit_seconds=30, ranks=left(3), lingering=True))
    world.tell(e.ProgressResumed(at=world.now, job="j", generation=1))
    world.wait(20)
    assert world.generation.number == 1
    world.exit(3, exit_code=0, last_step=-1)
    world.wait(1)
    assert world.job.outcome is not None
    assert world.job.outcome.state == "done"
