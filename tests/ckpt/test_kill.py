"""F01, F05: kill -9 of everything at random moments with keep=1, and retention racing with saves."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from ckpt_synthetic import commit, shard, spec_of, write_shards

from regrow.ckpt import catalog
from regrow.ckpt.assemble import Checkpoint
from regrow.ckpt.layout import Box
from regrow.ckpt.retention import Retention, prune
from regrow.ckpt.verify import verify

SUPPORT = Path(__file__).parent / "support"
KILLS = 16


@pytest.mark.slow
def test_killed_at_random_moments_it_never_goes_back(tmp_path):
    """Restore always succeeds, and never to before the newest step that was reported as committed."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    committed = 0
    for generation in range(1, KILLS + 1):
        process = subprocess.Popen(
            [sys.executable, str(SUPPORT / "ckpt_loop.py"), str(tmp_path), str(generation)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        restored = int(process.stdout.readline().split()[1])
        assert restored >= committed, f"seed {seed}: went back to {restored} from {committed}"
        timer = threading.Timer(rng.uniform(0.0, 0.25), process.kill)
        timer.start()
        for line in process.stdout:
            if line.endswith("\n"):
                committed = int(line.split()[1])
        process.stdout.close()
        process.wait()
        timer.join()
        entry = catalog.newest_restorable(tmp_path)
        if committed:
            assert entry is not None, f"seed {seed}: nothing to restore after step {committed}"
            assert entry.step >= committed, f"seed {seed}"
            assert verify(Path(entry.directory)).valid, f"seed {seed}"
    assert committed > KILLS, "too few steps for the kills to have hit anything"
    assert len(list(tmp_path.glob("step-*"))) <= 3


def test_a_reader_never_sees_half_a_checkpoint_while_old_ones_go(tmp_path):
    """F05: save and purge 60 times with keep=2 while another thread restores the newest over and over."""
    spec = spec_of(1)
    held = [[shard("w", (4, 8), (1,), (0,), 0)]]
    ended = threading.Event()
    problems: list[str] = []
    reads: list[int] = []

    def read() -> None:
        memory = bytearray(128)
        while not ended.is_set():
            entry = catalog.newest_restorable(tmp_path)
            if entry is None:
                continue
            with Checkpoint(Path(entry.directory)) as checkpoint:
                checkpoint.read(Box("w", "float32", (4, 8), (0, 0), (4, 8)), memoryview(memory))
            if memory != np.full(32, entry.step, np.float32).tobytes():
                problems.append(f"step {entry.step} held something else")
            reads.append(entry.step)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(1, 61):
            commit(spec, write_shards(tmp_path, step, spec, held, {"w": np.full((4, 8), step, np.float32)}))
            (tmp_path / f"step-{step + 1:012d}-g1-abc").mkdir()
            prune(tmp_path, Retention(keep_last=2), generation=1)
            assert (tmp_path / f"step-{step + 1:012d}-g1-abc").is_dir(), "a save that has begun was removed"
    finally:
        ended.set()
        reader.join()
    assert not problems
    assert len(set(reads)) > 3
    assert [entry.step for entry in catalog.scan(tmp_path) if entry.state == "restorable"] == [60, 59]
