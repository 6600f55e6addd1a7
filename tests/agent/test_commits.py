"""From durable shards to a committed checkpoint: fences, a store that is away, peers that come and go. Real files, real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.agent.leader import fresh_cluster
from tests.ckpt.support.ckpt_synthetic import shard, write_shards

from regrow import wire
from regrow.agent.cleaning import Cleaner
from regrow.agent.commits import Committer
from regrow.agent.peer import PeerClient, PeerServer, Report, Settled
from regrow.agent.registry import Keys
from regrow.ckpt import catalog
from regrow.ckpt.manifest import Metric
from regrow.ids import MeshShape
from regrow.store.base import Store
from regrow.store.memory import MemoryStore

LIMIT = 60.0


def spec_of(generation: int = 1, epoch: int = 1) -> wire.GenerationSpec:
    """Two ranks on one node."""
    return wire.GenerationSpec(
        job="job", epoch=epoch, generation=generation, mesh=MeshShape(dp=2), world_size=2, nodes=("n0",), committing_node="n0"
    )


def shards(folder: Path, step: int, spec: wire.GenerationSpec, loss: float | None = None) -> wire.ShardsDurable:
    """Durable shards of a small state."""
    arrays: dict[str, Any] = {"model.w": np.arange(24, dtype=np.float32).reshape(6, 4) + step}
    held = [[shard("model.w", (6, 4), (2,), (0,), rank)] for rank in (0, 1)]
    metrics = {} if loss is None else {"held_out": Metric(value=loss, step=step)}
    return write_shards(folder, step, spec, held, arrays, nonce=f"n{step}", metrics=metrics)


async def record_generation(store: Store, keys: Keys, spec: wire.GenerationSpec) -> None:
    """What the leader writes before members start."""
    record = wire.GenerationRecord(
        number=spec.generation, epoch=spec.epoch, mesh=spec.mesh, committing_node="n0", num_members=1, members_hash="x"
    )
    await store.put(keys.generation(spec.job), msgspec.json.encode(record))


class Running:
    """A committer and what it said."""

    def __init__(self, store: Store, keys: Keys, spec: wire.GenerationSpec, **more: Any) -> None:
        self.told: list[wire.CheckpointChanged] = []
        self.settled: list[Settled] = []
        self._changed = asyncio.Event()
        self.committer = Committer(spec, store, keys, report=self._tell, settle=self._settle, **more)
        self.task = asyncio.create_task(self.committer.run())

    def _tell(self, changed: wire.CheckpointChanged) -> None:
        self.told.append(changed)
        self._changed.set()

    def _settle(self, settled: Settled) -> None:
        self.settled.append(settled)
        self._changed.set()

    async def until(self, state: str, step: int = 1) -> wire.CheckpointChanged:
        """Wait for a state of a step."""
        async with asyncio.timeout(LIMIT):
            while True:
                for changed in self.told:
                    if (changed.state, changed.step) == (state, step):
                        return changed
                self._changed.clear()
                await self._changed.wait()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def running() -> AsyncIterator[Any]:
    """Makes committers."""
    made: list[Running] = []

    def make(*arguments: Any, **more: Any) -> Running:
        made.append(Running(*arguments, **more))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def test_durable_then_committed_under_the_generations_fence(tmp_path: Path, store: Store, running: Any) -> None:
    keys, spec = Keys(fresh_cluster()), spec_of()
    await record_generation(store, keys, spec)
    one = running(store, keys, spec)
    report = shards(tmp_path, 1, spec)
    assert one.committer.add(report) is None
    done = await one.until("committed")
    assert [changed.state for changed in one.told] == ["durable", "committed"]
    item = await store.get(keys.checkpoint("job", 1))
    assert item is not None
    record = msgspec.json.decode(item.value, type=wire.CheckpointRecord)
    assert (record.step, record.generation, record.directory, record.record_digest) == (1, 1, done.directory, done.record_digest)
    told = await store.get(keys.event(wire.checkpoint_mark("job", 1, 1)))
    assert told is not None
    assert told.mod_revision == item.mod_revision, "the journal's entry is in the same transaction"
    assert msgspec.json.decode(told.value, type=wire.EventRecord).reason == "checkpoint of step 1: committed"
    newest = catalog.newest_restorable(tmp_path)
    assert newest is not None
    assert (newest.step, newest.record_digest) == (1, done.record_digest)
    again = one.committer.add(report)
    assert again is not None
    assert again.outcome == "committed"


async def test_an_agent_that_was_left_behind_commits_nothing(tmp_path: Path, store: Store, running: Any) -> None:
    keys, spec = Keys(fresh_cluster()), spec_of()
    await record_generation(store, keys, spec)
    one = running(store, keys, spec)
    await one.committer.remember_fence()
    await record_generation(store, keys, spec_of(2))
    one.committer.add(shards(tmp_path, 1, spec))
    failed = await one.until("failed")
    assert "generation 1 of job job is over" in failed.reason
    assert await store.get(keys.checkpoint("job", 1)) is None
    assert await store.get(keys.event(wire.checkpoint_mark("job", 1, 1))) is None
    refused = one.committer.add(shards(tmp_path, 2, spec))
    assert refused is not None
    assert refused.outcome == "refused"


@pytest.mark.parametrize(("number", "epoch"), [(2, 1), (1, 2)])
async def test_the_store_must_have_this_very_generation(tmp_path: Path, store: Store, running: Any, number: int, epoch: int) -> None:
    keys, spec = Keys(fresh_cluster()), spec_of()
    await record_generation(store, keys, spec_of(number, epoch))
    one = running(store, keys, spec)
    one.committer.add(shards(tmp_path, 1, spec))
    assert "is not the current one" in (await one.until("failed")).reason


async def test_a_store_that_was_emptied_and_rebuilt_gets_the_checkpoint(tmp_path: Path, running: Any) -> None:
    keys, spec, memory = Keys(fresh_cluster()), spec_of(3, 2), MemoryStore()
    one = running(memory, keys, spec)
    one.committer.add(shards(tmp_path, 1, spec))
    assert "it has lost its memory" in (await one.until("pending")).reason
    await record_generation(memory, keys, spec_of(2, 1))
    one.committer.add(shards(tmp_path, 2, spec))
    await record_generation(memory, keys, spec)
    await one.until("committed", 1)
    await one.until("committed", 2)
    await record_generation(memory, keys, spec)
    one.committer.add(shards(tmp_path, 3, spec))
    await one.until("committed", 3)
    await record_generation(memory, keys, spec_of(4, 2))
    one.committer.add(shards(tmp_path, 4, spec))
    assert "is over" in (await one.until("failed", 4)).reason
    await memory.close()


async def test_without_the_store_a_checkpoint_is_pending_and_committed_later(tmp_path: Path, running: Any) -> None:
    server = MemoryStore()
    mine = server.connect()
    keys, spec = Keys("c"), spec_of()
    await record_generation(server, keys, spec)
    one = running(mine, keys, spec)
    await one.committer.remember_fence()
    mine.faults.unavailable = True
    one.committer.add(shards(tmp_path, 1, spec))
    await one.until("pending")
    assert one.settled == []
    mine.faults.unavailable = False
    await one.until("committed")
    assert [changed.state for changed in one.told] == ["durable", "pending", "committed"]
    assert [settled.outcome for settled in one.settled] == ["committed"]
    await mine.close()
    await server.close()


async def test_a_lost_answer_of_the_store_is_no_second_commit(tmp_path: Path, running: Any) -> None:
    store = MemoryStore()
    keys, spec = Keys("c"), spec_of()
    await record_generation(store, keys, spec)
    one = running(store, keys, spec)
    await one.committer.remember_fence()
    store.faults.lose_answers = 1
    one.committer.add(shards(tmp_path, 1, spec))
    await one.until("committed")
    assert [changed.state for changed in one.told] == ["durable", "committed"]
    await store.close()


async def test_a_failed_node_voids_the_step_for_all(tmp_path: Path, store: Store, running: Any) -> None:
    keys, spec = Keys(fresh_cluster()), spec_of()
    await record_generation(store, keys, spec)
    one = running(store, keys, spec)
    void = one.committer.add(wire.ShardsFailed(job="job", generation=1, step=1, node="n0", reason="disk full"))
    assert void is not None
    assert (void.outcome, one.told[0].state) == ("void", "failed")
    assert "disk full" in one.told[0].reason


async def test_damaged_shards_void_the_step(tmp_path: Path, store: Store, running: Any) -> None:
    keys, spec = Keys(fresh_cluster()), spec_of()
    await record_generation(store, keys, spec)
    one = running(store, keys, spec)
    report = shards(tmp_path, 1, spec)
    (Path(report.directory) / report.files[0].name).write_bytes(b"short")
    one.committer.add(report)
    assert "is not what node n0 reported" in (await one.until("failed")).reason
    assert [settled.outcome for settled in one.settled] == ["void"]
    assert await store.get(keys.checkpoint("job", 1)) is None


async def test_retention_follows_each_commit_and_its_keys(tmp_path: Path, store: Store, running: Any) -> None:
    keys, spec = Keys(fresh_cluster()), spec_of()
    await record_generation(store, keys, spec)
    policy = wire.CheckpointPolicy(path=str(tmp_path), keep_last=2, keep_best=1, best_metric="held_out")
    cleaner = Cleaner(spec, policy, store, keys)
    one = running(store, keys, spec, after_commit=cleaner.clean)
    for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5), (4, 1.7)):
        one.committer.add(shards(tmp_path, step, spec, loss))
        await one.until("committed", step)
    async with asyncio.timeout(LIMIT):
        while await store.get(keys.checkpoint("job", 1)) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert [entry.step for entry in catalog.scan(tmp_path)] == [4, 3, 2], "two of the last, and the best"
    assert await store.get(keys.checkpoint("job", 2)) is not None
    told = await store.get(keys.event(wire.checkpoint_mark("job", 1, 1, gone=True)))
    assert told is not None
    assert msgspec.json.decode(told.value, type=wire.EventRecord).kind == "checkpoint_gone"
    assert await store.get(keys.event(wire.checkpoint_mark("job", 1, 2, gone=True))) is None


async def test_a_committing_agent_that_moved_is_found(tmp_path: Path) -> None:
    async def handle(report: Report) -> Settled | None:
        return Settled(job=report.job, generation=report.generation, step=report.step, outcome="committed")

    async def find() -> str:
        return second.address

    first, second = PeerServer("127.0.0.1", 0, handle), PeerServer("127.0.0.1", 0, handle)
    await first.start()
    await second.start()
    address = first.address
    await first.close()
    settled: asyncio.Queue[Settled] = asyncio.Queue()
    client = PeerClient(address, settled.put_nowait, find=find)
    client.report(shards(tmp_path, 1, spec_of()))
    assert (await asyncio.wait_for(settled.get(), LIMIT)).step == 1
    third = PeerServer("127.0.0.1", 0, handle)
    await third.start(preferred_port=int(address.rpartition(":")[2]))
    assert third.address == address
    fourth = PeerServer("127.0.0.1", 0, handle)
    await fourth.start(preferred_port=int(address.rpartition(":")[2]))
    assert fourth.address != address
    await client.close()
    for server in (second, third, fourth):
        await server.close()


async def test_reports_reach_a_committing_agent_that_was_away(tmp_path: Path) -> None:
    heard: list[Report] = []

    async def handle(report: Report) -> Settled | None:
        heard.append(report)
        if len(heard) < 2:
            return None
        return Settled(job=report.job, generation=report.generation, step=report.step, outcome="committed")

    first = PeerServer("127.0.0.1", 0, handle)
    await first.start()
    settled: asyncio.Queue[Settled] = asyncio.Queue()
    client = PeerClient(first.address, settled.put_nowait)
    report = shards(tmp_path, 1, spec_of())
    client.report(report)
    async with asyncio.timeout(LIMIT):
        while not heard:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await first.close()
    port = int(first.address.rsplit(":", 1)[1])
    second = PeerServer("127.0.0.1", port, handle)
    await second.start()
    assert (await asyncio.wait_for(settled.get(), LIMIT)).outcome == "committed"
    assert heard == [report, report]
    await client.close()
    await second.close()
