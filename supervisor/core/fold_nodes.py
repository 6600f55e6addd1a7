"""Facts about nodes."""

from __future__ import annotations

from typing import assert_never

import msgspec

from regrow import wire
from regrow.supervisor.core import events as e
from regrow.supervisor.core import goodput, quarantine
from regrow.supervisor.core.view import GenerationView, JobView, Member, NodeView, View

_change = msgspec.structs.replace


def put(view: View, node: NodeView) -> View:
    """The view with this node in place of its older self."""
    return _change(view, nodes=view.nodes | {node.name: node})


def liveness(
    view: View,
    event: e.NodeJoined | e.NodeDisconnected | e.NodeSilent | e.NodeHeard | e.LeaseExpired | e.SpareStoreChanged,
) -> View:
    """Connections and silence. The first sign of life after none at all restarts everybody's grace."""
    if isinstance(event, e.NodeJoined | e.NodeHeard) and len(view.nodes) > 1 and not any(node.reachable for node in view.nodes.values()):
        view = _change(view, sighted_at=event.at)
    if isinstance(event, e.NodeJoined):
        return _joined(view, event)
    node = view.nodes.get(event.node)
    if node is None:
        return view
    match event:
        case e.NodeDisconnected():
            if not node.connected:
                return view
            return put(view, _change(node, connected=False, disconnected_at=event.at, silent_since=None, spare_store=""))
        case e.NodeSilent():
            if not node.connected:
                return view
            late = {
                name: _change(view.nodes[name], late_until=event.late_until)
                for name in event.late
                if name in view.nodes and view.nodes[name].reachable
            }
            return _change(view, nodes=view.nodes | late | {node.name: _change(node, silent_since=event.last_heard_at)})
        case e.NodeHeard():
            return _answers_again(put(view, _change(node, silent_since=None)), node, event.at)
        case e.LeaseExpired():
            return put(view, _change(node, lease_expired=True))
        case e.SpareStoreChanged():
            return put(view, _change(node, spare_store=event.address))
        case _:
            assert_never(event)


def _joined(view: View, event: e.NodeJoined) -> View:
    hello = event.hello
    before = view.nodes.get(hello.node)
    same_process = before is not None and before.incarnation == hello.incarnation
    healthy = hello.health.state == "healthy"
    node = NodeView(
        name=hello.node,
        incarnation=hello.incarnation,
        address=hello.address,
        peer_address=hello.peer_address,
        slots=hello.slots,
        joined_at=event.at,
        devices=hello.devices,
        hardware_id=hello.hardware_id,
        spare_store=hello.spare_store,
        health=hello.health,
        healthy_since=(before.healthy_since if before and before.healthy_since is not None else event.at) if healthy else None,
        leaving=before.leaving if before is not None and same_process else "",
        leaving_at=before.leaving_at if before is not None and same_process else None,
        leave_by=before.leave_by if before is not None and same_process else None,
        released=before.released if before is not None and same_process else False,
        clear_asked=before.clear_asked and not healthy if before is not None else False,
        unusable=before.unusable if before is not None and same_process else "",
        highest_epoch=hello.highest_epoch,
        highest_generation=hello.highest_generation,
        running=(hello.running.job, hello.running.generation) if hello.running else None,
        boot_id=hello.boot_id,
    )
    view = put(view, node)
    jobs = {name: _seen_by(job, hello, event.at) for name, job in view.jobs.items()}
    if before is None:
        jobs = {
            name: _change(job, effort=goodput.reserve(job.effort, event.at, goodput.reserved_with(job.effort, view, job.spec, node)))
            for name, job in jobs.items()
        }
    view = _change(view, jobs=jobs)
    return _answers_again(view, before, event.at) if before is not None and same_process else view


_CORRECTED_WITHIN_SECONDS = 3600.0
_BURST_SECONDS = 30.0
"""Who fell silent no longer before the symptom, or after it, and is not heard yet may have been lost with the node that is named."""


def _unheard_since(node: NodeView) -> float:
    """Minus infinity: it is heard."""
    since = node.silent_since if node.connected else node.disconnected_at
    return since if since is not None and not node.released else float("-inf")


def _answers_again(view: View, before: NodeView, at: float) -> View:
    """An agent that was silent is heard, and is the process that it was: its node was called lost, and was not.

    A process that joined after the loss proves nothing, nor does one node of several that fell silent together.
    """
    for job_name, job in view.jobs.items():
        last = job.incidents[-1] if job.incidents else None
        if last is None or (last.kind, last.node, last.cause) != ("node_lost", before.name, "infrastructure"):
            continue
        gap = at - last.symptom_at
        if gap > _CORRECTED_WITHIN_SECONDS or before.joined_at > last.symptom_at:
            continue
        if any(name != before.name and _unheard_since(other) >= last.symptom_at - _BURST_SECONDS for name, other in view.nodes.items()):
            continue
        text = f"the agent of {before.name} answers again after {gap:.1f} s, the same process: it stood still or was cut off, the node was not lost"
        view = _change(view, jobs=view.jobs | {job_name: _change(job, returned=(last.id, text))})
    return view


def _seen_by(job: JobView, hello: wire.Hello, at: float) -> JobView:
    """What a (re)connected agent runs, seen from a job that has it as a member."""
    generation = job.generation
    if generation is None or generation.stage not in ("starting", "running") or hello.node not in generation.members:
        return job
    member = generation.members[hello.node]
    running = hello.running
    if running is not None and running.job == job.spec.job and running.generation == generation.number:
        member = _change(member, adopted=True, empty_at=None, workers=running.workers or member.workers)
    elif member.sent_at is not None and hello.highest_generation < generation.number and not generation.adopted:
        member = _change(member, sent_at=None)
    elif member.sent_at is not None:
        member = _change(member, empty_at=at)
    return _change(job, generation=with_member(generation, member))


def with_member(generation: GenerationView, member: Member) -> GenerationView:
    """The generation with this member in place of its older self."""
    return _change(generation, members=generation.members | {member.node: member})


def condition(view: View, event: e.NodeHealth | e.NodeLeaving | e.NodeCommandGiven) -> View:
    """Health, departure, operator's orders."""
    if isinstance(event, e.NodeCommandGiven):
        return _command(view, event)
    node = view.nodes.get(event.node)
    if node is None:
        return view
    match event:
        case e.NodeHealth():
            since = (node.healthy_since if node.healthy_since is not None else event.at) if event.verdict.state == "healthy" else None
            return put(view, _change(node, health=event.verdict, healthy_since=since, clear_sent_at=None))
        case e.NodeLeaving():
            if node.leaving:
                return view
            leave_by = event.at + event.notice_seconds if event.notice_seconds > 0 else None
            return put(view, _change(node, leaving=event.reason or "asked to", leaving_at=event.at, leave_by=leave_by))
        case _:
            assert_never(event)


def _command(view: View, event: e.NodeCommandGiven) -> View:
    name = event.node
    match event.command:
        case "cordon":
            return _change(view, cordoned=view.cordoned | {name})
        case "uncordon":
            return _change(view, cordoned=view.cordoned - {name}, drains=view.drains - {name})
        case "drain":
            return _change(view, cordoned=view.cordoned | {name}, drains=view.drains | {name})
        case "clear":
            held = any(record.node == name and record.state in (*quarantine.OUT, "suspect") for record in view.quarantine.values())
            view = _change(view, clears=view.clears | {name}) if held else view
            node = view.nodes.get(name)
            if node is None:
                return view
            return put(view, _change(node, unusable="", clear_asked=node.health.state in ("degraded", "unhealthy")))
        case _:
            assert_never(event.command)


def unusable(view: View, name: str, reason: str) -> View:
    """The host needs recycling."""
    node = view.nodes.get(name)
    return put(view, _change(node, unusable=reason)) if node is not None else view


def probed_again(view: View, event: e.PeersWereProbed) -> View:
    """A witness tried a node that was put out as cut off."""
    for name in (*event.reached, *event.unreached):
        node = view.nodes.get(name)
        if node is not None and node.asked_again is not None and event.node in node.asked_again.witnesses:
            found = node.asked_again.found | {event.node: name in event.reached}
            view = put(view, _change(node, asked_again=_change(node.asked_again, found=found)))
    return view


def running(view: View, event: e.MemberPhase | e.WorkersExited) -> View:
    """Keep track of what an agent runs."""
    node = view.nodes.get(event.node)
    if node is None:
        return view
    if isinstance(event, e.MemberPhase):
        if event.phase == "started" and node.running != (event.job, event.generation):
            highest = max(node.highest_generation, event.generation)
            return put(view, _change(node, running=(event.job, event.generation), highest_generation=highest, stop_sent=None))
        if event.phase == "stopped" and node.running is not None and node.running[0] == event.job and node.running[1] <= event.generation:
            return put(view, _change(node, running=None, stop_sent=None))
        return view
    job = view.jobs[event.job]
    member = job.generation.members.get(event.node) if job.generation else None
    if member is None or job.generation is None or node.running != (event.job, event.generation):
        return view
    gone = {ended.rank for ended in event.exits} | set(job.generation.exits)
    if all(worker.rank in gone for worker in member.workers):
        return put(view, _change(node, running=None))
    return view
