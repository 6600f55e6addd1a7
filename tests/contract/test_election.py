"""Leader election: one leader at a time, and a former one that stops before the next one can begin."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from regrow.clock import ManualClock
from regrow.store import base
from regrow.store.base import LeaseLost, Put, Store
from regrow.store.election import Leadership, campaign, observe
from regrow.store.embedded import EmbeddedEtcd
from regrow.store.memory import MemoryStore
from regrow.store.open import open_store

LIMIT = 60.0


async def test_one_leads_the_other_takes_over_when_it_resigns(store: Store, prefix: str) -> None:
    key = prefix + "leader"
    first = await campaign(store, key, b"first", ttl=5)
    waiting = asyncio.create_task(campaign(store, key, b"second", ttl=5))
    seen: list[bytes | None] = []
    taken_over = asyncio.Event()

    async def look() -> None:
        async for item in observe(store, key):
            seen.append(item.value if item else None)
            if seen[-1] == b"second":
                taken_over.set()

    looking = asyncio.create_task(look())
    await first.publish(b"first, epoch 1")
    assert first.holds
    assert first.item.version == 2
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.3)
    resigned_at = time.monotonic()
    await first.resign()
    assert not first.holds
    second = await asyncio.wait_for(waiting, LIMIT)
    assert time.monotonic() - resigned_at < 3, "at once, not after the TTL"
    assert second.holds
    await asyncio.wait_for(taken_over.wait(), LIMIT)
    assert seen[-3:] in ([b"first, epoch 1", None, b"second"], [b"first", None, b"second"])
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    with pytest.raises(LeaseLost):
        await first.publish(b"too late")
    await second.resign()
    assert await store.get(key) is None


async def test_no_leader_is_none(store: Store, prefix: str) -> None:
    watching = observe(store, prefix + "leader")
    assert await asyncio.wait_for(anext(watching), LIMIT) is None
    await watching.aclose()


async def test_the_comparison_fences_a_former_leader(store: Store, prefix: str) -> None:
    key = prefix + "leader"
    first = await campaign(store, key, b"first", ttl=5)
    assert (await store.transaction((first.comparison,), (Put(prefix + "order", b"1"),))).succeeded
    await first.publish(b"first again")
    assert (await store.transaction((first.comparison,), (Put(prefix + "order", b"2"),))).succeeded
    await store.delete(key)
    second = await campaign(store, key, b"second", ttl=5)
    assert not (await store.transaction((first.comparison,), (Put(prefix + "order", b"3"),))).succeeded
    assert (await store.transaction((second.comparison,), (Put(prefix + "order", b"4"),))).succeeded
    await asyncio.wait_for(first.ended.wait(), LIMIT)
    assert first.reason == "the leader's record was removed"
    await first.close()
    await second.close()


async def test_giving_up_a_campaign_leaves_nothing(store: Store, prefix: str) -> None:
    key = prefix + "leader"
    first = await campaign(store, key, b"first", ttl=5)
    waiting = asyncio.create_task(campaign(store, key, b"second", ttl=5))
    await asyncio.sleep(0.2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await first.resign()
    assert await store.get(key) is None


async def test_many_candidates_one_leader_at_a_time(store: Store, prefix: str) -> None:
    key, leading, most, order = prefix + "leader", 0, 0, list[int]()

    async def run(number: int) -> None:
        nonlocal leading, most
        term: Leadership = await campaign(store, key, f"candidate {number}".encode(), ttl=5)
        leading += 1
        most = max(most, leading)
        order.append(number)
        await term.publish(f"candidate {number} leads".encode())
        leading -= 1
        await term.resign()

    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*(run(number) for number in range(6)))
    assert most == 1
    assert sorted(order) == list(range(6))


async def test_a_leader_without_its_store_steps_down_before_the_lease_can_end(etcd: EmbeddedEtcd) -> None:
    store = open_store(etcd.url, timeout=2.0)
    leader = await campaign(store, "/leader", b"me", ttl=2, margin=0.5)
    etcd.send_signal(signal.SIGSTOP)
    await asyncio.wait_for(leader.ended.wait(), LIMIT)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    last = leader.lease.acknowledged_at
    assert leader.reason == "no keepalive was acknowledged in time"
    assert now - last >= leader.lease.ttl - 0.5
    assert not leader.holds
    etcd.send_signal(signal.SIGCONT)
    second = await asyncio.wait_for(campaign(store, "/leader", b"again", ttl=2), LIMIT)
    assert second.item.create_revision > leader.item.create_revision
    await leader.close()
    await second.resign()
    await store.close()


async def test_a_leader_that_was_stopped_knows_at_once_that_its_term_may_be_over() -> None:
    """A process that wakes from SIGSTOP or suspend asks `holds` and must not need an answer from anybody."""
    clock = ManualClock()
    store = MemoryStore(clock)
    other = store.connect()
    leader = await campaign(store, "/leader", b"me", ttl=5, margin=1, clock=clock)
    assert leader.seconds_left == pytest.approx(4)
    store.faults.unavailable = True
    clock.advance(3.9)
    assert leader.holds
    clock.advance(0.2)
    assert not leader.holds
    assert other.tick() == [], "the store still waits: nobody else can lead yet"
    await asyncio.wait_for(leader.ended.wait(), LIMIT)
    clock.advance(1)
    assert other.tick() == [leader.lease.id]
    second = await campaign(other, "/leader", b"other", ttl=5, clock=clock)
    store.faults.unavailable = False
    assert not (await store.transaction((leader.comparison,), (Put("/order", b""),))).succeeded
    assert (await store.transaction((base.version("/order") == 0,), ())).succeeded
    await leader.close()
    await second.close()
    await store.close()
    await other.close()
