from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
from scene import form
from stub_agent import eventually

from regrow import wire

if TYPE_CHECKING:
    from conftest import Cluster


async def test_forms_on_all_nodes_and_counts_steps(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1", "n2", "n3")
    orders = [agent.order for agent in cluster.members()]
    assert [worker.rank for order in orders for worker in order.workers] == list(range(8))
    assert {order.master_address for order in orders} == {"127.0.0.1:40000"}
    assert [order.group_rank for order in orders] == [0, 1, 2, 3]
    assert orders[0].spec.micro_batches == (6,) * 8
    await cluster.step(1)
    await cluster.step(2)
    assert cluster.job().frontier == 2


async def test_node_loss_shrinks_and_return_grows_back(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1", "n2", "n3")
    for step in range(1, 4):
        await cluster.step(step)
    cluster.members()[0].committed(2)
    await eventually(lambda: 2 in cluster.job().checkpoints, "checkpoint known")
    await cluster.agents["n1"].die()
    cluster.agents["n2"].exit(4, exit_code=1, error="RuntimeError: Connection closed by peer [127.0.0.1]:4242")
    await cluster.generation(2, num_nodes=3)
    generation = cluster.job().generation
    assert generation is not None
    assert generation.spec.nodes == ("n0", "n2", "n3")
    assert str(generation.spec.mesh) == "dp=6,tp=1,pp=1"
    assert sum(generation.spec.micro_batches) == 48
    assert generation.spec.restore is not None
    assert generation.spec.restore.step == 2
    await cluster.step(3)
    await cluster.step(4)
    incident = cluster.job().incidents[-1]
    assert (incident.kind, incident.cause, incident.node) == ("node_lost", "infrastructure", "n1")
    assert incident.closed
    assert len(cluster.job().ledger.charges) == 1

    await cluster.agents["n1"].restart()
    await eventually(lambda: any(isinstance(m, wire.RequestSave) for m in cluster.agents["n0"].received), "asked to save")
    await cluster.step(5)
    cluster.agents["n0"].committed(5)
    await cluster.generation(3, num_nodes=4)
    generation = cluster.job().generation
    assert generation is not None
    assert generation.spec.nodes == ("n0", "n2", "n3", "n1")
    assert generation.spec.restore is not None
    assert generation.spec.restore.step == 5
    await cluster.step(6)
    assert len(cluster.job().ledger.charges) == 1


async def test_agent_restart_costs_no_step(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    await cluster.agents["n1"].die(workers=False)
    for step in range(2, 6):
        cluster.agents["n0"].complete(step)
    await eventually(lambda: cluster.job().frontier == 5, "the others' steps count")
    await cluster.agents["n1"].restart()
    await eventually(lambda: cluster.leader.term.view.nodes["n1"].connected, "back")
    await cluster.step(6)
    assert cluster.job().generation.number == 1
    assert not cluster.job().incidents


async def test_api_speaks_for_the_job(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    leader = await cluster.leading()
    async with httpx.AsyncClient(base_url=f"http://{leader.http_address}", trust_env=False) as client:
        document = (await client.get("/v1/jobs/train")).json()
        assert document["state"] == "running"
        assert document["step"] == 1
        assert document["mesh"] == "dp=4,tp=1,pp=1"
        assert [node["state"] for node in document["nodes"]] == ["member", "member"]
        missing = await client.get("/v1/jobs/nope")
        assert missing.status_code == 404
        assert "train" in missing.json()["error"]["hint"]
        bad = await client.post("/v1/jobs", content=b"{}")
        assert bad.status_code == 400
        metrics = (await client.get("/metrics")).text
        assert 'regrow_step{job_name="train"} 1.0' in metrics
        events = (await client.get("/v1/events", params={"job": "train"})).json()["events"]
        assert "record_generation" in [event["kind"] for event in events]
        where = (await client.get("/v1/jobs/train/where", params={"rank": 3})).json()
        assert where["ranks"][0]["node"] == "n1"
