"""Save on one mesh, load on others: real gloo ranks, DTensors, pipeline stages, two writers, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from regrow.ckpt import catalog
from regrow.ckpt.assemble import Checkpoint

CHAIN = [
    ("dp=2,tp=2,pp=2", 0),
    ("dp=3,tp=1,pp=1", 3),
    ("dp=1,tp=2,pp=3", 0),
    ("dp=2,tp=2,pp=1", 3),
    ("dp=1,tp=1,pp=1", 0),
]


def read_with_stock_tools(directory: Path) -> None:
    """What eight ranks wrote, read by torch.distributed.checkpoint in one process: bit for bit what we read."""
    with Checkpoint(directory) as checkpoint:
        boxes = list(checkpoint.boxes())
        loaded = {box.name: torch.zeros(box.shape, dtype=getattr(torch, box.dtype)) for box in boxes}
        with pytest.warns(UserWarning, match="torch.distributed is"):
            dcp.load(loaded, checkpoint_id=str(directory))
        assert any(box.name.startswith("optimizer.layers.2.") for box in boxes)
        for box in boxes:
            memory = bytearray(box.nbytes)
            checkpoint.read(box, memoryview(memory))
            assert loaded[box.name].numpy().tobytes() == memory, box.name


@pytest.mark.slow
async def test_any_mesh_to_any_other(ranks, writers, make_committer):
    point = None
    for number, (mesh, zero) in enumerate(CHAIN):
        spec = ranks.next_spec(mesh, point)
        committer = await make_committer(spec, writers)
        result = await ranks.phase(mesh, zero=zero, restore=point, steps=2)
        assert result["ok"], result["errors"]
        assert all(report[1] == "snapshot" for rank in result["ranks"] for report in rank["reports"])
        while (await committer.until("complete")).step != 2 * (number + 1):
            pass
        entry = ranks.newest()
        assert (entry.step, entry.generation, entry.samples) == (2 * (number + 1), number + 1, 16 * (number + 1))
        assert str(entry.mesh) == mesh
        if point is not None:
            assert entry.parent is not None
            assert entry.parent.record_digest == point.record_digest
        if number == 0:
            read_with_stock_tools(Path(entry.directory))
        point = entry.restore_point()
    there = {entry.step for entry in catalog.scan(ranks.checkpoints)}
    assert there >= {2 * (number + 1) for number in range(len(CHAIN))}  # the step before is void where a node wrote it late


@pytest.mark.slow
async def test_random_streams_of_a_rank(ranks, writers, make_committer):
    """G05: the next draw of each generator after a restore is the one that this very rank would have made; on another mesh it is new."""
    mesh = "dp=1,tp=2,pp=2"
    committer = await make_committer(ranks.next_spec(mesh), writers)
    saved = await ranks.phase(mesh, steps=1)
    await committer.until("complete")
    twin = [rank["then"] for rank in saved["ranks"]]
    point = ranks.newest().restore_point()
    draws = []
    for again in (mesh, mesh, "dp=2,tp=2,pp=1", "dp=2,tp=2,pp=1"):
        ranks.next_spec(again)
        result = await ranks.phase(again, restore=point)
        assert result["ok"], result["errors"]
        draws.append([rank["draws"] for rank in result["ranks"]])
    assert draws[0] == draws[1] == twin
    assert draws[2] == draws[3]
    for number in range(3):  # torch, NumPy, Python: no two ranks share a stream, nor one with the mesh before
        assert len({rank[number] for rank in (*draws[0], *draws[2])}) == 8
