"""Leader election on the store: a key created under a lease.

Two things keep a former leader harmless. Safety: `Leadership.comparison` goes into each of its transactions, and what it
orders carries its epoch. Liveness: it steps down by its own CLOCK_BOOTTIME, counted from the *sending* of the last
keepalive that the store acknowledged, with a margin, so it has stopped before the store can have expired its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from regrow.clock import Clock, SystemClock
from regrow.store import cas
from regrow.store.base import Comparison, KeyValue, Lease, LeaseLost, Store, StoreError, StoreUnavailable, create_revision

log = logging.getLogger("regrow.store")

_RETRY_SECONDS = 0.2


class Leadership:
    """The term of a leader, from the win on. It ends once and for all: `ended` is set and `reason` says why.

    Ask `holds` before each effect; wait for `ended` to clean up. Made by `campaign`.
    """

    def __init__(self, store: Store, key: str, item: KeyValue, lease: Lease, *, margin: float, clock: Clock) -> None:
        self.key = key
        self.ended = asyncio.Event()
        self.reason = ""
        self._store = store
        self._item = item
        self._lease = lease
        self._margin = margin
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def item(self) -> KeyValue:
        """The leader's record as it was last written."""
        return self._item

    @property
    def lease(self) -> Lease:
        """The lease that the record hangs on."""
        return self._lease

    @property
    def seconds_left(self) -> float:
        """Until this leader must stop unless a keepalive is acknowledged before; 0 or less: it must not act."""
        return 0.0 if self.ended.is_set() else self._lease.valid_until - self._margin - self._clock.boottime()

    @property
    def holds(self) -> bool:
        """True while this process may act as the leader."""
        return self.seconds_left > 0

    @property
    def comparison(self) -> Comparison:
        """Holds in the store exactly as long as this term lasts: put it into each transaction."""
        return create_revision(self.key) == self._item.create_revision

    def start(self) -> None:
        """Begin to watch over the term."""
        self._tasks = [
            asyncio.create_task(self._watch_the_clock(), name="leader-clock"),
            asyncio.create_task(self._watch_the_record(), name="leader-record"),
        ]

    async def publish(self, value: bytes, *, timeout: float = 5.0) -> None:
        """Replace the leader's record (its epoch, its addresses). `value` must be unique to this term.

        Raises:
            StoreUnavailable: the outcome is not known.
            LeaseLost: the term is over.
        """
        try:
            result = await cas.guarded(
                self._store, self.comparison, self.key, value, expected=self._item.mod_revision, lease=self._lease, timeout=timeout
            )
        except LeaseLost:
            await self._end("the lease is gone")
            raise
        if not result.won or result.current is None:
            await self._end("another leader was elected")
            raise LeaseLost("this leader's term is over", where=self.key, hint=self.reason)
        self._item = result.current

    async def resign(self) -> None:
        """Step down now; a standby can take over at once if the store answers, else after the TTL."""
        await self._end("resigned")
        await self._stop_tasks()
        with contextlib.suppress(StoreUnavailable):
            await self._lease.revoke()

    async def close(self) -> None:
        """Step down without a word to the store: the term ends there after the TTL."""
        await self._end("closed")
        await self._stop_tasks()

    async def _stop_tasks(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _end(self, reason: str) -> None:
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()
            log.warning("leader key=%s stepped down: %s", self.key, reason)
        await self._lease.close()

    async def _watch_the_clock(self) -> None:
        """asyncio sleeps by CLOCK_MONOTONIC, which stands still during suspend: so look often, and judge by BOOTTIME."""
        look_each = min(0.25, max(0.02, self._margin / 4))
        while not self.ended.is_set():
            if self._lease.lost.is_set():
                await self._end("the lease is gone")
            elif not self.holds:
                await self._end("no keepalive was acknowledged in time")
            else:
                await asyncio.sleep(look_each)

    async def _watch_the_record(self) -> None:
        async with self._store.watch_prefix(self.key, start_revision=self._item.mod_revision + 1) as watch:
            async for batch in watch:
                for event in batch.events:
                    taken = event.kind == "delete" or event.item.create_revision != self._item.create_revision
                    if event.key == self.key and taken:
                        await self._end("the leader's record was removed")
                        return


async def campaign(
    store: Store, key: str, value: bytes, *, ttl: float = 5.0, margin: float | None = None, clock: Clock | None = None
) -> Leadership:
    """Wait until this process is the leader. Cancel it to stop waiting.

    Args:
        store: where.
        key: the leader's record.
        value: its first content; unique to this process (an incarnation in it).
        ttl: of the lease, in seconds: how long the loss of a leader goes unnoticed at most.
        margin: seconds before the end of the lease at which the leader stops. Default: a fifth of the TTL, at least 0.5 s.
        clock: by whose boottime() the leader steps down.

    Raises:
        StoreError: for anything but an absent store, which it waits for.
    """
    lease: Lease | None = None
    chosen = max(0.5, ttl / 5) if margin is None else margin
    try:
        while True:
            try:
                if lease is None or lease.lost.is_set():
                    lease = await store.lease(ttl)
                result = await cas.create(store, key, value, lease=lease, timeout=ttl)
            except LeaseLost:
                lease = None
                continue
            except StoreUnavailable as error:
                log.info("campaign key=%s waits for the store: %s", key, error.what)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if result.won and result.current is not None:
                leadership = Leadership(store, key, result.current, lease, margin=chosen, clock=clock or SystemClock())
                leadership.start()
                log.info("leader key=%s won, revision=%d", key, result.current.create_revision)
                return leadership
            if result.current is not None:
                await _until_vacant(store, key, result.current, lease)
    except BaseException:
        if lease is not None:
            with contextlib.suppress(StoreError):
                await lease.close()
        raise


async def _until_vacant(store: Store, key: str, leader: KeyValue, lease: Lease) -> None:
    """Until the leader's record is gone, or our own lease (then the caller needs a new one)."""
    vacant = asyncio.create_task(_vacated(store, key, leader))
    lost = asyncio.create_task(lease.lost.wait())
    try:
        await asyncio.wait({vacant, lost}, return_when=asyncio.FIRST_COMPLETED)
        if vacant.done():
            vacant.result()
    finally:
        for task in (vacant, lost):
            task.cancel()
        await asyncio.gather(vacant, lost, return_exceptions=True)


async def _vacated(store: Store, key: str, leader: KeyValue) -> None:
    async with store.watch_prefix(key, start_revision=leader.mod_revision + 1) as watch:
        async for batch in watch:
            for event in batch.events:
                if event.key == key and (event.kind == "delete" or event.item.create_revision != leader.create_revision):
                    return
            if batch.snapshot is not None and all(item.key != key for item in batch.snapshot):
                return


async def observe(store: Store, key: str) -> AsyncGenerator[KeyValue | None]:
    """The leader's record now, and again whenever it changes; None while there is no leader. Endless; close it with aclose().

    Raises:
        AuthFailed: no permission to read the key.
    """
    first = True
    async with store.watch_prefix(key) as watch:
        async for batch in watch:
            mine = [event for event in batch.events if event.key == key]
            if mine:
                yield mine[-1].item if mine[-1].kind == "put" else None
            elif first:
                yield None
            first = False
