"""Which samples a step consumes: a pure function, the same multiset for any data-parallel size."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.agent.worker.data import BatchPlan, Recipe, permuted
from regrow.errors import ConfigurationError
from regrow.parallel.batch import split


def plan(
    num_samples: int, dp: int, *, replica: int = 0, batch: int = 12, micro: int = 2, drop_last: bool = False, seed: int = 5
) -> BatchPlan:
    recipe = Recipe(num_samples=num_samples, seed=seed, global_batch=batch, micro_batch=micro, drop_last=drop_last)
    return BatchPlan(recipe, split(batch, micro, dp), replica)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 255, 256, 257, 1003, 65_537])
def test_order_is_a_permutation(size: int) -> None:
    for seed, epoch in [(0, 0), (0, 1), (-3, 2), (1 << 63, 9)]:
        order = permuted(np.arange(size), size, seed, epoch)
        assert np.array_equal(np.sort(order), np.arange(size))


def test_order_depends_on_seed_and_epoch_only() -> None:
    order = permuted(np.arange(1003), 1003, 7, 3)
    assert np.array_equal(order[100:200], permuted(np.arange(100, 200), 1003, 7, 3))
    assert (order != permuted(np.arange(1003), 1003, 7, 4)).mean() > 0.98
    assert (order != permuted(np.arange(1003), 1003, 8, 3)).mean() > 0.98
    assert (order != np.arange(1003)).mean() > 0.98


def test_order_is_the_same_for_ever() -> None:
    """Checkpoints of older versions go on with this order: a change of these numbers is a change of the format."""
    assert permuted(np.arange(8), 1003, 7, 3).tolist() == FROZEN
    assert Recipe(num_samples=10, seed=1, global_batch=4, micro_batch=1).samples(8, 4).tolist() == FROZEN_STREAM


FROZEN = [968, 45, 765, 39, 819, 368, 156, 781]
FROZEN_STREAM = [8, 7, 0, 9]


def test_order_has_no_visible_structure() -> None:
    """Neighbours of the order are as far apart as chance has them: mean |a - b| of a uniform pair is n / 3."""
    size = 100_003
    order = permuted(np.arange(size), size, 1, 0)
    distance = np.abs(np.diff(order)).mean() / size
    assert abs(distance - 1 / 3) < 0.005
    first, second = permuted(np.arange(size), size, 1, 1), permuted(np.arange(size), size, 1, 2)
    assert abs(float(np.corrcoef(first, second)[0, 1])) < 0.02


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 5, 6])
def test_replicas_share_the_global_batch_in_order(dp: int) -> None:
    whole = plan(1003, 1)
    for step in (1, 2, 83, 84, 85, 167, 168):
        shares = [plan(1003, dp, replica=replica).step(step) for replica in range(dp)]
        joined = np.concatenate([share.samples for share in shares])
        assert np.array_equal(joined, whole.step(step).samples)
        positions = np.concatenate([share.positions for share in shares])
        assert np.array_equal(positions, np.arange(12) + (step - 1) * 12)
        assert [len(share) for share in shares] == list(split(12, 2, dp))
        assert all(rows.shape == (2,) for share in shares for rows in share)


def test_each_epoch_uses_each_sample_once_across_changing_replicas() -> None:
    """DP 4 -> 3 -> 5 -> 2 over 1,003 samples, with steps that are abandoned and done again (cases G07, G09)."""
    consumed: list[int] = []
    step, samples = 0, 0
    for dp, completed in [(4, 100), (3, 77), (5, 91), (2, 67)]:
        plans = [plan(1003, dp, replica=replica) for replica in range(dp)]
        for each in plans:
            each.rebase(step, samples)
        for _ in range(completed):
            step += 1
            consumed += np.concatenate([each.step(step).samples for each in plans]).tolist()
            samples = plans[0].consumed_after(step)
        for each in plans:
            each.step(step + 1)  # drawn, then the generation ends: nothing is consumed
    assert samples == 335 * 12 == len(consumed)
    for epoch in range(4):
        assert Counter(consumed[epoch * 1003 : (epoch + 1) * 1003]) == Counter(range(1003))


def test_drop_last_leaves_out_the_tail() -> None:
    one = plan(1003, 1, drop_last=True)
    epochs = [np.concatenate([one.step(step).samples for step in range(83 * e + 1, 83 * e + 84)]) for e in range(2)]
    for samples in epochs:
        assert len(set(samples.tolist())) == 996
    assert set(epochs[0].tolist()) != set(epochs[1].tolist())
    assert one.epoch_of(83) == 0
    assert one.epoch_of(84) == 1
    assert one.steps_per_epoch == 83


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 300),
    micro=st.integers(1, 4),
    count=st.integers(1, 9),
    dps=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(-(2**70), 2**70),
)
def test_any_sequence_of_replica_counts_gives_the_same_stream(size: int, micro: int, count: int, dps: list[int], seed: int) -> None:
    recipe = Recipe(num_samples=size, seed=seed, global_batch=micro * count, micro_batch=micro)
    got: list[int] = []
    for step, dp in enumerate(dps, start=1):
        counts = split(recipe.global_batch, micro, min(dp, count))
        got += [int(value) for replica in range(len(counts)) for value in BatchPlan(recipe, counts, replica).step(step).samples]
    assert got == recipe.samples(0, len(got)).tolist()
    whole = len(got) // size
    assert Counter(got[: whole * size]) == Counter(dict.fromkeys(range(size), whole) if whole else {})


@pytest.mark.parametrize(
    ("num_samples", "batch", "counts", "drop_last", "says"),
    [
        (10, 0, (1,), False, "not stated"),
        (0, 4, (4,), False, "0 samples"),
        (3, 4, (4,), True, "do not fill"),
        (10, 4, (1, 1), False, "are not the global batch"),
    ],
)
def test_nonsense_is_refused(num_samples: int, batch: int, counts: tuple[int, ...], drop_last: bool, says: str) -> None:
    recipe = Recipe(num_samples=num_samples, seed=0, global_batch=batch, micro_batch=1, drop_last=drop_last)
    with pytest.raises(ConfigurationError, match=says):
        BatchPlan(recipe, counts, 0)
