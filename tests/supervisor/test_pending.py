"""Checkpoints that were durable when their committing agent or the store went away: the next leader commits them, once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from scene import form
from stub_agent import eventually
from tests.ckpt.support.ckpt_synthetic import shard, write_shards

from regrow import wire
from regrow.ckpt import commit
from regrow.ids import MeshShape

if TYPE_CHECKING:
    from conftest import Cluster

KEY = "/regrow/test/jobs/train/checkpoints/7"


def durable(folder: Path, step: int, spec: wire.GenerationSpec) -> Path:
    """A checkpoint with its record on storage, as a committing agent leaves it when the store does not answer."""
    arrays: dict[str, Any] = {"model.w": np.arange(24, dtype=np.float32).reshape(6, 4) + step}
    held = [[shard("model.w", (6, 4), (2,), (0,), rank)] for rank in (0, 1)]
    found = commit.Collector(spec).add(write_shards(folder, step, spec, held, arrays, nonce=f"n{step}"))
    assert found.pending is not None
    commit.write_record(found.pending, written_at=1.0)
    return Path(found.pending.directory)


async def begin(cluster: Cluster, tmp_path: Path) -> Path:
    """A job that trains in generation 1; then its leader ends, and a durable checkpoint of step 7 is there."""
    (tmp_path / "ckpt").mkdir()
    await form(cluster, "n0", mesh=MeshShape(dp=2), max_nodes=1)
    await cluster.step(7)
    directory = durable(tmp_path / "ckpt", 7, cluster.agents["n0"].order.spec)
    cluster.supervisors[0].stop()
    await asyncio.gather(*cluster.tasks)
    cluster.supervisors.clear()
    cluster.tasks.clear()
    return directory


async def test_next_leader_commits_what_is_durable_after_reading_it_back(cluster: Cluster, tmp_path: Path, store: Any) -> None:
    directory = await begin(cluster, tmp_path)
    assert await store.get(KEY) is None
    await cluster.supervisor()
    await eventually(lambda: cluster.leader is not None and 7 in cluster.job().checkpoints, "the checkpoint is known")
    await eventually(lambda: cluster.job().checkpoints[7].evidence == ("read_back",), "it was read back")
    item = await store.get(KEY)
    record = msgspec.json.decode(item.value, type=wire.CheckpointRecord)
    assert (record.directory, record.generation, record.evidence) == (str(directory), 1, ("read_back",))
    assert cluster.job().generation is not None
    assert cluster.job().generation.number == 1


async def test_damaged_one_is_named_and_not_committed(cluster: Cluster, tmp_path: Path, store: Any) -> None:
    directory = await begin(cluster, tmp_path)
    largest = max((path for path in directory.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    await cluster.supervisor()
    await eventually(lambda: cluster.leader is not None and "train" in cluster.leader.term.view.jobs, "the job is loaded")
    await eventually(lambda: 7 not in cluster.job().checkpoints or cluster.job().checkpoints[7].damaged, "the damage is known")
    assert await store.get(KEY) is None


async def test_one_of_a_generation_that_is_over_is_left_to_its_story(cluster: Cluster, tmp_path: Path, store: Any) -> None:
    await begin(cluster, tmp_path)
    await cluster.supervisor()
    await eventually(lambda: cluster.leader is not None and 7 in cluster.job().checkpoints, "the checkpoint is known")
    await eventually(lambda: cluster.job().generation.members["n0"].adopted, "its agent is there")  # type: ignore[union-attr]
    await cluster.step(8)
    cluster.agents["n0"].exit(0, signal=9)
    await cluster.generation(2)
    spec = cluster.agents["n0"].order.spec
    assert spec.restore is not None
    assert spec.restore.step == 7
    durable(tmp_path / "ckpt", 9, msgspec.structs.replace(spec, generation=1, epoch=1))
    cluster.supervisors[0].stop()
    await asyncio.gather(*cluster.tasks)
    cluster.supervisors.clear()
    cluster.tasks.clear()
    await cluster.supervisor()
    await eventually(lambda: cluster.leader is not None and "train" in cluster.leader.term.view.jobs, "the job is loaded")
    await eventually(lambda: cluster.job().generation.members["n0"].adopted, "its agent is there")  # type: ignore[union-attr]
    await cluster.step(10)
    assert await store.get(KEY.replace("/7", "/9")) is None
