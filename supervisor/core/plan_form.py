"""Form a generation, or say why none can be formed."""

from __future__ import annotations

import msgspec

from regrow import wire
from regrow.errors import ConfigurationError
from regrow.parallel.planner import MeshChoice
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import ladder, ledger, membership, meshes, rates, restore, third
from regrow.supervisor.core.draft import Draft
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.records import Charge, IncidentSeed
from regrow.supervisor.core.view import GenerationView, JobView, View

_change = msgspec.structs.replace


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a generation is formed, and what that rules out."""

    seed: IncidentSeed | None = None
    charge: Charge | None = None
    without: frozenset[str] = frozenset()
    damaged: dict[int, str] = {}
    verified_only: bool = False
    delay_seconds: float = 0.0
    note: str = ""


def form(view: View, job: JobView, policy: Policy, now: float, taken: frozenset[str], draft: Draft, cause: Cause | None = None) -> None:
    """Record the next generation on the nodes that can carry it; else park the job, visibly; else end it with the reason."""
    why = cause or Cause()
    if job.not_before is not None and now < job.not_before:
        draft.look(job.not_before)
        draft.say(f"{job.spec.job} waits {job.not_before - now:.1f} s before the next attempt")
        return
    if not view.store_up:
        draft.say(f"{job.spec.job}: no generation can be recorded while the store does not answer")
        return
    seats = membership.eligible(view, job, taken, without=why.without)
    previous = job.generation.spec.nodes if job.generation else ()
    forbidden = membership.may_form(previous, seats, job.spec.min_nodes)
    if forbidden:
        _park(job, f"{forbidden}{_reasons(view, job)}", why, draft)
        return
    if job.generation is None and _wait_for_more(view, job, seats, policy, now, draft):
        return
    try:
        choice = meshes.choose(job.spec, sum(seat.slots for seat in seats))
    except ConfigurationError as error:
        draft.act(end(job, "failed", str(error), exit_code=2, cause="program"), because=str(error))
        return
    if choice is None:
        _park(job, f"no legal mesh for {sum(seat.slots for seat in seats)} workers on {len(seats)} nodes", why, draft)
        return
    point = restore.choose(job, why.damaged, verified_only=why.verified_only)
    if point.forbidden:
        draft.act(end(job, "failed", point.forbidden, exit_code=2, charge=why.charge), because=point.forbidden)
        return
    _record(view, job, policy, now, seats, choice, point, why, draft)


_TAINTED = ("sdc", "non_finite", "wrong_step")
"""Incidents whose generation wrote state that is not to be trusted."""


def overtaken(
    view: View, job: JobView, generation: GenerationView, policy: Policy, now: float, taken: frozenset[str], draft: Draft
) -> bool:
    """True: a checkpoint was committed between the decision and its record, and before anybody was told to start. Nobody loads an
    older one: the same members form once more. What a tainted generation wrote in that time is ruled out instead."""
    restored = generation.spec.restore.step if generation.spec.restore else 0
    late = [
        item
        for item in restore.usable(job, {})
        if item.step > restored and item.generation < generation.number and item.committed_at >= generation.created_at
    ]
    if not late or any(member.sent_at is not None for member in generation.members.values()):
        return False
    last = job.incidents[-1] if job.incidents else None
    if last is not None and last.generation_after == generation.number and last.kind in _TAINTED:
        for item in late:
            why = f"written after state diverged: {last.text}"[:500]
            action = a.SetCheckpoint(job=job.spec.job, step=item.step, generation=item.generation, damaged=why)
            draft.act(action, because=f"checkpoint of step {item.step} was committed after the decision: ruled out")
        return False
    others = frozenset(view.nodes) - set(generation.members)
    note = f"the checkpoint of step {late[0].step} was committed while generation {generation.number} was being recorded"
    decided = len(draft.actions)
    form(view, job, policy, now, taken, draft, Cause(without=others, note=note))
    return len(draft.actions) > decided


def _reasons(view: View, job: JobView) -> str:
    reasons = [f"{name}: {why}" for name, why in sorted(membership.blocked(view, job).items())]
    return f" ({'; '.join(reasons[:6])})" if reasons else ""


def _wait_for_more(view: View, job: JobView, seats: tuple[membership.Seat, ...], policy: Policy, now: float, draft: Draft) -> bool:
    """The first start waits a little for the rest of the nodes."""
    if len(seats) >= job.spec.max_nodes:
        return False
    newest = max(view.nodes[seat.node].joined_at for seat in seats[: max(1, job.spec.min_nodes)])
    due = max(newest, job.submitted_at) + policy.join_seconds
    if now >= due:
        return False
    draft.look(due)
    draft.say(f"{job.spec.job} has {len(seats)} of {job.spec.max_nodes} nodes and waits {due - now:.1f} s for more")
    return True


def _record(
    view: View,
    job: JobView,
    policy: Policy,
    now: float,
    seats: tuple[membership.Seat, ...],
    choice: MeshChoice,
    point: restore.Choice,
    why: Cause,
    draft: Draft,
) -> None:
    before = job.generation
    members = third.arrange(job, choice.mesh, membership.assign(seats, choice.workers_used, view.nodes))
    number = 1 + max([job.highest_generation, *(node.highest_generation for node in view.nodes.values())])
    climbed = ""
    newest_wanted = not _goes_back(job, point, why)
    in_place = keeps_processes(job) and newest_wanted
    names = tuple(members)
    seed = why.seed
    if before is not None and seed is not None and seed.kind != "growth":
        verified, world = why.verified_only, choice.workers_used
        here = situation(job, policy, now, members=names, world=world, point=point.point, verified=verified, in_place=in_place)
        rung, rungs = ladder.climb(here)
        climbed = ladder.explain(rung, rungs)
        seed = _change(seed, rung=rung.name)
    book = ledger.add(job.ledger, why.charge) if why.charge else job.ledger
    added = ledger.num_charges(book) - ledger.num_charges(job.ledger)
    text = f"{why.note or 'form'}: mesh {choice.mesh} on {len(names)} nodes ({choice.reason}), restore {point.reason}"
    spec = wire.GenerationSpec(
        job=job.spec.job,
        epoch=view.epoch,
        generation=number,
        mesh=choice.mesh,
        world_size=choice.workers_used,
        nodes=names,
        global_batch=job.spec.global_batch,
        micro_batch=job.spec.micro_batch,
        micro_batches=choice.micro_batches,
        layers_per_stage=choice.layers_per_stage,
        restore=point.point,
        committing_node=names[0],
        commit_address=view.nodes[names[0]].peer_address,
        restart_count=ledger.num_charges(book),
        reason=text[:500],
        failures_per_second=rates.failure_rate(job, now, more=added),
        tier_rates=rates.tier_rates(job, now, more=added),
        in_place=in_place,
        gasp=left_since(before) if before is not None and newest_wanted and job.spec.gasp else 0,
        memory=before is not None and newest_wanted and job.spec.checkpoint.memory_tier,
    )
    book = _change(book, frontier=max(book.frontier, job.frontier), num_incidents=len(job.incidents) + (1 if seed else 0))
    draft.act(
        a.RecordGeneration(
            job=job.spec.job,
            spec=spec,
            members=members,
            incident=seed,
            charge=why.charge,
            ledger=book,
            damaged=why.damaged,
        ),
        because=f"generation {number} of {job.spec.job}: {text}" + (f"; ladder: {climbed}" if climbed else ""),
    )


def _goes_back(job: JobView, point: restore.Choice, why: Cause) -> bool:
    """Is an older state wanted than the newest? Then what survivors hold in memory must not be taken up: they are forked anew."""
    tainted = why.seed is not None and why.seed.kind in _TAINTED
    restored = point.point.step if point.point is not None else 0
    return tainted or why.verified_only or bool(why.damaged) or restored < max(job.checkpoints, default=0)


def left_since(before: GenerationView) -> int:
    """The oldest generation whose workers' states are still the newest: the last one that trained. One that went back on purpose, to an
    older state, is the oldest itself."""
    trained = before.first_step_at is not None
    return before.number if trained else before.spec.gasp or before.number


def keeps_processes(job: JobView) -> bool:
    """May survivors go on in their processes? Where the script's workers can (their nodes said so), and only out of a generation
    that trained: behind a change that failed is the fork."""
    if not job.spec.in_place or job.generation is None or job.generation.first_step_at is None:
        return False
    members = job.generation.members
    if third.is_turned({name: member.workers for name, member in members.items()}):
        return False
    return any(wire.IN_PLACE_PHASE in member.phases for member in members.values())


def situation(
    job: JobView,
    policy: Policy,
    now: float,
    *,
    members: tuple[str, ...],
    world: int,
    point: wire.RestorePoint | None,
    verified: bool = False,
    in_place: bool = False,
) -> ladder.Situation:
    """The numbers that the ladder compares."""
    before = job.generation
    assert before is not None
    step = rates.median_step(job) or 0.0
    newest = max((item.step for item in job.checkpoints.values()), default=0)
    restored = point.step if point else 0
    older = max(0, newest - restored) * step
    old = set(before.members)
    restart = job.restart_seconds if job.restart_seconds is not None else policy.restart_seconds_prior
    return ladder.Situation(
        world_before=before.spec.world_size,
        world_after=world,
        same_members=old == set(members),
        uses_spare=bool(set(members) - old),
        restart_seconds=restart,
        redo_seconds=max(0, job.frontier - max(newest, restored)) * step,
        older_redo_seconds=older if verified or older > 0 else 0.0,
        wait_seconds=policy.node_return_seconds_prior,
        horizon_seconds=min(policy.node_return_seconds_prior, 1.0 / rates.failure_rate(job, now)),
        in_place_seconds=restart * policy.in_place_share if in_place else float("inf"),
    )


def _park(job: JobView, reason: str, why: Cause, draft: Draft) -> None:
    """Wait visibly. Said once: the same reason again is not a new order."""
    if job.parked and job.parked.partition(" (")[0] == reason.partition(" (")[0] and why.seed is None:
        draft.say(f"{job.spec.job} is parked: {reason}")
        return
    book = ledger.add(job.ledger, why.charge) if why.charge else job.ledger
    book = _change(book, frontier=max(book.frontier, job.frontier))
    seed = _change(why.seed, rung="park") if why.seed else None
    draft.act(
        a.ParkJob(job=job.spec.job, reason=reason, incident=seed, charge=why.charge, ledger=book),
        because=f"{job.spec.job} is parked: {reason}",
    )


def end(
    job: JobView,
    state: str,
    reason: str,
    *,
    exit_code: int,
    cause: str = "",
    node: str = "",
    rank: int = -1,
    traceback: str = "",
    charge: Charge | None = None,
) -> a.EndJob:
    """The order that ends a job, with its ledger closed."""
    assert state in ("done", "failed", "stopped")
    book = ledger.add(job.ledger, charge) if charge else job.ledger
    book = _change(book, state=state, reason=reason, exit_code=exit_code, cause=cause, frontier=max(book.frontier, job.frontier))
    return a.EndJob(
        job=job.spec.job,
        state=state,
        reason=reason,
        exit_code=exit_code,
        cause=cause,
        node=node,
        rank=rank,
        traceback=traceback,
        ledger=book,
    )
