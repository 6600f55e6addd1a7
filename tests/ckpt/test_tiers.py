"""Where a restore reads from: arenas of the own node that outlived the trainer, else storage; always verified."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
import torch
from ckpt_small import Small
from ckpt_synthetic import spec_of

from regrow.ckpt import catalog
from regrow.ckpt.manifest import DamagedCheckpointError


def point(folder: Path):
    entry = catalog.newest_restorable(folder)
    assert entry is not None
    return entry.restore_point()


@pytest.fixture
async def saved(make_writer, make_committer, tmp_path):
    """A trainer that saved step 3 and is gone; its writer."""
    writer = await make_writer()
    committer = await make_committer(msgspec.structs.replace(spec_of(1), job="small"), [writer])
    small = Small(tmp_path, writer=writer.socket)
    small.train(3)
    assert small.state.save(3, 12).outcome == "snapshot"
    await committer.until("complete")
    small.state.close()
    return writer, small


async def test_arenas_outlive_the_trainer(saved, tmp_path):
    writer, small = saved
    again = Small(tmp_path, 2, point(tmp_path), seed=9, writer=writer.socket)
    assert await asyncio.to_thread(again.state.restore) == 3
    assert again.state.loaded.bytes_read == 0
    assert again.state.loaded.bytes_from_memory >= again.state.loaded.bytes_needed > 0
    for name, value in small.tensors().items():
        assert torch.equal(value, again.tensors()[name]), name
    again.state.close()


async def test_an_arena_that_was_filled_anew_is_not_believed(saved, tmp_path):
    """The arena changes under the reader: its bytes fail the digests, storage is read."""
    writer, small = saved
    other = Small(tmp_path, 2, point(tmp_path), seed=9, writer=writer.socket)
    memory = other.state._sink.borrow(Path(point(tmp_path).directory))
    assert memory.keys() == {"rank-00000.safetensors"}
    size = os.fstat(memory["rank-00000.safetensors"]).st_size
    os.pwrite(memory["rank-00000.safetensors"], b"\x01" * size, 0)
    os.close(memory["rank-00000.safetensors"])
    assert await asyncio.to_thread(other.state.restore) == 3
    assert other.state.loaded.bytes_from_memory == 0
    assert other.state.loaded.bytes_read > 0
    for name, value in small.tensors().items():
        assert torch.equal(value, other.tensors()[name]), name
    other.state.close()


async def test_memory_serves_where_storage_lost_a_file(saved, tmp_path):
    writer, _ = saved
    decided = point(tmp_path)
    (Path(decided.directory) / "rank-00000.safetensors").unlink()
    again = Small(tmp_path, 2, decided, seed=9, writer=writer.socket)
    assert await asyncio.to_thread(again.state.restore) == 3
    again.state.close()
    writer.kill()
    await asyncio.to_thread(writer.start)
    lost = Small(tmp_path, 3, decided, seed=9, writer=writer.socket)
    with pytest.raises(DamagedCheckpointError, match=r"rank-00000\.safetensors.*is missing|is missing"):
        await asyncio.to_thread(lost.state.restore)
    lost.state.close()


async def test_a_stopped_writer_does_not_hold_a_restore_up(saved, tmp_path, monkeypatch):
    import signal

    from regrow.ckpt import sinks

    monkeypatch.setattr(sinks, "BORROW_SECONDS", 0.2)
    writer, _ = saved
    writer.process.send_signal(signal.SIGSTOP)
    try:
        again = Small(tmp_path, 2, point(tmp_path), seed=9, writer=writer.socket)
        assert await asyncio.to_thread(again.state.restore) == 3
        assert again.state.loaded.bytes_from_memory == 0
    finally:
        writer.process.send_signal(signal.SIGCONT)
