"""From symptoms to one decision: wait for the whole burst, name the cause, ask the ledger, form what can be formed."""

from __future__ import annotations

import msgspec

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import evidence, ledger, observe, plan_form, quarantine, rates, symptoms, third
from regrow.supervisor.core.draft import Draft
from regrow.supervisor.core.fold_generation import same_incident
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.records import Charge, IncidentSeed
from regrow.supervisor.core.symptoms import Findings, Symptom
from regrow.supervisor.core.view import GenerationView, JobView, View

_ORDER = (
    "wrong_step",
    "sdc",
    "non_finite",
    "node_lost",
    "unreachable",
    "returned_empty",
    "restore_refused",
    "worker_exit",
    "hang",
    "start_failed",
)
"""Which symptom is the cause when several are there: earlier ones explain later ones."""

_TEXT_LIMIT = 8_192


def recover(
    view: View,
    job: JobView,
    generation: GenerationView,
    findings: Findings,
    policy: Policy,
    now: float,
    taken: frozenset[str],
    draft: Draft,
) -> None:
    """One decision for everything that is wrong with a generation; or what it would be, where that is only written down."""
    off = observe.held(view, policy, "recovery")
    if off:
        made = Draft()
        _recover(view, job, generation, findings, policy, now, taken, made)
        key = f"recovery-{job.spec.job}-g{generation.number}"
        observe.shadow(view, draft, made, kind="recovery", key=key, why=off, job=job.spec.job)
        return
    _recover(view, job, generation, findings, policy, now, taken, draft)


def _recover(
    view: View,
    job: JobView,
    generation: GenerationView,
    findings: Findings,
    policy: Policy,
    now: float,
    taken: frozenset[str],
    draft: Draft,
) -> None:
    found = findings.symptoms
    first = min(symptom.seen_at for symptom in found)
    explained = any(symptom.explains for symptom in found)
    ready = first + _coalesce_seconds(view, generation, found, policy)
    if now < ready:
        evidence.ask_early(view, job, generation, found, policy, now, draft)
        draft.look(ready)
        waits = "the whole burst" if explained else "an explanation: all that is known are workers that lost a peer"
        draft.say(f"{len(found)} symptoms in generation {generation.number}; {ready - now:.2f} s more for {waits}")
        return
    burst = _burst(view, generation, found, policy, now)
    if burst is not None:
        draft.look(burst[0])
        draft.say(burst[1])
        return
    main = diagnose(found)
    if evidence.collect(view, job, generation, found, main, policy, now, draft):
        return
    main = _blame_hardware(view, evidence.name_silent(view, generation, found, main))
    seed = _seed(job, generation, main, found, now)
    charge = _charge(job, generation, seed, main, found, now) if seed.cause else None
    if main.fatal:
        draft.act(_fail(job, main, main.fatal, ledger.DO_NOT_REQUEUE, charge), because=main.fatal)
        return
    delay = 0.0
    verdict_text = "not charged"
    if charge is not None:
        verdict = ledger.judge(job.ledger, charge, job.spec, policy, rates.past(job))
        verdict_text = verdict.reason
        if not verdict.allowed and charge.cause in ledger.BLAMES_PROGRAM and now < first + policy.verdict_seconds and _may_be_machine(main):
            draft.look(first + policy.verdict_seconds)
            draft.say(f"{verdict.reason}: {first + policy.verdict_seconds - now:.2f} s more for the health of {main.node}")
            return
        if not verdict.allowed:
            reason = f"{verdict.reason}: {_place(main)}{main.text}"
            draft.act(_fail(job, main, reason, verdict.exit_code, charge), because=reason)
            return
        delay = verdict.delay_seconds
    elif job.unstarted >= policy.unstarted_limit:
        _give_up(job, main, policy, draft)
        return
    if delay > 0 and now < ready + delay:
        draft.look(ready + delay)
        draft.say(f"{_place(main)}{main.text}; waits {ready + delay - now:.1f} s: the last attempt made no progress")
        return
    without, quarantines = _exclusions(view, generation, found, main, policy, now)
    without, spare_text = _with_spare(view, job, generation, taken, without, main)
    others = f" (+{len(found) - 1} symptoms of the same incident)" if len(found) > 1 else ""
    cause = plan_form.Cause(
        seed=seed,
        charge=charge,
        without=without,
        damaged=_damaged(job, generation, main),
        verified_only=main.kind == "sdc",
        note=f"{main.kind} {_place(main)}{main.text}{others}; {verdict_text}{spare_text}",
    )
    decided = len(draft.actions)
    plan_form.form(view, job, policy, now, taken, draft, cause)
    if len(draft.actions) > decided:  # first who is not trusted, then who trains: a leader that dies in between forgets neither
        draft.actions[decided:decided] = quarantines


def _with_spare(
    view: View, job: JobView, generation: GenerationView, taken: frozenset[str], without: frozenset[str], main: Symptom
) -> tuple[frozenset[str], str]:
    """(who does not take part, what that is for): of two replicas that differ one is computed by a spare once."""
    asked = job.ledger.undecided
    swapped = third.swap_out(view, job, generation, taken, without) if main.kind == "sdc" and main.rank < 0 else ""
    if not swapped or asked is None:
        return without, ""
    return without | {swapped}, f"; a spare does step {asked.step} once in place of {swapped}"


def _coalesce_seconds(view: View, generation: GenerationView, found: tuple[Symptom, ...], policy: Policy) -> float:
    """How long after the first symptom the decision waits for others.

    Not at all where the symptom is itself the end of a wait: a hang whose process is known, and silence (who falls silent with a
    node is late by then, and `_burst` waits for that).
    """
    if symptoms.is_explained_hang(generation, found):
        return 0.0
    silent = [node for symptom in found if symptom.kind == "node_lost" and (node := view.nodes.get(symptom.node)) and node.silent_since]
    if len(silent) == len(found):
        return 0.0
    return policy.coalesce_seconds if any(symptom.explains for symptom in found) else policy.victim_seconds


def _burst(view: View, generation: GenerationView, found: tuple[Symptom, ...], policy: Policy, now: float) -> tuple[float, str] | None:
    """(when to decide, why not now): a lost node whose neighbours are late, too, is most likely not alone (a rack, a switch)."""
    lost = [symptom for symptom in found if symptom.kind == "node_lost"]
    if not lost:
        return None
    late = [
        until
        for name in generation.members
        if (node := view.nodes.get(name)) is not None and node.reachable and (until := node.late_until) is not None and until > now
    ]
    until = min(max(late, default=now), min(symptom.at for symptom in lost) + policy.burst_seconds)
    if until <= now:
        return None
    beyond = f"{len(late)} more have not beaten for over half of the silence limit"
    return until, f"{len(lost)} nodes of generation {generation.number} are lost, {beyond}: {until - now:.2f} s more for the whole burst"


def diagnose(found: tuple[Symptom, ...]) -> Symptom:
    """The symptom that explains the others: by kind, explaining ones and program errors before bare exits, then by time."""
    return min(
        found,
        key=lambda item: (not item.explains, _ORDER.index(item.kind), item.cause != "program", item.at, item.rank),
    )


def _blame_hardware(view: View, main: Symptom) -> Symptom:
    """A worker that ended on a node whose health verdict is bad is the node's fault."""
    node = view.nodes.get(main.node)
    if main.kind in ("worker_exit", "hang") and node is not None and node.health.state == "unhealthy":
        text = f"{main.text}; the health of {main.node} is bad: {node.health.reason}"
        return msgspec.structs.replace(main, cause="infrastructure", text=text, traceback="")
    if main.cause and node is not None and node.leaving:
        return msgspec.structs.replace(main, cause="preemption", text=f"{main.text}; {main.node} is leaving: {node.leaving}")
    return main


def _place(main: Symptom) -> str:
    where = f"rank {main.rank} " if main.rank >= 0 else ""
    where += f"on {main.node} " if main.node and main.rank >= 0 else ""
    return where


def _seed(job: JobView, generation: GenerationView, main: Symptom, found: tuple[Symptom, ...], now: float) -> IncidentSeed:
    earlier = same_incident(job, (main.node,)) if main.kind in ("node_lost", "returned_empty") and main.cause else None
    return IncidentSeed(
        id=earlier.id if earlier is not None else f"{job.spec.job}-g{generation.number}",
        kind=main.kind,
        cause=main.cause,
        symptom_at=min(now, *(symptom.at for symptom in found)),
        detected_at=min(now, *(symptom.seen_at for symptom in found)),
        node=main.node,
        rank=main.rank,
        text=main.text[:_TEXT_LIMIT],
    )


def _charge(job: JobView, generation: GenerationView, seed: IncidentSeed, main: Symptom, found: tuple[Symptom, ...], now: float) -> Charge:
    step = max(job.frontier, job.ledger.frontier)
    since = generation.recorded_at if generation.recorded_at is not None else now
    return Charge(
        at=now,
        cause=main.cause,
        generation=generation.number,
        incident=seed.id,
        step=step,
        fingerprint=ledger.fingerprint(main.traceback) or (main.kind if main.kind == "non_finite" else ""),
        early=step <= 0 and _certain_to_repeat(job, generation, main, found),
        ran_seconds=max(0.0, now - since) if symptoms.level(generation) == 0 else 0.0,
        text=main.text[:500],
    )


_PERMANENT = ("SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError", "NameError", symptoms.WRONG_USAGE)
"""Errors of the program text: a restart cannot help."""


def _may_be_machine(main: Symptom) -> bool:
    return main.kind == "worker_exit" and bool(main.node) and not main.text.startswith(_PERMANENT)


def _certain_to_repeat(job: JobView, generation: GenerationView, main: Symptom, found: tuple[Symptom, ...]) -> bool:
    """A job that is known to report steps failed before its first; or a script that does not fails the same on all its ranks."""
    if main.kind != "worker_exit" or main.cause != ledger.PROGRAM:
        return False
    declares = job.spec.mesh is not None or job.spec.global_batch > 0 or job.spec.model is not None
    if declares or symptoms.level(generation) > 0 or main.text.startswith(_PERMANENT):
        return True
    marks = {ledger.fingerprint(item.traceback) for item in found if item.kind == "worker_exit"}
    return len(generation.exits) == generation.spec.world_size and len(marks) == 1


def _fail(job: JobView, main: Symptom, reason: str, exit_code: int, charge: Charge | None) -> a.EndJob:
    return plan_form.end(
        job,
        "failed",
        reason,
        exit_code=exit_code,
        cause=main.cause,
        node=main.node,
        rank=main.rank,
        traceback=main.traceback[:_TEXT_LIMIT],
        charge=charge,
    )


def _give_up(job: JobView, main: Symptom, policy: Policy, draft: Draft) -> None:
    reason = f"{job.unstarted} generations in a row did not start (limit {policy.unstarted_limit}): {main.text}"
    draft.act(
        _fail(job, main, reason, 1, None),
        a.Page(key=f"unstarted-{job.spec.job}", reason=reason, job=job.spec.job),
        because=reason,
    )


def _exclusions(
    view: View, generation: GenerationView, found: tuple[Symptom, ...], main: Symptom, policy: Policy, now: float
) -> tuple[frozenset[str], list[a.Action]]:
    """Nodes that the next generation leaves out, and the hardware that is not trusted any more."""
    without = {symptom.node for symptom in found if symptom.kind == "node_lost"}
    behind = symptoms.singled_out(view, generation, found)
    without |= behind
    if cut := tuple(symptom for symptom in found if symptom.kind == "unreachable"):
        return frozenset(without | {symptom.node for symptom in cut}), _cut_off(view, cut, policy, now)
    orders: list[a.Action] = []
    node = view.nodes.get(main.node)
    allowed = not observe.held(view, policy, "quarantine")
    if (
        node is not None
        and main.kind == "start_failed"
        and main.node in behind
        and allowed
        and not quarantine.breaker_open(view, policy, now)
    ):
        key = quarantine.key_of(view, node)
        text = f"{main.text} while others did"
        return frozenset(without), [
            a.SetQuarantine(record=quarantine.suspect(view.quarantine.get(key), key=key, node=node, now=now, reason=text, policy=policy))
        ]
    if node is None or main.kind not in ("sdc", "non_finite", "hang", "worker_exit") or main.rank < 0:
        return frozenset(without), orders
    key = quarantine.key_of(view, node, generation.device_of(main.rank))
    previous = view.quarantine.get(key)
    if main.kind == "sdc":
        broken = quarantine.breaker_open(view, policy, now)
        if broken or not allowed:
            orders.append(a.Page(key=f"quarantine-{key}", reason=broken or "automatic quarantine is off", node=node.name))
            return frozenset(without | {node.name}), orders
        record = quarantine.put_out(previous, key=key, node=node, now=now, reason=main.text, evidence=("sdc",), policy=policy)
        return frozenset(without | {node.name}), [a.SetQuarantine(record=record)]
    if main.cause == "program" or not allowed or quarantine.breaker_open(view, policy, now):
        return frozenset(without), orders
    if main.kind in ("hang", "non_finite"):
        record = quarantine.suspect(previous, key=key, node=node, now=now, reason=main.text, policy=policy)
        orders.append(a.SetQuarantine(record=record))
        if record.state in quarantine.OUT:
            without.add(node.name)
    return frozenset(without), orders


def _cut_off(view: View, cut: tuple[Symptom, ...], policy: Policy, now: float) -> list[a.Action]:
    """Hosts that their peers cannot reach are kept out until they had time to heal: they would hang the next generation, too."""
    why = "automatic quarantine is off" if observe.held(view, policy, "quarantine") else quarantine.breaker_open(view, policy, now)
    if not why and len(cut) > quarantine.most_at_once(view, policy):
        why = f"{len(cut)} nodes cannot be reached at once: look for a common cause"
    if why:
        nodes = ", ".join(symptom.node for symptom in cut[:8])
        return [a.Page(key=f"unreachable-{cut[0].node}", reason=f"{cut[0].text} ({nodes}); {why}", node=cut[0].node)]
    orders: list[a.Action] = []
    for symptom in cut:
        node = view.nodes[symptom.node]
        key = quarantine.key_of(view, node)
        record = quarantine.put_out(
            view.quarantine.get(key), key=key, node=node, now=now, reason=symptom.text, evidence=("unreachable",), policy=policy
        )
        orders.append(a.SetQuarantine(record=record))
    return orders


def _damaged(job: JobView, generation: GenerationView, main: Symptom) -> dict[int, str]:
    """Checkpoints that this incident rules out."""
    if main.kind == "restore_refused" and generation.refusal is not None:
        return {generation.refusal.step: generation.refusal.problem}
    if main.kind == "non_finite" and generation.non_finite is not None:
        first = generation.non_finite.first_step
        return {
            step: f"written while something was not finite since step {first}"
            for step, item in job.checkpoints.items()
            if step >= first and item.generation == generation.number and not item.damaged
        }
    if main.kind == "sdc" and generation.divergence is not None:
        agreed = max((step for step in job.agreed_steps if step < generation.divergence.step), default=0)
        rested = [step for step in generation.rested if step < generation.divergence.step]
        agreed = max([agreed, *rested[:-1]])  # the report of a step says that the memory of the one before it was at rest
        since = agreed if generation.divergence.clean_step is None else generation.divergence.clean_step
        start = generation.spec.restore.step if generation.spec.restore else 0
        since = max(since, start)
        return {
            step: f"written after state diverged: {generation.divergence.text}"
            for step, item in job.checkpoints.items()
            if step > since and item.generation == generation.number and not item.damaged
        }
    return {}
