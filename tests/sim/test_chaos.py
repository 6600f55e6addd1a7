"""Safety first: everything breaks, the checkers watch, then the faults stop and the job must come back."""

from __future__ import annotations

import pytest

from regrow.supervisor.sim import faults
from regrow.supervisor.sim.simulate import run_seed


def run(small, seed):
    setup, workload = small()
    result = run_seed(setup, workload, lambda rng: faults.chaos(setup, rng), seed, converge=True)
    assert result.faults > 5
    assert result.checks > 1000
    assert not result.ended, f"regrow simulate --nodes 64 --days 2 --chaos --seeds 1 --seed {seed}: {result.ended}"


@pytest.mark.parametrize("first", range(1, 51, 10))
def test_fifty_seeds(small, first: int) -> None:
    for seed in range(first, first + 10):
        run(small, seed)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(51, 551, 50))
def test_five_hundred_seeds(small, first: int) -> None:
    for seed in range(first, first + 50):
        run(small, seed)
