"""F01, F05: kill -9 of everything at random moments with keep=1, and retention racing with saves."""

from __future__ import annotations

import asyncio
import json
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
from regrow.ckpt.manifest import DamagedCheckpointError
from regrow.ckpt.retention import Retention, prune
from regrow.ckpt.verify import verify

SUPPORT = Path(__file__).parent / "support"
SOAK = pytest.mark.soak


@pytest.mark.slow
@pytest.mark.parametrize("kills", [16, pytest.param(200, marks=[SOAK, pytest.mark.timeout(3600)])])
def test_killed_at_random_moments_it_never_goes_back(tmp_path, kills):
    """Restore always succeeds, and never to before the newest step that was reported as committed."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    committed = 0
    for generation in range(1, kills + 1):
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
    assert committed > kills, "too few steps for the kills to have hit anything"
    prune(tmp_path, Retention(keep_last=1), generation=kills + 1)
    assert len(list(tmp_path.glob("step-*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=[SOAK, pytest.mark.timeout(3600)])])
async def test_trainers_writer_or_both_killed_at_random_moments(make_writer, make_committer, tmp_path, kills):
    """The real writer with two trainers: whatever is killed when, the newest committed step is there, whole, and the next generation goes on.

    Every other generation writes one file for both ranks.
    """
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    step, seen = 0, set()
    for generation in range(1, kills + 1):
        # one of many write calls is fatal, or the writer lives and somebody is killed by the clock
        places = ["shard.open", "shard.write", "shard.fsync", "shard.done", "publish.node-n0.json.rename", "node.durable", ""]
        place = rng.choice(places) if step else ""  # there is something to lose from the first generation on
        writer = await make_writer(faults=f"{place}:kill:{rng.randrange(1, 12)}" if place else "")
        committer = await make_committer(spec_of(2, generation), [writer], keep=1)
        trainers = [trainer(writer.socket, tmp_path, generation, rank, range(step + 1, step + 2000)) for rank in range(2)]
        try:
            victim = rng.choice([*trainers, writer.process, None])
            if not place:
                step = (await committer.until("complete")).step
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                (victim or writer.process).kill()
            ended = asyncio.to_thread((victim if not place and victim else writer.process).wait)
            done = await asyncio.wait([asyncio.ensure_future(ended)], timeout=90)
            said = (tmp_path / "trainers.log").read_text()
            assert not done[1], f"seed {seed}: generation {generation} hangs, fatal place {place!r}: {said}"
        finally:
            for process in trainers:
                process.kill()
                await asyncio.to_thread(process.wait)
        while not committer.outcomes["complete"].empty():
            step = committer.outcomes["complete"].get_nowait().step
        seen.add(place)
        writer.kill()
        entry = catalog.newest_restorable(tmp_path)
        if step:
            assert entry is not None, f"seed {seed}: nothing to restore after step {step}"
            assert entry.step >= step, f"seed {seed}: went back to {entry.step} from {step}"
            assert verify(Path(entry.directory)).valid, f"seed {seed}"
            step = entry.step
        prune(tmp_path, Retention(keep_last=1), generation=generation + 1)
    assert step > 0
    assert len(seen) > 1


def trainer(socket: str, folder: Path, generation: int, rank: int, steps: range) -> subprocess.Popen[bytes]:
    """A producer process that saves step after step."""
    options = {
        "socket": socket, "folder": str(folder), "generation": generation, "rank": rank, "local_ranks": [0, 1], "steps": list(steps),
        "then": "exit", "node_file": generation % 2 == 0,
    }  # fmt: skip
    command = [sys.executable, str(SUPPORT / "ckpt_producer.py"), json.dumps(options)]
    with (folder / "trainers.log").open("a") as log:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)


def test_a_reader_never_sees_half_a_checkpoint_while_old_ones_go(tmp_path):
    """F05: save and purge 100 times with keep=2 while another thread restores the newest over and over."""
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
            try:
                with Checkpoint(Path(entry.directory)) as checkpoint:
                    checkpoint.read(Box("w", "float32", (4, 8), (0, 0), (4, 8)), memoryview(memory))
            except (DamagedCheckpointError, FileNotFoundError) as error:  # its record is what goes first
                newest = catalog.newest_restorable(tmp_path)
                if newest is None or newest.step < entry.step + 2:
                    problems.append(f"step {entry.step} was among the two to keep: {error}")
                continue  # this thread slept while two newer ones came: refused, not half read
            if memory != np.full(32, entry.step, np.float32).tobytes():
                problems.append(f"step {entry.step} held something else")
            reads.append(entry.step)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(1, 101):
            commit(spec, write_shards(tmp_path, step, spec, held, {"w": np.full((4, 8), step, np.float32)}))
            (tmp_path / f"step-{step + 1:012d}-g1-abc").mkdir()
            prune(tmp_path, Retention(keep_last=2), generation=1)
            assert (tmp_path / f"step-{step + 1:012d}-g1-abc").is_dir(), "a save that has begun was removed"
    finally:
        ended.set()
        reader.join()
    assert not problems
    assert len(set(reads)) > 3
    assert [entry.step for entry in catalog.scan(tmp_path) if entry.state == "restorable"] == [100, 99]
