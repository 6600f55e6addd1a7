"""A loop that belongs to somebody else on our position: a second start gives the steps, samples and random draws of an unbroken one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.agent.worker.data import BatchPlan, Recipe
from regrow.errors import ConfigurationError
from regrow.integrations.position import Position, check_equal

LOOP = """
import sys

import torch
from torch.utils.data import TensorDataset

import regrow
from regrow.integrations.position import Position, check_equal, loader

if __name__ == "__main__":
    folder, total, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    run = regrow.attach(level=2, global_batch=8, micro_batch=2, seed=5, checkpoint=folder)
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    plan = run.batches(num_samples=36)
    check_equal(plan, "test")
    position = Position(run, total)
    state = run.train_state(model=model, optimizer=optimizer)
    step = state.restore()
    left = position.begin()
    # As Trainer and Lightning do: opened once, asked for more than a step ahead by its own workers.
    batches = iter(loader(run, plan, TensorDataset(torch.arange(36.0)), total, num_workers=workers))
    while left:
        step += 1
        seen = []
        for _ in range(plan.counts[0]):
            (batch,) = next(batches)
            seen += [int(value) for value in batch]
            (model(batch[:, None]).square().mean() * torch.rand(())).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, *seen, float(torch.rand(())), float(model.weight), flush=True)
        left = position.completed(loss=0.5)
    position.end()
"""


def lines(tmp_path: Path, folder: str, total: int, workers: int = 0) -> list[str]:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REGROW_")}
    command = [sys.executable, str(script), str(tmp_path / folder), str(total), str(workers)]
    done = subprocess.run(command, env=kept | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_second_start_goes_on_as_if_there_had_been_one(tmp_path: Path) -> None:
    whole = lines(tmp_path, "a", 7)
    assert [line.split()[0] for line in whole] == ["1", "2", "3", "4", "5", "6", "7"]
    first, second = lines(tmp_path, "b", 3, workers=1), lines(tmp_path, "b", 7)
    assert first + second == whole


def plan(counts: tuple[int, ...]) -> BatchPlan:
    return BatchPlan(Recipe(num_samples=64, seed=0, global_batch=2 * sum(counts), micro_batch=2), counts, 0)


@pytest.mark.parametrize("counts", [(3, 3, 2), (1, 0)])
def test_a_mean_over_unequal_replicas_is_refused(counts: tuple[int, ...]) -> None:
    check_equal(plan((4, 4)), "trainer")
    with pytest.raises(ConfigurationError, match="micro-batches of 2"):
        check_equal(plan(counts), "trainer")


def test_a_loop_without_an_end_or_a_begin_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="0 steps"):
        Position(None, 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="was not begun"):
        Position(None, 3).completed()  # type: ignore[arg-type]
