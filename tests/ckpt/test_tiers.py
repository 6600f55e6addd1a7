"""Where a restore reads from: arenas of the own node that outlived the trainer, else storage; always verified."""

from __future__ import annotations

import asyncio
import importlib
import os
from pathlib import Path

import msgspec
import pytest
import torch
from ckpt_small import Small
from ckpt_synthetic import simple, spec_of

from regrow.ckpt import catalog
from regrow.ckpt.manifest import DamagedCheckpointError
from regrow.ckpt.remote import Tier, fetch, mirror
from regrow.ckpt.verify import verify
from regrow.errors import ConfigurationError, OperationalError


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


@pytest.fixture(scope="module")
def s3():
    """moto's server (an emulator of S3), and the environment that points clients at it."""
    moto_server = importlib.import_module("moto.server")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    yield names
    server.stop()


@pytest.fixture(params=["file", "s3"])
def tier_url(request, tmp_path, monkeypatch):
    """A fresh folder or bucket."""
    if request.param == "file":
        return f"file://{tmp_path}/second tier"
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    import fsspec

    fsspec.filesystem("s3").clear_instance_cache()
    bucket = f"bucket-{abs(hash(str(tmp_path))) % 10**9}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/jobs/small"


def test_a_second_tier(tier_url, tmp_path):
    """Mirror with retention, then a folder that was lost as a whole comes back and restores."""
    folder = tmp_path / "job"
    small = Small(folder)
    for step in (1, 2, 3):
        small.train(1)
        small.save(step)
    tier = Tier(tier_url)
    assert tier.scan() == []
    first = mirror(folder, tier, keep=2)
    assert [remote.record.step for remote in tier.scan()] == [3, 2]
    assert len(first.uploaded) == 2
    assert mirror(folder, tier, keep=2).uploaded == ()
    small.train(1)
    small.save(4)
    second = mirror(folder, tier, keep=2)
    assert [remote.record.step for remote in tier.scan()] == [4, 3]
    assert [name.split("-")[1] for name in second.removed] == ["000000000002"]
    made = fetch(tier, tmp_path / "back")
    assert verify(made).valid
    again = Small(tmp_path / "back", 2, point(tmp_path / "back"), seed=9)
    assert again.state.restore() == 4
    for name, value in small.tensors().items():
        assert torch.equal(value, again.tensors()[name]), name
    assert fetch(tier, tmp_path / "back") == made
    with pytest.raises(ConfigurationError, match="a checkpoint of step 9"):
        fetch(tier, tmp_path / "back", step=9)


def test_what_is_damaged_or_unfinished_in_the_second_tier(tier_url, tmp_path):
    import fsspec

    folder = tmp_path / "job"
    small = Small(folder)
    for step in (1, 2, 3):
        small.train(1)
        small.save(step)
    tier = Tier(tier_url)
    mirror(folder, tier, keep=3)
    files, root = fsspec.core.url_to_fs(tier_url)
    three, two, _ = tier.scan()
    files.rm_file(f"{root}/{three.directory}/record.json")  # an upload that was cut off
    damaged = bytearray(files.cat_file(f"{root}/{two.directory}/rank-00000.safetensors"))
    damaged[9000] ^= 1
    files.pipe_file(f"{root}/{two.directory}/rank-00000.safetensors", bytes(damaged))
    with pytest.raises(OperationalError, match=r"no checkpoint there is intact.*rank-00000\.safetensors"):
        fetch(tier, tmp_path / "back", step=2)
    assert list((tmp_path / "back").iterdir()) == []
    assert fetch(tier, tmp_path / "back").name.startswith("step-000000000001")
    assert list(mirror(folder, tier, keep=3).uploaded) == [three.directory]


def test_two_that_mirror_cannot_tear_each_others_record(tier_url, tmp_path):
    """The record is created, never replaced."""
    import fsspec

    folder = tmp_path / "job"
    small = Small(folder)
    small.save(1)
    name = Path(point(folder).directory).name
    files, root = fsspec.core.url_to_fs(tier_url)
    files.makedirs(f"{root}/{name}", exist_ok=True)
    files.pipe_file(f"{root}/{name}/record.json", b"of another writer")
    with pytest.raises(FileExistsError):
        files.pipe_file(f"{root}/{name}/record.json", b"mine", mode="create")
    assert Tier(tier_url).upload(Path(point(folder).directory)) == 0
    assert files.cat_file(f"{root}/{name}/record.json") == b"of another writer"


def test_a_store_that_does_not_answer_is_not_an_empty_one(tmp_path, monkeypatch, s3):
    import fsspec

    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(OperationalError, match="cannot be written"):
        Tier("s3://a-bucket-that-is-not-there/x").upload(Path(point_of_new(tmp_path)))
    with pytest.raises(ConfigurationError, match="cannot be used"):
        Tier("nonsense://x")


def point_of_new(folder: Path) -> str:
    small = Small(folder)
    small.save(1)
    return point(folder).directory


def test_removed_while_it_is_mirrored(tmp_path):
    """Retention is faster than the copy: nothing of it counts there, and the pass goes on with the others."""
    folder, gone = tmp_path / "jobs", []
    simple(folder, 1)
    simple(folder, 2)
    tier = Tier(f"file://{tmp_path}/second")

    def take_away(done: int, total: int) -> None:
        if not gone:
            newest = next(entry for entry in catalog.scan(folder) if entry.step == 2)
            gone.append(Path(newest.directory).rename(folder / ".regrow-trash-x"))

    assert [Path(name).name[:17] for name in mirror(folder, tier, keep=2, progress=take_away).uploaded] == ["step-000000000001"]
    assert [remote.record.step for remote in tier.scan()] == [1]
    directory = simple(folder, 3)
    (directory / "rank-00001.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match="is missing"):
        tier.upload(directory)
    assert [remote.record.step for remote in tier.scan()] == [1]
