"""A rank that became slower than it was holds all others up: at a step boundary a spare takes the ranks of its node."""

from __future__ import annotations

from regrow.errors import ConfigurationError
from regrow.supervisor.core import membership, meshes, rates, symptoms
from regrow.supervisor.core.draft import Draft
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import GenerationView, JobView, View

SLOW = "slow"


def to_move(
    view: View, job: JobView, generation: GenerationView, policy: Policy, now: float, taken: frozenset[str], draft: Draft
) -> dict[str, tuple[str, str]]:
    """{node: (why, "slow")} of the slowest rank, when it stays slow, a spare keeps the world as large, and the move pays; else nothing.

    What is gained is at most the excess, as if all of a step were compute; what is lost is a restart and a step of all workers.
    """
    named = {rank: one for rank, one in generation.slow.items() if rank >= 0 and one.excess_ratio >= policy.slow_ratio > 0}
    if not named or not job.spec.checkpoint.path or symptoms.level(generation) == 0:
        return {}
    rank = max(named, key=lambda each: named[each].excess_ratio)
    one, node = named[rank], generation.node_of(rank)
    text = f"rank {rank} computes {100 * one.excess_ratio:.0f} % longer than it did"
    due = one.since + policy.slow_seconds
    if now < due:
        draft.look(due)
        draft.say(f"{text}: moved in {due - now:.0f} s if it stays so")
        return {}
    world = generation.spec.world_size
    places = sum(seat.slots for seat in membership.eligible(view, job, taken, without=frozenset({node})))
    if not _is_as_large(job, places, world):
        draft.say(f"{text}; no spare can take the ranks of {node}")
        return {}
    horizon = rates.horizon_seconds(job, policy, now)
    restart = job.restart_seconds if job.restart_seconds is not None else policy.restart_seconds_prior
    gain, cost = world * one.excess_ratio / (1.0 + one.excess_ratio) * horizon, world * (restart + (rates.median_step(job) or 0.0))
    numbers = f"gain at most {gain:.0f} GPU-s in {horizon:.0f} s, cost {cost:.0f} GPU-s"
    if gain <= cost:
        draft.say(f"{text}; not moved: {numbers}")
        return {}
    return {node: (f"{text} ({numbers})", SLOW)}


def _is_as_large(job: JobView, places: int, world: int) -> bool:
    try:
        choice = meshes.choose(job.spec, places)
    except ConfigurationError:
        return False
    return choice is not None and choice.workers_used >= world
