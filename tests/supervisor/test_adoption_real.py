"""`regrow supervisor --adopt` with real agents, shims, workers and etcd: the data of a running etcd is gone, no step is."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from regrow import wire
from regrow.local.cluster import ClusterPlan, LocalCluster
from regrow.store.open import open_store

pytestmark = pytest.mark.timeout(300)
TOY = Path(__file__).parents[1] / "e2e" / "toy.py"
LIMIT = 120.0


def logged(folder: Path) -> dict[str, list[int]]:
    """{log file: steps}, without the line that names the generation."""
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("g*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        found[path.name] = [line["step"] for line in lines[1:]]
    return found


async def until_step(cluster: LocalCluster, step: int) -> dict[str, Any]:
    """The job's document once a step is completed, from whoever leads."""
    async with asyncio.timeout(LIMIT):
        while True:
            document = await cluster.api.get("/v1/jobs")
            jobs = {job["job"]: job for job in document["jobs"]}
            if "toy" in jobs and jobs["toy"]["step"] >= step:
                return jobs["toy"]
            await asyncio.sleep(0.1)


async def test_etcd_loses_its_data_under_a_running_job(tmp_path: Path) -> None:
    plan = ClusterPlan(root=tmp_path / "run", nodes=2, slots=1, supervisor_flags=("--adopt", "--ttl", "2"), env=(("OMP_NUM_THREADS", "1"),))
    spec = wire.JobSpec(
        job="toy",
        argv=(str(TOY), "--steps", "100000", "--pause", "0.05", "--log", str(tmp_path / "log")),
        min_nodes=2,
        max_nodes=2,
        global_batch=8,
        checkpoint=wire.CheckpointPolicy(path=str(tmp_path / "ckpt"), min_interval_seconds=1.0, max_interval_seconds=1.0),
    )
    async with LocalCluster(plan) as cluster:
        await cluster.api.post("/v1/jobs", msgspec.json.encode(spec))
        before = await until_step(cluster, 20)
        store = open_store(cluster.etcd.url)
        key = "/regrow/local/jobs/toy/"
        await _until_committed(store, key, above=0)
        cluster.etcd.send_signal(signal.SIGSTOP)
        shutil.rmtree(cluster.etcd.state / "data")
        cluster.etcd.send_signal(signal.SIGKILL)
        await _until_committed(store, key, above=before["step"])
        after = await until_step(cluster, before["step"] + 40)
        item = await store.get(f"{key}generation")
        await store.close()
        assert item is not None
        assert msgspec.json.decode(item.value, type=wire.GenerationRecord).number == 1
        assert after["generation"] == 1
        assert (await cluster.api.get("/v1/jobs/toy"))["restarts"] == 0
        logs = logged(tmp_path / "log")
    assert sorted(logs) == ["g1-r0.jsonl", "g1-r1.jsonl"], "no worker was started again"
    for steps in logs.values():
        assert steps == list(range(1, len(steps) + 1))


async def _until_committed(store: Any, key: str, *, above: int) -> None:
    """Until the store has a checkpoint of a step above `above`."""

    async with asyncio.timeout(LIMIT):
        while True:
            items = await store.get_prefix(f"{key}checkpoints/", timeout=LIMIT)
            if any(int(item.key.rpartition("/")[2]) > above for item in items):
                return
            await asyncio.sleep(0.2)
