"""When this job saves, to storage and to memory: the controllers of ckpt.interval and ckpt.tiers fed with this process's own
measurements (torch-free)."""

from __future__ import annotations

import msgspec

from regrow.ckpt.interval import Controller, Interval, Measured, whole_steps
from regrow.ckpt.tiers import MemoryTier, memory_interval, storage_interval
from regrow.wire import CheckpointPolicy, Control, GenerationSpec, TierInterval, TierRates

_WEIGHT = 0.3
"""Weight of the newest measurement in the running means."""


class Cadence:
    """Decides on rank 0 that a save is due. Seconds of this process's monotonic clock, steps of the job."""

    def __init__(self, policy: CheckpointPolicy, spec: GenerationSpec) -> None:
        self._controller = Controller.of_policy(policy)
        self._fixed_seconds = spec.save_interval_seconds
        rate = spec.failures_per_second or policy.prior_failures_per_hour / 3600.0
        self._rates = spec.tier_rates or TierRates(memory=rate, storage=rate)
        self._measured = Measured()
        self._last_step = self._last_kept = 0
        self._has_memory = policy.memory_tier
        self._memory = MemoryTier(given_seconds=policy.memory_interval_seconds)

    def started_at(self, step: int, restore_seconds: float) -> None:
        """The step that is safe on storage now, and what it took to load it."""
        self._last_step = self._last_kept = step
        self._measured = msgspec.structs.replace(self._measured, restore_seconds=restore_seconds)

    def ordered(self, order: Control) -> None:
        """New inputs from the supervisor. An interval of 0 gives the choice back to the controller."""
        if order.save_interval_seconds is not None:
            self._fixed_seconds = order.save_interval_seconds
        if order.failures_per_second is not None:
            self._rates = order.tier_rates or TierRates(memory=order.failures_per_second, storage=order.failures_per_second)

    def stepped(self, seconds: float) -> None:
        """A step took this long, without the stall of a save."""
        self._measured = msgspec.structs.replace(self._measured, step_seconds=_mean(self._measured.step_seconds, seconds))

    def saved(self, step: int, stall_seconds: float, *, memory: bool = False) -> None:
        """A snapshot of `step` was taken and held training up this long; `memory`: it is not written."""
        self._last_kept = step
        measured = self._memory.measured if memory else self._measured
        measured = msgspec.structs.replace(measured, stall_seconds=_mean(measured.stall_seconds or 0.0, stall_seconds))
        if memory:
            self._memory = msgspec.structs.replace(self._memory, measured=measured)
        else:
            self._last_step, self._measured = step, measured

    def wrote(self, write_seconds: float) -> None:
        """A snapshot became durable this long after it was taken."""
        self._measured = msgspec.structs.replace(self._measured, write_seconds=_mean(self._measured.write_seconds, write_seconds))

    def remembered(self, safe_seconds: float) -> None:
        """A snapshot that is not written was safe in memory this long after it was taken."""
        measured = self._memory.measured
        measured = msgspec.structs.replace(measured, write_seconds=_mean(measured.write_seconds, safe_seconds))
        self._memory = msgspec.structs.replace(self._memory, measured=measured)

    def interval(self) -> Interval:
        """What the controller chooses now for storage, with its reason; a fixed interval of the supervisor is not looked at here."""
        return self._controller.choose_at(self._measured, self._rates.storage)

    def tiers(self) -> tuple[TierInterval, ...]:
        """How often each tier is saved to now, and why."""
        storage = storage_interval(self.interval(), self._measured, self._fixed_seconds)
        return (storage, self._memory_interval()) if self._has_memory else (storage,)

    def memory_due(self, step: int, lag: int) -> bool:
        """The same as `due` for a snapshot that stays in memory: any snapshot counts."""
        step_seconds = self._measured.step_seconds
        if not self._has_memory or step_seconds <= 0.0:
            return False
        chosen, since = self._memory_interval(), step + lag - self._last_kept
        if chosen.rule == "given":
            return since * step_seconds >= chosen.interval_seconds
        return chosen.interval_seconds > 0.0 and since >= whole_steps(chosen.interval_seconds, step_seconds)

    def due(self, step: int, lag: int) -> bool:
        """Should ranks save `lag` steps after `step`, which is when they would hear of it?"""
        step_seconds = self._measured.step_seconds
        since = step + lag - self._last_step
        if self._fixed_seconds > 0.0:
            return step_seconds > 0.0 and since * step_seconds >= self._fixed_seconds
        chosen = self.interval()
        return since >= chosen.steps if chosen.steps else False

    def _memory_interval(self) -> TierInterval:
        stall = self._memory.measured.stall_seconds
        measured = msgspec.structs.replace(
            self._memory.measured,
            stall_seconds=self._measured.stall_seconds if stall is None else stall,
            step_seconds=self._measured.step_seconds,
        )
        tier = msgspec.structs.replace(self._memory, measured=measured, failures_per_second=self._rates.memory)
        return memory_interval(tier, self.interval())


def _mean(old: float, new: float) -> float:
    return new if old <= 0.0 else old + _WEIGHT * (new - old)
