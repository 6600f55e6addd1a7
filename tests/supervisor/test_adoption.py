"""`regrow supervisor --adopt`: etcd lost its memory, agents and training did not. Real etcd."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from scene import form
from stub_agent import eventually

from regrow import wire
from regrow.store.embedded import EmbeddedEtcd
from regrow.store.open import open_store

if TYPE_CHECKING:
    from conftest import Cluster

KEY = "/regrow/test/jobs/train"


class Etcds:
    """Servers of one test: one at a time is the cluster's store."""

    def __init__(self, root: Path, cluster: Cluster) -> None:
        self.root = root
        self.cluster = cluster
        self.running: list[EmbeddedEtcd] = []
        self.stores: list[Any] = []

    async def use(self, name: str) -> Any:
        """Start etcd on the folder `name`, and make it the store of supervisors to come."""
        etcd = EmbeddedEtcd(self.root / name)
        await etcd.start()
        self.running.append(etcd)
        store = open_store(etcd.url)
        self.stores.append(store)
        self.cluster.open_store = lambda: store
        return store

    async def lose(self) -> None:
        """The leader and its etcd go away; agents and workers stay."""
        leader = await self.cluster.leading()
        await self.running.pop().kill()
        leader.stop()
        await asyncio.gather(*self.cluster.tasks, return_exceptions=True)
        self.cluster.supervisors.clear()
        self.cluster.tasks.clear()

    async def close(self) -> None:
        for store in self.stores:
            await store.close()
        for etcd in self.running:
            await etcd.stop()


@pytest.fixture
async def etcds(tmp_path: Path, cluster: Cluster) -> AsyncIterator[Etcds]:
    made = Etcds(tmp_path, cluster)
    try:
        yield made
    finally:
        await cluster.close()
        cluster.agents.clear()
        cluster.supervisors.clear()
        cluster.tasks.clear()
        await made.close()


def starts(cluster: Cluster) -> list[int]:
    return [sum(1 for message in agent.received if isinstance(message, wire.StartGeneration)) for agent in cluster.agents.values()]


def stops(cluster: Cluster) -> int:
    return sum(1 for agent in cluster.agents.values() for message in agent.received if isinstance(message, wire.StopGeneration))


def unknown(cluster: Cluster) -> str:
    leader = cluster.leader
    assert leader is not None
    return "\n".join(entry.text for entry in leader.journal.since(0) if entry.text.startswith("adopted"))


async def test_empty_store_is_rebuilt_without_touching_a_worker(cluster: Cluster, etcds: Etcds) -> None:
    await etcds.use("first")
    await form(cluster, "n0", "n1")
    for step in range(1, 4):
        await cluster.step(step)
    epoch = cluster.agents["n0"].highest_epoch
    spec = cluster.agents["n0"].order.spec
    await etcds.lose()

    store = await etcds.use("second")
    await cluster.supervisor(adopt=True)
    await eventually(lambda: cluster.leader is not None and "train" in cluster.leader.term.view.jobs, "the job is adopted")
    await cluster.generation(1, num_nodes=2)
    await cluster.step(4)
    await cluster.step(5)
    assert starts(cluster) == [1, 1]
    assert stops(cluster) == 0
    assert not cluster.job().ledger.charges
    assert cluster.agents["n0"].highest_epoch > epoch
    item = await store.get(f"{KEY}/generation")
    record = msgspec.json.decode(item.value, type=wire.GenerationRecord)
    assert (record.number, record.epoch, record.spec) == (1, spec.epoch, spec), "what the committing agent compares with"
    assert msgspec.json.decode((await store.get(f"{KEY}/spec")).value, type=wire.JobSpec).job == "train"
    assert "charges before the adoption are not known" in unknown(cluster)
    cluster.agents["n1"].exit(2, signal=9)
    await cluster.generation(2, num_nodes=2)


async def test_store_of_yesterday_is_brought_up_to_what_runs(cluster: Cluster, etcds: Etcds, tmp_path: Path) -> None:
    await etcds.use("live")
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    shutil.copytree(tmp_path / "live", tmp_path / "copied")
    cluster.agents["n1"].exit(2, signal=9)
    await cluster.generation(2, num_nodes=2)
    await cluster.step(1)
    await cluster.step(2)
    before = starts(cluster)
    await etcds.lose()

    store = await etcds.use("copied")
    assert msgspec.json.decode((await store.get(f"{KEY}/generation")).value, type=wire.GenerationRecord).number == 1
    await cluster.supervisor(adopt=True)
    await eventually(lambda: cluster.leader is not None and "train" in cluster.leader.term.view.jobs, "the job is adopted")
    await cluster.generation(2, num_nodes=2)
    await cluster.step(3)
    assert starts(cluster) == before
    assert "the store had generation 1, agents run 2" in unknown(cluster)
    assert msgspec.json.decode((await store.get(f"{KEY}/generation")).value, type=wire.GenerationRecord).number == 2


async def test_without_the_flag_an_empty_store_is_not_filled(cluster: Cluster, etcds: Etcds) -> None:
    await etcds.use("first")
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    await etcds.lose()
    store = await etcds.use("second")
    await cluster.supervisor()
    leader = await cluster.leading()
    await eventually(lambda: "--adopt" in leader.term.last_reason if leader.term else False, "the way out is said")
    assert not leader.term.view.jobs
    assert stops(cluster) == 0
    assert await store.get(f"{KEY}/generation") is None


async def test_member_that_did_not_come_is_named_and_replaced_later(cluster: Cluster, etcds: Etcds) -> None:
    await etcds.use("first")
    await form(cluster, "n0", "n1", "n2")
    await cluster.step(1)
    await etcds.lose()
    await cluster.agents["n2"].die()
    await etcds.use("second")
    await cluster.supervisor(adopt=True)
    await eventually(lambda: cluster.leader is not None and "train" in cluster.leader.term.view.jobs, "the job is adopted")
    assert "have not told that they run it: n2" in unknown(cluster)
    await cluster.generation(2, num_nodes=2)


async def test_flag_changes_nothing_when_the_store_has_its_memory(cluster: Cluster, etcds: Etcds) -> None:
    await etcds.use("first")
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    (leader,) = cluster.supervisors
    leader.stop()
    await asyncio.gather(*cluster.tasks)
    cluster.supervisors.clear()
    cluster.tasks.clear()
    await cluster.supervisor(adopt=True)
    await eventually(lambda: cluster.leader is not None and "train" in cluster.leader.term.view.jobs, "the job is loaded")
    await cluster.generation(1, num_nodes=2)
    await cluster.step(2)
    assert starts(cluster) == [1, 1]
    assert not unknown(cluster)
