"""When this job saves: the interval controller of ckpt.interval fed with this process's own measurements (torch-free)."""

from __future__ import annotations

import msgspec

from regrow.ckpt.interval import Controller, Interval, Measured
from regrow.wire import CheckpointPolicy, Control, GenerationSpec

_WEIGHT = 0.3
"""Weight of the newest measurement in the running means."""


class Cadence:
    """Decides on rank 0 that a save is due. Seconds of this process's monotonic clock, steps of the job."""

    def __init__(self, policy: CheckpointPolicy, spec: GenerationSpec) -> None:
        self._controller = Controller.of_policy(policy)
        self._fixed_seconds = spec.save_interval_seconds
        self._rate = spec.failures_per_second or policy.prior_failures_per_hour / 3600.0
        self._measured = Measured()
        self._last_step = self._last_kept = 0
        self._memory_seconds = policy.memory_interval_seconds

    def started_at(self, step: int, restore_seconds: float) -> None:
        """The step that is safe on storage now, and what it took to load it."""
        self._last_step = self._last_kept = step
        self._measured = msgspec.structs.replace(self._measured, restore_seconds=restore_seconds)

    def ordered(self, order: Control) -> None:
        """New inputs from the supervisor. An interval of 0 gives the choice back to the controller."""
        if order.save_interval_seconds is not None:
            self._fixed_seconds = order.save_interval_seconds
        if order.failures_per_second is not None:
            self._rate = order.failures_per_second

    def stepped(self, seconds: float) -> None:
        """A step took this long, without the stall of a save."""
        self._measured = msgspec.structs.replace(self._measured, step_seconds=_mean(self._measured.step_seconds, seconds))

    def saved(self, step: int, stall_seconds: float, *, memory: bool = False) -> None:
        """A snapshot of `step` was taken and held training up this long; `memory`: it is not written."""
        self._last_kept = step
        if not memory:
            self._last_step = step
        stall = self._measured.stall_seconds
        self._measured = msgspec.structs.replace(self._measured, stall_seconds=_mean(stall or 0.0, stall_seconds))

    def wrote(self, write_seconds: float) -> None:
        """A snapshot became durable this long after it was taken."""
        self._measured = msgspec.structs.replace(self._measured, write_seconds=_mean(self._measured.write_seconds, write_seconds))

    def interval(self) -> Interval:
        """What the controller chooses now, with its reason; a fixed interval of the supervisor is not looked at here."""
        return self._controller.choose_at(self._measured, self._rate)

    def memory_due(self, step: int, lag: int) -> bool:
        """The same for a snapshot that stays in memory: any snapshot counts, and the job says how often."""
        since = (step + lag - self._last_kept) * self._measured.step_seconds
        return 0.0 < self._memory_seconds <= since

    def due(self, step: int, lag: int) -> bool:
        """Should ranks save `lag` steps after `step`, which is when they would hear of it?"""
        step_seconds = self._measured.step_seconds
        since = step + lag - self._last_step
        if self._fixed_seconds > 0.0:
            return step_seconds > 0.0 and since * step_seconds >= self._fixed_seconds
        chosen = self.interval()
        return since >= chosen.steps if chosen.steps else False


def _mean(old: float, new: float) -> float:
    return new if old <= 0.0 else old + _WEIGHT * (new - old)
