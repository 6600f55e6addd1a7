from __future__ import annotations

import pytest
from world import LOST_PEER, POLICY, PROGRAM, World, hello, running

from regrow import wire
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core import phases


def test_program_error_before_the_first_step_stops_at_once() -> None:
    world = running("a", "b", steps=0, commit=None)
    world.exit(3, exit_code=1, error=PROGRAM, last_step=-1)
    world.wait(1)
    outcome = world.job.outcome
    assert outcome is not None
    assert (outcome.state, outcome.exit_code, outcome.rank, outcome.node) == ("failed", 78, 3, "b")
    assert "ValueError: bad" in outcome.traceback
    assert not world.take(a.RecordGeneration)[1:]
    assert world.view.nodes["a"].running is None


def test_plain_script_is_restarted_once_and_stopped_at_the_same_place() -> None:
    world = running("a", steps=0, commit=None, mesh=None, global_batch=0, checkpoint=wire.CheckpointPolicy(), knows_regrow=False)
    world.exit(1, exit_code=1, error=PROGRAM, last_step=-1)
    world.wait(1)
    assert world.job.outcome is None
    assert world.generation.number == 2
    world.exit(1, exit_code=1, error=PROGRAM, last_step=-1)
    world.wait(5)
    assert world.job.outcome is not None
    assert "same place" in world.job.outcome.reason


@pytest.mark.parametrize("line", ["ImportError: no module named x", "SyntaxError: invalid syntax"])
def test_error_of_the_program_text_is_never_tried_twice(line: str) -> None:
    world = running("a", steps=0, commit=None, mesh=None, global_batch=0)
    world.exit(0, exit_code=1, error=f"Traceback\n{line}", last_step=-1)
    world.wait(1)
    assert world.job.outcome is not None
    assert world.job.outcome.exit_code == 78


def test_same_place_twice_stops_and_progress_in_between_does_not() -> None:
    world = running("a", "b")
    world.exit(0, exit_code=1, error=PROGRAM)
    world.wait(1)
    assert world.generation.number == 2
    world.steps(3, 9)
    world.exit(0, exit_code=1, error=PROGRAM)
    world.wait(1)
    assert world.generation.number == 3
    world.exit(0, exit_code=1, error=PROGRAM)
    world.wait(5)
    assert world.job.outcome is not None
    assert "twice at the same place at step 9" in world.job.outcome.reason


def test_signal_at_every_start_ends_without_progress() -> None:
    world = running("a", "b", steps=0, commit=None)
    for _ in range(20):
        if world.job.outcome is not None:
            break
        world.exit(0, signal=11, last_step=-1)
        world.wait(120)
    assert world.job.outcome is not None
    assert "no progress: 6 failures" in world.job.outcome.reason
    assert world.job.highest_generation == 6


def test_crashes_with_progress_go_on_until_the_budget_is_used_up() -> None:
    world = running("a", "b", max_restarts=3)
    step = 3
    for number in range(2, 5):
        world.exit(0, exit_code=1, error=PROGRAM)
        world.wait(1)
        assert world.generation.number == number
        world.steps(3, step + 2)
        step += 2
    world.exit(0, exit_code=1, error=PROGRAM)
    world.wait(1)
    assert world.job.outcome is not None
    assert "restart 4 of 3 by cause program" in world.job.outcome.reason


def test_budget_is_restored_by_healthy_progress() -> None:
    world = running("a", "b", max_restarts=1)
    world.exit(0, signal=9)
    world.wait(1)
    world.step(3)
    for number in range(4, 80):
        world.step(number, after=60.0)
    assert world.job.ledger.restored_at is not None
    world.exit(0, signal=9)
    world.wait(1)
    assert world.job.outcome is None
    assert world.generation.number == 3


def test_victims_wait_for_an_explanation() -> None:
    world = running("a", "b")
    world.exit(0, exit_code=1, error=LOST_PEER)
    world.wait(0.5)
    assert world.generation.number == 1
    world.exit(3, signal=9)
    world.wait(0.2)
    assert world.generation.number == 2
    incident = world.job.incidents[-1]
    assert (incident.rank, incident.cause) == (3, "unknown")


def test_victims_without_explanation_restart_in_the_end() -> None:
    world = running("a", "b")
    world.exit(0, exit_code=1, error=LOST_PEER)
    world.wait(POLICY.victim_seconds + 0.1)
    assert world.generation.number == 2


def test_torn_down_workers_are_no_symptom() -> None:
    world = running("a", "b")
    world.exit(0, signal=9, torn_down=True)
    world.wait(10)
    assert world.generation.number == 1


def test_zero_without_declared_end_is_a_failure_and_all_declared_is_done() -> None:
    world = running("a")
    world.exit(0, exit_code=0)
    world.wait(1)
    assert world.generation.number == 2
    for rank in (0, 1):
        world.exit(rank, exit_code=0, declared_end=True)
    assert world.job.outcome is not None
    assert (world.job.outcome.state, world.job.outcome.exit_code) == ("done", 0)


def test_kill_at_the_last_step_is_not_success() -> None:
    world = running("a")
    world.exit(0, exit_code=0, declared_end=True)
    world.exit(1, signal=9)
    world.wait(1)
    assert world.job.outcome is None
    assert "signal 9 (out of memory suspected)" in world.job.incidents[-1].text


def test_restore_refused_takes_the_older_one_and_then_says_so() -> None:
    world = running("a", "b", steps=6, commit=2)
    world.commit(5)
    world.exit(0, signal=9)
    world.wait(1)
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == 5
    refused = e.RestoreWasRefused(at=world.now, node="a", job="j", generation=2, rank=0, step=5, problem="digest differs")
    world.tell(refused)
    world.wait(1)
    assert world.generation.spec.restore.step == 2
    assert world.job.checkpoints[5].damaged == "digest differs"
    world.tell(e.RestoreWasRefused(at=world.now, node="a", job="j", generation=3, rank=0, step=2, problem="gone"))
    world.wait(1)
    assert world.job.outcome is not None
    assert world.job.outcome.exit_code == 2
    assert "step 5: digest differs" in world.job.outcome.reason


@pytest.mark.parametrize("fresh", [False, True])
def test_damaged_sole_checkpoint_is_never_a_silent_step_0(fresh: bool) -> None:
    world = World()
    world.join("a")
    made = wire.CheckpointPolicy(path="/ckpt", fresh_start=fresh)
    from world import spec

    world.tell(e.JobLoaded(at=world.now, spec=spec(max_nodes=1, checkpoint=made), num_damaged=1, submitted=True))
    if fresh:
        assert world.generation.spec.restore is None
    else:
        assert world.job.outcome is not None
        assert world.job.outcome.exit_code == 2


def test_script_that_does_not_take_up_its_state_is_stopped() -> None:
    world = running("a")
    world.exit(0, signal=9)
    world.wait(1)
    world.step(1)
    world.wait(1)
    assert world.job.outcome is not None
    assert "first completed step is 1, the restored checkpoint is of step 2" in world.job.outcome.reason


def test_hang_collects_stacks_names_the_odd_rank_and_restarts() -> None:
    world = running("a", "b")
    ranks = tuple(
        wire.RankProgress(rank=rank, started_step=4, applied_step=3, phase="step", age_seconds=9.0 + (2.0 if rank == 2 else 0))
        for rank in range(4)
    )
    world.now += 9
    world.tell(e.ProgressStalled(at=world.now, job="j", generation=1, since=world.now - 9, limit_seconds=8, ranks=ranks))
    assert len(world.take(a.AskStacks)) == 1, "at once: they are on their way while the burst is waited for"
    world.wait(0.2)
    assert world.take() == []
    for rank in (0, 1, 3):
        world.tell(e.OutputKept(at=world.now, node="a", job="j", generation=1, rank=rank, kind="stacks", text='File "x", line 1'))
    world.wait(POLICY.stacks_seconds + 0.1)
    assert world.generation.number == 2
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.rank, incident.node) == ("hang", 2, "b")
    assert world.view.quarantine["GPU-b-0"].state == "suspect"


def test_hang_of_a_process_that_does_not_run_waits_for_nothing() -> None:
    world = running("a", "b")
    world.now += 9
    ranks = tuple(
        wire.RankProgress(rank=rank, started_step=4, applied_step=3, phase="stopped" if rank == 2 else "step", age_seconds=9.0)
        for rank in range(4)
    )
    world.tell(e.ProgressStalled(at=world.now, job="j", generation=1, since=world.now - 9, limit_seconds=8, ranks=ranks))
    assert len(world.take(a.AskStacks)) == 1
    assert world.generation.number == 2
    assert world.job.incidents[-1].rank == 2


def test_silence_is_a_wait_by_itself() -> None:
    """Nobody else is late and nothing completes: the decision is made at the moment when progress excuses the silence no more."""
    world = running("a", "b", "c", min_nodes=2)
    heard = world.now - 2
    world.tell(e.NodeSilent(at=world.now, node="c", last_heard_at=heard))
    world.wait(POLICY.reconnect_seconds)
    assert world.job.incidents[-1].kind == "node_lost"
    assert world.generation.created_at == pytest.approx(heard + POLICY.reconnect_seconds)


def test_stalls_of_an_old_generation_say_nothing_about_a_new_one() -> None:
    world = running("a", "b")
    world.exit(0, signal=9)
    world.wait(1)
    world.tell(e.ProgressStalled(at=world.now, job="j", generation=1, since=world.now - 9, limit_seconds=8))
    world.wait(10)
    assert world.generation.number == 2


def test_sdc_names_quarantines_and_goes_back_to_a_verified_checkpoint() -> None:
    world = running("a", "b", "c", "d", steps=0, commit=None)
    equal = dict.fromkeys(range(8), "00")
    for number in range(1, 5):
        world.step(number)
        world.tell(e.DigestsReported(at=world.now, job="j", generation=1, step=number, digests=equal))
    world.commit(4)
    assert world.job.checkpoints[4].evidence == ("replica_consistent",)
    world.step(5)
    world.commit(5)
    world.tell(e.DigestsReported(at=world.now, job="j", generation=1, step=6, digests=equal | {5: "ff"}))
    world.wait(1)
    assert world.generation.spec.nodes == ("a", "b", "d")
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == 4
    assert world.job.checkpoints[5].damaged.startswith("written after state diverged")
    record = world.view.quarantine["GPU-c-1"]
    assert (record.state, record.node) == ("quarantined", "c")
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.rank, incident.node, incident.rung) == ("sdc", 5, "c", "roll_back")
    world.steps(5, 30)
    assert world.generation.spec.nodes == ("a", "b", "d")


def test_sdc_with_two_replicas_rolls_back_and_blames_nobody() -> None:
    from regrow.ids import MeshShape

    world = running("a", mesh=MeshShape(dp=2))
    world.tell(e.DigestsReported(at=world.now, job="j", generation=1, step=3, digests={0: "aa", 1: "bb"}))
    world.wait(1)
    assert world.generation.number == 2
    assert not world.view.quarantine
    assert "no strict majority" in world.job.incidents[-1].text


def test_at_rest_mismatch_names_the_rank_itself() -> None:
    world = running("a", "b")
    world.tell(e.AtRestMismatch(at=world.now, job="j", generation=1, rank=3, step=4, tensor="optimizer.w.exp_avg"))
    world.wait(1)
    assert world.generation.spec.nodes == ("a",)
    assert world.job.incidents[-1].rank == 3


def not_finite(world: World, first: int, last: int, ranks: dict[int, str]) -> None:
    for number in range(first, last + 1):
        world.step(number)
        world.tell(e.NonFiniteSeen(at=world.now, job="j", generation=world.generation.number, step=number, ranks=ranks))


def test_an_overflow_that_passes_is_left_alone() -> None:
    world = running("a", "b")
    not_finite(world, 4, 5, {0: "loss"})
    world.step(6)
    not_finite(world, 7, 8, {0: "loss"})
    world.steps(9, 12)
    assert world.generation.number == 1


def test_nan_of_one_rank_names_it_and_rolls_back_before_it() -> None:
    world = running("a", "b")
    world.commit(3)
    not_finite(world, 4, 5, {0: "loss", 1: "loss", 2: "layers.0.weight", 3: "loss"})
    world.commit(5)
    not_finite(world, 6, 6, dict.fromkeys(range(4), "layers.0.weight"))
    world.wait(1)
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.cause, incident.rank, incident.node) == ("non_finite", "infrastructure", 2, "b")
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == 3
    assert world.job.checkpoints[5].damaged
    assert world.view.quarantine["GPU-b-0"].state == "suspect"


def test_nan_of_the_program_is_tried_once() -> None:
    world = running("a", "b")
    not_finite(world, 4, 6, {0: "loss", 1: "loss"})
    world.wait(1)
    assert world.generation.number == 2
    assert not world.view.quarantine
    world.steps(3, 3)
    not_finite(world, 4, 6, {0: "loss", 1: "loss"})
    world.wait(10)
    assert world.job.outcome is not None
    assert "twice at the same place at step 6" in world.job.outcome.reason


def bad(device: str) -> wire.HealthVerdict:
    return wire.HealthVerdict(state="unhealthy", action="reboot", reason="XID 79", device_uuids=(device,), incident="i1")


def test_bad_health_drains_at_a_save_and_quarantines_the_gpu() -> None:
    world = running("a", "b", "c")
    world.tell(e.NodeHealth(at=world.now, node="b", verdict=bad("GPU-b-1")))
    assert world.view.quarantine["GPU-b-1"].state == "quarantined"
    assert [action.purpose for action in world.take(a.AskSave)] == ["drain"]
    world.step(4)
    world.step(5)
    assert world.generation.number == 1
    world.commit(4)
    assert world.generation.spec.nodes == ("a", "c")
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == 4
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.cause, incident.node) == ("unhealthy", "infrastructure", "b")
    world.steps(5, 6)
    assert world.job.incidents[-1].closed


def test_drain_does_not_wait_for_a_save_that_never_comes() -> None:
    world = running("a", "b", "c")
    world.tell(e.NodeHealth(at=world.now, node="b", verdict=bad("GPU-b-1")))
    world.wait(POLICY.save_seconds + 1)
    assert world.generation.spec.nodes == ("a", "c")


def test_drain_waits_when_the_rest_is_not_enough() -> None:
    world = running("a", "b", min_nodes=2)
    world.tell(e.NodeHealth(at=world.now, node="b", verdict=bad("GPU-b-1")))
    world.wait(300)
    assert world.generation.number == 1
    world.join("c")
    assert not world.job.parked


@pytest.mark.parametrize("action", ["none", "watch", "restart_app"])
def test_mild_verdicts_are_only_watched(action: str) -> None:
    world = running("a", "b")
    verdict = wire.HealthVerdict(state="degraded", action=action, reason="XID 31")
    world.tell(e.NodeHealth(at=world.now, node="b", verdict=verdict))
    world.wait(100)
    assert not world.take(a.AskSave)
    assert world.generation.number == 1


def test_leaving_node_drains_alone_and_is_released() -> None:
    world = running("a", "b")
    world.tell(e.NodeLeaving(at=world.now, node="b", reason="SIGTERM", notice_seconds=30))
    world.wait(0.1)
    assert [action.purpose for action in world.take(a.AskSave)] == ["drain"]
    world.step(4)
    world.commit(4)
    assert world.generation.spec.nodes == ("a",)
    assert [action.node for action in world.take(a.ReleaseNode)] == ["b"]
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.cause) == ("leaving", "preemption")


def test_notice_that_is_too_short_goes_on_without_a_save() -> None:
    world = running("a", "b")
    world.tell(e.NodeLeaving(at=world.now, node="b", reason="SIGTERM", notice_seconds=3))
    world.wait(3.1)
    assert world.generation.spec.nodes == ("a",)
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == 2


def test_start_refused_is_not_charged_and_tried_again_with_another_number() -> None:
    world = World(answer=False)
    world.join("a", "b")
    world.submit(max_nodes=2)
    world.tell(e.GenerationRecorded(at=world.now, job="j", generation=1))
    world.tell(e.StartWasRefused(at=world.now, node="a", job="j", generation=1, reason="port in use"))
    world.wait(1)
    assert world.generation.number == 2
    assert not world.job.ledger.charges
    assert not world.job.incidents


def test_unusable_node_is_left_out() -> None:
    world = running("a", "b")
    world.exit(0, signal=9)
    world.answer = False
    world.wait(1)
    world.tell(e.GenerationRecorded(at=world.now, job="j", generation=2))
    refused = e.StartWasRefused(at=world.now, node="b", job="j", generation=2, reason="pid 7 cannot be killed", node_unusable=True)
    world.tell(refused)
    world.wait(1)
    assert world.generation.spec.nodes == ("a",)


def test_generation_number_is_above_everything_that_anybody_saw() -> None:
    world = World()
    world.join("a", highest_generation=41)
    world.submit(max_nodes=1)
    assert world.generation.number == 42


def test_start_that_hangs_goes_on_without_the_node() -> None:
    world = World(answer=False)
    world.join("a", "b")
    world.submit(max_nodes=2)
    world.tell(e.GenerationRecorded(at=world.now, job="j", generation=1))
    world.tell(world.phase_event("a", "started", job="j", generation=1))
    world.wait(POLICY.phase_seconds + 1)
    assert world.generation.number == 2
    assert world.generation.spec.nodes == ("a",)


def test_phases_add_up_to_the_whole() -> None:
    world = running("a", "b", "c")
    world.answer = False
    world.lose("b")
    world.now += 0.05
    world.exit(0, exit_code=1, error=LOST_PEER)
    world.wait(0.2)
    world.now += 0.01
    world.tell(e.GenerationRecorded(at=world.now, job="j", generation=2))
    for name in ("stopped", "started", "rendezvous", "restored"):
        for node in ("a", "c"):
            world.now += 0.1
            world.tell(world.phase_event(node, name, job="j", generation=2))
    world.step(3)
    incident = world.job.incidents[-1]
    assert phases.whole(incident) is None
    assert phases.current(incident) == "first_step"
    world.step(4)
    incident = world.job.incidents[-1]
    spans = phases.spans(incident)
    assert list(spans) == list(phases.NAMES)
    assert sum(spans.values()) == pytest.approx(phases.whole(incident))
    assert spans["start"] == pytest.approx(0.2)
    assert phases.restart_seconds(incident) == pytest.approx(sum(spans.values()) - spans["detect"] - spans["decide"] - 1.0)


def test_store_down_makes_no_generation_and_touches_no_worker() -> None:
    world = running("a", "b")
    world.tell(e.StoreChanged(at=world.now, up=False))
    world.exit(0, signal=9)
    world.wait(60)
    assert world.generation.number == 1
    assert not world.take()
    world.tell(e.StoreChanged(at=world.now, up=True))
    assert world.generation.number == 2


def test_record_that_fails_leaves_the_old_generation_alone() -> None:
    world = running("a", "b", "c", max_nodes=3)
    world.lose("c")
    world.exit(0, exit_code=1, error=LOST_PEER)
    world.wait(1)
    world.join("c")
    world.steps(3, 60)
    assert world.job.boundary is not None
    world.answer = False
    world.commit(60)
    assert world.generation.stage == "recording"
    world.tell(e.ActionFailed(at=world.now, seq=1, kind="record_generation", job="j", generation=3, reason="no answer"))
    assert world.generation.number == 2
    assert world.generation.stage == "running"
    assert not world.take(a.StopWorkers)


def test_new_leader_adopts_what_runs() -> None:
    world = running("a", "b")
    record, members = world.generation.spec, {name: member.workers for name, member in world.generation.members.items()}
    other = World()
    other.tell(e.JobLoaded(at=other.now, spec=world.job.spec, generation=record, members=members, checkpoints=()))
    for name in ("a", "b"):
        now = wire.RunningGeneration(job="j", epoch=1, generation=1, workers=members[name], spec=record)
        other.tell(e.NodeJoined(at=other.now, hello=hello(name, highest_generation=1, running=now)))
    other.wait(30)
    other.step(9)
    other.wait(2)
    assert other.generation.number == 1
    assert not other.take(a.RecordGeneration)
    assert not other.job.incidents


def test_new_leader_forms_anew_when_nothing_runs_any_more() -> None:
    world = running("a", "b")
    record = world.generation.spec
    other = World()
    ckpt = wire.CheckpointRecord(step=2, generation=1, epoch=1, directory="/ckpt/x", record_digest="d")
    other.tell(e.JobLoaded(at=other.now, spec=world.job.spec, generation=record, checkpoints=(ckpt,)))
    other.join("a", "b", highest_generation=1)
    other.wait(10)
    assert other.generation.number == 2
    assert other.generation.spec.restore is not None
    assert other.generation.spec.restore.step == 2
    assert not other.job.ledger.charges


def test_who_alone_says_nothing_is_named_where_all_others_lost_a_peer() -> None:
    """Its shim is stopped, so nobody reaps it: the end of the one that the others lost is never told."""
    world = running("a", "b", "c")
    for rank in (0, 1, 4, 5):
        world.exit(rank, exit_code=1, error=LOST_PEER)
    world.wait(POLICY.victim_seconds + POLICY.reach_seconds + 1)
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.node, incident.rank) == ("worker_exit", "b", -1)
    assert "nothing is heard of its workers" in incident.text


def test_a_hang_without_an_odd_rank_names_the_only_member_that_cannot_be_heard() -> None:
    """A host stands still: the ranks that can be looked at wait at the same place."""
    world = running("a", "b", "c", min_nodes=1)
    ranks = tuple(wire.RankProgress(rank=rank, started_step=4, applied_step=3, phase="step", age_seconds=9.0) for rank in (0, 1, 4, 5))
    world.now += 9
    stalled = e.ProgressStalled(at=world.now, job="j", generation=1, since=world.now - 9, limit_seconds=8, ranks=ranks)
    world.tell(stalled, e.NodeSilent(at=world.now, node="b", last_heard_at=world.now - 0.1))
    for rank in (0, 1, 4, 5):
        world.tell(e.OutputKept(at=world.now, node="a", job="j", generation=1, rank=rank, kind="stacks", text='File "x", line 1'))
    world.wait(POLICY.stacks_seconds + POLICY.reach_seconds + 1)
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.node) == ("hang", "b")
