"""What was learned of a job's times, over the terms of leaders: a new one need not begin at the floors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from regrow.supervisor.core import hang_limits, rates
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.records import LearnedRecord
from regrow.supervisor.core.view import JobView
from regrow.supervisor.detector import Stall
from regrow.supervisor.phase_times import PhaseTimes

_CHANGE = 1.5
"""A time is written again when it changed by this factor: limits are several times as long."""
_LEAST_SECONDS = 60.0
"""Between two writes of a job, unless a generation completed its first step."""


class Learned:
    """Of all jobs. Edge state: phases are seen in beats, and only what a next leader needs goes to the store."""

    def __init__(self, policy: Policy, write: Callable[[str, LearnedRecord], None]) -> None:
        """Args:
        write: (job, record), soon; called when something changed that matters.
        """
        self._policy = policy
        self._write = write
        self._times: defaultdict[str, PhaseTimes] = defaultdict(PhaseTimes)
        self._written: dict[str, tuple[float, LearnedRecord]] = {}

    def times(self, job: str) -> PhaseTimes:
        """How long this job's phases took."""
        return self._times[job]

    def loaded(self, job: str, record: LearnedRecord | None, now: float) -> None:
        """Begin with what the leader before this one wrote."""
        if record is None:
            return
        self._written[job] = (now, record)
        for phase, seconds in record.phase_seconds.items():
            if phase in hang_limits.PHASES:
                self._times[job].took(phase, seconds)

    def limit(self, job: JobView, stall: Stall) -> float:
        """Seconds without progress after which the job is hung."""
        longest = self._times[job.spec.job].longest()
        return hang_limits.limit(job, self._policy, stopped=stall.stopped, phases=stall.phases, longest=longest)

    def keep(self, jobs: Mapping[str, JobView], now: float) -> None:
        """Write what a next leader should know."""
        for name, job in jobs.items():
            generation = job.generation
            if generation is None or job.outcome is not None:
                continue
            at, known = self._written.get(name, (now - _LEAST_SECONDS, job.learned))
            stepped = generation.number if generation.first_step_at is not None else known.generation
            if stepped == known.generation and now < at + _LEAST_SECONDS:
                continue
            found = LearnedRecord(generation=stepped, step_seconds=rates.median_step(job), phase_seconds=self._times[name].longest())
            changed = stepped != known.generation or _differs(known, found)
            self._written[name] = (now, found if changed else known)
            if changed:
                self._write(name, found)


def _differs(known: LearnedRecord, found: LearnedRecord) -> bool:
    pairs = [(known.step_seconds, found.step_seconds)]
    pairs += [(known.phase_seconds.get(phase), seconds) for phase, seconds in found.phase_seconds.items()]
    return any(new is not None and (old is None or not old / _CHANGE <= new <= old * _CHANGE) for old, new in pairs)
