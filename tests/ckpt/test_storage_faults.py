"""Real faults of storage and clock: a FUSE file system that fails as it is told, and libfaketime around the writer."""

from __future__ import annotations

import asyncio
import ctypes.util
import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from ckpt_small import Small
from ckpt_synthetic import spec_of

from regrow.ckpt import catalog
from regrow.errors import OperationalError

LIMIT = 60.0
SERVER = Path(__file__).with_name("support") / "ckpt_fuse.py"


class Storage:
    """A mounted file system and the word that it obeys."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "mount"
        self._control = folder / "control"
        (folder / "backing").mkdir(parents=True)
        self.root.mkdir()
        self.says("ok")
        with (folder / "fuse.log").open("wb") as log:
            command = [sys.executable, str(SERVER), str(self.root), str(folder / "backing"), str(self._control)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + LIMIT
        while not self.root.is_mount():
            assert self._process.poll() is None, (folder / "fuse.log").read_text()
            assert time.monotonic() < end
            time.sleep(0.02)

    def says(self, word: str) -> None:
        fresh = self._control.with_suffix(".new")
        fresh.write_text(word)
        fresh.replace(self._control)

    def close(self) -> None:
        self.says("ok")
        subprocess.run(["umount", "-l", str(self.root)], check=True)
        self._process.terminate()
        self._process.wait(LIMIT)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("these tests mount FUSE: root and /dev/fuse are needed")
    made = Storage(tmp_path / "fuse")
    yield made
    made.close()


@pytest.fixture
async def trainer(storage, make_writer, make_committer):
    """A small job on that storage, its committing agent's half, and its folder."""
    folder = storage.root / "checkpoints"
    writer = await make_writer()
    committer = await make_committer(msgspec.structs.replace(spec_of(1), job="small"), [writer])
    small = Small(folder, writer=writer.socket, back_pressure="wait", wait_seconds=LIMIT)
    yield small, committer, folder
    small.state.close()


async def save(small: Small, step: int) -> str:
    small.train(1)
    return (await asyncio.to_thread(small.state.save, step, step * 4)).outcome


async def heard(small: Small, count: int) -> None:
    """Until `count` snapshots have an outcome."""
    async with asyncio.timeout(LIMIT):
        while small.state.counts.durable + small.state.counts.not_durable < count:
            small.state.ready()
            await asyncio.sleep(0.01)


def newest(folder: Path) -> catalog.CatalogEntry:
    found = catalog.newest_restorable(folder)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("word", "code"), [("eio-write", errno.EIO), ("eio-fsync", errno.EIO), ("erofs", errno.EROFS), ("enospc", errno.ENOSPC)]
)
async def test_storage_that_fails_fails_saves_and_nothing_else(storage, trainer, word, code):
    """Each failed save is counted with its reason, the last good one stays, and saves work again with the storage."""
    small, committer, folder = trainer
    assert await save(small, 1) == "snapshot"
    await committer.until("complete")
    storage.says(word)
    for step in (2, 3):
        assert await save(small, step) == "snapshot"
        assert os.strerror(code) in (await committer.until("void")).reason
    await heard(small, 3)
    assert newest(folder).step == 1
    assert (small.state.counts.durable, small.state.counts.not_durable) == (1, 2)
    assert os.strerror(code) in small.state.counts.last_reason
    storage.says("ok")
    assert await save(small, 4) == "snapshot"
    await committer.until("complete")
    assert newest(folder).step == 4
    again = Small(folder, 2, newest(folder).restore_point(), seed=9)
    assert again.state.restore() == 4
    for name, value in small.tensors().items():
        assert torch.equal(value, again.tensors()[name]), name


async def test_storage_that_hangs_and_comes_back(storage, trainer):
    """While it hangs both arenas fill and further saves are skipped; afterwards what waited becomes durable."""
    small, committer, folder = trainer
    assert await save(small, 1) == "snapshot"
    await committer.until("complete")
    storage.says("hang")
    assert await save(small, 2) == "snapshot"
    small.state._wait_seconds = 0.0
    outcomes = [await save(small, step) for step in (3, 4, 5)]
    assert outcomes[-1] == "skipped"
    assert small.state.counts.skipped == outcomes.count("skipped") >= 2
    assert newest(folder).step == 1
    storage.says("ok")
    await committer.until("complete")
    await heard(small, small.state.counts.snapshots)
    assert newest(folder).step >= 2


async def test_slow_storage_is_waited_for_by_nobody(storage, trainer):
    """A save returns before it is written; the write takes what the storage takes."""
    small, committer, folder = trainer
    assert await save(small, 1) == "snapshot"
    await committer.until("complete")
    storage.says("slow")
    assert await save(small, 2) == "snapshot"
    await committer.until("complete")
    await heard(small, 2)
    assert small.state.counts.write_seconds >= 0.2
    assert small.state.counts.stall_seconds < small.state.counts.write_seconds
    assert newest(folder).step == 2


async def test_storage_that_cannot_be_read_is_an_error_not_a_fresh_start(storage, trainer):
    """F09: neither a listing nor a file that fails is read as "there is nothing"."""
    small, committer, folder = trainer
    assert await save(small, 1) == "snapshot"
    await committer.until("complete")
    decided = newest(folder).restore_point()
    storage.says("eio-read")
    with pytest.raises(OperationalError, match="cannot be listed"):
        catalog.decide_restore(folder)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        Small(folder, 2, decided, seed=9).state.restore()
    storage.says("ok")
    assert Small(folder, 3, decided, seed=9).state.restore() == 1


@pytest.fixture
def faked_clocks() -> Iterator[None]:
    """libfaketime leaves its shared memory behind when the process that made it is killed: take away what came during the test."""

    def shared() -> set[Path]:
        return {*Path("/dev/shm").glob("faketime_shm_*"), *Path("/dev/shm").glob("sem.faketime_sem_*")}

    before = shared()
    yield
    for path in shared() - before:
        path.unlink(missing_ok=True)


def _faketime() -> str:
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    assert found, "libfaketime is not installed: apt-get install faketime"
    return str(found[0])


@pytest.mark.parametrize("jump", ["-10d", "+10d"])
async def test_a_wall_clock_that_jumps_while_the_writer_writes(faked_clocks, make_writer, make_committer, tmp_path, monkeypatch, jump):
    """The writer's clock goes ten days back or on between two saves: order, durations and deadlines are as before."""
    stamp = tmp_path / "clock"
    stamp.write_text("+0")
    for name, value in {
        "LD_PRELOAD": _faketime(),
        "FAKETIME_TIMESTAMP_FILE": str(stamp),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }.items():
        monkeypatch.setenv(name, value)
    writer = await make_writer()
    monkeypatch.undo()
    committer = await make_committer(msgspec.structs.replace(spec_of(1), job="small"), [writer])
    small = Small(tmp_path / "c", writer=writer.socket, back_pressure="wait")
    for step in (1, 2, 3):
        assert await save(small, step) == "snapshot"
        await committer.until("complete")
        stamp.write_text(jump if step == 1 else "+0")
    await heard(small, 3)
    assert 0.0 < small.state.counts.write_seconds < LIMIT
    assert [entry.step for entry in catalog.scan(tmp_path / "c")] == [3, 2, 1]
    small.state.close()


def test_what_these_tests_need_is_here():
    """They are not skipped anywhere: a machine without it fails."""
    assert shutil.which("fusermount3") or shutil.which("fusermount")
    assert ctypes.util.find_library("fuse3") or ctypes.util.find_library("fuse")
    found: Any = _faketime()
    assert found
