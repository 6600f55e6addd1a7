"""When to save: optimal checkpoint intervals, and the controller that turns measurements into one. Pure.

Two units of time on purpose: formulas take any unit as long as all arguments share it; the `Controller` is in seconds.

What the interval T trades, as a share of the time (measured form):

    overhead(T) = s / T + f (T / 2 + w + detect + R)

s visible stall of a save, w time from snapshot to durable (until then a failure goes back to the save before), R restore,
f failures per time, only of those failures that need this tier. Only s and f decide T* = sqrt(2 s / f); the rest is the bill.
"""

from __future__ import annotations

import math

import msgspec

from regrow.errors import ConfigurationError
from regrow.wire import CheckpointPolicy

SEED_A = 4.0
"""Seed text: 0.5 x 8 minutes lost per failure and hour of interval, in minutes. One example's cost, not a constant."""
SEED_B = 55.8
"""Seed text: 60 x 0.93. One example's cost of saving; its unit is not stated there."""
METHODS = ("seed", "young", "daly", "exact")


def linear_cost(interval: float, rate: float, a: float = SEED_A, b: float = SEED_B) -> float:
    """E(T) = a f T + b / T: lost work grows with T, saving shrinks with it. Source: seed text, example 9.6.3."""
    return a * rate * interval + b / interval


def linear_optimum(rate: float, a: float = SEED_A, b: float = SEED_B) -> float:
    """T* = sqrt(b / (a f)), where both terms of `linear_cost` are equal."""
    return math.sqrt(b / (a * rate))


def young(cost: float, mtbf: float) -> float:
    """T = sqrt(2 C M), first order in C / M. Source: J. W. Young, CACM 17(9), 1974."""
    return math.sqrt(2.0 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """T = sqrt(2 C M) (1 + sqrt(x) / 3 + x / 9) - C with x = C / (2 M); M when C >= 2 M.

    Source: J. T. Daly, Future Generation Computer Systems 22(3), 2006, equation 37.
    """
    if cost >= 2.0 * mtbf:
        return mtbf
    x = cost / (2.0 * mtbf)
    return math.sqrt(2.0 * cost * mtbf) * (1.0 + math.sqrt(x) / 3.0 + x / 9.0) - cost


def exact(cost: float, mtbf: float) -> float:
    """The T that minimises `exponential_overhead`: T = M (1 + W0(-exp(-1 - C / M))), for any C / M.

    Source: Daly 2006 before its expansion; W0 is Lambert's function.
    """
    return mtbf * (1.0 + _lambert_w0_shifted(cost / mtbf))


def _lambert_w0_shifted(c: float) -> float:
    """W0(-exp(-1 - c)) for c >= 0, solved as x + log(1 - x) = -c with W = x - 1: stable for c from 1e-16 to 1e3."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if middle in (low, high):
            break
        if math.log1p(-middle) + middle < -c:
            high = middle
        else:
            low = middle
    return (low + high) / 2.0 - 1.0


def exponential_overhead(interval: float, cost: float, mtbf: float, recovery: float = 0.0) -> float:
    """Extra time as a share of useful time when failures are exponential, also during saves and recoveries.

    M e^(R/M) (e^((T+C)/M) - 1) / T - 1 (Daly 2006, equation 20). Infinite where the exponentials overflow.
    """
    try:
        return mtbf * math.exp(recovery / mtbf) * math.expm1((interval + cost) / mtbf) / interval - 1.0
    except OverflowError:
        return math.inf


def measured_overhead(interval: float, stall: float, rate: float, write: float = 0.0, detect: float = 0.0, restore: float = 0.0) -> float:
    """overhead(T) = s/T + f (T/2 + w + detect + R): share of the time that does not advance training."""
    return stall / interval + rate * (interval / 2.0 + write + detect + restore)


def job_mtbf(gpus: int, rate_per_gpu: float) -> float:
    """MTBF = 1 / (G lambda): series model, independent failures. Unit: that of 1 / lambda."""
    return 1.0 / (gpus * rate_per_gpu)


def posterior_rate(failures: int, exposure: float, prior_rate: float, prior_failures: float = 1.0) -> float:
    """Mean of the Gamma posterior of a failure rate: (a + n) / (a / prior + exposure) with a pseudo-failures of weight.

    Without a prior (0) Jeffreys' prior is used, (n + 1/2) / exposure: never 0, never infinite for exposure > 0.
    """
    if prior_rate > 0.0:
        return (prior_failures + failures) / (prior_failures / prior_rate + exposure)
    return (failures + 0.5) / exposure if exposure > 0.0 else 0.0


def whole_steps(interval: float, step: float) -> int:
    """The interval as a number of training steps, rounded down, at least one (BLOOM: 6956 s of 105 s are 66)."""
    return max(1, math.floor(interval / step * (1.0 + 1e-12)))


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a job knows about its own saves and recoveries, in seconds. None: not measured yet."""

    stall_seconds: float | None = None
    write_seconds: float = 0.0
    restore_seconds: float = 0.0
    detect_seconds: float = 0.0
    step_seconds: float = 0.0
    notice_seconds: float = 0.0
    """Warning time before a preemption; 0: none is expected."""
    checkpoint_bytes: float = 0.0


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the interval, in seconds where not said otherwise. 0 of an optional limit: no limit."""

    min_seconds: float = 0.0
    max_seconds: float = 3600.0
    write_bytes_per_second: float = 0.0
    """Share of the storage bandwidth that checkpoints may use on average."""
    max_stall_ratio: float = 0.0
    """Share of the time that the stalls of saves may take."""
    max_lost_gpu_hours: float = 0.0
    """What one failure may cost at most; needs `gpus`."""
    gpus: int = 0


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A decision with its reason."""

    interval_seconds: float
    steps: int
    """The same in whole steps; 0 while the step time is unknown."""
    optimum_seconds: float
    """What the formula alone says."""
    rule: str
    """What set the value: formula, first_save, write, bandwidth, min, max, lost_gpu_hours or step."""
    lower_seconds: float
    lower_rule: str
    upper_seconds: float
    upper_rule: str
    overhead_ratio: float
    failures_per_second: float
    reason: str
    warnings: tuple[str, ...] = ()


class Controller:
    """Chooses the interval from measurements. Holds configuration only: the same inputs give the same answer.

    Args:
        bounds: limits from the job's checkpoint policy.
        prior_failures_per_second: what is believed of the whole job's all-cause rate before anything was seen; 0: nothing.
        prior_failures: weight of that belief in pseudo-failures.

    Raises:
        ConfigurationError: a bound or prior that is negative, not finite, or contradicts another.
    """

    def __init__(self, bounds: Bounds | None = None, *, prior_failures_per_second: float = 0.0, prior_failures: float = 1.0) -> None:
        self._bounds = bounds or Bounds()
        self._prior_rate = prior_failures_per_second
        self._prior_failures = prior_failures
        _check_bounds(self._bounds, prior_failures_per_second, prior_failures)

    @classmethod
    def of_policy(cls, policy: CheckpointPolicy) -> Controller:
        """The controller that a job's checkpoint policy asks for."""
        bounds = Bounds(min_seconds=policy.min_interval_seconds, max_seconds=policy.max_interval_seconds)
        return cls(bounds, prior_failures_per_second=policy.prior_failures_per_hour / 3600.0)

    def choose(self, measured: Measured, *, failures: int = 0, exposure_seconds: float = 0.0) -> Interval:
        """The interval for a job that saw `failures` in `exposure_seconds` of running."""
        return self.choose_at(measured, posterior_rate(failures, exposure_seconds, self._prior_rate, self._prior_failures))

    def choose_at(self, measured: Measured, failures_per_second: float) -> Interval:
        """The interval for a known failure rate (what the supervisor sends to workers)."""
        stall, rate = measured.stall_seconds, failures_per_second
        if stall is None:
            return self.apply(0.0, measured, rate, story="no save was measured yet, so the first one is taken early")
        if rate <= 0.0:
            return self.apply(math.inf, measured, rate, story="no failure rate is known, so only the bounds decide")
        optimum = math.sqrt(2.0 * stall / rate)
        story = f"sqrt(2 x {stall:.3g} s stall x {1.0 / rate:.4g} s MTBF) = {optimum:.4g} s"
        return self.apply(optimum, measured, rate, story=story)

    def apply(self, optimum_seconds: float, measured: Measured, failures_per_second: float, *, story: str = "") -> Interval:
        """Bounds and whole steps applied to what a formula says (infinity: it says nothing)."""
        stall, rate = measured.stall_seconds, failures_per_second
        bounded, rule = self._bounded(optimum_seconds, measured)
        if stall is None and rule == "formula":
            rule = "first_save"
        (lower, lower_rule), (upper, upper_rule) = self._floor(measured), self._ceiling()
        value, steps = _stepped(bounded, measured.step_seconds, lower)
        if steps == 1 and bounded < measured.step_seconds:
            rule = "step"
        cost = (
            measured_overhead(value, stall or 0.0, rate, measured.write_seconds, measured.detect_seconds, measured.restore_seconds)
            if value > 0.0
            else 0.0
        )
        reason = story or f"the formula says {optimum_seconds:.6g} s"
        if rule not in ("formula", "first_save"):
            reason += f"; {_RULES[rule]} sets {value if rule == 'step' else bounded:.4g} s"
        if steps:
            reason += f"; {steps} step{'s' if steps > 1 else ''} of {measured.step_seconds:.3g} s"
        return Interval(
            interval_seconds=value,
            steps=steps,
            optimum_seconds=optimum_seconds,
            rule=rule,
            lower_seconds=lower,
            lower_rule=lower_rule,
            upper_seconds=upper,
            upper_rule=upper_rule,
            overhead_ratio=cost,
            failures_per_second=rate,
            reason=reason,
            warnings=tuple(warnings(value, 1.0 / rate if rate > 0.0 else math.inf, measured)) + self._contradiction(measured),
        )

    def _floor(self, measured: Measured) -> tuple[float, str]:
        bounds = self._bounds
        budget = measured.checkpoint_bytes / bounds.write_bytes_per_second if bounds.write_bytes_per_second else 0.0
        stalls = (measured.stall_seconds or 0.0) / bounds.max_stall_ratio if bounds.max_stall_ratio else 0.0
        return max((bounds.min_seconds, "min"), (measured.write_seconds, "write"), (budget, "bandwidth"), (stalls, "stall"))

    def _ceiling(self) -> tuple[float, str]:
        bounds = self._bounds
        if bounds.max_lost_gpu_hours and bounds.gpus:
            return min((bounds.max_seconds, "max"), (bounds.max_lost_gpu_hours * 3600.0 / bounds.gpus, "lost_gpu_hours"))
        return bounds.max_seconds, "max"

    def _bounded(self, optimum: float, measured: Measured) -> tuple[float, str]:
        floor, low_rule = self._floor(measured)
        ceiling, high_rule = self._ceiling()
        if optimum < floor or floor > ceiling:
            return floor, low_rule
        return (ceiling, high_rule) if optimum > ceiling else (optimum, "formula")

    def _contradiction(self, measured: Measured) -> tuple[str, ...]:
        (floor, low_rule), (ceiling, high_rule) = self._floor(measured), self._ceiling()
        if floor <= ceiling:
            return ()
        return (f"{_RULES[low_rule]} needs {floor:.4g} s, more than the {ceiling:.4g} s of {_RULES[high_rule]}: the longer one is kept",)


_RULES = {
    "min": "the lower bound",
    "max": "the upper bound",
    "write": "the time to make a save durable",
    "bandwidth": "the storage bandwidth budget",
    "stall": "the share of the time that stalls may take",
    "lost_gpu_hours": "the cap on lost GPU hours",
    "step": "one training step",
}


def _stepped(interval: float, step: float, floor: float) -> tuple[float, int]:
    if step <= 0.0 or not math.isfinite(interval):
        return interval, 0
    steps = whole_steps(interval, step)
    if steps * step < floor:
        steps = math.ceil(floor / step * (1.0 - 1e-12))
    return steps * step, steps


def warnings(interval: float, mtbf: float, measured: Measured) -> list[str]:
    """What is doubtful about an interval, as sentences. All times in seconds."""
    found: list[str] = []
    if interval >= mtbf / 2.0:
        survive = math.exp(-interval / mtbf)
        found.append(
            f"the interval of {_time(interval)} is {interval / mtbf:.2g} x the MTBF of {_time(mtbf)}: first-order formulas fail there"
            f" (P(no failure within an interval) = {survive:.0%}); check the unit of the failure rate, or use --method exact"
        )
    recovery = measured.detect_seconds + measured.restore_seconds
    if recovery > interval / 10.0:
        found.append(
            f"recovery takes {_time(recovery)}, not much shorter than the interval of {_time(interval)}:"
            " speed up the restore before saving more often"
        )
    if measured.write_seconds > interval:
        found.append(
            f"a save needs {_time(measured.write_seconds)} to be durable, longer than the interval: bandwidth rules, not the formula"
        )
    needed = notice_needed(measured)
    if measured.notice_seconds > 0.0 and needed > measured.notice_seconds:
        found.append(f"a preemption notice of {measured.notice_seconds:g} s cannot hold one step and one save: {needed:g} s needed")
    return found


def storage_warnings(checkpoint: float, storage: float, keep: int) -> list[str]:
    """Whether the checkpoints that are kept, and one being written, fit into the storage (same unit)."""
    needed = checkpoint * (keep + 1)
    if storage <= 0.0 or needed <= storage:
        return []
    return [
        f"{keep} kept checkpoints and one being written need {needed:g} GB, {storage:g} GB are there: keep at most {max(0, int(storage // checkpoint) - 1)}"
    ]


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """One place of checkpoints: the node's memory, a peer's memory, a local disk, shared storage."""

    name: str
    share: float
    """Share of all failures that only this tier, or one further out, survives: 1 for the first that anything needs."""
    stall_seconds: float
    write_seconds: float


def tier_intervals(tiers: tuple[Tier, ...], failures_per_second: float, bounds: Bounds | None = None) -> dict[str, Interval]:
    """An interval for each tier by itself: its own stall and write time, and only the failures that need it."""
    controller = Controller(bounds or Bounds(max_seconds=math.inf))
    return {
        tier.name: controller.choose_at(
            Measured(stall_seconds=tier.stall_seconds, write_seconds=tier.write_seconds), failures_per_second * tier.share
        )
        for tier in tiers
    }


def notice_needed(measured: Measured) -> float:
    """Seconds of notice that one step and one durable save need."""
    return measured.step_seconds + max(measured.stall_seconds or 0.0, measured.write_seconds)


def _time(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "infinity"
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _check_bounds(bounds: Bounds, rate: float, weight: float) -> None:
    named = {
        "min_interval_seconds": bounds.min_seconds,
        "max_interval_seconds": bounds.max_seconds,
        "write_bytes_per_second": bounds.write_bytes_per_second,
        "max_stall_ratio": bounds.max_stall_ratio,
        "max_lost_gpu_hours": bounds.max_lost_gpu_hours,
        "prior failure rate": rate,
        "prior weight": weight,
    }
    for name, value in named.items():
        if math.isnan(value) or value < 0.0 or (math.isinf(value) and name != "max_interval_seconds"):
            raise ConfigurationError(f"{name} is {value}", where="checkpoint policy", hint="give a finite number of at least 0")
    if bounds.max_seconds <= 0.0 or bounds.min_seconds > bounds.max_seconds:
        raise ConfigurationError(
            f"interval bounds {bounds.min_seconds:g} to {bounds.max_seconds:g} s hold no interval",
            where="checkpoint policy",
            hint="the upper bound must be positive and not below the lower one",
        )
