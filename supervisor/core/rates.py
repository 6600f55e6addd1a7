"""Failure rate and the limits that are learned from the history of steps."""

from __future__ import annotations

import itertools
import statistics

from regrow import wire
from regrow.supervisor.core import ledger
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import JobView

_LEAST_GAPS = 7
_BURSTY = 3.0


def failure_rate(job: JobView, now: float, *, more: int = 0) -> float:
    """Posterior mean of the job's failure rate, per second, after n incidents (and `more`) in T seconds.

    See `ledger.posterior_rate`.
    """
    seconds = max(0.0, now - job.submitted_at)
    return ledger.posterior_rate(ledger.num_charges(job.ledger) + more, seconds, job.spec.checkpoint.prior_failures_per_hour)


def tier_rates(job: JobView, now: float, *, more: int = 0) -> wire.TierRates | None:
    """The same by tier. Memory might serve any failure, so its rate is that of all causes (of those that it did serve it would be none
    while it is not saved to); storage's is of those after which the job did not go on from memory, with `more`, of which nobody knows
    yet. Each is rather too high than too low. None: no tier in memory."""
    policy = job.spec.checkpoint
    if not policy.memory_tier:
        return None
    seconds = max(0.0, now - job.submitted_at)
    served = min(job.ledger.num_from_memory, ledger.num_charges(job.ledger))
    others = ledger.num_charges(job.ledger) - served + more
    return wire.TierRates(
        memory=failure_rate(job, now, more=more),
        storage=ledger.posterior_rate(others, seconds, policy.prior_failures_per_hour),
    )


def over_dispersed(job: JobView) -> float | None:
    """How much burstier than chance the incidents come, when that is beyond doubt: the squared coefficient of variation of the
    times between them (1 for a Poisson process). None below eight incidents or below the limit of 3."""
    times = [charge.at for charge in job.ledger.charges]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    if len(gaps) < _LEAST_GAPS or sum(gaps) <= 0:
        return None
    mean = statistics.fmean(gaps)
    ratio = statistics.variance(gaps) / mean**2
    return ratio if ratio > _BURSTY else None


def in_batches(job: JobView, now: float, window_seconds: float) -> float | None:
    """`over_dispersed`, as long as the last failure is no older than the window: old batches are no advice for today."""
    charges = job.ledger.charges
    return over_dispersed(job) if charges and now < charges[-1].at + window_seconds else None


def median_step(job: JobView) -> float | None:
    """Median of the last step durations in seconds; before the first of this term what the leader before wrote down, or None."""
    return statistics.median(job.step_seconds) if job.step_seconds else job.learned.step_seconds


_SAVE_STEPS = 5
"""Within so many steps ranks agree on a save, take it, and have it written."""


def save_seconds(job: JobView, policy: Policy) -> float:
    """How long a save that an order waits for may take: the policy's time, longer where steps are long. A job whose steps last as long as the
    deadline would never be able to grow again."""
    return max(policy.save_seconds, _SAVE_STEPS * (median_step(job) or 0.0))


def horizon_seconds(job: JobView, policy: Policy, now: float) -> float:
    """Over how long a change pays that the next failure undoes: the expected time to it, within the policy's bounds."""
    return min(policy.growth_horizon_seconds, max(policy.growth_horizon_least_seconds, 1.0 / failure_rate(job, now)))


def hang_limit(job: JobView, policy: Policy, *, stopped: bool = False) -> float:
    """Seconds without any change of progress after which a generation is hung.

    The job's fixed limit wins; else max(floor, factor x median step). Before the first step of a generation the limit
    is at least `hang_first_step_seconds`; a new leader knows from the one before it whether there was one.

    Args:
        stopped: an agent sees a worker whose process does not run.
    """
    step = median_step(job)
    factor = policy.hang_stopped_factor if stopped else policy.hang_factor
    limit = job.spec.hang_seconds or max(policy.hang_floor_seconds, factor * (step or 0.0))
    generation = job.generation
    if generation is None or (generation.first_step_at is None and generation.number != job.learned.generation):
        limit = max(limit, policy.hang_first_step_seconds)
    return limit


def stopped_limit(job: JobView, policy: Policy) -> float:
    """Seconds without a completed step after which silence of a node is not excused by progress any more."""
    return max(policy.stopped_floor_seconds, policy.stopped_steps * (median_step(job) or 0.0))


def past(job: JobView) -> ledger.Past:
    """What the ledger's rules need to know of a job."""
    return ledger.Past(since=job.submitted_at, step_seconds=median_step(job))
