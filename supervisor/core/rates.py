"""Failure rate and the limits that are learned from the history of steps."""

from __future__ import annotations

import statistics

from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import JobView

_DEFAULT_PRIOR_PER_SECOND = 1.0 / 86_400.0
"""One failure a day until something is known."""


def failure_rate(job: JobView, now: float, *, more: int = 0) -> float:
    """Posterior mean of the job's failure rate, per second: Gamma(1, 1/prior) updated by n incidents (and `more`) in T seconds.

    (1 + n) / (1/prior + T), the conjugate update of a Poisson rate (Gelman et al., Bayesian Data Analysis, section 2.6).
    """
    prior = job.spec.checkpoint.prior_failures_per_hour / 3600.0 or _DEFAULT_PRIOR_PER_SECOND
    return (1 + len(job.ledger.charges) + more) / (1.0 / prior + max(0.0, now - job.submitted_at))


def median_step(job: JobView) -> float | None:
    """Median of the last step durations in seconds; None before the first."""
    return statistics.median(job.step_seconds) if job.step_seconds else None


def hang_limit(job: JobView, policy: Policy, *, stopped: bool = False) -> float:
    """Seconds without any change of progress after which a generation is hung.

    The job's fixed limit wins; else max(floor, factor x median step). Before the first step of a generation the limit
    is at least `hang_first_step_seconds`.

    Args:
        stopped: an agent sees a worker whose process does not run.
    """
    step = median_step(job)
    factor = policy.hang_stopped_factor if stopped else policy.hang_factor
    limit = job.spec.hang_seconds or max(policy.hang_floor_seconds, factor * (step or 0.0))
    generation = job.generation
    if generation is None or generation.first_step_at is None:
        limit = max(limit, policy.hang_first_step_seconds)
    return limit


def stopped_limit(job: JobView, policy: Policy) -> float:
    """Seconds without a completed step after which silence of a node is not excused by progress any more."""
    return max(policy.stopped_floor_seconds, policy.stopped_steps * (median_step(job) or 0.0))
