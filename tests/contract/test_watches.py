"""What every store does with watches."""

from __future__ import annotations

import asyncio

import pytest

from regrow.store import base
from regrow.store.base import Delete, Put, Store, Watch, WatchBatch

LIMIT = 60.0


async def take(watch: Watch) -> WatchBatch:
    return await asyncio.wait_for(anext(watch), LIMIT)


async def until(watch: Watch, key: str) -> list[base.Event]:
    """All events up to and including the first one of a key."""
    seen: list[base.Event] = []
    async with asyncio.timeout(LIMIT):
        async for batch in watch:
            seen.extend(batch.events)
            if any(event.key == key for event in batch.events):
                return seen
    raise AssertionError("the watch ended")


def told(events: list[base.Event], prefix: str) -> list[tuple[str, str, bytes]]:
    return [(event.kind, event.key.removeprefix(prefix), event.value) for event in events]


async def test_a_watch_begins_with_what_is_there(store: Store, prefix: str) -> None:
    await store.put(prefix + "b", b"2")
    await store.put(prefix + "a", b"1")
    watch = store.watch_prefix(prefix)
    first = await take(watch)
    assert first.snapshot is not None
    assert [item.key for item in first.snapshot] == [prefix + "a", prefix + "b"]
    assert told(list(first.events), prefix) == [("put", "b", b"2"), ("put", "a", b"1")], "in order of revision"
    await store.put(prefix + "c", b"3")
    batch = await take(watch)
    assert batch.snapshot is None
    assert told(list(batch.events), prefix) == [("put", "c", b"3")]
    assert batch.revision == batch.events[-1].item.mod_revision
    assert watch.connected


async def test_an_empty_prefix_gives_an_empty_snapshot(store: Store, prefix: str) -> None:
    first = await take(store.watch_prefix(prefix))
    assert first.snapshot == ()
    assert first.events == ()


async def test_changes_come_in_order_and_from_this_prefix_only(store: Store, prefix: str) -> None:
    watch = store.watch_prefix(prefix)
    await take(watch)
    lease = await store.lease(10)
    await store.put(prefix[:-1] + "0", b"a neighbour")
    await store.put(prefix + "a", b"1", lease=lease)
    await store.put(prefix + "a", b"2")
    await store.put(prefix + "b", b"1", lease=lease)
    await store.delete(prefix + "a")
    await lease.revoke()
    await store.put(prefix + "end", b"")
    events = await until(watch, prefix + "end")
    assert told(events, prefix) == [
        ("put", "a", b"1"),
        ("put", "a", b"2"),
        ("put", "b", b"1"),
        ("delete", "a", b""),
        ("delete", "b", b""),
        ("put", "end", b""),
    ]
    revisions = [event.item.mod_revision for event in events]
    assert revisions == sorted(revisions)
    assert events[0].item.lease == lease.id
    assert (events[1].item.version, events[1].item.create_revision) == (2, events[0].item.mod_revision)


async def test_a_transaction_comes_as_one_batch(store: Store, prefix: str) -> None:
    await store.put(prefix + "old", b"")
    watch = store.watch_prefix(prefix)
    await take(watch)
    puts = [Put(f"{prefix}{number:03d}", b"x" * 5000) for number in range(120)]
    result = await store.transaction((), [*puts, Delete(prefix + "old")])
    batch = await take(watch)
    assert len(batch.events) == 121
    assert {event.item.mod_revision for event in batch.events} == {result.revision}


async def test_a_watch_from_a_revision_gets_what_happened_since(store: Store, prefix: str) -> None:
    await store.put(prefix + "a", b"before")
    start = await store.put(prefix + "a", b"1")
    await store.put(prefix + "b", b"2")
    await store.delete(prefix + "a")
    watch = store.watch_prefix(prefix, start_revision=start)
    events = await until(watch, prefix + "b")
    while told(events, prefix)[-1][0] != "delete":
        events.extend((await take(watch)).events)
    assert told(events, prefix) == [("put", "a", b"1"), ("put", "b", b"2"), ("delete", "a", b"")]


async def test_a_watch_from_a_compacted_revision_gets_a_snapshot(store: Store, prefix: str) -> None:
    start = await store.put(prefix + "a", b"1")
    await store.put(prefix + "b", b"1")
    await store.delete(prefix + "a")
    last = await store.put(prefix + "b", b"2")
    await store.compact(last)
    watch = store.watch_prefix(prefix, start_revision=start)
    batch = await take(watch)
    assert batch.snapshot is not None
    assert [(item.key, item.value) for item in batch.snapshot] == [(prefix + "b", b"2")]
    await store.put(prefix + "c", b"3")
    assert told(list((await take(watch)).events), prefix) == [("put", "c", b"3")]


async def test_a_big_backlog_is_complete(store: Store, prefix: str) -> None:
    """More than grpc's default message limit, in one go."""
    start = (await store.put(prefix + "begin", b"")) + 1
    for number in range(60):
        await store.put(f"{prefix}{number:03d}", bytes([number]) * 150_000)
    await store.put(prefix + "end", b"")
    events = await until(store.watch_prefix(prefix, start_revision=start), prefix + "end")
    assert [event.key for event in events] == [*(f"{prefix}{number:03d}" for number in range(60)), prefix + "end"]
    assert all(event.value == bytes([number]) * 150_000 for number, event in enumerate(events[:60]))
    listing = await store.get_prefix(prefix)
    assert sum(len(item.value) for item in listing) == 9_000_000
    await store.delete_prefix(prefix)


async def test_waiting_may_be_given_up_without_losing_anything(store: Store, prefix: str) -> None:
    watch = store.watch_prefix(prefix)
    await take(watch)
    for number in range(5):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(watch), 0.02)
        await store.put(f"{prefix}{number}", b"")
        assert told(list((await take(watch)).events), prefix) == [("put", str(number), b"")]


async def test_a_closed_watch_ends(store: Store, prefix: str) -> None:
    async with store.watch_prefix(prefix) as watch:
        await take(watch)
        waiting = asyncio.create_task(anext(watch))
        await asyncio.sleep(0)
        await watch.aclose()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(waiting, LIMIT)
        assert [batch async for batch in watch] == []
    again = store.watch_prefix(prefix)
    await take(again)
    await store.close()
    assert [batch async for batch in again] == []
    assert not again.connected


async def test_many_watches_on_one_client(store: Store, prefix: str) -> None:
    watches = [store.watch_prefix(f"{prefix}{number}/") for number in range(20)]
    await asyncio.gather(*(take(watch) for watch in watches))
    for number in range(20):
        await store.put(f"{prefix}{number}/x", str(number).encode())
    batches = await asyncio.gather(*(take(watch) for watch in watches))
    assert [batch.events[0].value for batch in batches] == [str(number).encode() for number in range(20)]
