"""How often a job saves to each of its tiers: storage, and between that the nodes' memory. Pure, seconds throughout.

Each tier has its own formula, T* = sqrt(2 s / f): s its own visible stall, f only the failures that need it. A save to storage is a
snapshot in memory, too, so a tier in memory is of use only where it is saved to more often than storage.
"""

from __future__ import annotations

import msgspec

from regrow.ckpt.interval import Bounds, Controller, Interval, Measured
from regrow.wire import TierInterval

MAX_STALL_RATIO = 0.003
"""Share of the time that snapshots in memory may take (ADR 19)."""
OFF = 0.0


class MemoryTier(msgspec.Struct, frozen=True, kw_only=True):
    """What the interval of snapshots in memory is chosen from."""

    given_seconds: float = 0.0
    """As often as the user said; 0: the controller chooses."""
    measured: Measured = Measured()
    """Stall of a snapshot in memory (before the first: of a save to storage, the same copy), `write_seconds` until it is safe there."""
    failures_per_second: float = 0.0
    """Of those that memory might serve."""


def memory_interval(tier: MemoryTier, storage: Interval) -> TierInterval:
    """How often to take a snapshot that stays in memory, in whole steps where a step's time is known.

    Args:
        tier: What was measured and asked for.
        storage: How often storage is saved to.
    """
    measured, rate = tier.measured, tier.failures_per_second
    if tier.given_seconds > 0.0:
        return _answer(tier, tier.given_seconds, "given", f"--memory-interval says {tier.given_seconds:g} s")
    if measured.stall_seconds is None:
        return _answer(tier, OFF, "first_save", "no save was measured yet")
    if rate <= 0.0:
        return _answer(tier, OFF, "no_failures", "no failure rate is known")
    found = Controller(Bounds(max_seconds=float("inf"), max_stall_ratio=MAX_STALL_RATIO)).choose_at(measured, rate)
    if found.interval_seconds >= storage.interval_seconds:
        often = f"{found.reason}: storage is saved to every {storage.interval_seconds:.4g} s, so nothing is left for memory"
        return _answer(tier, OFF, "storage", often)
    return _answer(tier, found.interval_seconds, found.rule, found.reason)


def storage_interval(found: Interval, measured: Measured, given_seconds: float = 0.0) -> TierInterval:
    """The same for storage; `given_seconds`: as often as an operator said, 0: as the controller chose."""
    return TierInterval(
        tier="storage",
        interval_seconds=given_seconds or found.interval_seconds,
        rule="given" if given_seconds else found.rule,
        reason=f"{given_seconds:g} s were ordered" if given_seconds else found.reason,
        stall_seconds=measured.stall_seconds or 0.0,
        safe_seconds=measured.write_seconds,
        failures_per_second=found.failures_per_second,
    )


def memory_warnings(state_gb: float, node_memory_gb: float, *, copies: bool) -> list[str]:
    """Whether what the ranks of a node save fits into its memory besides the state itself: two arenas, and with `copies` for a buddy as
    much again. `state_gb` of one node; 0 of either: not known."""
    held = 4 if copies else 2
    needed = state_gb * held
    if state_gb <= 0.0 or node_memory_gb <= 0.0 or needed <= node_memory_gb:
        return []
    return [f"snapshots in memory need {needed:.4g} GB a node ({held} times what its ranks save), {node_memory_gb:g} GB are there"]


def _answer(tier: MemoryTier, interval: float, rule: str, reason: str) -> TierInterval:
    return TierInterval(
        tier="memory",
        interval_seconds=interval,
        rule=rule,
        reason=reason,
        stall_seconds=tier.measured.stall_seconds or 0.0,
        safe_seconds=tier.measured.write_seconds,
        failures_per_second=tier.failures_per_second,
    )
