"""Repeated micro-steps and numbers that are not finite: what the core makes of them."""

from __future__ import annotations

import pytest
from world import World, running

from regrow import wire
from regrow.ids import MeshShape
from regrow.supervisor.core import events as e
from regrow.supervisor.core import sdc


def not_finite(world: World, first: int, last: int, ranks: dict[int, str]) -> None:
    for number in range(first, last + 1):
        world.step(number)
        world.tell(e.NonFiniteSeen(at=world.now, job="j", generation=world.generation.number, step=number, ranks=ranks))


def judged(world: World, step: int, verdict: str, **more: object) -> None:
    told = wire.ReplayVerdict(verdict=verdict, reason=f"rank {more.get('once') or more.get('suspects')}", **more)  # type: ignore[arg-type]
    world.tell(e.ReplayJudged(at=world.now, job="j", generation=world.generation.number, step=step, verdict=told))


def test_a_named_suspect_is_put_out_and_checkpoints_since_the_last_clean_check_are_not_used() -> None:
    world = running("a", "b", "c", "d")
    world.steps(1, 3)
    judged(world, 3, "agree")
    world.commit(3)
    world.steps(4, 6)
    world.commit(6)
    judged(world, 6, "diverged", suspects=(5,))
    world.wait(1)
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.rank, incident.node, incident.cause) == ("sdc", 5, "c", "infrastructure")
    assert world.view.quarantine["GPU-c-1"].state == "quarantined"
    assert "c" not in world.generation.spec.nodes
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == 3
    assert world.job.digest_checks == {"replay_agree": 1, "replay_diverged": 1}


def test_replicas_that_agree_do_not_verify_against_a_wrong_gradient() -> None:
    """Digests agree at every step: a wrong gradient went into all replicas alike. Only the clean check counts."""
    world = running("a", "b", "c", "d")
    for step in (1, 2, 3, 4):
        world.step(step)
        world.tell(e.DigestsReported(at=world.now, job="j", generation=1, step=step, digests=dict.fromkeys(range(8), "aa")))
    world.commit(4)
    judged(world, 4, "diverged", suspects=(5,))
    world.wait(1)
    assert world.generation.spec.restore is None or world.generation.spec.restore.step < 4


@pytest.mark.parametrize("told", [True, False])
def test_without_a_replica_memory_at_rest_says_which_checkpoints_are_sound(told: bool) -> None:
    """Parameters sharded over the replicas: nobody agrees with anybody. What a later look at the same memory found unchanged is gone on
    with; where no rank looked, all of this generation is in doubt."""
    world = running("a", "b", "c", "d", steps=0, commit=None)
    for step in range(1, 7):
        world.step(step)
        digests = dict.fromkeys(range(8), wire.AT_REST) if told else {}
        world.tell(e.DigestsReported(at=world.now, job="j", generation=1, step=step, digests=digests))
        if step in (3, 6):
            world.commit(step)
    assert not world.job.agreed_steps, "a counter of steps that is equal everywhere is no agreement"
    world.tell(e.AtRestMismatch(at=world.now, job="j", generation=1, step=7, rank=5, tensor="model.x"))
    world.wait(1)
    restore = world.generation.spec.restore
    assert (restore.step if restore else 0) == (3 if told else 0), "step 6 was saved and not looked at again"


def test_one_wrong_result_that_was_replaced_is_remembered_the_second_accuses() -> None:
    world = running("a", "b", "c", "d")
    world.steps(1, 4)
    judged(world, 2, "diverged", once=(5,), repaired=True)
    judged(world, 3, "diverged", once=(1,), repaired=True)
    world.wait(1)
    assert world.generation.number == 1
    assert not world.job.incidents
    judged(world, 4, "diverged", once=(5,), repaired=True)
    world.wait(1)
    assert world.job.incidents[-1].rank == 5
    assert world.view.quarantine["GPU-c-1"].state == "quarantined"


@pytest.mark.parametrize(("days", "accused"), [(3, True), (13, True), (15, False)])
def test_suspicion_stays_with_the_hardware_for_weeks_whatever_was_clean_meanwhile(days: float, accused: bool) -> None:
    """Wrong once, a restart, many clean checks, and wrong once again: half of the first is left after two weeks."""
    world = running("a", "b", "c", "d")
    world.steps(1, 3)
    judged(world, 3, "diverged", once=(5,), repaired=True)
    world.wait(1)
    record = world.view.quarantine["GPU-c-1"]
    assert (record.state, record.suspicion) == ("healthy", 1.0), "counted once, and still in use"
    world.exit(0, signal=9)
    world.wait(1)
    assert "c" in world.generation.spec.nodes
    world.steps(3, 5)
    world.wait(days * 86_400)
    for step in (6, 7):
        world.step(step)
        judged(world, step, "agree")
    rank = next(rank for rank in range(8) if world.generation.device_of(rank) == "GPU-c-1")
    world.step(8)
    judged(world, 8, "diverged", once=(rank,), repaired=True)
    world.wait(1)
    record = world.view.quarantine["GPU-c-1"]
    assert (record.state == "quarantined") == accused, record
    assert record.suspicion == pytest.approx(1.0 if accused else 1.0 + 0.5 ** (days / 14), rel=0.01), "an accusation is a strike"
    assert accused == ("in earlier generations" in world.job.incidents[-1].text)


def test_a_mismatch_without_a_name_rolls_back_and_blames_nobody() -> None:
    world = running("a", "b")
    world.steps(1, 2)
    judged(world, 2, "diverged")
    world.wait(1)
    assert world.generation.number == 2
    assert not world.view.quarantine
    assert set(world.generation.spec.nodes) == {"a", "b"}


def test_skipped_is_counted_and_nothing_more() -> None:
    world = running("a", "b")
    world.steps(1, 2)
    judged(world, 2, "skipped")
    world.wait(1)
    assert world.generation.number == 1
    assert world.job.digest_checks == {"replay_skipped": 1}


def test_suspects_of_two_nodes_are_nobody() -> None:
    world = running("a", "b")
    world.steps(1, 2)
    judged(world, 2, "diverged", suspects=(1, 2))
    world.wait(1)
    assert not world.view.quarantine
    assert world.job.incidents[-1].kind == "sdc"


@pytest.mark.parametrize(
    ("ranks", "cause", "text"),
    [
        ({2: "w"}, "infrastructure", "rank 2 alone"),
        (dict.fromkeys(range(4), "w"), "program", "4 ranks"),
        ({2: "w", 3: "w"}, "infrastructure", "all of replica 1"),
        ({1: "w", 2: "w"}, "program", "2 ranks"),
        ({0: "loss"}, "program", "all ranks"),
    ],
)
def test_k03_not_finite_is_sorted_by_who_made_it(ranks: dict[int, str], cause: str, text: str) -> None:
    """All replicas alike: the program. One rank, or the ranks of one replica: a part."""
    world = running("a", "b", mesh=MeshShape(dp=2, tp=2))
    world.commit(3)
    not_finite(world, 4, 6, ranks)
    world.wait(1)
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.cause) == ("non_finite", cause)
    assert text in incident.text


def test_k03_what_comes_again_on_the_same_rank_is_not_called_hardware() -> None:
    world = running("a", "b")
    for step in (4, 5, 6):
        world.step(step)
        world.tell(e.NonFiniteSeen(at=world.now, job="j", generation=1, step=step, ranks={2: "w"}, again=(2,)))
    world.wait(1)
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.cause, incident.rank) == ("non_finite", "unknown", 2)
    assert "again when its work was repeated" in incident.text


def evidence(receivers: int, received: dict[int, dict[int, str]]) -> dict[int, wire.DigestEvidence]:
    ranks = range(receivers)
    return {rank: wire.DigestEvidence(received=received.get(rank, {}), receivers=receivers) for rank in ranks}


@pytest.mark.parametrize(
    ("size", "received", "rank"),
    [
        (4, {0: {2: "w"}, 1: {2: "w"}, 2: {2: "w"}, 3: {2: "w"}}, 2),
        (4, {0: {2: "w"}, 1: {2: "w"}, 3: {2: "w"}}, 2),
        (4, {3: {2: "w"}}, 3),
        (4, {3: {0: "v", 1: "v", 2: "w"}}, 3),
        (4, {0: {2: "w"}, 1: {2: "w"}}, -1),
        (4, {0: {2: "w"}, 1: {3: "w"}}, -1),
        (2, {0: {1: "w"}}, -1),
        (2, {0: {1: "w"}, 1: {1: "w"}}, 1),
    ],
)
def test_whose_fault_it_is_that_a_shard_arrived_otherwise(size: int, received: dict[int, dict[int, str]], rank: int) -> None:
    found = sdc.blame(evidence(size, received))
    assert found is not None
    assert found.rank == rank, found
    assert sdc.blame(evidence(size, {})) is None


@pytest.mark.parametrize("rank", [5, -1])
def test_a_wrong_all_gather_goes_back_before_its_step_and_puts_out_whom_it_names(rank: int) -> None:
    world = running("a", "b", "c", "d", steps=0, commit=None)
    for step in range(1, 7):
        world.step(step)
        world.tell(e.DigestsReported(at=world.now, job="j", generation=1, step=step, digests=dict.fromkeys(range(8), wire.AT_REST)))
        if step in (3, 6):
            world.commit(step)
    world.tell(e.ReceivedWrong(at=world.now, job="j", generation=1, rank=rank, step=6, reason="model.w of rank 5 arrived otherwise"))
    world.wait(1)
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.rank) == ("sdc", rank)
    assert ("GPU-c-1" in world.view.quarantine) == (rank == 5)
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == 3, "step 6 was computed from what arrived wrong"
    assert world.job.digest_checks["received_wrong"] == 1


def test_a_vote_says_in_which_tensor_and_block() -> None:
    world = running("a", "b", "c", "d")
    world.step(1)
    digests = {rank: "aa" if rank != 3 else "bb" for rank in range(8)}
    world.tell(e.DigestsReported(at=world.now, job="j", generation=1, step=1, digests=digests, located="model.w differs in block 2"))
    world.wait(1)
    assert world.job.incidents[-1].text.endswith("; model.w differs in block 2")


@pytest.mark.parametrize(
    ("again", "accused"),
    [
        ({0: "a0", 1: "b0", 2: "a0", 3: "b0"}, "GPU-b-1"),  # rank 3 was wrong the first time
        ({0: "a0", 1: "b9", 2: "a0", 3: "b9"}, "GPU-a-1"),  # rank 1 was
        ({0: "a0", 1: "c4", 2: "a0", 3: "c4"}, ""),  # another digest than both: the step does not repeat itself
        ({0: "a7", 1: "b0", 2: "a7", 3: "b0"}, ""),  # nor does it at the position that agreed
    ],
)
def test_of_two_replicas_the_one_is_named_whose_result_does_not_come_again(again: dict[int, str], accused: str) -> None:
    """A tie names nobody and goes back. Then the same step, done again from the same state, tells who was right."""
    world = running("a", "b", mesh=MeshShape(dp=2, tp=2), steps=0, commit=None)
    for step in (1, 2, 3):
        world.step(step)
        agreed = {0: "x", 1: "y", 2: "x", 3: "y"}
        world.tell(e.DigestsReported(at=world.now, job="j", generation=world.generation.number, step=step, digests=agreed))
    world.commit(3)
    world.step(4)
    world.tell(e.DigestsReported(at=world.now, job="j", generation=1, step=4, digests={0: "a0", 1: "b0", 2: "a0", 3: "b9"}))
    world.wait(1)
    assert world.generation.number == 2
    assert not world.view.quarantine
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == 3
    world.step(4)
    world.tell(e.DigestsReported(at=world.now, job="j", generation=2, step=4, digests=again))
    world.wait(1)
    assert set(world.view.quarantine) == ({accused} if accused else set())
    assert world.job.ledger.undecided is None
    assert (world.generation.number > 2) == bool(accused)
