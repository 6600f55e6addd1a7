"""What an operator wants of a job: stop, save-and-stop, pause, abort. It holds also when workers hang."""

from __future__ import annotations

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import plan_form, rates, symptoms
from regrow.supervisor.core.draft import Draft
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import Boundary, GenerationView, JobView, View


def plan(view: View, job: JobView, policy: Policy, now: float, draft: Draft) -> None:
    """Carry out the command that the job has."""
    generation = job.generation
    running = generation is not None and generation.stage in ("recording", "starting", "running")
    match job.command:
        case "pause" if job.paused:
            draft.say(f"{job.spec.job} is paused")
        case "stop" | "abort":
            grace = policy.stop_grace_seconds if job.command == "stop" else 0.0
            _finish(view, job, generation if running else None, grace, f"{job.command} by an operator", draft)
        case _:
            if generation is None or not running:
                _finish(view, job, None, 0.0, f"{job.command}: nothing was running", draft)
            else:
                _save_first(view, job, generation, policy, now, draft)


def _save_first(view: View, job: JobView, generation: GenerationView, policy: Policy, now: float, draft: Draft) -> None:
    """Save at an agreed boundary, let the workers leave, then finish; without waiting for what cannot come."""
    boundary = job.boundary
    grace = policy.stop_grace_seconds
    if generation.first_step_at is None and not generation.adopted:
        _finish(view, job, generation, grace, f"{job.command} before the first step: nothing to save", draft)
        return
    if not job.spec.checkpoint.path:
        _finish(view, job, generation, grace, f"{job.command}: this job saves no checkpoints", draft)
        return
    if boundary is None:
        draft.act(
            a.AskSave(
                job=job.spec.job,
                generation=generation.number,
                nodes=tuple(generation.members),
                purpose="pause" if job.command == "pause" else "save-and-stop",
                stop_after=True,
                deadline_seconds=rates.save_seconds(job, policy),
                reason=f"{job.command} by an operator",
            ),
            because=f"{job.command}: save at the next step boundary, then stop",
        )
        draft.look(now + rates.save_seconds(job, policy))
        return
    if _left_after_save(generation, boundary):
        _finish(view, job, generation, 0.0, f"{job.command}: saved step {boundary.committed_step}", draft)
        return
    broken = [
        symptom
        for symptom in symptoms.find(view, job, generation, policy, now).symptoms
        if not (symptom.kind == "worker_exit" and _left(generation, symptom.rank))
    ]
    if broken or boundary.failed or now >= boundary.deadline:
        why = broken[0].text if broken else boundary.failed or f"no checkpoint within {boundary.deadline - boundary.asked_at:.0f} s"
        _finish(view, job, generation, grace, f"{job.command} without a new checkpoint: {why}", draft, exit_code=3)
        return
    draft.look(boundary.deadline)
    draft.say(f"{job.command} waits for the save, {boundary.deadline - now:.1f} s at most")


def _left(generation: GenerationView, rank: int) -> bool:
    fact = generation.exits.get(rank)
    return fact is not None and fact.exit.exit_code == 0 and fact.exit.signal == 0


def _left_after_save(generation: GenerationView, boundary: Boundary) -> bool:
    """Committed, and everybody left by themselves, at the step that was committed."""
    if boundary.committed_step is None or len(generation.exits) < generation.spec.world_size:
        return False
    last = max((fact.exit.last_step for fact in generation.exits.values()), default=-1)
    return boundary.committed_step >= last


def _finish(
    view: View, job: JobView, generation: GenerationView | None, grace: float, reason: str, draft: Draft, *, exit_code: int = 0
) -> None:
    if generation is not None:
        draft.act(
            *(
                a.StopWorkers(job=job.spec.job, node=name, generation=generation.number, grace_seconds=grace, reason=reason)
                for name in generation.members
                if name in view.nodes and view.nodes[name].reachable and len(generation.exits) < generation.spec.world_size
            )
        )
    if job.command == "pause":
        draft.act(a.ParkJob(job=job.spec.job, reason=reason, state="paused", ledger=job.ledger), because=reason)
        return
    code = 1 if job.command == "abort" else exit_code
    draft.act(plan_form.end(job, "stopped", reason, exit_code=code), because=reason)
