"""What a new leader knows of a job that goes on: its age, and soon how well it uses its GPUs."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from world import LOST_PEER, POLICY, STARTED, World, hello, killed_after_six_steps, running, spec

from regrow import wire
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core import goodput, rates
from regrow.supervisor.core.records import Charge, LedgerRecord

HOUR = 3600.0


def next_leader(old: World, *, after: float = 3.0, ledger: LedgerRecord | None = None, greeted: tuple[str, ...] | None = None) -> World:
    """The same job as the store tells it to the leader of the next term. `greeted`: nodes that have come back; default: all."""
    new = World(POLICY)
    new.now = old.now + after
    for node in old.generation.spec.nodes if greeted is None else greeted:
        new.tell(e.NodeJoined(at=new.now, hello=hello(node)))
    members = {name: member.workers for name, member in old.generation.members.items()}
    new.tell(
        e.JobLoaded(
            at=new.now,
            spec=old.job.spec,
            generation=old.generation.spec,
            members=members,
            ledger=old.job.ledger if ledger is None else ledger,
            incidents=old.job.incidents,
            command="run",
            highest_generation=old.generation.number,
        )
    )
    return new


def test_the_rate_of_failures_is_over_the_jobs_life_and_not_over_a_term() -> None:
    world = running("n0", "n1", steps=3)
    world.now += HOUR
    world.exit(3, exit_code=1)
    world.wait(10.0)
    before = rates.failure_rate(world.job, world.now)
    assert len(world.job.ledger.charges) == 1
    after = next_leader(world)
    assert after.job.submitted_at == world.job.submitted_at
    assert rates.failure_rate(after.job, after.now) == pytest.approx(before, rel=0.01)


def test_a_ledger_of_an_older_version_counts_from_its_first_charge() -> None:
    world = running("n0", "n1", steps=3)
    first = Charge(incident="i", at=world.now - HOUR, cause="unknown", generation=1, step=1)
    after = next_leader(world, ledger=LedgerRecord(charges=(first,)))
    assert after.job.submitted_at == first.at


def test_a_job_that_is_submitted_again_begins_anew() -> None:
    world = World(POLICY)
    world.tell(e.JobLoaded(at=world.now, spec=spec(), ledger=LedgerRecord(frontier=9), submitted=True))
    assert world.job.submitted_at == world.now
    assert world.job.ledger.since == world.now


def test_goodput_is_known_again_after_a_few_steps_of_the_adopted_generation() -> None:
    world = running("n0", "n1", steps=10)
    after = next_leader(world)
    assert after.generation.adopted
    after.step(11, seconds=9.0)
    assert goodput.ratio(after.job, after.now) is None, "one step after a change of leader says nothing"
    after.steps(12, 20)
    assert after.job.effort.best_gpu_seconds_per_step is not None
    assert goodput.ratio(after.job, after.now) is not None
    assert str(after.generation.spec.mesh) in after.job.mesh_seconds


def test_goodput_and_ettr_go_on_over_a_change_of_leader() -> None:
    """The account is in the ledger; what passed between it and the new leader's first report is counted from the steps."""
    world = running("n0", "n1", steps=10)
    world.now += 100.0
    world.steps(11, 300)
    assert [action.ledger.effort.frontier for action in world.take(a.SaveLedger)] == [197]
    ratio, ettr = goodput.ratio(world.job, world.now), goodput.ettr(world.job, world.now)
    assert ratio is not None
    assert ettr is not None
    assert ettr < 0.8
    after = next_leader(world)
    assert goodput.ratio(after.job, after.now) is None, "nobody said yet which step it is"
    after.step(301, num_steps=1)
    after.steps(302, 306)
    assert goodput.ratio(after.job, after.now) == pytest.approx(ratio, rel=0.01)
    assert goodput.ettr(after.job, after.now) == pytest.approx(ettr, rel=0.01)
    third = next_leader(after)
    third.step(307)
    assert goodput.ettr(third.job, third.now) == pytest.approx(ettr, rel=0.02)


def test_a_restored_budget_and_the_account_do_not_overwrite_each_other() -> None:
    world = running("n0", "n1", steps=10)
    world.exit(3, exit_code=1)
    world.wait(10.0)
    world.steps(3, 4_000)
    books = [action.ledger for action in world.take(a.SaveLedger)]
    assert sum(one.restored_at is not None and two.restored_at is None for one, two in itertools.pairwise(books)) == 0
    assert world.job.ledger.restored_at is not None
    assert world.job.ledger.effort is not None


def test_word_of_a_checkpoint_that_was_removed_since_does_not_bring_it_back() -> None:
    """An agent keeps what it could not tell while nobody led: by then its retention has removed the older ones."""
    world = running("n0", "n1", steps=10, commit=None)
    world.commit(8)
    world.commit(10)
    world.commit(6)
    assert sorted(world.job.checkpoints) == [8, 10]
    world.commit(8, evidence=("replica_consistent",))
    assert world.job.checkpoints[8].evidence == ("replica_consistent",)
    world.step(11)
    world.commit(11)
    assert 11 in world.job.checkpoints


@pytest.mark.parametrize(
    ("told", "counted"),
    [
        pytest.param({"a": 4, "b": 4}, 4, id="both say where they went on"),
        pytest.param({"a": 4, "b": 3}, 3, id="never more than the lowest says"),
        pytest.param({"a": 9, "b": 9}, 6, id="never beyond the frontier of the fault"),
        pytest.param({"a": 0, "b": 0}, 0, id="what storage gave"),
        pytest.param({}, 0, id="agents that were restarted too do not know"),
    ],
)
def test_a_leader_that_comes_in_mid_recovery_learns_from_the_members_what_they_took_up(told: dict[str, int], counted: int) -> None:
    """Agents repeat the phases of a generation to each new leader; its first step may have been told to the one before."""
    old, start = killed_after_six_steps(checkpoint=wire.CheckpointPolicy(memory_interval_seconds=5.0))
    assert old.generation.spec.memory
    new = next_leader(old)
    for node, kept in told.items():
        for phase in STARTED:
            step = start + kept if phase == "restored" else -1
            new.tell(e.MemberPhase(at=new.now, node=node, job="j", generation=new.generation.number, phase=phase, step=step))
    new.step(start + 8)
    incident = new.job.incidents[-1]
    assert incident.closed
    assert incident.restored_step == start + counted
    assert incident.frontier == start + 6


def test_a_new_leader_loses_no_member_that_has_not_greeted_it_yet_for_a_failed_worker() -> None:
    """Leader and worker were killed in one moment: who comes back first tells of lost peers, the others are on their way."""
    after = next_leader(running("n0", "n1", "n2"), greeted=("n0",))
    after.view = msgspec.structs.replace(after.view, term_at=after.now)
    after.exit(0, exit_code=1, error=LOST_PEER)
    after.wait(1.0)
    assert not after.job.incidents, "nobody is lost for not having greeted yet"
    for node in ("n1", "n2"):
        after.tell(e.NodeJoined(at=after.now, hello=hello(node)))
    after.exit(2, signal=9)
    after.wait(POLICY.takeover_seconds)
    incident = after.job.incidents[-1]
    assert (incident.kind, incident.rank) == ("worker_exit", 2)
    assert set(after.generation.spec.nodes) == {"n0", "n1", "n2"}
