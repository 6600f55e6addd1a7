"""The event of a change is in the transaction of the change, and in the next leader's journal exactly once, wherever this one ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from scene import form
from stub_agent import eventually

from regrow import wire
from regrow.store.base import Put
from regrow.store.memory import MemoryStore
from regrow.supervisor import recent
from regrow.supervisor.keys import Keys
from regrow.supervisor.service import Supervisor

if TYPE_CHECKING:
    from conftest import Cluster

KEYS = Keys("test")
ORDERS = [
    pytest.param("jobs/train/pause", "jobs/train/command", "command_given", id="pause"),
    pytest.param("jobs/train/save-and-stop", "jobs/train/command", "command_given", id="save-and-stop"),
    pytest.param("nodes/n0/cordon", "cordons/n0", "node_command_given", id="cordon"),
    pytest.param("nodes/n0/drain", "cordons/n0", "node_command_given", id="drain"),
    pytest.param("automation/off", "automation", "automation_switched", id="automation"),
]


async def post(leader: Supervisor, path: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(f"http://{leader.http_address}/v1/{path}", headers={"x-regrow-user": "ada"})


def told(supervisor: Supervisor, kind: str) -> list[str]:
    """Kinds of its journal's entries of an order of ours: its own, or `decided` where an earlier leader was given it."""
    entries = [entry for entry in supervisor.journal.since(0) if kind in (entry.kind, entry.data.get("kind"))]
    return [entry.kind for entry in entries if entry.data.get("by") == "ada" or entry.text.endswith("by ada")]


async def succeed(cluster: Cluster, first: Supervisor, state: str = "") -> Supervisor:
    first.stop()
    await asyncio.gather(*cluster.tasks)
    second = await cluster.supervisor(state=state)
    await eventually(lambda: second.term is not None and second.term.ready and second.term.view.term_at, "the next one leads")
    return second


@pytest.mark.parametrize(("path", "key", "kind"), ORDERS)
async def test_an_order_is_one_transaction_with_its_event(cluster: Cluster, store: MemoryStore, path: str, key: str, kind: str) -> None:
    await form(cluster, "n0", "n1")
    leader = cluster.leader
    assert leader is not None
    assert (await post(leader, path)).status_code == 200
    changed = await store.get(f"{KEYS.root}/{key}")
    assert changed is not None
    found = {item.mod_revision: msgspec.json.decode(item.value, type=wire.EventRecord) for item in await store.get_prefix(KEYS.events)}
    assert found[changed.mod_revision].kind == kind
    assert found[changed.mod_revision].reason.endswith("by ada")
    await eventually(lambda: told(leader, kind), "it is in the journal")


@pytest.mark.parametrize(("path", "key", "kind"), ORDERS)
async def test_a_leader_that_ends_between_the_change_and_its_journal(cluster: Cluster, path: str, key: str, kind: str) -> None:
    del key
    await form(cluster, "n0", "n1")
    first = cluster.leader
    assert first is not None
    assert first.term is not None
    first.term.post = lambda *_events: None  # type: ignore[method-assign]  # here it is killed
    assert (await post(first, path)).status_code == 200
    assert not told(first, kind)
    second = await succeed(cluster, first)
    assert told(second, kind) == ["decided"]
    third = await succeed(cluster, second, state=first.config.state)
    assert told(third, kind) == ["decided"], "on the first one's disk"
    fourth = await succeed(cluster, third, state=second.config.state)
    assert told(fourth, kind) == ["decided"], "what was told is not told again"


@pytest.mark.parametrize(("path", "key", "kind"), ORDERS)
async def test_what_the_journal_has_is_not_told_again(cluster: Cluster, path: str, key: str, kind: str) -> None:
    del key
    await form(cluster, "n0", "n1")
    first = cluster.leader
    assert first is not None
    assert (await post(first, path)).status_code == 200
    await eventually(lambda: told(first, kind), "it is in the journal")
    second = await succeed(cluster, first, state=first.config.state)
    assert told(second, kind) == told(first, kind)
    assert len(told(second, kind)) == 1
    recorded = [entry.generation for entry in second.journal.since(0) if "record_generation" in (entry.kind, entry.data.get("kind"))]
    assert sorted(set(recorded)) == sorted(recorded)
    assert len([entry for entry in second.journal.since(0) if entry.data.get("submitted")]) == 1


async def test_an_order_whose_answer_was_lost_is_given_once(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1")
    leader = cluster.leader
    assert leader is not None
    leader.store.faults.lose_answers = 1  # type: ignore[union-attr]
    assert (await post(leader, "nodes/n1/cordon")).status_code == 200
    await eventually(lambda: "n1" in leader.term.view.cordoned, "the core was told")  # type: ignore[union-attr]
    assert len(told(leader, "node_command_given")) == 1
    assert (await post(leader, "nodes/n1/uncordon")).status_code == 200
    assert await leader.store.get(KEYS.cordon("n1")) is None  # type: ignore[union-attr]


async def test_an_order_that_the_store_did_not_take_is_no_event(cluster: Cluster, store: MemoryStore) -> None:
    await form(cluster, "n0", "n1")
    leader = cluster.leader
    assert leader is not None
    await store.delete(KEYS.leader)  # its term is over, and it has not heard of it
    answer = await post(leader, "nodes/n1/uncordon")
    assert answer.status_code == 503
    assert not [item for item in await store.get_prefix(KEYS.events) if b"node_command" in item.value]
    assert not told(leader, "node_command_given")


async def commit(store: MemoryStore, step: int, *, gone: bool = False) -> wire.CheckpointRecord:
    """As the committing agent does."""
    record = wire.CheckpointRecord(step=step, generation=1, epoch=1, directory=f"/c/step-{step}-g1", record_digest=f"d{step}")
    event = msgspec.json.encode(wire.checkpoint_event("train", record, 7.0))
    mark = wire.checkpoint_mark("train", 1, step)
    await store.transaction([], [Put(KEYS.checkpoint("train", step), msgspec.json.encode(record)), Put(KEYS.event(mark), event)])
    if gone:
        event = msgspec.json.encode(wire.checkpoint_event("train", record, 8.0, gone=True))
        await store.delete(KEYS.checkpoint("train", step))
        await store.put(KEYS.event(wire.checkpoint_mark("train", 1, step, gone=True)), event)
    return record


def of_step(supervisor: Supervisor, step: int) -> list[str]:
    entries = [entry for entry in supervisor.journal.since(0) if entry.kind in ("checkpoint_moved", "checkpoint_gone", "decided")]
    return [
        str(entry.data.get("kind", entry.kind))
        for entry in entries
        if f"step {step}:" in entry.text or (entry.kind == "checkpoint_gone" and entry.data["step"] == step)
    ]


async def test_checkpoints_of_a_time_without_a_leader_are_told_once(cluster: Cluster, store: MemoryStore) -> None:
    await form(cluster, "n0", "n1")
    first = cluster.leader
    assert first is not None
    await commit(store, 5)
    await eventually(lambda: of_step(first, 5), "told by the store's watch")
    cluster.agents["n0"].committed(5)  # the agent says so, too
    first.stop()
    await asyncio.gather(*cluster.tasks)
    await commit(store, 6)
    await commit(store, 7, gone=True)
    second = await cluster.supervisor(state=first.config.state)
    await eventually(lambda: second.term is not None and second.term.ready and second.term.view.jobs, "the next one leads")
    await eventually(lambda: len(second.term.view.nodes) == 2, "agents are back")  # type: ignore[union-attr]
    cluster.agents["n0"].committed(6)
    await commit(store, 8, gone=True)
    await eventually(lambda: "checkpoint_gone" in of_step(second, 8), "removed under the second")
    assert [of_step(second, step) for step in (5, 6, 7, 8)] == [
        ["checkpoint_moved"],
        ["checkpoint_moved"],
        ["checkpoint_moved", "checkpoint_gone"],
        ["checkpoint_moved", "checkpoint_gone"],
    ]


async def test_evidence_for_a_checkpoint_is_in_the_transaction_of_its_record(cluster: Cluster, store: MemoryStore) -> None:
    await form(cluster, "n0", "n1")
    await commit(store, 5)
    cluster.agents["n0"].committed(5)
    for step in (5, 6):
        await cluster.step(step, digests=dict.fromkeys(range(4), "same"))

    async def amended() -> Any:
        item = await store.get(KEYS.checkpoint("train", 5))
        return item if item is not None and b"replica_consistent" in item.value else None

    async with asyncio.timeout(20):
        while (item := await amended()) is None:  # noqa: ASYNC110  # written in the background
            await asyncio.sleep(0.01)
    found = {event.mod_revision: event.value for event in await store.get_prefix(KEYS.events)}
    assert b"set_checkpoint" in found[item.mod_revision]


def test_entries_of_checkpoints_are_bounded_and_take_no_room_of_decisions() -> None:
    mine = recent.Recent(KEYS)
    mine.begin(["000001-000000001", *(wire.checkpoint_mark("j", 1, step) for step in range(100))])
    removed: list[str] = []
    for step in range(100, 200):
        mine.of_checkpoint(wire.checkpoint_mark("j", 1, step), removed.append)
    assert removed == [KEYS.event(wire.checkpoint_mark("j", 1, step)) for step in range(200 - recent.KEPT_CHECKPOINTS)]


def test_a_checkpoint_whose_record_is_written_again_is_one_entry() -> None:
    """Evidence is added to it, and a new leader's watch sees it once more."""
    mine = recent.Recent(KEYS)
    marks = [wire.checkpoint_mark("j", 1, step) for step in range(recent.KEPT_CHECKPOINTS)]
    mine.begin(marks)
    removed: list[str] = []
    for mark in (*marks, *marks[-1:] * 5):
        mine.of_checkpoint(mark, removed.append)
    assert removed == []
    mine.of_checkpoint(wire.checkpoint_mark("j", 1, 1000), removed.append)
    assert removed == [KEYS.event(marks[0])]
