"""The generation record under lost answers, rivals and an ended term."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from regrow import wire
from regrow.ids import MeshShape
from regrow.store.base import Comparison, version
from regrow.store.memory import MemoryStore
from regrow.supervisor import recent
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core.records import LedgerRecord, QuarantineRecord
from regrow.supervisor.core.view import View
from regrow.supervisor.effects import Effects, Members
from regrow.supervisor.journal import Journal
from regrow.supervisor.keys import Keys, decision_mark


class Desk:
    """Effects with their outcomes."""

    def __init__(self, store: MemoryStore, comparison: Comparison | None = None) -> None:
        self.events: asyncio.Queue[e.Event] = asyncio.Queue()
        self.lost: list[str] = []
        self.keys = Keys("test")
        self.effects = Effects(
            store, self.keys, comparison=comparison, connections={}, post=self.events.put_nowait, now=lambda: 1.0, lost=self.lost.append
        )

    async def outcome(self) -> Any:
        return await asyncio.wait_for(self.events.get(), 20)


def record(number: int, num_nodes: int = 2) -> a.RecordGeneration:
    names = tuple(f"n{index:03d}" for index in range(num_nodes))
    members = {name: (wire.WorkerAssignment(rank=index, local_rank=0),) for index, name in enumerate(names)}
    spec = wire.GenerationSpec(job="j", epoch=1, generation=number, mesh=MeshShape(dp=num_nodes), world_size=num_nodes, nodes=names)
    return a.RecordGeneration(job="j", spec=spec, members=members, ledger=LedgerRecord(frontier=7))


async def stored(store: MemoryStore, key: str, kind: Any) -> Any:
    item = await store.get(key)
    assert item is not None
    return msgspec.json.decode(item.value, type=kind)


@pytest.mark.parametrize("num_nodes", [2, 300])
async def test_record_is_one_transaction_with_members_and_ledger(store: MemoryStore, num_nodes: int) -> None:
    desk = Desk(store)
    desk.effects.dispatch(1, record(1, num_nodes), View(epoch=1))
    assert isinstance(await desk.outcome(), e.GenerationRecorded)
    assert (await stored(store, desk.keys.job("j", "generation"), wire.GenerationRecord)).number == 1
    assert (await stored(store, desk.keys.job("j", "ledger"), LedgerRecord)).frontier == 7
    chunks = await store.get_prefix(desk.keys.members_of("j", 1))
    nodes = [name for item in chunks for name in msgspec.json.decode(item.value, type=Members).nodes]
    assert len(nodes) == num_nodes
    assert len(await store.get_prefix(desk.keys.events)) == 1
    desk.effects.dispatch(2, record(2), View(epoch=1))
    assert isinstance(await desk.outcome(), e.GenerationRecorded)
    await desk.effects.stop()


async def test_a_rival_that_was_faster_ends_the_term(store: MemoryStore) -> None:
    desk = Desk(store)
    await store.put(desk.keys.job("j", "generation"), b"{}")
    desk.effects.dispatch(1, record(1), View(epoch=1))
    outcome = await desk.outcome()
    assert isinstance(outcome, e.ActionFailed)
    assert outcome.fenced
    assert desk.lost
    await desk.effects.stop()


async def test_an_ended_term_writes_nothing(store: MemoryStore) -> None:
    desk = Desk(store, version("/regrow/test/leader") > 0)
    desk.effects.start()
    desk.effects.dispatch(1, record(1), View(epoch=1))
    outcome = await desk.outcome()
    assert isinstance(outcome, e.ActionFailed)
    assert outcome.fenced
    desk.effects.write(desk.keys.quarantined("GPU/1"), b"x")
    async with asyncio.timeout(20):
        while len(desk.lost) < 2:  # noqa: ASYNC110  # a list has no event
            await asyncio.sleep(0.01)
    assert len(await store.get_prefix("/regrow/test/")) == 0
    await desk.effects.stop()


async def test_store_that_is_gone_fails_the_record_and_keeps_the_rest(store: MemoryStore) -> None:
    client = store.connect()
    desk = Desk(client)
    desk.effects.start()
    client.faults.unavailable = True
    desk.effects.dispatch(1, record(1), View(epoch=1))
    desk.effects.write(desk.keys.quarantined("GPU-1"), b"x")
    seen = [await desk.outcome(), await desk.outcome()]
    assert {type(item) for item in seen} == {e.ActionFailed, e.StoreChanged}
    client.faults.unavailable = False
    assert (await desk.outcome()).up
    async with asyncio.timeout(20):
        while await store.get(desk.keys.quarantined("GPU-1")) is None:  # noqa: ASYNC110  # written in the background
            await asyncio.sleep(0.01)
    assert not desk.lost
    await desk.effects.stop()
    await client.close()


async def test_a_lost_answer_does_not_lose_the_record(store: MemoryStore) -> None:
    client = store.connect()
    desk = Desk(client)
    client.faults.lose_answers = 1
    desk.effects.dispatch(1, record(1), View(epoch=1))
    assert isinstance(await desk.outcome(), e.GenerationRecorded)
    desk.effects.dispatch(2, record(2), View(epoch=1))
    assert isinstance(await desk.outcome(), e.GenerationRecorded)
    assert not desk.lost
    await desk.effects.stop()
    await client.close()


def put_out(number: int) -> a.SetQuarantine:
    return a.SetQuarantine(record=QuarantineRecord(key="GPU-1", state="suspect", since=float(number), reason=f"sign {number}", node="n0"))


@pytest.mark.parametrize(
    ("action", "key", "kind"),
    [
        (record(1), "jobs/j/generation", "record_generation"),
        (a.ParkJob(job="j", state="parked", reason="few", ledger=LedgerRecord(), incident=None), "jobs/j/ledger", "park_job"),
        (a.EndJob(job="j", state="done", reason="all", exit_code=0, ledger=LedgerRecord()), "jobs/j/ledger", "end_job"),
        (put_out(1), "quarantine/GPU-1", "set_quarantine"),
    ],
)
async def test_a_decision_is_in_the_transaction_of_its_change(store: MemoryStore, action: a.Action, key: str, kind: str) -> None:
    desk = Desk(store)
    desk.effects.start()
    desk.effects.dispatch(7, action, View(epoch=3))
    mark = decision_mark(3, 7)
    async with asyncio.timeout(20):
        while (told := await store.get(desk.keys.event(mark))) is None:  # noqa: ASYNC110  # written in the background
            await asyncio.sleep(0.01)
    changed = await store.get(f"/regrow/test/{key}")
    assert changed is not None
    assert changed.mod_revision == told.mod_revision
    assert [(name, found.kind, found.epoch) for name, found in (await recent.load(store, desk.keys)).items()] == [(mark, kind, 3)]
    await desk.effects.stop()


async def test_the_store_keeps_the_newest_decisions_only(store: MemoryStore) -> None:
    """Also those that were in a hurry: each is written, whatever newer value its record has by then."""
    desk = Desk(store)
    desk.effects.recent.begin([decision_mark(1, number) for number in range(1, 41)])
    for number in range(1, 41):
        await store.put(desk.keys.event(decision_mark(1, number)), b"{}")
    for number in range(1, 200):
        desk.effects.dispatch(number, put_out(number), View(epoch=2))
    desk.effects.start()
    last = desk.keys.event(decision_mark(2, 199))
    async with asyncio.timeout(20):
        while await store.get(last) is None:  # noqa: ASYNC110  # written in the background
            await asyncio.sleep(0.01)
    kept = [item.key for item in await store.get_prefix(desk.keys.events)]
    assert kept == [desk.keys.event(decision_mark(2, number)) for number in range(200 - recent.KEPT, 200)]
    assert (await stored(store, desk.keys.quarantined("GPU-1"), QuarantineRecord)).reason == "sign 199"
    await desk.effects.stop()


async def test_the_next_leader_tells_what_the_last_one_had_no_time_to_write_down(store: MemoryStore, tmp_path: Path) -> None:
    keys = Keys("test")
    decided = wire.EventRecord(kind="end_job", at=5.0, reason="done: all steps", job="j")
    marks = [decision_mark(epoch, seq) for epoch, seq in ((3, 8), (3, 9), (4, 2))]
    for mark in marks:
        await store.put(keys.event(mark), msgspec.json.encode(decided))
    await store.put(keys.event(decision_mark(5, 1)), b"not JSON")
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.open()
    journal.write(epoch=3, at=1.0, kind="park_job", job="j", data={"seq": 8}, mark=marks[0])
    journal.close()
    for _ in range(2):  # what was told is not told again
        journal = Journal(path)
        journal.open()
        recent.tell(journal, await recent.load(store, keys))
        told = [(entry.epoch, entry.data["mark"], entry.text) for entry in journal.since(0) if entry.kind == "decided"]
        text = "end_job under an earlier leader: done: all steps"
        assert told == [(3, marks[1], text), (4, marks[2], text)]
        journal.close()
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("drop table marks")  # a journal that was written before there was one
        database.execute("update events set body = json_remove(json_set(body, '$.data.seq', 9), '$.data.mark') where epoch = 3 and id = 2")
        database.execute("update events set body = json_remove(json_set(body, '$.data.seq', 2), '$.data.mark') where epoch = 4")
    journal = Journal(path)
    journal.open()
    recent.tell(journal, await recent.load(store, keys))
    journal.close()
    assert len([entry for entry in journal.since(0) if entry.kind == "decided"]) == 2
