"""The etcd client while etcd, its members and the network in between are broken."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contract.relay import Relay
from tests.contract.waiting import LIMIT, boottime, eventually

from regrow.store import cas
from regrow.store.base import Event, NoSpace, StoreUnavailable, Watch
from regrow.store.connection import Access
from regrow.store.embedded import EmbeddedCluster, EmbeddedEtcd, EtcdOptions
from regrow.store.etcd import EtcdStore
from regrow.store.etcd_watch import WatchLimits

QUICK = WatchLimits(quiet=0.3, answer=0.7, repair=0)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[EmbeddedCluster]:
    made = EmbeddedCluster(tmp_path / "cluster")
    await made.start()
    yield made
    await made.stop()


def client(*endpoints: str, timeout: float = 20.0, limits: WatchLimits | None = None) -> EtcdStore:
    return EtcdStore(Access(endpoints), timeout=timeout, watch_limits=limits)


async def collect(watch: Watch, last: str) -> list[Event]:
    """All events up to the one of key `last`."""
    seen: list[Event] = []
    async with asyncio.timeout(LIMIT):
        async for batch in watch:
            seen.extend(batch.events)
            if any(event.key == last for event in batch.events):
                return seen
    raise AssertionError("the watch ended")


async def vanished(store: EtcdStore, key: str) -> None:
    """Until a key is gone."""
    async with asyncio.timeout(LIMIT), store.watch_prefix(key) as watch:
        async for batch in watch:
            if batch.snapshot == () or any(event.kind == "delete" for event in batch.events):
                return


async def test_a_watch_outlives_restarts_of_etcd_and_misses_nothing(etcd: EmbeddedEtcd) -> None:
    store = client(etcd.endpoint)
    watch = store.watch_prefix("/w/")
    await asyncio.wait_for(anext(watch), LIMIT)
    for generation in range(3):
        await store.put(f"/w/{generation}/before", b"")
        await etcd.kill()
        await etcd.restart()
        # the client may find the connection dead only now: a put that is not known to be applied is put again
        await cas.create(store, f"/w/{generation}/after", b"", timeout=LIMIT)
        await store.delete(f"/w/{generation}/before", timeout=LIMIT)
    await store.put("/w/end", b"")
    events = await collect(watch, "/w/end")
    kinds = [(event.kind, event.key) for event in events]
    expected = [
        (kind, f"/w/{number}/{name}") for number in range(3) for kind, name in (("put", "before"), ("put", "after"), ("delete", "before"))
    ]
    assert kinds == [*expected, ("put", "/w/end")]
    await store.close()


async def test_a_lease_outlives_a_restart_of_etcd(etcd: EmbeddedEtcd) -> None:
    store = client(etcd.endpoint)
    lease = await store.lease(2)
    await store.put("/n/a", b"", lease=lease)
    await etcd.kill()
    await etcd.restart()
    restarted_at = boottime()
    await eventually(lambda: lease.acknowledged_at >= restarted_at + lease.ttl)
    assert await store.get("/n/a") is not None
    assert not lease.lost.is_set()
    await store.close()


async def test_a_watch_that_was_cut_off_over_a_compaction_lists_and_diffs(etcd: EmbeddedEtcd) -> None:
    direct = client(etcd.endpoint)
    for name in ("stays", "changes", "goes"):
        await direct.put(f"/w/{name}", b"1")
    async with Relay(etcd.client_port) as relay:
        store = client(relay.endpoint, limits=QUICK)
        watch = store.watch_prefix("/w/")
        assert len((await asyncio.wait_for(anext(watch), LIMIT)).events) == 3
        await eventually(lambda: watch.connected)
        await relay.close_port()
        await direct.put("/w/changes", b"2")
        await direct.delete("/w/goes")
        last = await direct.put("/w/comes", b"1")
        await direct.compact(last)
        await relay.open_port()
        batch = await asyncio.wait_for(anext(watch), LIMIT)
        assert [(event.kind, event.key, event.value) for event in batch.events] == [
            ("delete", "/w/goes", b""),
            ("put", "/w/changes", b"2"),
            ("put", "/w/comes", b"1"),
        ]
        assert batch.snapshot is not None
        assert [item.key for item in batch.snapshot] == ["/w/changes", "/w/comes", "/w/stays"]
        await direct.put("/w/next", b"")
        assert [event.key for event in (await asyncio.wait_for(anext(watch), LIMIT)).events] == ["/w/next"]
        await store.close()
    await direct.close()


async def test_a_store_that_lost_its_data_is_told_as_deletions(etcd: EmbeddedEtcd) -> None:
    """Revisions begin anew at 1: a watch that waited for the old ones would be silent for ever."""
    store = client(etcd.endpoint)
    for number in range(20):
        await store.put("/w/old", str(number).encode())
    watch = store.watch_prefix("/w/")
    await asyncio.wait_for(anext(watch), LIMIT)
    lease = await store.lease(2)
    await etcd.kill()
    shutil.rmtree(etcd.state / "data")
    await etcd.restart()
    await cas.create(store, "/w/new", b"", timeout=LIMIT)
    seen = [(event.kind, event.key) for event in await collect(watch, "/w/new")]
    assert seen == [("delete", "/w/old"), ("put", "/w/new")]
    await asyncio.wait_for(lease.lost.wait(), LIMIT)
    await store.put("/w/next", b"")
    assert [event.key for event in await collect(watch, "/w/next")] == ["/w/next"]
    await store.close()


async def test_a_stopped_etcd_is_noticed_by_deadlines_and_forgiven(etcd: EmbeddedEtcd) -> None:
    store = client(etcd.endpoint, limits=QUICK)
    watch = store.watch_prefix("/w/")
    await asyncio.wait_for(anext(watch), LIMIT)
    lease = await store.lease(2)
    await store.put("/w/mine", b"", lease=lease)
    etcd.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        await store.put("/w/x", b"", timeout=0.5)
    assert 0.4 < time.monotonic() - began < 5
    assert caught.value.maybe_applied, "it was sent: nobody can know"
    await eventually(lambda: not watch.connected and lease.valid_until <= boottime())
    assert not lease.lost.is_set(), "only the store can say so"
    etcd.send_signal(signal.SIGCONT)
    # etcd's own clock ran on while it was stopped: the lease may or may not have survived, but the client must learn which
    answered_after = boottime()
    await eventually(lambda: lease.lost.is_set() or lease.acknowledged_at >= answered_after + 3)
    assert (await store.get("/w/mine") is None) == lease.lost.is_set()
    await store.put("/w/end", b"")
    await collect(watch, "/w/end")
    await store.close()


async def test_a_proxy_that_accepts_and_never_answers(etcd: EmbeddedEtcd) -> None:
    async with Relay(etcd.client_port) as relay:
        relay.stall()
        alone = client(relay.endpoint, timeout=0.5)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await alone.get("/a")
        with pytest.raises(StoreUnavailable):
            await alone.lease(2)
        assert time.monotonic() - began < 10
        await alone.close()
        for first in ("read", "write"):
            store = client(relay.endpoint, etcd.endpoint, timeout=2.0, limits=QUICK)
            if first == "read":
                assert await store.get("/a", timeout=LIMIT) is None
            else:
                await store.put("/a", b"a write that was never sent is sent to the next one", timeout=LIMIT)
            assert store.endpoint == etcd.endpoint
            await store.close()
        assert relay.num_connections >= 2


async def test_a_connection_that_falls_silent_keeps_no_lease_and_no_watch_wrongly_alive(etcd: EmbeddedEtcd) -> None:
    direct = client(etcd.endpoint)
    async with Relay(etcd.client_port) as relay:
        store = client(relay.endpoint, limits=QUICK)
        lease = await store.lease(2)
        await store.put("/n/a", b"", lease=lease)
        watch = store.watch_prefix("/w/")
        await asyncio.wait_for(anext(watch), LIMIT)
        await eventually(lambda: watch.connected)
        relay.stall()
        stalled_at = boottime()
        await direct.put("/w/missed", b"")
        await vanished(direct, "/n/a")
        await eventually(lambda: not watch.connected)
        assert lease.acknowledged_at <= stalled_at
        assert lease.valid_until <= boottime(), "the holder knew no later than the store acted"
        relay.cut()
        relay.flow()
        await asyncio.wait_for(lease.lost.wait(), LIMIT)
        assert [event.key for event in await collect(watch, "/w/missed")] == ["/w/missed"]
        await store.close()
    await direct.close()


async def test_a_full_listing_repairs_what_a_watch_missed(etcd: EmbeddedEtcd) -> None:
    store = client(etcd.endpoint, limits=WatchLimits(quiet=0.1, answer=LIMIT, repair=0.3))
    await store.put("/w/a", b"1")
    watch = store.watch_prefix("/w/")
    await asyncio.wait_for(anext(watch), LIMIT)
    assert watch._known is not None
    watch._known.pop("/w/a")  # as if its put had been missed
    watch._known["/w/gone"] = 1  # as if its deletion had been missed
    batch = await asyncio.wait_for(anext(watch), LIMIT)
    assert [(event.kind, event.key) for event in batch.events] == [("delete", "/w/gone"), ("put", "/w/a")]
    assert batch.snapshot is not None
    await store.put("/w/b", b"")
    assert [event.key for event in await collect(watch, "/w/b")] == ["/w/b"], "no batch when nothing was missed"
    await store.close()


async def test_a_silent_endpoint_is_left_by_watches_and_leases(etcd: EmbeddedEtcd) -> None:
    async with Relay(etcd.client_port) as relay:
        store = client(relay.endpoint, etcd.endpoint, limits=QUICK)
        watch = store.watch_prefix("/w/")
        await asyncio.wait_for(anext(watch), LIMIT)
        lease = await store.lease(3)
        await store.put("/w/mine", b"", lease=lease)
        assert [event.key for event in await collect(watch, "/w/mine")] == ["/w/mine"]
        relay.stall()
        stalled_at = boottime()
        await eventually(lambda: lease.acknowledged_at >= stalled_at + lease.ttl)
        assert not lease.lost.is_set()
        assert store.endpoint == etcd.endpoint
        await store.put("/w/end", b"")
        assert [event.key for event in await collect(watch, "/w/end")] == ["/w/end"]
        await store.close()


async def test_compare_and_swap_is_certain_over_a_connection_that_breaks(etcd: EmbeddedEtcd) -> None:
    """Each increment is applied exactly once, though answers get lost all the time."""
    async with Relay(etcd.client_port) as relay:
        store = client(relay.endpoint)
        stop = asyncio.Event()

        async def vandal() -> None:
            while not stop.is_set():
                await asyncio.sleep(0.03)
                relay.cut()

        breaking = asyncio.create_task(vandal())
        revision = 0
        for number in range(40):
            result = await cas.swap(store, "/c", f"value {number}".encode(), expected=revision, timeout=LIMIT)
            assert result.won, (number, result)
            assert result.current is not None
            revision = result.current.mod_revision
        stop.set()
        await breaking
        item = await store.get("/c", timeout=LIMIT)
        assert item is not None
        assert (item.version, item.value) == (40, b"value 39")
        await store.close()


# --- three members


async def test_a_dead_first_member_is_passed_over(cluster: EmbeddedCluster) -> None:
    await cluster.members[0].stop()
    store = client(*(member.endpoint for member in cluster.members))
    await asyncio.gather(*(store.get(f"/{number}", timeout=LIMIT) for number in range(5)))
    assert store.endpoint != cluster.members[0].endpoint
    watch = store.watch_prefix("/w/")
    await asyncio.wait_for(anext(watch), LIMIT)
    await store.put("/w/a", b"")
    assert [event.key for event in await collect(watch, "/w/a")] == ["/w/a"]
    await store.close()


async def test_failover_of_the_leading_member_loses_no_event_and_no_lease(cluster: EmbeddedCluster) -> None:
    store = client(*(member.endpoint for member in cluster.members))
    lease = await store.lease(3)
    await store.put("/w/mine", b"", lease=lease)
    watch = store.watch_prefix("/w/")
    await asyncio.wait_for(anext(watch), LIMIT)
    written: list[str] = []
    for number in range(30):
        if number == 10:
            leader = await _leading(cluster)
            await leader.kill()
            died_at = boottime()
        result = await cas.create(store, f"/w/{number:02d}", str(number).encode(), timeout=LIMIT)
        assert result.won
        written.append(f"/w/{number:02d}")
    await eventually(lambda: lease.acknowledged_at >= died_at + lease.ttl)
    assert not lease.lost.is_set()
    assert await store.get("/w/mine") is not None
    assert [event.key for event in await collect(watch, written[-1])] == written
    await leader.restart()
    await store.close()


async def test_a_member_that_was_cut_off_serves_no_stale_read_and_renews_no_lease(cluster: EmbeddedCluster) -> None:
    alone, *others = cluster.members
    store = client(alone.endpoint, limits=QUICK)
    lease = await store.lease(3)
    await store.put("/leader", b"me", lease=lease)
    watch = store.watch_prefix("/leader")
    await asyncio.wait_for(anext(watch), LIMIT)
    for member in others:
        member.send_signal(signal.SIGSTOP)
    stopped_at = boottime()
    refused = await asyncio.gather(
        store.get("/leader", timeout=1.5), store.put("/leader", b"me", lease=lease, timeout=1.5), return_exceptions=True
    )
    assert [type(one) for one in refused] == [StoreUnavailable] * 2
    await eventually(lambda: not watch.connected and lease.valid_until <= boottime())
    assert lease.acknowledged_at < stopped_at + 3
    for member in others:
        member.send_signal(signal.SIGCONT)
    await eventually(lambda: watch.connected)
    await store.get("/leader", timeout=LIMIT)
    await store.close()


async def _leading(cluster: EmbeddedCluster) -> EmbeddedEtcd:
    for member in cluster.members:
        probe = client(member.endpoint)
        status = await probe.status()
        await probe.close()
        if status.leader == status.member:
            return member
    raise AssertionError("no leader")


# --- quota


async def test_a_full_store_says_so_goes_on_reading_and_recovers(tmp_path: Path) -> None:
    etcd = EmbeddedEtcd(tmp_path / "etcd", EtcdOptions(quota_bytes=4 * 1024 * 1024))
    await etcd.start()
    store = client(etcd.endpoint)
    lease = await store.lease(2)
    await store.put("/mine", b"", lease=lease)
    with pytest.raises(NoSpace) as caught:
        await _fill(store)
    assert "disarm" in caught.value.hint
    assert (await store.status()).alarms == ("NOSPACE",)
    full_at = boottime()
    await eventually(lambda: lease.acknowledged_at >= full_at + lease.ttl)
    assert await store.get("/mine") is not None, "leases live on"
    await store.delete("/big")
    await store.clear_no_space()
    await store.put("/small", b"again")
    assert (await store.status()).alarms == ()
    await store.close()
    await etcd.stop()


async def _fill(store: EtcdStore) -> None:
    for _ in range(40):
        await store.put("/big", bytes(500_000))
