"""Case B03: etcd does not answer for a while under real training. Real agents, workers, etcd."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from regrow import wire
from regrow.local.cluster import ClusterPlan, LocalCluster
from regrow.store.open import open_store

pytestmark = pytest.mark.timeout(600)
TOY = Path(__file__).parents[1] / "e2e" / "toy.py"
LIMIT = 120.0


def steps(tmp_path: Path) -> list[int]:
    """What rank 0 of generation 1 has logged."""
    path = tmp_path / "log" / "g1-r0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines[1:] if line.endswith("}")]


async def until(what: str, condition: Any) -> Any:
    """Until `condition()` (it may be a coroutine function) is true."""
    try:
        async with asyncio.timeout(LIMIT):
            while True:
                found = condition()
                value = await found if asyncio.iscoroutine(found) else found
                if value:
                    return value
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(what) from None


@pytest.mark.parametrize("seconds", [8.0, pytest.param(120.0, marks=pytest.mark.soak)])
async def test_b03_store_is_away_while_training_is_healthy(tmp_path: Path, seconds: float) -> None:
    plan = ClusterPlan(root=tmp_path / "run", nodes=2, slots=1, supervisor_flags=("--ttl", "2"), env=(("OMP_NUM_THREADS", "1"),))
    spec = wire.JobSpec(
        job="toy",
        argv=(str(TOY), "--steps", "100000", "--pause", "0.05", "--log", str(tmp_path / "log")),
        min_nodes=2,
        max_nodes=2,
        global_batch=8,
        checkpoint=wire.CheckpointPolicy(path=str(tmp_path / "ckpt"), min_interval_seconds=2.0, max_interval_seconds=2.0),
    )
    async with LocalCluster(plan) as cluster, httpx.AsyncClient(trust_env=False) as client:
        await cluster.api.post("/v1/jobs", msgspec.json.encode(spec))
        await until("training", lambda: len(steps(tmp_path)) > 10)
        facts = json.loads((cluster.root / "supervisor" / "supervisor.json").read_text())
        before = len(steps(tmp_path))
        cluster.etcd.send_signal(signal.SIGSTOP)
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def says_so() -> bool:
            text = (await client.get(f"http://{facts['http']}/metrics", timeout=10.0)).text
            return any(line.startswith("regrow_store_up") and line.endswith(" 0.0") for line in text.splitlines())

        await until("metrics say that the store is away", says_so)
        await asyncio.sleep(max(0.0, seconds - (loop.time() - began)))  # the length of the outage is what is tested
        away = len(steps(tmp_path))
        assert away > before, "training goes on"
        cluster.etcd.send_signal(signal.SIGCONT)
        store = open_store(cluster.etcd.url)

        async def registered() -> bool:
            return len(await store.get_prefix("/regrow/local/nodes/", timeout=LIMIT)) == 2

        async def committed() -> bool:
            items = await store.get_prefix("/regrow/local/jobs/toy/checkpoints/", timeout=LIMIT)
            return any(int(item.key.rpartition("/")[2]) > before for item in items)

        async def leads() -> bool:
            document = await cluster.api.get("/v1/jobs/toy")
            return document["step"] > away and not document["restarts"] and document["generation"] == 1

        await until("all nodes are registered again", registered)
        await until("what was pending is committed", committed)
        await until("a leader knows the job as it runs", leads)
        await store.close()
        made = sorted(path.name for path in (tmp_path / "log").iterdir())
    assert made == ["g1-r0.jsonl", "g1-r1.jsonl"], "no worker was started again"
    done = steps(tmp_path)
    assert done == list(range(1, len(done) + 1))
