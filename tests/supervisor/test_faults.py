"""Faults of training through the real driver: digests, hangs, health, program errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
from scene import form
from stub_agent import eventually

from regrow import wire
from regrow.ids import MeshShape

if TYPE_CHECKING:
    from conftest import Cluster

ERROR = 'Traceback (most recent call last):\n  File "/x/train.py", line 3, in <module>\nValueError: no data'


async def test_flipped_bit_is_voted_down(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1", "n2", "n3")
    equal = dict.fromkeys(range(8), "00")
    for step in range(1, 4):
        await cluster.step(step, digests=equal)
    cluster.members()[0].committed(3)
    await eventually(lambda: 3 in cluster.job().checkpoints and cluster.job().checkpoints[3].evidence, "verified")
    for agent in cluster.members():
        agent.complete(4, digests=equal | {5: "0f"})
    await cluster.generation(2, num_nodes=3)
    generation = cluster.job().generation
    assert generation.spec.nodes == ("n0", "n1", "n3")
    assert generation.spec.restore.step == 3
    assert cluster.job().incidents[-1].rank == 5
    leader = cluster.leader
    stored = await eventually_stored(leader, leader.keys.quarantined("GPU-n2-1"))
    assert b'"quarantined"' in stored
    async with httpx.AsyncClient(base_url=f"http://{leader.http_address}", trust_env=False) as client:
        assert (await client.get("/v1/nodes/n2")).json()["state"] == "quarantined"
        assert (await client.post("/v1/nodes/n2/clear")).status_code == 200
        await eventually(lambda: leader.term.view.quarantine["GPU-n2-1"].state == "probation", "cleared")


async def eventually_stored(leader: object, key: str) -> bytes:
    import asyncio

    async with asyncio.timeout(20):
        while True:
            item = await leader.store.get(key)  # type: ignore[attr-defined]
            if item is not None:
                return item.value
            await asyncio.sleep(0.01)


async def test_hang_is_found_by_lack_of_progress(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1", hang_seconds=0.6)
    await cluster.step(1)
    await cluster.step(2)
    agents = cluster.agents
    await eventually(lambda: any(isinstance(m, wire.CollectStacks) for m in agents["n0"].received), "stacks are asked for")
    for rank, name in ((0, "n0"), (1, "n0"), (3, "n1")):
        agents[name].send(wire.Output(job="train", generation=1, rank=rank, kind="stacks", text='File "a", line 1'))
    await cluster.generation(2, num_nodes=2)
    incident = cluster.job().incidents[-1]
    assert (incident.kind, incident.rank, incident.node) == ("hang", 2, "n1")


async def test_xid_drains_the_node_at_a_checkpoint(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1", "n2")
    await cluster.step(1)
    verdict = wire.HealthVerdict(state="unhealthy", action="reboot", reason="XID 79", device_uuids=("GPU-n1-0",))
    cluster.agents["n1"].send(wire.HealthChanged(verdict=verdict))
    await eventually(lambda: any(isinstance(m, wire.RequestSave) for m in cluster.agents["n0"].received), "save asked")
    await cluster.step(2)
    cluster.agents["n0"].committed(2)
    await cluster.generation(2, num_nodes=2)
    await eventually(lambda: not cluster.agents["n1"].live, "its old workers are stopped")
    assert cluster.job().incidents[-1].kind == "unhealthy"


async def test_program_error_is_shown_with_rank_and_traceback(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1")
    cluster.agents["n1"].exit(2, exit_code=1, error=ERROR)
    await eventually(lambda: cluster.job().outcome, "failed")
    leader = cluster.leader
    async with httpx.AsyncClient(base_url=f"http://{leader.http_address}", trust_env=False) as client:
        document = (await client.get("/v1/jobs/train")).json()
    assert document["state"] == "failed"
    assert document["outcome"]["rank"] == 2
    assert document["outcome"]["traceback"] == ERROR
    await eventually(lambda: not cluster.agents["n0"].live, "the others are stopped")
    await cluster.submit()
    await cluster.generation(2, num_nodes=2)


async def test_finished_job_may_be_submitted_again(cluster: Cluster) -> None:
    spec = await form_and_finish(cluster)
    await cluster.leader.submit(spec)
    await cluster.generation(2, num_nodes=1)
    assert cluster.agents["n0"].order.spec.restore.step == 1


async def form_and_finish(cluster: Cluster) -> wire.JobSpec:
    await form(cluster, "n0")
    spec = cluster.job().spec
    await cluster.step(1)
    cluster.agents["n0"].committed(1)
    leader = cluster.leader
    record = wire.CheckpointRecord(step=1, generation=1, epoch=1, directory="/ckpt/step-1-g1", record_digest="d")
    await leader.store.put(leader.keys.checkpoint("train", 1), wire.encode(record).strip())
    cluster.agents["n0"].exit_all(exit_code=0, declared_end=True)
    await eventually(lambda: cluster.job().outcome, "done")
    return spec


async def test_no_unused_store_delays_the_start_and_nothing_else(cluster: Cluster) -> None:
    await cluster.supervisor()
    await cluster.leading()
    await cluster.start("n0")
    await cluster.submit(mesh=MeshShape(dp=2), max_nodes=1)
    await cluster.generation(1, num_nodes=1)
    assert cluster.agents["n0"].order.master_address == "127.0.0.1:40000"
    cluster.agents["n0"].exit(0, signal=9)
    await cluster.generation(2, num_nodes=1)
    assert cluster.agents["n0"].order.master_address == "127.0.0.1:40001"


async def test_leaving_agent_is_released_and_the_rest_goes_on(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    cluster.agents["n1"].send(wire.Leaving(reason="SIGTERM", notice_seconds=30))
    await eventually(lambda: any(isinstance(m, wire.RequestSave) for m in cluster.agents["n0"].received), "save asked")
    cluster.agents["n0"].committed(1)
    await cluster.generation(2, num_nodes=1)
    await eventually(lambda: cluster.agents["n1"].released, "released")
