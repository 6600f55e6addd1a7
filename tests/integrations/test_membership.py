"""Members of a launch on a real etcd: rounds, fences, refusals, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from regrow import wire
from regrow.errors import OperationalError
from regrow.integrations.membership import ClosedError, LateError, Membership, Names, RefusedError, Settings
from regrow.store.base import Store
from regrow.store.embedded import EmbeddedEtcd
from regrow.store.open import open_store
from regrow.supervisor.effects import Cordon

Join = Callable[..., Any]
"""Starts a member of a launch."""
NAMES = Names("test", "fit")
LEADER = wire.LeaderRecord(supervisor="s/1", epoch=7, beat_address="127.0.0.1:1", http_address="127.0.0.1:2")


def serve() -> tuple[str, int]:
    return "127.0.0.1", 1


@pytest.fixture
async def store(etcd: EmbeddedEtcd) -> AsyncIterator[Store]:
    opened = open_store(etcd.url)
    await opened.put(NAMES.cluster.leader, msgspec.json.encode(LEADER))
    yield opened
    await opened.close()


@pytest.fixture
async def member(store: Store) -> AsyncIterator[Join]:
    made: list[Membership] = []

    async def start(node: str, **changes: Any) -> Membership:
        values: dict[str, Any] = {"least": 1, "most": 2, "ttl_seconds": 2.0, "settle_seconds": 0.3, "join_seconds": 60.0}
        made.append(Membership(store, Settings(cluster="test", run="fit", node=node, **(values | changes))))
        await made[-1].start()
        return made[-1]

    yield start
    for item in made:
        await item.stop()


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def both(a: Membership, b: Membership) -> None:
    one, other = await asyncio.gather(a.join(serve), b.join(serve))
    assert one == other
    assert set(one.members) == {a.id, b.id}


async def test_two_form_a_round_and_go_on_without_one_that_left(member: Join) -> None:
    a, b = await member("a"), await member("b")
    await both(a, b)
    assert a.picture().current is not None
    assert a.picture().current.epoch == 7
    assert (a.mine, b.mine, a.count(), b.count()) == (1, 1, 0, 0)
    await b.leave()
    await eventually(lambda: a.count() == 1)
    alone = await a.join(serve)
    assert (alone.number, alone.members) == (2, (a.id,))


async def test_one_that_was_silent_too_long_is_fenced_until_it_asked_again(member: Join) -> None:
    a, b = await member("a"), await member("b")
    await both(a, b)
    b._tasks[-1].cancel()  # its keeper sleeps, as in a process that was stopped
    assert b._lease is not None
    await b._lease.revoke()
    await eventually(lambda: a.count() == 1)
    assert (await a.join(serve)).members == (a.id,)
    await eventually(lambda: b.count() == 1)  # awake again: what its workers do counts for nothing
    again = asyncio.create_task(b.join(serve))
    await eventually(lambda: a.count() == 1)
    found = await a.join(serve)
    assert (found.number, found.members) == (3, (a.id, b.id))
    assert await again == found


async def test_one_that_comes_back_before_anybody_moved_goes_on(member: Join) -> None:
    a, b = await member("a"), await member("b")
    await both(a, b)
    before = a.picture().members[b.id].arrival
    assert b._lease is not None
    await b._lease.revoke()
    b._lease.lost.set()
    await eventually(lambda: b.id in a.picture().members and a.picture().members[b.id].arrival > before)
    assert (a.count(), b.count(), a.picture().number) == (0, 0, 1)


async def test_a_crash_of_the_store_changes_nothing(member: Join, etcd: EmbeddedEtcd) -> None:
    a, b = await member("a", ttl_seconds=30.0), await member("b", ttl_seconds=30.0)
    await both(a, b)
    await etcd.kill()
    assert (a.count(), b.count()) == (0, 0)
    await etcd.restart()
    await a._store.status()
    assert (a.count(), b.count(), a.picture().number) == (0, 0, 1)
    await b.leave()
    await eventually(lambda: a.count() == 1)  # and changes are seen again
    assert (await a.join(serve)).members == (a.id,)


async def test_of_two_that_form_the_same_round_one_wins(member: Join, store: Store) -> None:
    a, b = await member("a"), await member("b")
    await asyncio.gather(a._want(1), b._want(1))
    await eventually(lambda: len(a.picture().members) == len(b.picture().members) == 2)
    seen = a.picture()
    await asyncio.gather(a._form(seen, (a.id,), serve), b._form(seen, (b.id,), serve))
    found = await store.get(NAMES.generation)
    assert found is not None
    assert found.version == 1
    await a._form(seen, (a.id,), serve)  # one that read the launch before that round cannot replace it
    assert await store.get(NAMES.generation) == found


async def test_a_third_one_is_a_spare_until_a_place_is_free(member: Join) -> None:
    a, b, c = await member("a"), await member("b"), await member("c")
    await both(a, b)
    spare = asyncio.create_task(c.join(serve))
    await eventually(lambda: c.id in a.picture().members and a.picture().members[c.id].member.wants == 2)
    assert a.count() == 0
    await b.leave()
    await eventually(lambda: a.count() == 2)
    found = await a.join(serve)
    assert found.members == (a.id, c.id)
    assert await spare == found


async def test_a_drain_ends_what_runs_and_a_cordon_only_keeps_out(member: Join, store: Store) -> None:
    a, b = await member("a"), await member("b")
    await both(a, b)
    await store.put(NAMES.cluster.cordon("b"), msgspec.json.encode(Cordon(node="b", by="ann")))
    await eventually(lambda: b.refused(trains=False))
    assert b.count() == 0
    await store.put(NAMES.cluster.cordon("b"), msgspec.json.encode(Cordon(node="b", drain=True, by="ann")))
    await eventually(lambda: b.count() == 1)
    with pytest.raises(RefusedError, match="drained by ann"):
        await b.join(serve)
    await eventually(lambda: a.count() == 1)
    assert (await a.join(serve)).members == (a.id,)
    assert not a.picture().closed


async def test_an_end_is_told_to_those_who_wait_and_those_who_come(member: Join) -> None:
    a, late = await member("a", most=1), await member("late", most=1)
    await a.join(serve)
    waits = asyncio.create_task(late.join(serve))
    await eventually(lambda: late.id in a.picture().members)
    await a.close_launch()
    with pytest.raises(ClosedError, match="another --rdzv-id"):
        await waits
    with pytest.raises(ClosedError):
        await (await member("c")).join(serve)


async def test_too_few(member: Join) -> None:
    a = await member("a", least=2, join_seconds=1.0)
    with pytest.raises(LateError, match="1 of at least 2 nodes came within 1 s"):
        await a.join(serve)


async def test_without_a_leader_nothing_starts(member: Join, store: Store) -> None:
    await store.delete(NAMES.cluster.leader)
    with pytest.raises(OperationalError, match="no supervisor leads cluster 'test'"):
        await member("a")
    assert not (await store.get_prefix(NAMES.root)).items
