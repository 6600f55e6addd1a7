"""The copy of a snapshot: by our own stores or by torch, at once or while the next step is under way; always the same bytes."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from ckpt_small import Small
from ckpt_synthetic import spec_of

from regrow.ckpt import catalog, flatten, snapshot, streaming
from regrow.ckpt.layout import lay_out
from regrow.ckpt.snapshot import Snapshotter

LIMIT = 60.0


@pytest.fixture
async def trainer(make_writer, make_committer, tmp_path):
    """A small job whose snapshots are late, and its committing agent's half."""
    writer = await make_writer()
    committer = await make_committer(msgspec.structs.replace(spec_of(1), job="small"), [writer])
    small = Small(tmp_path, writer=writer.socket, late_copy=True)
    yield small, committer
    small.state.close()


def restored(folder, generation: int) -> Small:
    entry = catalog.newest_restorable(folder)
    assert entry is not None
    again = Small(folder, generation, entry.restore_point(), seed=9)
    assert again.state.restore() == entry.step
    return again


async def test_the_optimizer_waits_for_a_late_copy(trainer, tmp_path, monkeypatch):
    """The copy is held up: forward and backward go on, the update does not, and what is saved is the state of the saved step."""
    small, committer = trainer
    go, real = threading.Event(), streaming.copier()
    assert real is not None, "a C compiler is needed"

    def held_up(parts: streaming.Table) -> None:
        assert go.wait(LIMIT)
        real(parts)

    monkeypatch.setattr(streaming, "copier", lambda: held_up)
    small.train(3)
    go.set()
    assert small.state.save(3, 12).outcome == "snapshot"  # the first save of a generation plans; it is not what is looked at
    small.train(1)
    await committer.until("complete")
    go.clear()
    before = {name: value.clone() for name, value in small.tensors().items()}
    report = await asyncio.to_thread(small.state.save, 4, 16)
    assert report.outcome == "snapshot"
    assert small.state.ready(), "one arena is being filled, the other is free"
    step = threading.Thread(target=small.train, args=(1,))
    step.start()
    step.join(0.3)
    assert step.is_alive(), "the update came before the copy was complete"
    for name, value in small.tensors().items():
        assert torch.equal(value, before[name]), name
    go.set()
    step.join(LIMIT)
    await committer.until("complete")
    assert small.state.counts.join_seconds > 0
    assert any(not torch.equal(value, before[name]) for name, value in small.tensors().items())
    for name, value in restored(tmp_path, 2).tensors().items():
        assert torch.equal(value, before[name]), name


async def test_the_last_late_copy_is_not_lost(trainer, tmp_path):
    """No update follows the last save: whoever waits for it to be durable, or closes, completes it."""
    small, committer = trainer
    small.train(2)
    assert small.state.save(2, 8).outcome == "snapshot"
    small.state.join()
    await committer.until("complete")
    small.train(1)
    assert small.state.save(3, 12).outcome == "snapshot"
    small.state.close()
    await committer.until("complete")
    for name, value in restored(tmp_path, 2).tensors().items():
        assert torch.equal(value, small.tensors()[name]), name


@pytest.mark.parametrize(("seed", "plain"), [(0, False), (1, False), (2, False), (0, True)])
def test_every_length_and_alignment(seed, plain):
    """Pieces of 0 to 40,000 bytes from odd addresses; nothing beside the target is touched."""
    copy = streaming.copier(plain=plain)
    assert copy is not None, "a C compiler is needed"
    random = np.random.default_rng(seed)
    source = random.integers(0, 256, 1 << 20, dtype=np.uint8)
    target = np.zeros(1 << 20, np.uint8)
    expected = target.copy()
    parts, at = [], 0
    while at < (1 << 20) - 41_000:
        size, start = int(random.integers(0, 40_000)), int(random.integers(0, (1 << 20) - 40_000))
        parts.append((target.ctypes.data + at, source.ctypes.data + start, size))
        expected[at : at + size] = source[start : start + size]
        at += size + int(random.integers(0, 70))
    copy(streaming.table(parts))
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_copy_also_of_one_large_tensor(threads, monkeypatch):
    """Each byte is copied once, all of them before `copy` returns, by as many threads as were asked for."""
    real, rows, who = streaming.copier(), [], set()
    assert real is not None, "a C compiler is needed"
    meet = threading.Barrier(threads)

    def noted(parts: streaming.Table) -> None:
        if threading.get_ident() not in who:
            who.add(threading.get_ident())
            meet.wait(LIMIT)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.5)  # who does not wait for the others returns before their bytes are there
        rows.extend(parts.tolist())
        real(parts)

    monkeypatch.setattr(streaming, "copier", lambda: noted)
    live = {"large": torch.randn(6_000_001), "small": torch.randn(17, 3), "turned": torch.randn(300, 200).t(), "one": torch.tensor(3.0)}
    live |= {f"t{number}": torch.randn(3_000_000) for number in range(3)}
    items = flatten.items_of(live)
    image = lay_out([item.box for item in items.values()])
    arenas = [mmap.mmap(-1, image.plan.file_bytes) for _ in range(2)]
    snapshotter = Snapshotter(image, arenas, threads=threads)
    snapshotter.bind(items)
    assert snapshotter.copy(1) is None
    assert len(who) == threads
    assert max(size for _, _, size in rows) <= snapshot.PORTION_BYTES
    assert sum(size for _, _, size in rows) == sum(value.nbytes for name, value in live.items() if name != "turned")
    for chunk in image.plan.chunks:
        assert arenas[1][chunk.at : chunk.at + chunk.nbytes] == live[chunk.name].contiguous().numpy().tobytes(), chunk.name
        assert not any(arenas[0][chunk.at : chunk.at + min(chunk.nbytes, 100)])


def test_without_a_compiler_torch_copies(tmp_path):
    """The same checkpoint, byte for byte in its tensors."""
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from ckpt_small import Small; from regrow.ckpt import streaming; assert streaming.copier() is None;"
        "s = Small(Path(sys.argv[2])); s.train(2); s.save(2)"
    )
    support = str(Path(__file__).with_name("support"))
    environment = {**os.environ, "PATH": "/nowhere", "CC": "", streaming.OFF_VARIABLE: "1"}
    subprocess.run([sys.executable, "-c", script, support, str(tmp_path)], env=environment, check=True, timeout=LIMIT)
    small = Small(tmp_path / "own")
    small.train(2)
    for name, value in restored(tmp_path, 2).tensors().items():
        assert torch.equal(value, small.tensors()[name]), name
