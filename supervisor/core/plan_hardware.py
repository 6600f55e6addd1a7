"""Trust in hardware: quarantine by evidence, ways out by time, by a repair, by an operator."""

from __future__ import annotations

import msgspec

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import observe, quarantine, reachable, standing
from regrow.supervisor.core.draft import Draft
from regrow.supervisor.core.memo import Memo
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.records import Accused, QuarantineRecord
from regrow.supervisor.core.view import GenerationView, JobView, NodeView, View

_moving: Memo[tuple[QuarantineRecord, ...]] = Memo()
"""Records that time or evidence may move on: those of hardware that was repaired long ago are many and stay as they are."""
_CLEAR_SECONDS = 10.0
"""Time for an agent to look at its node anew after an operator cleared it; what it says then counts."""


def plan(view: View, policy: Policy, now: float, draft: Draft) -> None:
    """Put out what its own verdict condemns, and move every record on when it is due."""
    for record in _moving.get((view.quarantine,), None, lambda: tuple(it for it in view.quarantine.values() if it.state != "healthy")):
        _move_on(view, record, policy, now, draft)
    for node in standing.notable(view):
        if node.clear_asked and node.reachable:
            action = a.ClearHealth(node=node.name)
            draft.act(action, because=f"{node.name} is repaired, says an operator: its agent ends what it holds ({node.health.reason})")
    for node in standing.notable(view):
        if node.connected and quarantine.is_bad(node):
            _condemn(view, node, policy, now, draft)
    for job in view.jobs.values():
        if job.generation is not None and job.generation.wrong_once and job.generation.divergence is None:
            _remember(view, job, job.generation, now, draft)
        if job.accused is not None:
            _accuse(view, job.accused, policy, now, draft)


def _accuse(view: View, accused: Accused, policy: Policy, now: float, draft: Draft) -> None:
    """Put out a device that does not train any more when it is found to have been wrong."""
    node = view.nodes.get(accused.place.node)
    if node is None:
        return
    key = quarantine.key_of(view, node, accused.place.device)
    previous = view.quarantine.get(key)
    if previous is not None and previous.since >= accused.at:
        return
    off = observe.held(view, policy, "quarantine") or quarantine.breaker_open(view, policy, now)
    if off:
        if f"quarantine-{key}" not in view.pages:
            reason = f"{node.name} would be quarantined ({accused.text}): {off}"
            draft.act(a.Page(key=f"quarantine-{key}", reason=reason, node=node.name), because=reason)
        return
    record = quarantine.put_out(previous, key=key, node=node, now=now, reason=accused.text, evidence=("sdc",), policy=policy)
    draft.act(a.SetQuarantine(record=record), because=f"quarantine {key} of {node.name}: {accused.text}")


def _remember(view: View, job: JobView, generation: GenerationView, now: float, draft: Draft) -> None:
    """Results that were wrong once outlive the generation, with the hardware that gave them. (What leads to an accusation is a strike.)"""
    for rank, count in generation.wrong_once.items():
        node = view.nodes.get(generation.node_of(rank))
        if node is None:
            continue
        key = quarantine.key_of(view, node, generation.device_of(rank))
        previous = view.quarantine.get(key)
        mark = f"{job.spec.job}/{generation.number}/{rank}/{count}"
        if previous is None or previous.suspected_by != mark:
            record = quarantine.remember(previous, key=key, node=node, now=now, mark=mark)
            draft.act(
                a.SetQuarantine(record=record), because=f"{key}: a result of rank {rank} was wrong once, suspicion {record.suspicion:.2f}"
            )


def _move_on(view: View, record: QuarantineRecord, policy: Policy, now: float, draft: Draft) -> None:
    node = view.nodes.get(record.node)
    if record.node in view.clears and record.state in (*quarantine.OUT, "suspect"):
        cleared = msgspec.structs.replace(record, state="probation", since=now, until=now + policy.probation_seconds)
        draft.act(a.SetQuarantine(record=cleared), because=f"{record.key}: cleared by an operator, on probation")
        return
    moved = quarantine.next_state(record, node, policy, now)
    if moved is not None:
        draft.act(a.SetQuarantine(record=moved), because=f"{record.key}: {record.state} -> {moved.state}")
        return
    if reachable.plan(view, record, node, policy, now, draft):
        return
    draft.look(quarantine.due_at(record, node, policy, now))


def _condemn(view: View, node: NodeView, policy: Policy, now: float, draft: Draft) -> None:
    named = node.health.device_uuids or (quarantine.chassis(view, node),)
    fresh = [key for key in named if key not in view.quarantine or view.quarantine[key].state not in quarantine.OUT]
    if not fresh or node.name in view.clears:
        return
    if node.clear_asked or (node.clear_sent_at is not None and now < node.clear_sent_at + _CLEAR_SECONDS):
        draft.look(node.clear_sent_at + _CLEAR_SECONDS if node.clear_sent_at is not None else None)
        return
    broken = quarantine.breaker_open(view, policy, now)
    off = observe.held(view, policy, "quarantine")
    if off:
        for key in fresh:
            would = f"quarantine {key} of {node.name}: {node.health.reason}"
            observe.note(
                view, draft, kind="quarantine", key=f"quarantine-{key}-{node.health.incident}", would=would, why=off, node=node.name
            )
    if broken or off:
        why = broken or off
        if f"quarantine-{node.name}" not in view.pages:
            page = a.Page(
                key=f"quarantine-{node.name}", reason=f"{node.name} would be quarantined ({node.health.reason}): {why}", node=node.name
            )
            draft.act(page, because=page.reason)
        return
    for key in fresh:
        record = quarantine.put_out(
            view.quarantine.get(key),
            key=key,
            node=node,
            now=now,
            reason=node.health.reason,
            evidence=node.health.evidence[:8],
            policy=policy,
        )
        draft.act(a.SetQuarantine(record=record), because=f"quarantine {key} of {node.name}: {node.health.reason}")
