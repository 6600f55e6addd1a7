"""Files of removed checkpoints are written over by the writer that made them, and by nobody else."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import torch
from ckpt_small import Small
from ckpt_synthetic import spec_of

from regrow.ckpt import catalog
from regrow.ckpt.recycling import TRASH, Recycler
from regrow.ckpt.verify import verify


async def test_the_writer_writes_over_its_own_files(make_writer, make_committer, tmp_path):
    """With one kept, each save has the blocks of the last but one; every checkpoint holds its own step."""
    writer = await make_writer()
    committer = await make_committer(msgspec.structs.replace(spec_of(1), job="small"), [writer], keep=1)
    small = Small(tmp_path, writer=writer.socket, back_pressure="wait")
    inodes: list[int] = []
    for step in range(1, 7):
        small.train(1)
        assert small.state.save(step, step * 4).outcome == "snapshot"
        while (await committer.until("complete")).step != step:
            pass
        (file,) = tmp_path.glob(f"step-{step:012d}-*/rank-00000.safetensors")
        inodes.append(file.stat().st_ino)
        entry = catalog.newest_restorable(tmp_path)
        assert entry is not None
        assert verify(Path(entry.directory)).valid
    assert len(set(inodes)) < len(inodes), "nothing was recycled"
    again = Small(tmp_path, 2, entry.restore_point(), seed=9)
    assert again.state.restore() == 6
    for name, value in small.tensors().items():
        assert torch.equal(value, again.tensors()[name]), name
    small.state.close()


@pytest.fixture
def trash(tmp_path: Path) -> Path:
    """A removed checkpoint with one file, and a place for the next."""
    folder = tmp_path / f"{TRASH}step-000000000001-g1-abc-0123"
    folder.mkdir()
    (folder / "rank-00000.safetensors").write_bytes(b"x" * 8192)
    (tmp_path / "next").mkdir()
    return folder / "rank-00000.safetensors"


def test_its_own_file_is_taken_once(trash, tmp_path):
    recycler, target = Recycler(), tmp_path / "next" / "rank-00000.safetensors"
    recycler.wrote(trash)
    inode = trash.stat().st_ino
    assert recycler.take(tmp_path, target, 8192)
    assert target.stat().st_ino == inode
    assert not trash.exists()
    assert not recycler.take(tmp_path, tmp_path / "next" / "other", 8192)


@pytest.mark.parametrize("why", ["of another incarnation", "has another name", "has another size", "is in the way", "is gone"])
def test_what_is_left_alone(trash, tmp_path, why):
    """Files that somebody else wrote or still names (skip-batches links them), that do not fit, or over one that is there."""
    recycler, target = Recycler(), tmp_path / "next" / "rank-00000.safetensors"
    if why != "of another incarnation":
        recycler.wrote(trash)
    if why == "has another name":
        (tmp_path / "kept").hardlink_to(trash)
    elif why == "is in the way":
        target.write_bytes(b"live")
    elif why == "is gone":
        trash.unlink()
    size = 4096 if why == "has another size" else 8192
    assert not recycler.take(tmp_path, target, size)
    assert target.exists() == (why == "is in the way")
    if why == "is in the way":
        assert target.read_bytes() == b"live"
    if why != "is gone":
        assert trash.read_bytes() == b"x" * 8192


def test_a_full_disk_gets_its_space_back(trash, tmp_path):
    recycler = Recycler()
    other = trash.with_name("rank-00001.safetensors")
    other.write_bytes(b"y")
    shared = trash.with_name("node-n0.shards")
    shared.write_bytes(b"z")
    recycler.wrote(trash)
    recycler.wrote(shared)
    assert recycler.free(tmp_path) == 2
    assert not trash.exists()
    assert other.exists()
    assert os.listdir(tmp_path / "next") == []  # noqa: PTH208 - names
