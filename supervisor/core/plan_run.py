"""A generation that trains: drains, growth, evidence for checkpoints, the failure rate, budgets."""

from __future__ import annotations

import msgspec

from regrow import wire
from regrow.errors import ConfigurationError
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import goodput, ledger, membership, meshes, observe, plan_form, plan_slow, preempt, rates, symptoms
from regrow.supervisor.core.draft import Draft
from regrow.supervisor.core.fold_generation import same_incident
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.records import Charge, IncidentSeed
from regrow.supervisor.core.view import Boundary, GenerationView, JobView, View

_RATE_CHANGE = 0.25
"""Workers are told a new failure rate when it moved by more than this share."""


def plan(
    view: View,
    job: JobView,
    generation: GenerationView,
    policy: Policy,
    now: float,
    taken: frozenset[str],
    claimed: dict[str, preempt.Claim],
    draft: Draft,
) -> None:
    """What a healthy generation needs; `claimed`: what it has to give up to another job."""
    _evidence(job, draft)
    wanted = _to_drain(view, job, generation, claimed) or plan_slow.to_move(view, job, generation, policy, now, taken, draft)
    leaving = _permitted(view, job, generation, wanted, policy, now, draft)
    hurried = [at for name in leaving if (at := view.nodes[name].leaving_at) is not None and now < at + policy.coalesce_seconds]
    if hurried:
        draft.look(max(hurried) + policy.coalesce_seconds)
        draft.say(f"{len(leaving)} nodes are leaving: wait for the whole burst")
        return
    if leaving:
        _drain(view, job, generation, leaving, policy, now, taken, draft)
        return
    if job.boundary is not None:
        _boundary(view, job, job.boundary, policy, now, taken, draft)
        return
    if generation.first_step_at is None:
        return
    _tell_rate(job, generation, now, draft)
    if job.returned is not None:
        incident, text = job.returned
        book = ledger.refund(job.ledger, incident)
        action = a.SaveLedger(job=job.spec.job, ledger=book, incident=incident, corrected=text)
        draft.act(action, because=f"incident {incident}: {text}; its charge is taken back")
        return
    if not _restore_budget(job, policy, now, draft):
        _account(job, policy, now, draft)
    off = observe.held(view, policy, "growth")
    made = Draft() if off else draft
    _grow(view, job, generation, policy, now, taken, made)
    if off:
        key = f"growth-{job.spec.job}-g{generation.number}"
        observe.shadow(view, draft, made, kind="growth", key=key, why=off, job=job.spec.job)


def _evidence(job: JobView, draft: Draft) -> None:
    """A checkpoint of a step at which all replicas agreed is verified by that."""
    for step in sorted(job.agreed_steps & set(job.checkpoints)):
        item = job.checkpoints[step]
        if "replica_consistent" not in item.evidence and not item.damaged:
            action = a.SetCheckpoint(job=job.spec.job, step=step, generation=item.generation, evidence=("replica_consistent",))
            draft.act(action, because=f"checkpoint of step {step} is verified: all replicas agreed at that step")


_PREEMPTED = "preempted"
_BY_ITSELF = ("health", plan_slow.SLOW)
"""Nobody asked for these: they have an observe-only mode and a budget."""


def _to_drain(view: View, job: JobView, generation: GenerationView, claimed: dict[str, preempt.Claim]) -> dict[str, tuple[str, str]]:
    """Members that should go: {node: (why, asked | health | preempted | slow)}."""
    result = {name: (claim.why, _PREEMPTED) for name, claim in claimed.items() if name in generation.members}
    for name, why in membership.blocked(view, job).items():
        if name not in generation.members or not view.nodes[name].reachable or why == "cordoned":
            continue
        asked = bool(view.nodes[name].leaving) or name in view.drains
        result[name] = (why, "asked" if asked else "health")
    return result


def _permitted(
    view: View, job: JobView, generation: GenerationView, leaving: dict[str, tuple[str, str]], policy: Policy, now: float, draft: Draft
) -> dict[str, tuple[str, str]]:
    """Those that go: all that were asked to, and of the sick and slow as many as automation and the hour's budget let."""
    sick = sorted(name for name, (_, kind) in leaving.items() if kind in _BY_ITSELF)
    if not sick:
        return leaving
    off = observe.held(view, policy, "drain")
    gone, most = observe.evicted(view, job, now), observe.most_evictions(view, policy)
    allowed = [] if off else sick[: max(0, most - len(gone - set(sick)))]
    for name in sick:
        if name in allowed:
            continue
        why = off or f"{len(gone)} nodes were taken out of {job.spec.job} within an hour, the limit is {most}"
        would = f"drain {name} out of generation {generation.number} of {job.spec.job}: {leaving[name][0]}"
        key = f"drain-{job.spec.job}-g{generation.number}-{name}"
        observe.note(view, draft, kind="drain", key=key, would=would, why=why, job=job.spec.job, node=name)
        if not off and f"evictions-{job.spec.job}" not in view.pages:
            draft.act(a.Page(key=f"evictions-{job.spec.job}", reason=f"{why}: look for a common cause", job=job.spec.job), because=why)
    return {name: why for name, why in leaving.items() if name in allowed or why[1] not in _BY_ITSELF}


def _drain(
    view: View,
    job: JobView,
    generation: GenerationView,
    leaving: dict[str, tuple[str, str]],
    policy: Policy,
    now: float,
    taken: frozenset[str],
    draft: Draft,
) -> None:
    """Save at the next boundary, then form without these nodes. What cannot save, or has no time, goes at once."""
    names = tuple(sorted(leaving))
    text = "; ".join(f"{name} {leaving[name][0]}" for name in names)
    boundary = job.boundary
    forced = any(view.nodes[name].leaving or leaving[name][1] == _PREEMPTED for name in names)
    remaining = membership.eligible(view, job, taken)
    if not forced and membership.may_form(generation.spec.nodes, remaining, job.spec.min_nodes):
        draft.say(f"drain waits: {text}; {len(remaining)} other usable nodes are fewer than the least number {job.spec.min_nodes}")
        return
    saves = generation.first_step_at is not None and bool(job.spec.checkpoint.path) and symptoms.level(generation) > 0
    limits = [view.nodes[name].leave_by for name in names]
    seconds = min([rates.save_seconds(job, policy), *(by - now for by in limits if by is not None)])
    if saves and boundary is None and seconds > 0:
        draft.act(
            a.AskSave(
                job=job.spec.job,
                generation=generation.number,
                nodes=tuple(generation.members),
                purpose="drain",
                deadline_seconds=seconds,
                reason=text,
            ),
            because=f"drain: {text}; save within {seconds:.0f} s, then go on without",
        )
        draft.look(now + seconds)
        return
    if boundary is not None and boundary.committed_step is None and not boundary.failed and now < boundary.deadline:
        draft.look(boundary.deadline)
        draft.say(f"drain: {text}; the save has {boundary.deadline - now:.1f} s left")
        return
    kinds = {kind for _, kind in leaving.values()}
    _form_without(view, job, generation, names, text, policy, now, taken, draft, only=kinds.pop() if len(kinds) == 1 else "")


def _form_without(
    view: View,
    job: JobView,
    generation: GenerationView,
    names: tuple[str, ...],
    text: str,
    policy: Policy,
    now: float,
    taken: frozenset[str],
    draft: Draft,
    *,
    only: str,
) -> None:
    """`only`: why all of them go, where that is one thing."""
    node = view.nodes[names[0]]
    asked = names[0] in view.drains and not node.leaving
    kind, reason = ("leaving", "preemption") if node.leaving else ("drain", "") if asked else ("unhealthy", "infrastructure")
    if only in (_PREEMPTED, plan_slow.SLOW):
        kind, reason = only, ""
    boundary = job.boundary
    since = boundary.asked_at if boundary is not None else now
    earlier = same_incident(job, names) if kind == "unhealthy" else None
    seed = IncidentSeed(
        id=earlier.id if earlier is not None else f"{job.spec.job}-g{generation.number}",
        kind=kind,
        cause=reason or "planned",
        symptom_at=since,
        detected_at=since,
        node=names[0],
        text=text,
    )
    charge = None
    if reason:
        step = max(job.frontier, job.ledger.frontier)
        charge = Charge(at=now, cause=reason, generation=generation.number, incident=seed.id, step=step, text=text[:500])
        verdict = ledger.judge(job.ledger, charge, job.spec, policy, rates.past(job))
        if not verdict.allowed:
            draft.act(
                plan_form.end(job, "failed", verdict.reason, exit_code=verdict.exit_code, cause=reason, node=names[0], charge=charge),
                because=verdict.reason,
            )
            return
    saved = f"saved step {boundary.committed_step}" if boundary and boundary.committed_step is not None else "nothing new was saved"
    cause = plan_form.Cause(seed=seed, charge=charge, without=frozenset(names), note=f"{kind}: {text}; {saved}")
    plan_form.form(view, job, policy, now, taken, draft, cause)


def _boundary(view: View, job: JobView, boundary: Boundary, policy: Policy, now: float, taken: frozenset[str], draft: Draft) -> None:
    """A save that was asked for: form when it is committed, forget it when it failed or took too long."""
    if boundary.committed_step is not None:
        places = membership.places(membership.eligible(view, job, taken))
        better = meshes.choose(job.spec, places)
        world = job.generation.spec.world_size if job.generation else 0
        if boundary.purpose != "growth" or better is None or better.workers_used <= world:
            why = f"{places} places are left" if boundary.purpose == "growth" else "nobody is to be drained any more"
            draft.act(a.EndBoundary(job=job.spec.job, reason=why), because=f"{boundary.purpose} is called off: {why}")
            return
        seed = IncidentSeed(
            id=f"{job.spec.job}-g{boundary.generation}",
            kind=boundary.purpose,
            cause="planned",
            symptom_at=now,
            detected_at=now,
            text=boundary.purpose,
        )
        note = f"{boundary.purpose} at the checkpoint of step {boundary.committed_step}"
        plan_form.form(view, job, policy, now, taken, draft, plan_form.Cause(seed=seed, note=note))
        return
    if boundary.failed or now >= boundary.deadline:
        why = boundary.failed or f"not committed within {boundary.deadline - boundary.asked_at:.0f} s"
        draft.act(a.EndBoundary(job=job.spec.job, reason=why), because=f"{boundary.purpose} is put off: the save was {why}")
        return
    draft.look(boundary.deadline)
    draft.say(f"{boundary.purpose} waits for the save that was asked for {now - boundary.asked_at:.1f} s ago")


def _grow(view: View, job: JobView, generation: GenerationView, policy: Policy, now: float, taken: frozenset[str], draft: Draft) -> None:
    """Use nodes that are back, when the gain until the next failure beats the cost of one more restart."""
    seats = membership.eligible(view, job, taken)
    places = membership.places(seats)
    world = generation.spec.world_size
    if places <= world or not job.spec.checkpoint.path or symptoms.level(generation) == 0:
        return
    try:
        choice = meshes.choose(job.spec, places)
    except ConfigurationError:
        return
    if choice is None or choice.workers_used <= world:
        return
    last = max(value for value in (job.last_formed_at, job.boundary_failed_at, generation.first_step_at) if value is not None)
    due = last + policy.growth_cooldown_seconds
    if now < due:
        draft.look(due)
        draft.say(f"growth from {world} to {choice.workers_used} workers waits {due - now:.1f} s (cool-down)")
        return
    calm_at = job.ledger.charges[-1].at + policy.budget_window_seconds if job.ledger.charges else now
    bursty = rates.in_batches(job, now, policy.budget_window_seconds)
    if bursty is not None:
        draft.look(calm_at)
        draft.say(f"no growth: failures come in batches ({bursty:.1f} times the variance of chance): fix machines first")
        return
    horizon = rates.horizon_seconds(job, policy, now)
    restart = job.restart_seconds if job.restart_seconds is not None else policy.restart_seconds_prior
    gain, cost = (choice.workers_used - world) * horizon, world * (restart + (rates.median_step(job) or 0.0))
    numbers = f"gain {gain:.0f} GPU-s in {horizon:.0f} s, cost {cost:.0f} GPU-s"
    if gain <= cost:
        draft.say(f"no growth from {world} to {choice.workers_used} workers: {numbers}")
        return
    draft.act(
        a.AskSave(
            job=job.spec.job,
            generation=generation.number,
            nodes=tuple(generation.members),
            purpose="growth",
            deadline_seconds=rates.save_seconds(job, policy),
            reason=f"grow to {choice.workers_used} workers",
        ),
        because=f"grow from {world} to {choice.workers_used} workers at the next checkpoint: {numbers}",
    )
    draft.look(now + rates.save_seconds(job, policy))


def _tell_rate(job: JobView, generation: GenerationView, now: float, draft: Draft) -> None:
    rate, tiers = rates.failure_rate(job, now), rates.tier_rates(job, now)
    told = generation.rate_told or generation.spec.failures_per_second
    same = told > 0 and abs(rate - told) <= _RATE_CHANGE * told
    if same and not _tiers_changed(tiers, generation.tiers_told or generation.spec.tier_rates):
        return
    nodes = tuple(generation.members)
    draft.act(
        a.TellRate(job=job.spec.job, generation=generation.number, nodes=nodes, failures_per_second=rate, tier_rates=tiers),
        because=f"failure rate of {job.spec.job} is now {rate * 3600:.3g} per hour (was {told * 3600:.3g})",
    )


def _tiers_changed(now: wire.TierRates | None, told: wire.TierRates | None) -> bool:
    if now is None or told is None:
        return now is not None
    return any(abs(new - old) > _RATE_CHANGE * old for new, old in ((now.memory, told.memory), (now.storage, told.storage)))


def _account(job: JobView, policy: Policy, now: float, draft: Draft) -> None:
    """Keep the account of goodput where the next leader finds it; never a reason to be woken."""
    told = job.ledger.effort
    if job.effort.best_gpu_seconds_per_step is None or now < (told.until if told else job.effort.since) + policy.account_seconds:
        return
    book = msgspec.structs.replace(job.ledger, effort=goodput.account(job, now))
    draft.act(a.SaveLedger(job=job.spec.job, ledger=book), because=f"the account of {job.spec.job} up to step {job.frontier}")


def _restore_budget(job: JobView, policy: Policy, now: float, draft: Draft) -> bool:
    due = ledger.restore_due(job.ledger, policy, now)
    if due is None:
        return False
    if now < due:
        draft.look(due)
        return False
    book = msgspec.structs.replace(job.ledger, restored_at=now, frontier=max(job.ledger.frontier, job.frontier))
    draft.act(
        a.SaveLedger(job=job.spec.job, ledger=book),
        because=f"budgets of {job.spec.job} are restored: {policy.healthy_seconds:.0f} s of progress",
    )
    return True
