"""Actions of ours as facts: what was decided is in the view before it is dispatched."""

from __future__ import annotations

from typing import assert_never

import msgspec

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core import goodput, rates
from regrow.supervisor.core.fold_generation import open_incident, with_incident
from regrow.supervisor.core.fold_nodes import put, with_member
from regrow.supervisor.core.ledger import MACHINE
from regrow.supervisor.core.memo import Memo
from regrow.supervisor.core.records import IncidentSeed
from regrow.supervisor.core.view import (
    AskedAgain,
    Boundary,
    GenerationView,
    Incident,
    JobView,
    Member,
    NodeView,
    Observation,
    Outcome,
    View,
)

_change = msgspec.structs.replace
_INCIDENT_HISTORY = 256
_RETRY_SECONDS = 0.5
_OBSERVED_HISTORY = 512


def issued(view: View, event: e.Issued) -> View:
    """An action is on its way."""
    view = _change(view, next_seq=max(view.next_seq, event.seq + 1))
    action, at = event.action, event.at
    match action:
        case a.StopWorkers():
            node = view.nodes.get(action.node)
            return put(view, _change(node, stop_sent=(action.generation, at))) if node is not None else view
        case a.ReleaseNode():
            node = view.nodes.get(action.node)
            return put(view, _change(node, released=True)) if node is not None else view
        case a.ClearHealth():
            node = view.nodes.get(action.node)
            return put(view, _change(node, clear_asked=False, clear_sent_at=at)) if node is not None else view
        case a.AskAgain():
            node = view.nodes.get(action.node)
            asked = AskedAgain(at=at, witnesses=action.witnesses)
            return put(view, _change(node, asked_again=asked)) if node is not None else view
        case a.SetQuarantine():
            return _quarantine(view, action)
        case a.Observe():
            made = Observation(at=at, kind=action.kind, would=action.would, why=action.why, job=action.job, node=action.node)
            return _change(view, observed=dict([*view.observed.items(), (action.key, made)][-_OBSERVED_HISTORY:]))
        case a.Page():
            return _change(view, pages=view.pages | {action.key: at})
        case _:
            job = view.jobs.get(action.job)
            if job is None:
                return view
            view = _change(view, jobs=view.jobs | {action.job: _of_job(job, action, at)})
            return _use_up_store(view, action.master_address) if isinstance(action, a.StartMember) else view


def _use_up_store(view: View, address: str) -> View:
    """A TCPStore that a generation got is nobody's spare any more, whatever its node has said last."""
    owner = _owners.get((view.nodes,), address, lambda: next((node for node in view.nodes.values() if node.spare_store == address), None))
    return put(view, _change(owner, spare_store="")) if owner is not None else view


_owners: Memo[NodeView | None] = Memo()
"""Thousands of members start with one address: it is looked up once per change of the nodes."""


_OfJob = (
    a.RecordGeneration
    | a.StartMember
    | a.AskSave
    | a.EndBoundary
    | a.TellRate
    | a.AskStacks
    | a.AskReach
    | a.SetCheckpoint
    | a.ParkJob
    | a.EndJob
    | a.SaveLedger
)


def _of_job(job: JobView, action: _OfJob, at: float) -> JobView:
    current = job.generation
    match action:
        case a.RecordGeneration():
            return _record(job, action, at)
        case a.ParkJob():
            return _park(job, action, at)
        case a.EndJob():
            return _end(job, action, at)
        case a.StartMember():
            return _started(job, action, at)
        case a.AskSave():
            return _change(job, boundary=_boundary(job, action, at))
        case a.EndBoundary():
            return _change(job, boundary=None, boundary_failed_at=at)
        case a.TellRate():
            told = {"rate_told": action.failures_per_second, "tiers_told": action.tier_rates}
            return _change(job, generation=_change(current, **told)) if current else job
        case a.AskStacks():
            return _change(job, generation=_change(current, stacks_asked_at=at)) if current else job
        case a.AskReach():
            return _change(job, generation=_change(current, reach_asked_at=at, reach_asked=tuple(action.peers))) if current else job
        case a.SetCheckpoint():
            return _checkpoint(job, action)
        case a.SaveLedger():
            return _corrected(_change(job, ledger=action.ledger), action)
        case _:
            assert_never(action)


def _corrected(job: JobView, action: a.SaveLedger) -> JobView:
    """The incident that an order to write the ledger corrects, if it does."""
    if not action.incident:
        return job
    items = tuple(
        _change(item, cause="unknown", text=f"{item.text}; {action.corrected}") if item.id == action.incident else item
        for item in job.incidents
    )
    return _change(job, incidents=items, returned=None)


def _record(job: JobView, action: a.RecordGeneration, at: float) -> JobView:
    spec, before = action.spec, job.generation
    members = {name: Member(node=name, group_rank=index, workers=action.members[name]) for index, name in enumerate(spec.nodes)}
    generation = GenerationView(spec=spec, members=members, stage="recording", created_at=at)
    checkpoints = job.checkpoints | {
        step: _change(job.checkpoints[step], damaged=why) for step, why in action.damaged.items() if step in job.checkpoints
    }
    restored = spec.restore.step if spec.restore else 0
    unstarted = job.unstarted
    charged = action.incident is not None and bool(action.incident.cause) and not _is_open(job, action.incident)
    tried = before is not None and before.first_step_at is None and any(member.sent_at is not None for member in before.members.values())
    if tried and not charged:
        unstarted += 1
    job = _lost_work(job, restored)
    job = _incident(job, action.incident, at, before, spec.generation, restored)
    return _change(
        job,
        generation=generation,
        before=before if before is not None and before.stage != "ended" else None,
        highest_generation=max(job.highest_generation, spec.generation),
        checkpoints=checkpoints,
        ledger=action.ledger,
        boundary=None,
        parked="",
        paused=False,
        last_formed_at=at,
        not_before=action.not_before,
        unstarted=unstarted,
        frontier=restored,
        effort_base=job.effort_base if before is not None or job.incidents else restored,
    )


def _is_open(job: JobView, seed: IncidentSeed) -> bool:
    last = open_incident(job)
    return last is not None and last.id == seed.id


def _lost_work(job: JobView, restored: int) -> JobView:
    num = max(0, job.frontier - restored)
    if num == 0 or job.generation is None:
        return job
    return _change(job, effort=goodput.rolled_back(job.effort, num_steps=num, step_seconds=rates.median_step(job) or 0.0))


def _incident(
    job: JobView, seed: IncidentSeed | None, at: float, before: GenerationView | None, after: int, restored: int | None
) -> JobView:
    """Open an incident, or carry the open one over to the generation that follows."""
    last = open_incident(job)
    if last is not None and (seed is None or not seed.cause or seed.id == last.id):
        last = _change(last, generation_after=after, decided_at=at, restored_step=restored, marks={}, rung=seed.rung if seed else last.rung)
        if seed is not None and seed.cause in MACHINE and last.cause not in MACHINE:
            last = _change(last, kind=seed.kind, cause=seed.cause, text=f"{last.text}; {seed.text}")
        return with_incident(job, last)
    if seed is None or not seed.cause:
        return job
    if last is not None:
        job = with_incident(job, _change(last, closed=True))
    made = Incident(
        id=seed.id,
        kind=seed.kind,
        cause=seed.cause,
        symptom_at=seed.symptom_at,
        detected_at=seed.detected_at,
        decided_at=at,
        node=seed.node,
        rank=seed.rank,
        text=seed.text,
        rung=seed.rung,
        generation_before=before.number if before else 0,
        generation_after=after,
        frontier=max(job.frontier, last.frontier) if last is not None else job.frontier,
        restored_step=restored,
    )
    return _change(job, incidents=(*job.incidents, made)[-_INCIDENT_HISTORY:])


def _park(job: JobView, action: a.ParkJob, at: float) -> JobView:
    job = _incident(job, action.incident, at, job.generation, 0, None)
    generation = _change(job.generation, stage="ended") if job.generation else None
    return _change(
        job,
        generation=generation,
        parked=action.reason if action.state == "parked" else "",
        paused=action.state == "paused",
        boundary=None,
        ledger=action.ledger,
    )


def _end(job: JobView, action: a.EndJob, at: float) -> JobView:
    outcome = Outcome(
        state=action.state,
        reason=action.reason,
        exit_code=action.exit_code,
        at=at,
        cause=action.cause,
        node=action.node,
        rank=action.rank,
        traceback=action.traceback,
    )
    last = open_incident(job)
    if last is not None:
        job = with_incident(job, _change(last, closed=True))
    generation = _change(job.generation, stage="ended") if job.generation else None
    return _change(
        job,
        outcome=outcome,
        generation=generation,
        boundary=None,
        parked="",
        paused=False,
        ledger=action.ledger,
        effort=goodput.reserve(job.effort, at, 0),
    )


def _started(job: JobView, action: a.StartMember, at: float) -> JobView:
    current = job.generation
    if current is None or current.number != action.generation or action.node not in current.members:
        return job
    member = _change(current.members[action.node], sent_at=at)
    return _change(job, generation=_change(with_member(current, member), master_address=action.master_address))


def _boundary(job: JobView, action: a.AskSave, at: float) -> Boundary:
    done = job.generation.completed_step if job.generation else None
    return Boundary(
        purpose=action.purpose,
        asked_at=at,
        deadline=at + action.deadline_seconds,
        generation=action.generation,
        asked_step=done or 0,
        stop_after=action.stop_after,
    )


def _checkpoint(job: JobView, action: a.SetCheckpoint) -> JobView:
    known = job.checkpoints.get(action.step)
    if known is None:
        return job
    evidence = tuple(dict.fromkeys((*known.evidence, *action.evidence)))
    changed = _change(known, evidence=evidence, damaged=action.damaged or known.damaged)
    return _change(job, checkpoints=job.checkpoints | {action.step: changed})


def _quarantine(view: View, action: a.SetQuarantine) -> View:
    record = action.record
    table = view.quarantine | {record.key: record}
    held = any(other.node == record.node and other.state in ("quarantined", "burn_in", "suspect") for other in table.values())
    clears = view.clears if held else view.clears - {record.node}
    return _change(view, quarantine=table, clears=clears)


def failed(view: View, event: e.ActionFailed) -> View:
    """An action had no effect: what it would have done is open again."""
    job = view.jobs.get(event.job)
    current = job.generation if job is not None else None
    if event.kind in ("stop_workers", "clear_health"):
        node = view.nodes.get(event.node)
        if node is None:
            return view
        if event.kind == "stop_workers":
            return put(view, _change(node, stop_sent=None))
        return put(view, _change(node, clear_asked=True, clear_sent_at=None))
    if job is None or current is None or current.number != event.generation:
        return view
    if event.kind == "record_generation" and current.stage == "recording":
        back = job.before if job.before is not None else _change(current, stage="ended")
        job = _change(job, generation=back, before=None, not_before=event.at + _RETRY_SECONDS)
    elif event.kind == "start_member" and event.node in current.members:
        job = _change(job, generation=with_member(current, _change(current.members[event.node], sent_at=None)))
    return _change(view, jobs=view.jobs | {event.job: job})
