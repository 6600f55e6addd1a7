"""Random streams that outlive a process: what the next one of the same slot draws, and what it refuses to go on with."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from regrow.agent.worker.streams import HALF_BYTES, StreamFile
from regrow.ckpt import rng


def draws() -> list[float]:
    """From every global generator; the normal ones keep a second number for later."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(())), float(torch.randn(()))]


def seed(number: int) -> None:
    """All of them."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@pytest.fixture
def file(tmp_path: Path) -> StreamFile:
    return StreamFile(tmp_path / "streams-1", rank=3, mesh="2x2x1")


def test_the_next_process_of_the_slot_draws_what_the_last_one_would_have_drawn(file: StreamFile, tmp_path: Path) -> None:
    seed(1)
    draws()
    for step in (6, 7):
        file.write(step, rng.now())
        last = draws()
    seed(2)
    next_one = StreamFile(tmp_path / "streams-1", rank=3, mesh="2x2x1")
    found = next_one.read(7)
    assert found is not None
    rng.put_back(found)
    assert draws() == last
    before = next_one.read(6)
    assert before is not None, "a rank may have died one step ahead of its peers"
    rng.put_back(before)
    assert draws() != last
    assert draws() == last


@pytest.mark.parametrize(("step", "rank", "mesh"), [(9, 3, "2x2x1"), (7, 2, "2x2x1"), (7, 3, "1x2x2"), (8, 3, "2x2x1")])
def test_streams_of_another_step_rank_or_mesh_are_not_gone_on_with(
    file: StreamFile, tmp_path: Path, step: int, rank: int, mesh: str
) -> None:
    file.write(7, rng.now())
    other = StreamFile(tmp_path / "streams-1", rank=rank, mesh=mesh)
    assert other.read(step) is None
    assert file.read(7) is not None


def test_a_half_that_was_being_written_is_not_taken(file: StreamFile, tmp_path: Path) -> None:
    file.write(6, rng.now())
    file.write(7, rng.now())
    with (tmp_path / "streams-1").open("r+b") as torn:
        torn.seek(HALF_BYTES + 200)
        torn.write(b"torn")
    assert file.read(7) is None
    assert file.read(6) is not None
