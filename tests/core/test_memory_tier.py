"""Snapshots in memory: when the leader allows them, and that work which they kept is not lost work."""

from __future__ import annotations

from tests.core.world import killed_after_six_steps, running

from regrow import wire
from regrow.supervisor.core import actions as a

MEMORY = wire.CheckpointPolicy(memory_interval_seconds=5.0)


def test_a_job_without_them_is_not_told_of_memory() -> None:
    world = running("a", "b")
    world.exit(0, signal=9)
    world.wait(1)
    assert not world.generation.spec.memory


def test_steps_that_memory_kept_are_not_lost() -> None:
    world = running("a", "b", checkpoint=MEMORY)
    assert not world.generation.spec.memory, "the first generation goes on from what its start says"
    world, start = killed_after_six_steps(checkpoint=MEMORY)
    assert world.generation.spec.memory
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == start, "what is restored when memory has nothing"
    lost = world.job.effort.lost_steps
    world.step(start + 5)
    assert world.job.effort.lost_steps == lost - 4
    assert world.job.incidents[-1].restored_step == start + 4
    assert not world.job.outcome, "a first step beyond the checkpoint is no sign of a state that was not taken up"


def test_each_tier_has_a_rate_of_its_own_failures() -> None:
    """A failure counts for storage until the job is seen to have gone on from memory; workers are told when that changes their rates."""
    world, start = killed_after_six_steps(checkpoint=MEMORY)
    begun = world.generation.spec.tier_rates
    assert begun is not None
    assert begun.storage == begun.memory, "one failure, of which nobody knows yet what it needs"
    world.take()
    world.step(start + 5)
    assert world.job.ledger.num_from_memory == 1
    world.wait(1)
    (told,) = world.take(a.TellRate)
    assert told.tier_rates.memory > 10 * told.tier_rates.storage
    world.wait(1)
    assert not world.take(a.TellRate), "told once"


def test_a_failure_that_went_to_storage_counts_there() -> None:
    world, start = killed_after_six_steps(checkpoint=MEMORY)
    world.step(start + 1)
    assert world.job.ledger.num_from_memory == 0
    rates = world.generation.spec.tier_rates
    assert rates is not None
    assert rates.storage == rates.memory, "memory might have served it, had it been saved to"


def test_a_job_without_the_tier_has_one_rate() -> None:
    world, _ = killed_after_six_steps()
    assert world.generation.spec.tier_rates is None


def test_what_storage_gave_back_is_still_lost_work() -> None:
    world, start = killed_after_six_steps(checkpoint=MEMORY)
    lost = world.job.effort.lost_steps
    world.step(start + 1)
    assert world.job.effort.lost_steps == lost


def test_where_an_older_state_is_wanted_memory_is_left_alone() -> None:
    """The newest checkpoint is damaged: what came after it must not come back either."""
    world = running("a", "b", checkpoint=MEMORY)
    newest = world.job.frontier
    world.commit(newest, damaged="block 3 is not what was committed")
    world.steps(newest + 1, newest + 2)
    world.exit(0, signal=9)
    world.wait(1)
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step < newest
    assert not world.generation.spec.memory
