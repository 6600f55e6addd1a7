"""Preemption between jobs, where the policy allows it: a job of higher priority that cannot form takes what it needs at least.

A job keeps its nodes unless this says otherwise. Nodes are given up like drained ones: after a save, at a step boundary, and
nobody is charged. Pure and level-triggered: the same view gives the same claims, and they vanish with their reason.
"""

from __future__ import annotations

import msgspec

from regrow.supervisor.core import membership
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import JobView, View


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A node that a running job is to give up."""

    node: str
    holder: str
    claimant: str
    why: str


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """What preemption wants now."""

    nodes: dict[str, Claim] = {}
    """By node."""
    kept: dict[str, str] = {}
    """{free node: job of higher priority that waits and will use it}."""
    look_at: float | None = None
    """When the next job has waited long enough to preempt."""

    def of(self, job: str) -> dict[str, Claim]:
        """Nodes that this job is to give up."""
        return {name: claim for name, claim in self.nodes.items() if claim.holder == job}

    def denied(self, job: str) -> frozenset[str]:
        """Nodes that this job cannot form on: claimed or kept for others."""
        return frozenset(name for name, claim in self.nodes.items() if claim.claimant != job) | frozenset(
            name for name, other in self.kept.items() if other != job
        )


NOTHING = Claims()


def claims(view: View, policy: Policy, now: float) -> Claims:
    """Who has to give up what, with the reason; empty while preemption is off.

    Claimants are served by priority, then age. Each takes its least number of nodes: free ones first, then of jobs of lower
    priority, the lowest and youngest first, from the highest ranks down: first what they can spare above their own least number,
    then whole jobs. A claimant that could not form even with all of that takes nothing.
    """
    if not policy.preemption or len(view.jobs) < 2:
        return NOTHING
    held = {
        name: job.spec.job
        for job in view.jobs.values()
        if job.outcome is None and job.generation is not None and job.generation.stage != "ended"
        for name in job.generation.members
    }
    nodes: dict[str, Claim] = {}
    kept: dict[str, str] = {}
    look_at: float | None = None
    for job in sorted(view.jobs.values(), key=_rank):
        if not _waits(job):
            continue
        usable = {name for name in view.nodes if name not in membership.blocked(view, job)} - set(kept) - set(nodes)
        free = sorted(name for name in usable if name not in held)
        least = max(1, job.spec.min_nodes)
        taken = _take(view, job, usable, held, least - len(free))
        if len(free) < least and not taken:
            continue
        due = _waiting_since(job) + policy.preempt_after_seconds
        if taken and now < due:
            look_at = due if look_at is None else min(look_at, due)
            continue
        nodes |= {name: _claim(view, job, name, held[name]) for name in taken}
        kept |= dict.fromkeys(free[: max(least, job.spec.max_nodes)], job.spec.job)
    return Claims(nodes=nodes, kept=kept, look_at=look_at)


def _rank(job: JobView) -> tuple[int, float, str]:
    return -job.spec.priority, job.submitted_at, job.spec.job


def _waits(job: JobView) -> bool:
    """For nodes: a job that is parked for another reason (no legal mesh) would not use them."""
    idle = job.generation is None or job.generation.stage == "ended"
    otherwise = bool(job.parked) and not job.parked.partition(" ")[2].startswith(membership.FEW)
    return job.outcome is None and job.command == "run" and not job.paused and idle and not otherwise


def _waiting_since(job: JobView) -> float:
    decided = [item.decided_at for item in job.incidents[-1:]]
    return max([job.submitted_at, *decided, *([job.last_formed_at] if job.last_formed_at is not None else [])])


def _take(view: View, job: JobView, usable: set[str], held: dict[str, str], missing: int) -> list[str]:
    """Nodes of lower jobs, exactly `missing` or a whole job more; empty when that is not enough or nothing is missing."""
    if missing <= 0:
        return []
    lower = [other for other in view.jobs.values() if other.spec.priority < job.spec.priority and other.spec.job in held.values()]
    lower.sort(key=lambda other: (other.spec.priority, -other.submitted_at, other.spec.job))
    spare: list[str] = []
    rest: list[list[str]] = []
    for other in lower:
        assert other.generation is not None
        members = list(reversed(other.generation.spec.nodes))
        above = max(0, len(members) - max(1, other.spec.min_nodes))
        mine = [name for name in members if name in usable]
        spare += mine[:above]
        rest.append(mine[above:])
    if len(spare) >= missing:
        return spare[:missing]
    taken = spare
    for whole in rest:
        taken = taken + whole
        if len(taken) >= missing:
            return taken
    return []


def _claim(view: View, job: JobView, node: str, holder: str) -> Claim:
    lower = view.jobs[holder].spec.priority
    why = f"preempted by {job.spec.job} (priority {job.spec.priority} over {lower})"
    return Claim(node=node, holder=holder, claimant=job.spec.job, why=why)
