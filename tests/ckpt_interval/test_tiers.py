"""The interval of each tier: storage by its own stall and the failures that need it, memory by its own, within its bounds."""

from __future__ import annotations

import pytest

from regrow.agent.worker.cadence import Cadence
from regrow.ckpt import tiers
from regrow.ckpt.interval import Bounds, Controller, Interval, Measured
from regrow.ckpt.tiers import MemoryTier, memory_interval, memory_warnings
from regrow.ids import MeshShape
from regrow.wire import CheckpointPolicy, Control, GenerationSpec, TierRates


def stored(seconds: float) -> Interval:
    """A storage tier that is saved to so often."""
    return Controller(Bounds(max_seconds=seconds)).choose_at(Measured(stall_seconds=1.0), 0.0)


def tier(stall: float | None, mtbf: float, *, safe: float = 0.0, step: float = 0.0, given: float = 0.0) -> MemoryTier:
    measured = Measured(stall_seconds=stall, write_seconds=safe, step_seconds=step)
    return MemoryTier(given_seconds=given, measured=measured, failures_per_second=1.0 / mtbf if mtbf else 0.0)


@pytest.mark.parametrize(
    ("one", "storage", "seconds", "rule"),
    [
        (tier(0.01, 20_000.0), 600.0, 20.0, "formula"),  # sqrt(2 x 0.01 x 20000)
        (tier(0.01, 20_000.0, step=0.3), 600.0, 19.8, "formula"),  # 66 whole steps
        (tier(0.01, 200.0), 600.0, 10 / 3, "stall"),  # sqrt says 2 s: 0.5 % of the time
        (tier(0.01, 200.0, safe=5.0), 600.0, 5.0, "write"),  # the buddy has the copy after 5 s
        (tier(0.01, 200.0, safe=5.0, step=2.0), 600.0, 6.0, "write"),  # rounded up: never below a bound from below
        (tier(0.01, 20_000.0), 20.0, 0.0, "storage"),  # storage comes as often
        (tier(0.01, 20_000.0), 20.1, 20.0, "formula"),
        (tier(5.0, 20_000.0), 900.0, 0.0, "storage"),  # 0.3 % of the time allow it each 1667 s
        (tier(None, 20_000.0), 600.0, 0.0, "first_save"),
        (tier(0.01, 0.0), 600.0, 0.0, "no_failures"),
        (tier(0.01, 0.0, given=7.0), 600.0, 7.0, "given"),
        (tier(None, 200.0, given=7.0, safe=9.0), 5.0, 7.0, "given"),  # the user's word is not bent
        (tier(0.01, 20.0, step=30.0), 600.0, 30.0, "step"),
    ],
)
def test_memory_is_saved_to(one: MemoryTier, storage: float, seconds: float, rule: str) -> None:
    found = memory_interval(one, stored(storage))
    assert found.interval_seconds == pytest.approx(seconds)
    assert found.rule == rule
    assert found.reason
    assert found.failures_per_second == one.failures_per_second


def test_stalls_in_memory_stay_within_their_share() -> None:
    for stall in (0.001, 0.01, 0.1, 1.0):
        found = memory_interval(tier(stall, 60.0), stored(1e9))
        assert stall / found.interval_seconds <= tiers.MAX_STALL_RATIO * (1 + 1e-9)


@pytest.mark.parametrize(
    ("state", "memory", "copies", "words"),
    [
        (10.0, 40.0, True, []),
        (10.0, 39.0, True, ["need 40 GB a node (4 times"]),
        (10.0, 20.0, False, []),
        (10.0, 19.0, False, ["need 20 GB a node (2 times"]),
        (0.0, 19.0, True, []),
        (10.0, 0.0, True, []),
    ],
)
def test_memory_that_snapshots_need(state: float, memory: float, copies: bool, words: list[str]) -> None:
    found = memory_warnings(state, memory, copies=copies)
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


def cadence(rates: TierRates | None, **policy: object) -> Cadence:
    spec = GenerationSpec(
        job="j", epoch=1, generation=1, mesh=MeshShape(), world_size=1, nodes=("a",), failures_per_second=1e-3, tier_rates=rates
    )
    made = Cadence(CheckpointPolicy(**policy), spec)  # pyright: ignore[reportArgumentType]
    made.started_at(0, 0.0)
    made.stepped(0.5)
    return made


def test_each_tier_goes_by_its_own_stall_and_its_own_failures() -> None:
    one = cadence(TierRates(memory=1e-3, storage=1e-5), memory_auto=True)
    assert not one.memory_due(30, 1), "no stall was measured: the first save goes to storage"
    one.saved(2, 0.05)
    one.wrote(0.3)
    storage, memory = one.tiers()
    assert (storage.tier, storage.interval_seconds) == ("storage", pytest.approx(100.0))  # sqrt(2 x 0.05 / 1e-5)
    assert (memory.tier, memory.rule) == ("memory", "stall"), "the same copy: its stall is expected before it was measured"
    assert memory.interval_seconds == pytest.approx(17.0)  # 0.05 / 0.003 = 16.7 s in whole steps
    assert next(step for step in range(3, 99) if one.memory_due(step, 1)) == 35
    one.saved(36, 0.004, memory=True)
    one.remembered(1.2)
    storage, memory = one.tiers()
    assert storage.stall_seconds == 0.05
    assert (memory.stall_seconds, memory.safe_seconds) == (0.004, 1.2)
    assert memory.interval_seconds == pytest.approx(2.5)  # sqrt(2 x 0.004 / 1e-3) = 2.83 s
    assert next(step for step in range(36, 300) if one.due(step, 1)) == 201, "snapshots in memory do not put a checkpoint off"
    one.ordered(Control(failures_per_second=1e-3, tier_rates=TierRates(memory=1e-9, storage=1e-3)))
    assert one.tiers()[1].rule == "storage"
    assert not one.memory_due(90, 1)


def test_without_a_tier_in_memory_all_failures_need_storage() -> None:
    one = cadence(None)
    one.saved(2, 0.05)
    (storage,) = one.tiers()
    assert storage.interval_seconds == pytest.approx(10.0)
    assert not one.memory_due(1000, 1)
