"""fold(view, event) -> view: records facts and never decides. Total over the closed union of events."""

from __future__ import annotations

from typing import assert_never

import msgspec

from regrow import wire
from regrow.supervisor.core import events as e
from regrow.supervisor.core import fold_corruption, fold_issued, fold_nodes, goodput
from regrow.supervisor.core import fold_generation as generation
from regrow.supervisor.core.records import LearnedRecord, LedgerRecord
from regrow.supervisor.core.view import CheckpointView, Effort, GenerationView, Incident, JobView, Member, Outcome, View

_change = msgspec.structs.replace


def fold(view: View, event: e.Event) -> View:
    """The view after one more fact."""
    match event:
        case e.LeaderStarted():
            return View(epoch=event.epoch, term_at=event.at, automation=view.automation)
        case e.EpochRaised():
            return _change(view, epoch=max(view.epoch, event.epoch))
        case e.StoreChanged():
            return _change(view, store_up=event.up)
        case e.Tick():
            return view
        case e.Issued():
            return fold_issued.issued(view, event)
        case e.ActionFailed():
            return fold_issued.failed(view, event)
        case e.AutomationSwitched():
            return _change(view, automation=event.on)
        case e.JobLoaded():
            return _job_loaded(view, event)
        case e.CommandGiven():
            return _command(view, event)
        case e.QuarantineLoaded():
            return _change(
                view,
                quarantine=view.quarantine | {record.key: record for record in event.records},
                cordoned=view.cordoned | set(event.cordoned) | set(event.drained),
                drains=view.drains | set(event.drained),
            )
        case e.NodeJoined() | e.NodeDisconnected() | e.NodeSilent() | e.NodeHeard() | e.LeaseExpired() | e.SpareStoreChanged():
            return fold_nodes.liveness(view, event)
        case e.CheckpointGone():
            return _checkpoint_gone(view, event)
        case e.NodeHealth() | e.NodeLeaving() | e.NodeCommandGiven():
            return fold_nodes.condition(view, event)
        case _:
            return _of_generation(view, event)


_OfGeneration = (
    e.GenerationRecorded
    | e.MemberPhase
    | e.WorkersExited
    | e.StepsCompleted
    | e.DigestsReported
    | e.AtRestMismatch
    | e.ReceivedWrong
    | e.NonFiniteSeen
    | e.ReplayJudged
    | e.ProgressStalled
    | e.ProgressResumed
    | e.OutputKept
    | e.PeersWereProbed
    | e.RestoreWasRefused
    | e.StartWasRefused
    | e.CheckpointMoved
)


def _of_generation(view: View, event: _OfGeneration) -> View:
    if isinstance(event, e.PeersWereProbed) and not event.job:
        return fold_nodes.probed_again(view, event)
    job = view.jobs.get(event.job)
    if job is None:
        return view
    if isinstance(event, e.CheckpointMoved):
        return with_job(view, generation.checkpoint_moved(job, event))
    if isinstance(event, e.MemberPhase | e.WorkersExited):
        view = fold_nodes.running(view, event)
    current = job.generation
    if current is None or current.number != event.generation or current.stage == "ended":
        return view
    if isinstance(event, e.StartWasRefused) and event.node_unusable:
        view = fold_nodes.unusable(view, event.node, event.reason)
    return with_job(view, _fold_current(view, job, current, event))


def _fold_current(view: View, job: JobView, current: GenerationView, event: _OfGeneration) -> JobView:
    match event:
        case e.GenerationRecorded():
            return generation.recorded(job, current, event)
        case e.MemberPhase():
            return generation.member_phase(job, current, event)
        case e.WorkersExited():
            return generation.exited(job, current, event)
        case e.StepsCompleted():
            return generation.steps_completed(job, current, event)
        case e.DigestsReported() | e.AtRestMismatch() | e.ReceivedWrong() | e.NonFiniteSeen() | e.ReplayJudged():
            return fold_corruption.found(view, job, current, event)
        case e.ProgressStalled():
            return generation.stalled(job, current, event)
        case e.ProgressResumed():
            moving = _change(current, stall=None, stacks_asked_at=None, stacks={}, reach_asked_at=None, reach={}, progress_at=event.at)
            return _change(job, generation=moving)
        case e.OutputKept():
            return generation.output(job, current, event)
        case e.PeersWereProbed():
            return generation.probed(job, current, event)
        case e.RestoreWasRefused():
            return generation.restore_refused(job, current, event)
        case e.StartWasRefused():
            return generation.start_refused(job, current, event)
        case e.CheckpointMoved():
            return generation.checkpoint_moved(job, event)
        case _:
            assert_never(event)


def with_job(view: View, job: JobView) -> View:
    """The view with this job in place of its older self."""
    return _change(view, jobs=view.jobs | {job.spec.job: job})


def _job_loaded(view: View, event: e.JobLoaded) -> View:
    ledger = event.ledger or LedgerRecord()
    since = ledger.since or min([event.at, *(charge.at for charge in ledger.charges)])
    ledger = _change(ledger, since=since)
    checkpoints = {record.step: checkpoint(record, event.at) for record in event.checkpoints}
    usable = [item.step for item in checkpoints.values() if not item.damaged]
    frontier = max([ledger.frontier, *usable]) if not event.spec.checkpoint.fresh_start else 0
    reserved = goodput.reserved(view, event.spec)
    outcome = _outcome(ledger, event.at)
    generation = _adopted(event) if event.generation is not None else None
    if generation is not None and outcome is not None:
        generation = _change(generation, stage="ended")
    job = JobView(
        spec=event.spec,
        submitted_at=since,
        effort=Effort(since=event.at, reserved_at=event.at, num_reserved=reserved),
        command=event.command,
        command_at=event.at,
        generation=generation,
        highest_generation=max(event.highest_generation, event.generation.generation if event.generation else 0),
        checkpoints=checkpoints,
        num_damaged=event.num_damaged,
        ledger=ledger,
        frontier=frontier,
        effort_base=frontier,
        past=ledger.effort if outcome is None else None,
        learned=event.learned or LearnedRecord(),
        outcome=outcome,
        paused=event.command == "pause" and event.generation is None,
        incidents=_told(event.incidents, generation),
    )
    return with_job(view, job)


def _told(incidents: tuple[Incident, ...], generation: GenerationView | None) -> tuple[Incident, ...]:
    """Incidents of earlier terms. The last one goes on only with the generation that was to end it."""
    if not incidents or incidents[-1].closed:
        return incidents
    goes_on = generation is not None and generation.stage != "ended" and incidents[-1].generation_after == generation.number
    return incidents if goes_on else (*incidents[:-1], _change(incidents[-1], closed=True))


def _outcome(ledger: LedgerRecord, at: float) -> Outcome | None:
    match ledger.state:
        case "done" | "failed" | "stopped":
            return Outcome(state=ledger.state, reason=ledger.reason, exit_code=ledger.exit_code, at=at, cause=ledger.cause)
        case _:
            return None


def _adopted(event: e.JobLoaded) -> GenerationView:
    spec = event.generation
    assert spec is not None
    members = {
        name: Member(node=name, group_rank=index, workers=event.members.get(name, ()), sent_at=event.at)
        for index, name in enumerate(spec.nodes)
    }
    return GenerationView(
        spec=spec,
        members=members,
        stage="starting",
        created_at=event.at,
        recorded_at=event.at,
        adopted=True,
        progress_at=event.at,
    )


def checkpoint(record: wire.CheckpointRecord, at: float) -> CheckpointView:
    """A committed checkpoint as the core keeps it."""
    return CheckpointView(
        step=record.step,
        generation=record.generation,
        directory=record.directory,
        record_digest=record.record_digest,
        samples=record.samples,
        committed_at=at,
        evidence=record.evidence,
        damaged=record.damaged,
    )


def _checkpoint_gone(view: View, event: e.CheckpointGone) -> View:
    job = view.jobs.get(event.job)
    if job is None or event.step not in job.checkpoints:
        return view
    kept = {step: item for step, item in job.checkpoints.items() if step != event.step}
    return with_job(view, _change(job, checkpoints=kept))


def _command(view: View, event: e.CommandGiven) -> View:
    job = view.jobs.get(event.job)
    if job is None or job.outcome is not None:
        return view
    paused = job.paused and event.command != "run"
    return with_job(view, _change(job, command=event.command, command_at=event.at, paused=paused, boundary=None))
