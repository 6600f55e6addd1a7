"""What every store does with leases, by the machine's clock, and what the memory store does by a clock of the test."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.contract.waiting import boottime, eventually

from regrow.clock import ManualClock
from regrow.store.base import LeaseLost, NoSpace, Store, StoreUnavailable
from regrow.store.memory import MemoryStore


async def gone(store: Store, key: str, *, limit: float) -> float:
    """Seconds until a key was deleted."""
    began = time.monotonic()
    async with asyncio.timeout(limit), store.watch_prefix(key) as watch:
        async for batch in watch:
            if not batch.snapshot and any(event.kind == "delete" for event in batch.events):
                return time.monotonic() - began
            if batch.snapshot == ():
                return 0.0
    raise AssertionError("the watch ended")


async def test_revoking_deletes_all_keys_of_a_lease(store: Store, prefix: str) -> None:
    lease = await store.lease(10)
    await store.put(prefix + "a", b"", lease=lease)
    await store.put(prefix + "b", b"", lease=lease.id)
    await store.put(prefix + "c", b"", lease=lease)
    await store.put(prefix + "c", b"let go")
    item = await store.get(prefix + "a")
    assert item is not None
    assert item.lease == lease.id
    assert not lease.lost.is_set()
    await lease.revoke()
    assert [item.key for item in await store.get_prefix(prefix)] == [prefix + "c"]
    assert lease.lost.is_set()
    assert lease.valid_until == 0
    with pytest.raises(LeaseLost):
        await lease.refresh()
    await lease.revoke()


async def test_a_lease_that_nobody_keeps_alive_expires_in_time(store: Store, prefix: str) -> None:
    before = boottime()
    lease = await store.lease(1, keep_alive=False)
    assert lease.ttl == 2, "the least TTL"
    assert before <= lease.acknowledged_at <= boottime()
    assert lease.valid_until == lease.acknowledged_at + lease.ttl
    await store.put(prefix + "a", b"", lease=lease)
    await gone(store, prefix + "a", limit=30)
    lasted = boottime() - before
    assert lasted >= 2.0, "a lease must not end before its TTL, a leader relies on it"
    with pytest.raises(LeaseLost):
        await lease.refresh()
    assert lease.lost.is_set()


async def test_a_lease_that_is_kept_alive_outlives_its_ttl_and_ends_after_close(store: Store, prefix: str) -> None:
    lease = await store.lease(2)
    await store.put(prefix + "a", b"", lease=lease)
    granted_at = lease.acknowledged_at
    await eventually(lambda: lease.acknowledged_at >= granted_at + lease.ttl)
    assert await store.get(prefix + "a") is not None
    assert lease.valid_until > boottime()
    await lease.close()
    last = lease.acknowledged_at
    await gone(store, prefix + "a", limit=30)
    assert boottime() - last >= lease.ttl


async def test_a_lease_that_was_ended_behind_its_holders_back_is_lost(store: Store, prefix: str) -> None:
    lease, other = await store.lease(2), await store.lease(2)
    await store.put(prefix + "a", b"", lease=other)
    await _end_behind_the_back(store, other.id)
    assert await store.get(prefix + "a") is None
    await asyncio.wait_for(other.lost.wait(), 30)
    assert not lease.lost.is_set()


async def _end_behind_the_back(store: Store, number: int) -> None:
    if isinstance(store, MemoryStore):
        store.server.revoke(number)
        return
    from regrow.store import connection as rpc
    from regrow.store import etcd_rpc_pb2 as pb
    from regrow.store.etcd import EtcdStore

    assert isinstance(store, EtcdStore)
    await store._connection.call(rpc.LEASE_REVOKE, pb.LeaseRevokeRequest(id=number))


# --- by the test's clock


async def test_manual_time_keeps_and_ends_leases() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    kept, left = await store.lease(5), await store.lease(5, keep_alive=False)
    await store.put("kept", b"", lease=kept)
    await store.put("left", b"", lease=left)
    clock.advance(4.9)
    assert store.tick() == []
    clock.advance(0.2)
    assert store.tick() == [left.id]
    assert await store.get("left") is None
    assert await store.get("kept") is not None
    assert left.lost.is_set()
    assert kept.acknowledged_at == pytest.approx(1004.9)
    await store.close()


async def test_a_client_that_is_cut_off_loses_its_lease_and_others_see_it() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    other = store.connect()
    lease = await store.lease(5)
    await store.put("/n/a", b"x", lease=lease)
    watch = other.watch_prefix("/n/")
    assert [event.kind for event in (await anext(watch)).events] == ["put"]
    store.faults.unavailable = True
    with pytest.raises(StoreUnavailable) as caught:
        await store.put("/n/b", b"")
    assert caught.value.maybe_applied is False
    clock.advance(5)
    assert other.tick() == [lease.id]
    assert [event.kind for event in (await anext(watch)).events] == ["delete"]
    assert not lease.lost.is_set(), "nobody can have told it"
    assert lease.valid_until <= clock.boottime(), "but it can know"
    store.faults.unavailable = False
    store.tick()
    assert lease.lost.is_set()
    await store.close()
    await other.close()


async def test_a_restart_of_the_server_starts_leases_anew() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    lease = await store.lease(5, keep_alive=False)
    clock.advance(4)
    store.server.restart()
    clock.advance(4)
    assert store.tick() == []
    clock.advance(1)
    assert store.tick() == [lease.id]
    await store.close()


async def test_faults_of_the_memory_store() -> None:
    store = MemoryStore(ManualClock(), timeout=0.05)
    store.faults.delay = 0.2
    with pytest.raises(StoreUnavailable) as caught:
        await store.put("a", b"applied all the same")
    assert caught.value.maybe_applied
    store.faults.delay = 0.0
    assert (await store.get("a")) is not None
    store.server.no_space = True
    with pytest.raises(NoSpace):
        await store.put("b", b"")
    assert (await store.status()).alarms == ("NOSPACE",)
    await store.delete("a")
    await store.close()
