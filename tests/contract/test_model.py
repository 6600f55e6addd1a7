"""Random programs: the memory store answers like etcd, and a watch over a broken network ends up with what is there."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest
from tests.contract.relay import Relay
from tests.contract.waiting import LIMIT

from regrow.store import base
from regrow.store.base import Comparison, Delete, Get, KeyValue, Operation, Put, Store, StoreError, Watch
from regrow.store.connection import Access
from regrow.store.embedded import EmbeddedEtcd
from regrow.store.etcd import EtcdStore
from regrow.store.etcd_watch import WatchLimits
from regrow.store.memory import MemoryStore
from regrow.store.open import open_store

NAMES = ("a", "a/1", "a/2", "b", "c")
TARGETS = ("value", "version", "create_revision", "mod_revision")
_runs = itertools.count()


class Twin:
    """One program on one store. Revisions are told relative to the first, and so can be compared between stores."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.store = store
        self.prefix = prefix
        self.origin = 0
        self.leases: list[base.Lease] = []

    def shown(self, item: KeyValue | None) -> Any:
        if item is None:
            return None
        numbers = [lease.id for lease in self.leases]
        lease = numbers.index(item.lease) if item.lease else None
        name = item.key.removeprefix(self.prefix)
        return (name, item.value, item.version, item.create_revision - self.origin, item.mod_revision - self.origin, lease)

    def operation(self, step: tuple[Any, ...]) -> Operation:
        kind, name, content, lease = step
        if kind == "put":
            number = self.leases[lease % len(self.leases)].id if lease is not None and self.leases else 0
            return Put(self.prefix + name, content, number)
        return Delete(self.prefix + name, prefix=content) if kind == "delete" else Get(self.prefix + name, prefix=content)

    def comparison(self, step: tuple[Any, ...]) -> Comparison:
        name, target, operator, operand = step
        if target in ("create_revision", "mod_revision") and operand:
            operand += self.origin
        return Comparison(self.prefix + name, target, operator, operand)

    async def run(self, step: tuple[Any, ...]) -> Any:
        kind, *rest = step
        try:
            if kind == "grant":
                self.leases.append(await self.store.lease(600, keep_alive=False))
                return len(self.leases)
            if kind == "revoke":
                await self.leases[rest[0] % len(self.leases)].revoke() if self.leases else None
                return None
            if kind == "list":
                listing = await self.store.get_prefix(self.prefix + rest[0])
                return [self.shown(item) for item in listing]
            compare, success, failure = rest
            result = await self.store.transaction(
                [self.comparison(one) for one in compare],
                [self.operation(one) for one in success],
                [self.operation(one) for one in failure],
            )
            answers = [([self.shown(item) for item in one.items], one.deleted) for one in result.results]
            return result.succeeded, result.revision - self.origin, answers
        except StoreError as error:
            return type(error).__name__


def random_step(dice: random.Random) -> tuple[Any, ...]:
    def operation() -> tuple[Any, ...]:
        kind = dice.choice(("put", "put", "delete", "get"))
        content: Any = dice.choice((b"", b"x", b"y")) if kind == "put" else dice.random() < 0.4
        return kind, dice.choice(NAMES), content, dice.choice((None, None, dice.randrange(4)))

    def comparison() -> tuple[Any, ...]:
        target = dice.choice(TARGETS)
        operand = dice.choice((b"", b"x", b"y")) if target == "value" else dice.randrange(8)
        return dice.choice(NAMES), target, dice.choice(("==", "!=", "<", ">")), operand

    kind = dice.choices(("grant", "revoke", "list", "transaction"), (1, 1, 2, 8))[0]
    if kind == "grant":
        return (kind,)
    if kind == "revoke":
        return kind, dice.randrange(4)
    if kind == "list":
        return kind, dice.choice(("", "a", "a/"))
    some = [tuple(operation() for _ in range(dice.randrange(4))) for _ in range(2)]
    return kind, tuple(comparison() for _ in range(dice.randrange(3))), some[0], some[1]


async def told(watch: Watch, twin: Twin, last: str) -> list[Any]:
    """Everything a watch said from its start to the put of `last`."""
    seen: list[Any] = []
    async with asyncio.timeout(LIMIT):
        async for batch in watch:
            for event in batch.events:
                seen.append((event.kind, twin.shown(event.item)[::4] if event.kind == "delete" else twin.shown(event.item)))
                if event.key == twin.prefix + last:
                    return seen
    raise AssertionError("the watch ended")


@pytest.mark.parametrize("seed", range(12))
async def test_the_memory_store_answers_like_etcd(etcd_for_models: EmbeddedEtcd, seed: int) -> None:
    dice = random.Random(seed)
    program = [random_step(dice) for _ in range(60)]
    prefix = f"/model-{next(_runs)}/"
    twins = [Twin(MemoryStore(), prefix), Twin(open_store(etcd_for_models.url, timeout=LIMIT), prefix)]
    watches: list[Watch] = []
    for twin in twins:
        twin.origin = await twin.store.put(prefix + "begin", b"")
        watches.append(twin.store.watch_prefix(prefix, start_revision=twin.origin))
    for number, step in enumerate(program):
        memory, real = [await twin.run(step) for twin in twins]
        assert memory == real, f"seed {seed}, step {number}: {step}"
    for twin in twins:
        await twin.store.put(prefix + "end", b"")
    stories = [await told(watch, twin, "end") for watch, twin in zip(watches, twins, strict=True)]
    assert _by_revision(stories[0]) == _by_revision(stories[1])
    for twin in twins:
        await twin.store.close()


def _by_revision(story: list[Any]) -> list[Any]:
    """Within one revision (a deletion of many keys) the order has no meaning."""
    return sorted(story, key=lambda one: (one[1][-1] if one[0] == "delete" else one[1][4], one[1][0]))


@pytest.fixture
def etcd_for_models(shared_etcd: EmbeddedEtcd) -> EmbeddedEtcd:
    return shared_etcd


async def _vandalise(relay: Relay, direct: EtcdStore, dice: random.Random, stop: asyncio.Event) -> None:
    """Cut, stall, close the port, compact, at random, until told to stop; then leave everything in order."""
    while not stop.is_set():
        await asyncio.sleep(dice.uniform(0.02, 0.15))
        match dice.randrange(5):
            case 0:
                relay.cut()
            case 1:
                relay.stall()
                await asyncio.sleep(dice.uniform(0.05, 0.6))
                relay.flow()
            case 2:
                await relay.close_port()
                await asyncio.sleep(dice.uniform(0.0, 0.3))
                await relay.open_port()
            case 3:
                await direct.compact((await direct.status()).revision)
            case _:
                pass
    relay.flow()


@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)])
async def test_a_watch_over_a_broken_network_ends_up_with_what_is_there(etcd: EmbeddedEtcd, seed: int) -> None:
    """The table that is kept from events alone equals the listing, and no key's revisions ever go back."""
    dice = random.Random(seed)
    direct = EtcdStore(Access((etcd.endpoint,)), timeout=LIMIT)
    async with Relay(etcd.client_port) as relay:
        limits = WatchLimits(quiet=0.2, answer=0.3, repair=0)
        store = EtcdStore(Access((relay.endpoint,)), timeout=5.0, watch_limits=limits)
        table: dict[str, KeyValue] = {}
        newest: dict[str, int] = {}

        async def follow() -> None:
            async for batch in store.watch_prefix("/w/"):
                for event in batch.events:
                    assert event.item.mod_revision > newest.get(event.key, 0), (seed, event)
                    newest[event.key] = event.item.mod_revision
                    if event.kind == "put":
                        table[event.key] = event.item
                    else:
                        del table[event.key]
                if batch.snapshot is not None:
                    assert {item.key: item for item in batch.snapshot} == table, seed
                if "/w/end" in table:
                    return

        following = asyncio.create_task(follow())
        stop = asyncio.Event()
        breaking = asyncio.create_task(_vandalise(relay, direct, dice, stop))
        for number in range(400):
            key = f"/w/{dice.randrange(20)}"
            await (direct.delete(key) if dice.random() < 0.3 else direct.put(key, str(number).encode()))
            await asyncio.sleep(0.01)
        stop.set()
        await breaking
        await direct.put("/w/end", b"")
        await asyncio.wait_for(following, LIMIT)
        assert table == {item.key: item for item in await direct.get_prefix("/w/")}, seed
        await store.close()
    await direct.close()
