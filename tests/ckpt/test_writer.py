"""The writer process: real sockets, arenas, files, signals and faults."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from ckpt_small import Small
from ckpt_synthetic import spec_of

from regrow.ckpt import catalog, sinks
from regrow.ckpt.client import WriterControl
from regrow.ckpt.protocol import WriterStatus
from regrow.ckpt.verify import verify
from regrow.errors import FencedError, OperationalError
from regrow.wire import ShardsDurable

SUPPORT = Path(__file__).parent / "support"


async def status_of(writer, condition=lambda status: True) -> WriterStatus:
    """Ask until the answer fits."""
    control = await WriterControl.connect(writer.socket, "n0")
    try:
        async with asyncio.timeout(60):
            await control.query_status()
            async for message in control.messages():
                if isinstance(message, WriterStatus):
                    if condition(message):
                        return message
                    await asyncio.sleep(0.02)
                    await control.query_status()
    finally:
        await control.close()
    raise AssertionError("the writer is gone")


def take_until_refused(producer) -> None:
    while True:
        producer.sink.take(60.0)


def start_producer(writer, folder, **options) -> subprocess.Popen[str]:
    settings = {"socket": writer.socket, "folder": str(folder), "rank": 0, "local_ranks": [0], "steps": [], "then": "exit", **options}
    return subprocess.Popen([sys.executable, str(SUPPORT / "ckpt_producer.py"), json.dumps(settings)], stdout=subprocess.PIPE, text=True)


async def test_two_ranks_make_one_report_and_one_checkpoint(make_writer, make_producer, make_committer, tmp_path):
    writer = await make_writer()
    committer = await make_committer(spec_of(2), [writer])
    ranks = [make_producer(writer, rank=rank) for rank in range(2)]
    for step in (1, 2, 3):
        for rank in ranks:
            assert rank.save(step)
        await committer.until("complete")
    assert [(type(message), message.step) for message in committer.messages] == [(ShardsDurable, step) for step in (1, 2, 3)]
    assert committer.messages[0].ranks == (0, 1)
    entries = catalog.scan(tmp_path)
    assert [(entry.step, entry.state) for entry in entries] == [(3, "restorable"), (2, "restorable"), (1, "restorable")]
    assert all(verify(Path(entry.directory)).valid for entry in entries)
    status = await status_of(writer)
    assert (status.arenas, status.saves_durable, status.unacknowledged) == (4, 3, ())


async def test_a_report_is_kept_until_it_is_acknowledged(make_writer, make_producer, tmp_path):
    writer = await make_writer()
    rank = make_producer(writer, local_ranks=(0,))
    rank.save(1)
    for _ in range(2):
        control = await WriterControl.connect(writer.socket, "n0")
        message = await anext(aiter(control.messages()))
        assert (message.step, type(message)) == (1, ShardsDurable)
        await control.close()
    control = await WriterControl.connect(writer.socket, "n0")
    await control.acknowledge(await anext(aiter(control.messages())))
    await status_of(writer, lambda status: status.unacknowledged == ())
    await control.close()


@pytest.mark.parametrize(("place", "kind", "words"), [
    ("shard.allocate", "enospc", "No space left"),
    ("shard.write", "eio", "Input/output error"),
    ("shard.open", "erofs", "Read-only file system"),
    ("publish.node-n0.json.fsync", "enospc", "No space left"),
])  # fmt: skip
async def test_storage_errors_void_the_step_and_training_goes_on(make_writer, make_producer, make_committer, tmp_path, place, kind, words):
    writer = await make_writer(faults=f"{place}:{kind}:1")
    committer = await make_committer(spec_of(2), [writer])
    ranks = [make_producer(writer, rank=rank) for rank in range(2)]
    for rank in ranks:
        assert rank.save(1)
    outcome = await committer.until("void")
    assert words in outcome.reason
    for rank in ranks:
        assert rank.save(2)
    assert (await committer.until("complete")).step == 2
    await status_of(writer, lambda status: not status.writing)
    assert [path.name for path in tmp_path.glob("step-*")] == [catalog.scan(tmp_path)[0].name]


async def test_a_full_disk(make_writer, make_producer, make_committer, short_path):
    """The real thing: a file system of 2 MB."""
    folder = short_path / "full"
    folder.mkdir()
    mounted = await asyncio.to_thread(subprocess.run, ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        writer = await make_writer()
        committer = await make_committer(spec_of(1), [writer])
        rank = make_producer(writer, folder, rows=300, local_ranks=(0,))
        rank.save(1)
        assert (await committer.until("complete")).step == 1
        rank.save(2)
        assert "No space left" in (await committer.until("void")).reason
        entry = catalog.newest_restorable(folder)
        assert entry is not None
        assert entry.step == 1
        assert verify(Path(entry.directory)).valid
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", str(folder)], check=True)


async def test_a_slow_writer_skips_loudly_and_never_mixes_steps(make_writer, make_producer, make_committer, tmp_path):
    """F07: save every step on slow storage; every published checkpoint has one step across ranks, skipped ones are counted."""
    writer = await make_writer(faults="shard.write:slow=0.15:0")
    committer = await make_committer(spec_of(2), [writer])
    ranks = [make_producer(writer, rank=rank) for rank in range(2)]
    saved = []
    for step in range(1, 13):
        took = [rank.save(step, wait_seconds=0.0) for rank in ranks]
        saved.append(all(took))
        await asyncio.sleep(0.03)
    assert not all(saved)
    for step, took in enumerate(saved, 1):
        assert (await committer.until("complete" if took else "void")).step == step
    for entry in catalog.scan(tmp_path):
        assert entry.state == "restorable"
        data = b"".join((Path(entry.directory) / f"rank-0000{rank}.safetensors").read_bytes() for rank in range(2))
        import numpy as np

        values = np.frombuffer(data, np.float32)
        assert np.count_nonzero(values == np.float32(entry.step)) >= 64 * 1024


async def test_a_step_that_is_overtaken_while_its_manifest_is_written(make_writer, make_producer, make_committer, tmp_path):
    """Step 2 becomes durable before step 1: the newest checkpoint is step 2, whole, and step 1 is void."""
    writer = await make_writer(faults="publish.node-n0.json.write:slow=1.5:1")
    committer = await make_committer(spec_of(1), [writer])
    rank = make_producer(writer, local_ranks=(0,))
    assert rank.save(1)
    shard_of_1 = "step-000000000001-*/rank-00000.safetensors"
    await status_of(writer, lambda status: any(tmp_path.glob(shard_of_1)) and not status.writing)
    assert rank.save(2)
    assert (await committer.until("complete")).step == 2
    outcome = await committer.until("void")
    assert (outcome.step, outcome.reason) == (1, "superseded by step 2")
    entry = catalog.newest_restorable(tmp_path)
    assert entry is not None
    assert entry.step == 2
    assert verify(Path(entry.directory)).valid


async def test_a_killed_trainer_loses_no_submitted_snapshot(make_writer, make_producer, make_committer, tmp_path):
    """Its submitted snapshot becomes durable, its leased arena comes back, its unfinished step is void."""
    writer = await make_writer(faults="shard.write:slow=0.3:0")
    committer = await make_committer(spec_of(2), [writer])
    other = make_producer(writer, rank=1)
    victim = start_producer(writer, tmp_path, generation=1, local_ranks=[0, 1], steps=[1], then="take")
    assert victim.stdout is not None
    for line in victim.stdout:
        if line.startswith("hanging"):
            break
    other.save(1)
    other.save(2)
    victim.kill()
    victim.wait()
    victim.stdout.close()
    assert (await committer.until("complete")).step == 1
    outcome = await committer.until("void")
    assert (outcome.step, "rank 0 ended before its snapshot" in outcome.reason) == (2, True)
    other.sink.close()
    await status_of(writer, lambda status: status.producers == 0 and not status.writing)
    following = [make_producer(writer, generation=2, rank=rank) for rank in range(2)]
    committer = await make_committer(spec_of(2, 2), [writer])
    assert (await status_of(writer)).arenas == 4
    for rank in following:
        rank.save(2)
    assert (await committer.until("complete")).step == 2


async def test_an_older_generation_is_refused(make_writer, make_producer, tmp_path):
    """A03: a paused generation that wakes up leaves no trace."""
    writer = await make_writer()
    old = make_producer(writer, local_ranks=(0,), generation=1)
    new = make_producer(writer, local_ranks=(0,), generation=2)
    old.save(7)
    with pytest.raises(FencedError, match="later generation"):
        take_until_refused(old)
    with pytest.raises(FencedError, match="generation 1 is behind"):
        make_producer(writer, generation=1, local_ranks=(0,))
    assert new.save(1)
    await status_of(writer, lambda status: status.saves_durable == 1)
    assert [path.name.split("-")[2] for path in tmp_path.glob("step-*")] == ["g2"]


async def test_ranks_that_disagree_void_the_step(make_writer, make_producer, make_committer, tmp_path):
    writer = await make_writer()
    committer = await make_committer(spec_of(2), [writer])
    ranks = [make_producer(writer, rank=rank) for rank in range(2)]
    for rank in ranks:
        rank.save(1, samples=8 + rank.rank)
    assert "disagrees about directory or samples" in (await committer.until("void")).reason


PLACES = [
    "shard.open",
    "shard.allocate",
    "shard.write",
    "shard.fsync",
    "shard.done",
    "publish.node-n0.json.write",
    "publish.node-n0.json.fsync",
    "publish.node-n0.json.rename",
    "publish.node-n0.json.sync",
    "node.durable",
]


@pytest.mark.parametrize("place", PLACES)
async def test_a_writer_killed_at_any_call_leaves_the_last_checkpoint(make_writer, make_producer, make_committer, tmp_path, place):
    nth = 2 if place.startswith(("publish", "node")) else 3
    writer = await make_writer(faults=f"{place}:kill:{nth}")
    committer = await make_committer(spec_of(2), [writer])
    ranks = [make_producer(writer, rank=rank) for rank in range(2)]
    for rank in ranks:
        rank.save(1)
    await committer.until("complete")
    for rank in ranks:
        rank.save(2)
    assert await asyncio.to_thread(writer.process.wait, 60) == -signal.SIGKILL
    entry = catalog.newest_restorable(tmp_path)
    assert entry is not None
    assert entry.step == 1
    assert verify(Path(entry.directory)).valid
    with pytest.raises(OperationalError):
        ranks[0].sink.take(60.0)
    writer.faults = ""
    await asyncio.to_thread(writer.start)
    committer = await make_committer(spec_of(2), [writer])
    for rank in ranks:
        rank.connect()
        rank.save(3)
    await committer.until("complete")
    newest = catalog.newest_restorable(tmp_path)
    assert newest is not None
    assert newest.step == 3


async def test_the_end_of_the_lifeline_ends_the_writer(make_writer):
    reader, keeper = os.pipe()
    writer = await make_writer(lifeline=reader)
    os.close(reader)
    started = time.monotonic()
    os.close(keeper)
    assert await asyncio.to_thread(writer.process.wait, 30) == 0
    assert time.monotonic() - started < 2.0
    with pytest.raises(OperationalError):
        await WriterControl.connect(writer.socket, "n0")


async def test_the_end_of_the_lifeline_ends_a_stopped_writer(make_writer):
    """SIGSTOP outlives nothing: the kernel continues it when the launcher's end of the pipe closes, however the launcher died."""
    reader, keeper = os.pipe()
    writer = await make_writer(lifeline=reader)
    os.close(reader)
    writer.process.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, writer.process.pid, os.WSTOPPED | os.WNOWAIT)
    os.close(keeper)
    assert await asyncio.to_thread(writer.process.wait, 30) == 0


async def test_a_second_writer_on_the_same_socket_is_refused(make_writer, short_path):
    writer = await make_writer()
    command = [sys.executable, "-m", "regrow.ckpt.writer", "--socket", writer.socket, "--state", str(short_path)]
    second = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    _, text = await second.communicate()
    assert (second.returncode, b"another checkpoint writer" in text) == (2, True)
    assert writer.process.poll() is None


async def test_sigterm_finishes_what_is_being_written(make_writer, make_producer, tmp_path):
    writer = await make_writer(faults="shard.fsync:slow=0.5:0")
    rank = make_producer(writer, local_ranks=(0,))
    rank.save(1)
    await status_of(writer, lambda status: status.writing == (1,))
    writer.process.terminate()
    assert await asyncio.to_thread(writer.process.wait, 30) == 0
    assert (tmp_path / "step-000000000001-g1-abc" / "node-n0.json").exists()


async def test_a_training_state_finds_the_writer_that_replaced_a_killed_one(make_writer, make_committer, tmp_path):
    """Snapshots that died with the writer are counted; the next save connects again; storage trouble never raises."""
    writer = await make_writer(faults="shard.fsync:kill:2")
    small = Small(tmp_path, writer=writer.socket)
    spec = msgspec.structs.replace(spec_of(1), job="small")
    committer = await make_committer(spec, [writer])
    small.state.prepare()
    small.train(1)
    assert small.state.save(1, 4).outcome == "snapshot"
    await committer.until("complete")
    assert small.state.save(2, 8).outcome == "snapshot"
    assert await asyncio.to_thread(writer.process.wait, 60) == -signal.SIGKILL
    report = small.state.save(3, 12)
    assert (report.outcome, "no checkpoint writer" in report.reason) == ("failed", True)
    assert (small.state.counts.durable, small.state.counts.not_durable, small.state.counts.failed) == (1, 1, 1)
    writer.faults = ""
    await asyncio.to_thread(writer.start)
    committer = await make_committer(spec, [writer])
    small.train(1)
    assert small.state.save(4, 16).outcome == "snapshot"
    assert (await committer.until("complete")).step == 4
    assert small.state.save(4, 16).reason == "this step was saved already"
    entry = catalog.newest_restorable(tmp_path)
    assert entry is not None
    again = Small(tmp_path, 2, entry.restore_point(), seed=9)
    assert again.state.restore() == 4
    small.state.close()


async def test_a_full_house_is_skipped_or_waited_for(make_writer, tmp_path):
    """Back-pressure is a policy, told to the caller and counted."""
    writer = await make_writer(faults="shard.write:slow=0.4:0")
    outcomes = {}
    for generation, policy in enumerate(("skip", "fail", "wait"), 1):
        small = Small(tmp_path / policy, generation, writer=writer.socket, back_pressure=policy)
        assert small.state.ready()
        outcomes[policy] = [small.state.save(step, step).outcome for step in (1, 2, 3)]
        small.state.close()
    assert outcomes == {
        "skip": ["snapshot", "snapshot", "skipped"],
        "fail": ["snapshot", "snapshot", "failed"],
        "wait": ["snapshot", "snapshot", "snapshot"],
    }


async def test_a_stopped_writer_holds_training_up_once(make_writer, tmp_path, monkeypatch):
    """SIGSTOP: the save fails after a bounded wait, later ones fail at once, and nothing raises."""
    monkeypatch.setattr(sinks, "PREPARE_SECONDS", 0.3)
    writer = await make_writer()
    writer.process.send_signal(signal.SIGSTOP)
    try:
        small = Small(tmp_path, writer=writer.socket)
        first = small.state.save(1, 4)
        assert (first.outcome, "no arenas in time" in first.reason) == ("failed", True)
        second = small.state.save(2, 8)
        assert (second.outcome, "asked again in" in second.reason) == ("failed", True)
        small.state.close()
    finally:
        writer.process.send_signal(signal.SIGCONT)
