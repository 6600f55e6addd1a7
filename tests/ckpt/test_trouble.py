"""Storage that hangs, is late or is slow, clocks that jump, and what many saves leave behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import psutil
import pytest
from ckpt_small import Small
from ckpt_synthetic import simple, spec_of

from regrow.ckpt import catalog, restoring
from regrow.ckpt.commit import Collector, write_record
from regrow.ckpt.manifest import DamagedCheckpointError
from regrow.ckpt.retention import Retention, prune


def point(folder: Path):
    entry = catalog.newest_restorable(folder)
    assert entry is not None
    return entry.restore_point()


async def test_storage_that_hangs_for_ever_stops_no_training(make_writer, make_committer, tmp_path):
    """Two snapshots wait in the arenas, the others are skipped and counted; the last good checkpoint stays what it was."""
    writer = await make_writer(faults="shard.write:hang:2+")
    committer = await make_committer(msgspec.structs.replace(spec_of(1), job="small"), [writer])
    small = Small(tmp_path, writer=writer.socket)
    small.train(1)
    assert small.state.save(1, 4).outcome == "snapshot"
    await committer.until("complete")
    outcomes = []
    for step in range(2, 7):
        small.train(1)
        outcomes.append(small.state.save(step, step * 4).outcome)
    assert outcomes[0] == "snapshot"
    assert outcomes[-1] == "skipped"
    assert small.state.counts.skipped == outcomes.count("skipped") >= 3
    assert "still being written" in small.state.counts.last_reason
    assert point(tmp_path).step == 1
    again = Small(tmp_path, 2, point(tmp_path), seed=9)
    assert again.state.restore() == 1
    small.state.close()


def test_a_rank_to_which_the_directory_shows_late_waits_for_it(tmp_path):
    """F09: cached attributes of a network file system hide the newest directory for a while: same step, no start from 0."""
    directory = simple(tmp_path, 1)
    simple_point = point(tmp_path)
    hidden = directory.with_name("hidden")
    directory.rename(hidden)
    timer = threading.Timer(0.4, hidden.rename, [directory])
    timer.start()
    try:
        assert restoring.open_point(str(tmp_path), simple_point).record.step == 1
    finally:
        timer.join()


def test_a_checkpoint_that_is_gone_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(restoring, "VISIBLE_SECONDS", 0.1)
    directory = simple(tmp_path, 1)
    decided = point(tmp_path)
    directory.rename(directory.with_name("moved"))
    with pytest.raises(DamagedCheckpointError, match="has no record"):
        restoring.open_point(str(tmp_path), decided)


def test_one_that_was_set_aside_is_not_restored(tmp_path):
    directory = simple(tmp_path, 1)
    decided = point(tmp_path)
    catalog.set_aside(directory, "replicas disagreed at step 1")
    with pytest.raises(DamagedCheckpointError, match="replicas disagreed at step 1"):
        restoring.open_point(str(tmp_path), decided)


def test_clocks_that_jump_change_no_order(tmp_path):
    """The second checkpoint is written ten minutes before the first by its node's clock: it is the newest all the same."""
    from ckpt_synthetic import shard, write_shards

    held = [[shard("w", (4, 8), (1,), (0,), 0)]]
    for step, at in ((1, 10_000.0), (2, 9_400.0), (3, 9_999.0)):
        import numpy as np

        report = write_shards(tmp_path, step, spec_of(1), held, {"w": np.zeros((4, 8), np.float32)})
        pending = Collector(spec_of(1)).add(report).pending
        assert pending is not None
        write_record(pending, written_at=at)
    assert [entry.step for entry in catalog.scan(tmp_path)] == [3, 2, 1]
    prune(tmp_path, Retention(keep_last=2), generation=1)
    assert [entry.step for entry in catalog.scan(tmp_path)] == [3, 2]


async def test_two_hundred_saves_leave_nothing_behind(make_writer, make_committer, tmp_path):
    """Memory and descriptors of trainer and writer after 20 and after 200 saves."""
    writer = await make_writer()
    committer = await make_committer(msgspec.structs.replace(spec_of(1), job="small"), [writer])
    small = Small(tmp_path, writer=writer.socket, back_pressure="wait")
    small.train(1)

    def sizes() -> dict[str, int]:
        mine, its = psutil.Process(), psutil.Process(writer.process.pid)
        return {
            "writer_bytes": its.memory_info().rss,
            "trainer_bytes": mine.memory_info().rss,
            "writer_fds": its.num_fds(),
            "trainer_fds": mine.num_fds(),
        }

    before: dict[str, int] = {}
    for step in range(1, 201):
        assert await asyncio.to_thread(small.state.save, step, step * 4)
        while (await committer.until("complete")).step != step:
            pass
        await asyncio.to_thread(prune, tmp_path, Retention(keep_last=2), generation=1)
        if step == 20:
            before = sizes()
    after = sizes()
    assert small.state.counts.skipped == small.state.counts.failed == 0
    for name in ("writer_fds", "trainer_fds"):
        assert after[name] <= before[name] + 1, (name, before, after)
    for name in ("writer_bytes", "trainer_bytes"):
        assert after[name] <= before[name] * 1.01 + (1 << 20), (name, before, after)
    small.state.close()


def test_a_restore_needs_the_memory_of_its_own_part(tmp_path):
    """H05: peak memory of a process that restores half of a 64 MB tensor: by rows a few buffers, by columns a stored chunk for each thread."""
    script = tmp_path / "load.py"
    script.write_text(
        """
import sys, resource
from pathlib import Path
import torch
from regrow.ckpt.assemble import Checkpoint
from regrow.ckpt.flatten import Item
from regrow.ckpt.layout import Box
from regrow.ckpt.loading import load_items
rows = sys.argv[2] == "rows"
sizes = (1024, 8192) if rows else (2048, 4096)
with Checkpoint(Path(sys.argv[1])) as checkpoint:
    local = torch.zeros(sizes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    load_items(Path(sys.argv[1]), checkpoint.source, [Item(Box("w", "float32", (2048, 8192), (0, 0), sizes), local)])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert float(local.sum()) == local.numel()
"""
    )
    import numpy as np
    from ckpt_synthetic import commit, shard, write_shards

    shape = (2048, 8192)
    held = [[shard("w", shape, (4,), (0,), rank)] for rank in range(4)]
    report = write_shards(tmp_path / "c", 1, spec_of(4), held, {"w": np.ones(shape, np.float32)})
    commit(spec_of(4), report)
    for how, most in (("rows", 24), ("columns", 80)):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), report.directory, how]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert int(done.stdout) / 1024 <= most, f"{how}: {int(done.stdout) / 1024:.0f} MB over the target"
