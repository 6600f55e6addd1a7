"""Torch's DataLoader over a batch plan: every sample once, whatever was prefetched, on any number of replicas."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from regrow.agent.worker.data import BatchPlan, Recipe
from regrow.errors import ConfigurationError
from regrow.integrations.sampler import StepSampler
from regrow.parallel.batch import split

RECIPE = Recipe(num_samples=96, seed=3, global_batch=16, micro_batch=2)
DATA = TensorDataset(torch.arange(96))


def trained(dp: int, first: int, last: int, *, workers: int = 0) -> list[int]:
    """Samples of the steps first .. last in the order of the global batch; the loaders are asked for two steps more."""
    counts = split(16, 2, dp)
    shares: list[list[list[int]]] = []
    for replica in range(dp):
        plan = BatchPlan(RECIPE, counts, replica, base_step=first - 1, base_samples=(first - 1) * 16)
        sampler = StepSampler(plan, last + 2)
        loader = DataLoader(DATA, batch_sampler=sampler, num_workers=workers, multiprocessing_context="spawn" if workers else None)
        assert len(loader) == (last + 2 - first + 1) * counts[replica]
        walk = sampler.steps(loader)
        steps = [next(walk) for _ in range(first, last + 1)]
        assert {len(step) for step in steps} == {counts[replica]}
        shares.append([[int(sample) for (batch,) in step for sample in batch] for step in steps])
        del walk, loader
    return [sample for step in zip(*shares, strict=True) for share in step for sample in share]


def test_every_sample_once_over_a_change_of_replicas() -> None:
    whole = trained(1, 1, 6)
    assert sorted(whole) == list(range(96))
    assert trained(4, 1, 2) + trained(3, 3, 5) + trained(2, 6, 6) == whole


def test_prefetching_changes_nothing() -> None:
    assert trained(1, 2, 4, workers=1) == trained(1, 2, 4)


def test_the_walk_ends_with_the_run() -> None:
    plan = BatchPlan(RECIPE, split(16, 2, 3), 2, base_step=4, base_samples=64)
    sampler = StepSampler(plan, 6)
    assert [len(step) for step in sampler.steps(DataLoader(DATA, batch_sampler=sampler))] == [2, 2]
    assert len(StepSampler(plan, 3)) == 0
    assert list(StepSampler(plan, 3)) == []


def test_a_run_without_steps_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the last step is 0"):
        StepSampler(BatchPlan(RECIPE, (8,), 0), 0)
