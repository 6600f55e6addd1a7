"""How long a generation may stand still before it is hung: by what its ranks are doing."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from regrow.supervisor.core import rates
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import JobView

PHASES: dict[str, float] = {"eval": 600.0, "save": 120.0, "restore": 300.0}
"""Phases with a limit of their own, and what it is in seconds until one of them was seen to end."""


def limit(job: JobView, policy: Policy, *, stopped: bool, phases: Collection[str], longest: Mapping[str, float]) -> float:
    """Seconds without any change of progress after which the generation is hung.

    Where a rank is in one of `PHASES` it is that phase's limit: what the job states, else max(floor, factor x the longest that
    was seen); the largest of several. Else that of a step (`rates.hang_limit`), which also holds when a process does not run.

    Args:
        stopped: an agent sees a worker whose process does not run.
        phases: of the ranks, now.
        longest: {phase: longest of the last ones in seconds}, of this job in this leader's term.
    """
    step = rates.hang_limit(job, policy, stopped=stopped)
    held = [phase for phase in PHASES if phase in phases]
    if stopped or not held:
        return step
    found = max(_of_phase(job, policy, phase, longest) for phase in held)
    generation = job.generation
    first = generation is None or (generation.first_step_at is None and not generation.adopted)  # a new leader has not seen the first step
    return max(found, step) if first else found


def _of_phase(job: JobView, policy: Policy, phase: str, longest: Mapping[str, float]) -> float:
    stated = job.spec.hang_phase_seconds.get(phase)
    if stated:
        return stated
    seen = longest.get(phase)
    return PHASES[phase] if seen is None else max(policy.hang_floor_seconds, policy.hang_phase_factor * seen)
