"""Orders to agents in bursts, and records to the store in batches."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from regrow import wire
from regrow.ids import MeshShape
from regrow.store.base import Put
from regrow.store.memory import MemoryStore
from regrow.supervisor import outbox, writes
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core.view import Effort, GenerationView, JobView, Member, View
from regrow.supervisor.keys import Keys, decision_mark
from regrow.supervisor.outbox import Outbox
from regrow.supervisor.writes import Writes

NAMES = tuple(f"n{index:03d}" for index in range(200))


class Line:
    """A connection that keeps what it is given, as bytes."""

    def __init__(self, sent: list[tuple[str, Any]], node: str, *, seconds: float = 0.0) -> None:
        self._sent, self._node, self._seconds = sent, node, seconds

    def send(self, message: msgspec.Struct) -> bool:
        self._sent.append((self._node, wire.decode(wire.encode(message).rstrip(), wire.ToAgent)))
        until = asyncio.get_running_loop().time() + self._seconds
        while asyncio.get_running_loop().time() < until:
            pass
        return True


def view_of() -> View:
    workers = {name: (wire.WorkerAssignment(rank=index, local_rank=0),) for index, name in enumerate(NAMES)}
    spec = wire.GenerationSpec(job="j", epoch=3, generation=1, mesh=MeshShape(dp=len(NAMES)), world_size=len(NAMES), nodes=NAMES)
    members = {name: Member(node=name, group_rank=index, workers=workers[name]) for index, name in enumerate(NAMES)}
    generation = GenerationView(spec=spec, members=members, stage="starting", created_at=1.0)
    job_spec = wire.JobSpec(job="j", argv=("train.py",), max_nodes=len(NAMES), env={"A": "b"})
    return View(
        epoch=3, jobs={"j": JobView(spec=job_spec, submitted_at=1.0, effort=Effort(since=1.0, reserved_at=1.0), generation=generation)}
    )


def start(name: str) -> a.StartMember:
    return a.StartMember(job="j", node=name, generation=1, group_rank=NAMES.index(name), master_address="h:1")


class Desk:
    def __init__(self, *connected: str, seconds: float = 0.0) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.failed: list[tuple[int, str, str]] = []
        lines: Any = {name: Line(self.sent, name, seconds=seconds) for name in connected}
        self.outbox = Outbox(lines, lambda seq, action, why: self.failed.append((seq, action.node, why)))
        self.view = view_of()

    async def all_out(self, number: int) -> None:
        async with asyncio.timeout(20):
            while len(self.sent) + len(self.failed) < number:  # noqa: ASYNC110  # turns of the loop are what it is about
                await asyncio.sleep(0)


async def test_a_start_says_what_the_message_of_the_protocol_says() -> None:
    desk = Desk(*NAMES)
    for seq, name in enumerate(NAMES, 1):
        desk.outbox.start(seq, start(name), desk.view)
    await desk.all_out(len(NAMES))
    job = desk.view.jobs["j"]
    assert job.generation is not None
    for seq, (name, message) in enumerate(desk.sent, 1):
        assert message == wire.StartGeneration(
            epoch=3,
            seq=seq,
            spec=job.generation.spec,
            job_spec=job.spec,
            workers=job.generation.members[name].workers,
            group_rank=seq - 1,
            master_address="h:1",
        )


async def test_another_generation_is_not_told_what_the_first_one_was() -> None:
    desk = Desk("n000")
    desk.outbox.start(1, start("n000"), desk.view)
    job = desk.view.jobs["j"]
    assert job.generation is not None
    spec = msgspec.structs.replace(job.generation.spec, generation=2)
    second = msgspec.structs.replace(job, generation=msgspec.structs.replace(job.generation, spec=spec))
    view = msgspec.structs.replace(desk.view, jobs={"j": second})
    desk.outbox.start(2, start("n000"), view)  # of the first one: it is over
    desk.outbox.start(3, msgspec.structs.replace(start("n000"), generation=2), view)
    await desk.all_out(2)
    assert [(message.seq, message.spec.generation) for _, message in desk.sent] == [(1, 1), (3, 2)]


async def test_the_loop_gets_its_turn_between_bursts() -> None:
    desk = Desk(*NAMES, seconds=outbox._BURST_SECONDS / 10)
    turns: list[int] = []

    def look() -> None:
        turns.append(len(desk.sent))
        if len(desk.sent) < len(NAMES):
            asyncio.get_running_loop().call_soon(look)

    for seq, name in enumerate(NAMES, 1):
        desk.outbox.start(seq, start(name), desk.view)
    look()
    await desk.all_out(len(NAMES))
    assert len(set(turns)) >= 10, "beats are read while a start of many goes out"


async def test_orders_to_one_node_keep_their_order() -> None:
    desk = Desk("n000", "n001")
    desk.outbox.start(1, start("n000"), desk.view)
    stop = a.StopWorkers(job="j", node="n000", generation=1, reason="it is over")
    desk.outbox.order(2, stop, desk.view)
    desk.outbox.order(3, msgspec.structs.replace(stop, node="n001"), desk.view)
    assert [(name, message.seq) for name, message in desk.sent] == [("n001", 3)], "nothing waits for this one"
    await desk.all_out(3)
    assert [(name, type(message)) for name, message in desk.sent[1:]] == [
        ("n000", wire.StartGeneration),
        ("n000", wire.StopGeneration),
    ]
    desk.outbox.order(4, stop, desk.view)
    assert len(desk.sent) == 4, "nothing waits any more"


async def test_who_is_not_connected_is_told_of_once() -> None:
    desk = Desk("n000")
    desk.outbox.start(1, start("n001"), desk.view)
    desk.outbox.start(2, start("n000"), desk.view)
    desk.outbox.order(3, a.StopWorkers(job="j", node="n002", generation=1), desk.view)
    desk.outbox.order(4, a.ClearHealth(node="n003"), desk.view)
    desk.outbox.order(5, a.ReleaseNode(node="n003", reason="may go"), desk.view)
    await desk.all_out(4)
    assert desk.failed == [(3, "n002", "not connected"), (4, "n003", "not connected"), (1, "n001", "not connected")]


async def test_after_the_term_nothing_goes_out() -> None:
    desk = Desk(*NAMES)
    for seq, name in enumerate(NAMES, 1):
        desk.outbox.start(seq, start(name), desk.view)
    desk.outbox.stop()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not desk.sent
    assert not desk.failed


# --- records


class Counting(MemoryStore):
    """A store that counts its transactions."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.num_bytes: list[int] = []

    async def transaction(self, compare: Any, success: Any, failure: Any = (), **more: Any) -> Any:
        self.sizes.append(len(success))
        self.num_bytes.append(sum(len(item.value) for item in success if isinstance(item, Put)))
        return await super().transaction(compare, success, failure, **more)


async def written(made: Writes, task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(20):
        while made:  # noqa: ASYNC110  # a background writer has no event
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_many_records_share_transactions_and_the_newest_value_wins() -> None:
    store, keys = Counting(), Keys("test")
    told: list[e.Event] = []
    made = Writes(store, None, post=told.append, now=lambda: 1.0, lost=lambda _: None)
    for round_ in range(2):
        for number in range(300):
            mark = decision_mark(1, round_ * 300 + number + 1)
            made.write(keys.quarantined(f"GPU-{number}"), b"%d" % round_, [Put(keys.event(mark), b"{}")])
    made.write(keys.cordon("n0"), None)
    task = asyncio.create_task(made.run())
    await written(made, task)
    assert {item.value for item in await store.get_prefix(keys.quarantine)} == {b"1"}
    assert len(await store.get_prefix(keys.events)) == 600
    assert max(store.sizes) <= writes._MOST_OPERATIONS
    assert len(store.sizes) <= 16, "901 operations, 64 at a time"
    assert not told
    await store.close()


async def test_a_change_and_its_event_are_never_in_two_transactions() -> None:
    store, keys = Counting(), Keys("test")
    made = Writes(store, None, post=lambda _: None, now=lambda: 1.0, lost=lambda _: None)
    for number in range(100):
        made.write(
            keys.quarantined(f"GPU-{number}"), b"x", [Put(keys.event(decision_mark(1, 4 * number + more)), b"{}") for more in range(4)]
        )
    await written(made, asyncio.create_task(made.run()))
    revisions = {item.mod_revision for item in await store.get_prefix(keys.quarantine)}
    events = {item.key: item.mod_revision for item in await store.get_prefix(keys.events)}
    for item in await store.get_prefix(keys.quarantine):
        number = int(item.key.rpartition("-")[2])
        assert {events[keys.event(decision_mark(1, 4 * number + more))] for more in range(4)} == {item.mod_revision}
    assert len(revisions) < 100
    await store.close()


async def test_long_values_do_not_share_a_transaction() -> None:
    store, keys = Counting(), Keys("test")
    made = Writes(store, None, post=lambda _: None, now=lambda: 1.0, lost=lambda _: None)
    for name in "abcd":
        made.write(keys.job(name, "incidents"), b"x" * 300_000)
    await written(made, asyncio.create_task(made.run()))
    assert store.num_bytes == [300_000] * 4
    await store.close()
