"""plan(view, policy, now) -> Decision: pure, level-triggered, total. It says why, with the numbers, and when to look next."""

from __future__ import annotations

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import membership, plan_command, plan_form, plan_hardware, plan_recover, plan_run, preempt, standing, symptoms
from regrow.supervisor.core.actions import Decision
from regrow.supervisor.core.draft import Draft
from regrow.supervisor.core.memo import Memo
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import GenerationView, JobView, NodeView, View

_STOP_AGAIN_SECONDS = 3.0
_unsent: Memo[bool] = Memo()


def plan(view: View, policy: Policy, now: float) -> Decision:
    """What to do about everything that the view says, now."""
    draft = Draft()
    if view.term_at is None:
        draft.say("not leading")
        return draft.decision()
    plan_hardware.plan(view, policy, now, draft)
    claims = preempt.claims(view, policy, now)
    draft.look(claims.look_at)
    for job in sorted(view.jobs.values(), key=lambda job: (-job.spec.priority, job.submitted_at, job.spec.job)):
        _job(view, job, policy, now, claims, draft)
    _leftovers(view, now, draft)
    _releases(view, draft)
    return draft.decision()


def _taken(view: View, job: JobView, claims: preempt.Claims, draft: Draft) -> frozenset[str]:
    """Nodes that other jobs hold, or that were just given to them: a job keeps its nodes, but for what preemption claims."""
    taken: set[str] = set(claims.denied(job.spec.job))
    for other in view.jobs.values():
        if other is not job and other.generation is not None and other.generation.stage != "ended":
            taken |= set(other.generation.members)
    for action in draft.actions:
        if isinstance(action, a.RecordGeneration) and action.job != job.spec.job:
            taken |= set(action.members)
    return frozenset(taken)


def _job(view: View, job: JobView, policy: Policy, now: float, claims: preempt.Claims, draft: Draft) -> None:
    if job.outcome is not None:
        return
    if job.command != "run":
        plan_command.plan(view, job, policy, now, draft)
        return
    generation = job.generation
    taken = _taken(view, job, claims, draft)
    if generation is None or generation.stage == "ended":
        plan_form.form(view, job, policy, now, taken, draft)
        return
    if generation.stage == "recording":
        _recording(view, generation, policy, now, draft)
        return
    findings = symptoms.find(view, job, generation, policy, now)
    if findings.symptoms:
        plan_recover.recover(view, job, generation, findings, policy, now, taken, draft)
        return
    draft.look(findings.look_at)
    draft.say(findings.waiting)
    if len(symptoms.finished_ranks(generation)) == generation.spec.world_size:
        reason = f"all {generation.spec.world_size} workers reached their declared end at step {job.frontier}"
        draft.act(plan_form.end(job, "done", reason, exit_code=0), because=reason)
        return
    if _unsent.get((generation.members,), None, lambda: any(member.sent_at is None for member in generation.members.values())):
        _start(view, job, generation, policy, now, taken, draft)
        return
    plan_run.plan(view, job, generation, policy, now, taken, claims.of(job.spec.job), draft)


def _recording(view: View, generation: GenerationView, policy: Policy, now: float, draft: Draft) -> None:
    due = generation.created_at + policy.record_seconds
    draft.say(f"generation {generation.number} is being recorded" + ("" if view.store_up else ": the store does not answer"))
    draft.look(due if now < due else None)


def _start(view: View, job: JobView, generation: GenerationView, policy: Policy, now: float, taken: frozenset[str], draft: Draft) -> None:
    """Send the start to members that do not have it. The TCPStore is the first member's that has an unused one."""
    if plan_form.overtaken(view, job, generation, policy, now, taken, draft):
        return
    unsent = [member for member in generation.members.values() if member.sent_at is None]
    master = generation.master_address
    if not master:
        master = next(
            (view.nodes[name].spare_store for name in generation.spec.nodes if name in view.nodes and view.nodes[name].spare_store), ""
        )
    if not master:
        since = generation.recorded_at if generation.recorded_at is not None else generation.created_at
        draft.look(since + policy.phase_seconds)
        draft.say(f"no member of generation {generation.number} has an unused TCPStore ready")
        return
    ready = [member for member in unsent if member.node in view.nodes and view.nodes[member.node].reachable]
    number = generation.number
    draft.act(
        *(
            a.StartMember(job=job.spec.job, node=member.node, generation=number, group_rank=member.group_rank, master_address=master)
            for member in ready
        ),
        because=f"start generation {number} on {len(ready)} nodes, rendezvous at {master}" if ready else "",
    )
    if len(ready) < len(unsent):
        draft.look(now + policy.reconnect_seconds)


def _leftovers(view: View, now: float, draft: Draft) -> None:
    """Workers of no current generation are stopped. Members of one that starts are told by the start itself."""
    unwanted = _find_unwanted(view)
    if not unwanted:
        return
    ordered = {action.node for action in draft.actions if isinstance(action, a.StopWorkers)}
    recorded = {name for action in draft.actions if isinstance(action, a.RecordGeneration) for name in action.members}
    for node in unwanted:
        assert node.running is not None
        name, number = node.running
        job = view.jobs.get(name)
        if job is None:
            draft.say(
                f"{node.name} runs {name!r}, which nobody knows: left alone (a store that lost its memory is rebuilt with `regrow supervisor --adopt`)"
            )
            continue
        if node.name in ordered or node.name in recorded:
            continue
        if node.stop_sent is not None and node.stop_sent[0] >= number:
            due = node.stop_sent[1] + _STOP_AGAIN_SECONDS
            if now < due:
                draft.look(due)
                continue
        reason = f"{node.name} runs generation {number} of {name}, which is over"
        highest = max(job.highest_generation, number)
        draft.act(a.StopWorkers(job=name, node=node.name, generation=highest, reason=reason), because=reason)


_unwanted: Memo[tuple[NodeView, ...]] = Memo()


def _find_unwanted(view: View) -> tuple[NodeView, ...]:
    """Reachable nodes whose workers belong to no current generation."""
    generations = [part for job in view.jobs.values() for part in (job.generation and job.generation.members, job.before)]
    stages = tuple((name, job.generation.number, job.generation.stage) for name, job in view.jobs.items() if job.generation is not None)

    def find() -> tuple[NodeView, ...]:
        return tuple(
            node
            for node in view.nodes.values()
            if node.running is not None
            and node.reachable
            and ((job := view.jobs.get(node.running[0])) is None or not _wanted(job, node.name, node.running[1]))
        )

    return _unwanted.get((view.nodes, *generations), (len(view.jobs), stages), find)


def _wanted(job: JobView, node: str, number: int) -> bool:
    """True: leave it alone. A generation that starts replaces older workers itself; while it is being recorded, the one before
    goes on, for the record may fail."""
    generation = job.generation
    if generation is None:
        return False
    if generation.stage == "ended":
        return False
    if node in generation.members or number == generation.number:
        return True
    return job.before is not None and node in job.before.members


def _releases(view: View, draft: Draft) -> None:
    leaving = [node for node in standing.notable(view) if node.leaving]
    if not leaving:
        return
    busy = {
        name
        for job in view.jobs.values()
        if job.generation is not None and job.generation.stage != "ended" and job.outcome is None
        for name in (*job.generation.members, *(job.before.members if job.before is not None else ()))
    }
    recorded = [action for action in draft.actions if isinstance(action, a.RecordGeneration)]
    ending = {action.job for action in draft.actions if isinstance(action, a.RecordGeneration | a.EndJob | a.ParkJob)}
    for node in leaving:
        if node.released or not node.connected or node.name in busy:
            continue
        if any(node.name in action.members for action in recorded) or (node.running is not None and node.running[0] in ending):
            continue
        draft.act(a.ReleaseNode(node=node.name, reason="nothing of it is in use"), because=f"{node.name} may leave")


def usable_nodes(view: View, job: JobView) -> dict[str, str]:
    """{node: why not} of all nodes for a job; empty text: usable. For people and tests."""
    out = membership.blocked(view, job)
    return {name: out.get(name, "") for name in view.nodes}
