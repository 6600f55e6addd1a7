"""All ranks of a node in one file: written by the real writer, read by everything that reads a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_synthetic import spec_of

from regrow.ckpt import catalog
from regrow.ckpt.assemble import Checkpoint
from regrow.ckpt.dcp_reader import RegrowReader
from regrow.ckpt.layout import Box
from regrow.ckpt.manifest import DamagedCheckpointError, read_manifests, read_record
from regrow.ckpt.verify import verify

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"
NAME = "node-n0.shards"
ROWS = 700
"""2.9 MB: several blocks a rank, and sizes that are no multiple of one."""


@pytest.fixture
async def saved(make_writer, make_committer, make_producer, tmp_path) -> Any:
    """Saves steps of two ranks; returns the newest checkpoint's directory."""
    writer = await make_writer()
    committer = await make_committer(spec_of(2), [writer], keep=1)
    producers = [make_producer(writer, rank=rank, rows=ROWS, node_file=True) for rank in range(2)]

    async def save(*steps: int) -> Path:
        for step in steps:
            for producer in producers:
                assert producer.save(step)
            while (await committer.until("complete")).step != step:
                pass
        entry = catalog.newest_restorable(tmp_path)
        assert entry is not None
        assert entry.step == steps[-1]
        return Path(entry.directory)

    return save


def values(directory: Path) -> np.ndarray[Any, Any]:
    """The tensor, by our reader."""
    memory = bytearray(ROWS * 4096)
    with Checkpoint(directory) as checkpoint:
        checkpoint.read(Box("w", "float32", (ROWS, 1024), (0, 0), (ROWS, 1024)), memoryview(memory))
    return np.frombuffer(memory, np.float32).reshape(ROWS, 1024)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
async def test_every_reader_reads_it(saved):
    """`values` reads by Python, RegrowReader by C."""
    directory = await saved(3)
    assert {path.name for path in directory.iterdir()} == {NAME, "node-n0.json", ".metadata", "record.json"}
    record = read_record(directory)
    ranks = read_manifests(directory, record)[0].ranks
    assert record.version == 2
    assert [rank.container_at for rank in ranks] == [0, ranks[0].size_bytes]
    assert verify(directory).valid
    assert (values(directory) == 3).all()
    for reader in ({"checkpoint_id": str(directory)}, {"storage_reader": RegrowReader(directory)}):
        target = {"w": torch.zeros(ROWS, 1024)}
        dcp.load(target, no_dist=True, **reader)
        assert (target["w"] == 3).all()
    printed = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert printed is not None
    space: dict[str, Any] = {}
    exec(compile(printed[1], str(DOCUMENT), "exec"), space)
    assert (space["load"](directory)["w"] == 3).all()


async def test_its_blocks_are_used_again(saved):
    """With one kept, every other save has the same file: whole, of its own step."""
    inodes: list[int] = []
    for step in range(1, 7):
        directory = await saved(step)
        inodes.append((directory / NAME).stat().st_ino)
        assert verify(directory).valid
        assert (values(directory) == step).all()
    assert len(set(inodes)) < len(inodes), "nothing was recycled"


async def test_damage_is_named_by_rank_and_block(saved, tmp_path):
    directory = await saved(1)
    ranks = read_manifests(directory, read_record(directory))[0].ranks
    path, good = directory / NAME, (directory / NAME).read_bytes()
    chunk = ranks[1].chunks[0]
    at = ranks[1].container_at + chunk.at + (1 << 20) + 5
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    (problem,) = verify(directory).problems
    assert (problem.file, problem.kind) == (NAME, "altered")
    assert f"tensor w, block 1 (file bytes from {at - 5})" in problem.detail
    with pytest.raises(DamagedCheckpointError, match=r"tensor w: block 1"):
        values(directory)
    path.write_bytes(good[ranks[0].size_bytes :] + good[: ranks[0].size_bytes])
    assert ranks[0].size_bytes == ranks[1].size_bytes
    assert [problem.kind for problem in verify(directory).problems] == ["swapped", "swapped"]
    path.write_bytes(good[: ranks[0].size_bytes])
    assert "truncated" in {problem.kind for problem in verify(directory).problems}
    entry = catalog.scan(tmp_path)[0]
    assert (entry.state, f"{NAME} has {ranks[0].size_bytes} bytes" in entry.problem) == ("damaged", True)
    with pytest.raises(DamagedCheckpointError, match="is truncated"):
        values(directory)
    path.unlink()
    assert verify(directory).problems[0].detail == "the file of node n0's ranks is gone"


async def test_a_rank_that_fails_or_goes_leaves_no_file(make_writer, make_committer, make_producer, tmp_path):
    """One rank's write fails; then one ends before its snapshot: void both times, and the next step is whole."""
    writer = await make_writer(faults="shard.write:eio:2")
    committer = await make_committer(spec_of(2), [writer])
    first, second = (make_producer(writer, rank=rank, rows=ROWS, node_file=True) for rank in range(2))
    assert first.save(1)
    assert second.save(1)
    assert "Input/output error" in (await committer.until("void")).reason
    assert first.save(2)
    second.sink.close()
    assert "rank 1 ended before its snapshot" in (await committer.until("void")).reason
    second.connect()
    assert second.save(3)
    assert first.save(3)
    assert (await committer.until("complete")).step == 3
    assert [path.parent.name[:17] for path in sorted(tmp_path.glob(f"step-*/{NAME}"))] == ["step-000000000003"]
