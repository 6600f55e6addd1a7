"""A store in this process: same interface and rules as etcd, leases on an injected clock, faults on demand.

For unit tests, the simulator and programs without etcd. `connect` gives further clients of the same data, each with
faults of its own, so that one can be cut off while the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Self

from regrow.clock import Clock, SystemClock
from regrow.store.base import (
    Compacted,
    Comparison,
    Delete,
    Event,
    KeyValue,
    Lease,
    LeaseLost,
    Listing,
    NoSpace,
    Operation,
    Put,
    StoreStatus,
    StoreUnavailable,
    TransactionResult,
    WatchBatch,
    value,
    version,
)
from regrow.store.memory_server import MemoryServer
from regrow.store.rules import check_size, difference, lease_id

_TICK_SECONDS = 0.05


class Faults:
    """What goes wrong for one client. Assign to the attributes at any time.

    unavailable: calls fail at once, keepalives are not sent, watches fall silent (and catch up afterwards).
    delay: seconds that each call takes; a call whose time limit is shorter is applied, but the caller gets StoreUnavailable.
    lose_answers: number of coming writes that are applied, but answered with StoreUnavailable.
    """

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._unavailable = False
        self.delay = 0.0
        self.lose_answers = 0

    @property
    def unavailable(self) -> bool:
        """True: this client is cut off from the store."""
        return self._unavailable

    @unavailable.setter
    def unavailable(self, cut: bool) -> None:
        self._unavailable = cut
        self._server.wake()


class MemoryStore:
    """`Store` in memory.

    Args:
        clock: what leases expire by. With a clock given, time passes only in `tick`; without one the machine's clock is
            used and a background task ticks while there are leases.
        server: the data; None makes a new, empty one.
        timeout: default time limit of a call, in seconds.
    """

    def __init__(self, clock: Clock | None = None, *, server: MemoryServer | None = None, timeout: float = 5.0) -> None:
        self.server = server or MemoryServer(clock or SystemClock())
        self.faults = Faults(self.server)
        self._automatic = clock is None
        self._timeout = timeout
        self._leases: dict[int, MemoryLease] = {}
        self._watches: set[MemoryWatch] = set()
        self._ticker: asyncio.Task[None] | None = None
        self.server.before_expiry.append(self._send_keepalives)

    def connect(self) -> MemoryStore:
        """Another client of the same data, with faults of its own."""
        return MemoryStore(None if self._automatic else self.server.clock, server=self.server, timeout=self._timeout)

    def tick(self) -> list[int]:
        """Send the keepalives that are due, then expire leases. Returns the ids of those that expired."""
        return self.server.tick()

    # --- Store

    async def get(self, key: str, *, timeout: float | None = None) -> KeyValue | None:
        """See `Store.get`."""
        await self._answered(timeout)
        return self.server.get(key)

    async def get_prefix(self, prefix: str, *, revision: int = 0, keys_only: bool = False, timeout: float | None = None) -> Listing:
        """See `Store.get_prefix`."""
        await self._answered(timeout)
        listing = self.server.listing(prefix, revision)
        if not keys_only:
            return listing
        bare = (KeyValue(k.key, b"", k.create_revision, k.mod_revision, k.version, k.lease) for k in listing.items)
        return Listing(listing.revision, tuple(bare))

    async def next_keys(self, prefix: str, after: str, limit: int, *, timeout: float | None = None) -> tuple[str, ...]:
        """See `Store.next_keys`."""
        await self._answered(timeout)
        return tuple(item.key for item in self.server.listing(prefix) if item.key > prefix + after)[:limit]

    async def put(self, key: str, value: bytes, *, lease: Lease | int = 0, timeout: float | None = None) -> int:
        """See `Store.put`."""
        return (await self.transaction((), (Put(key, value, lease_id(lease)),), timeout=timeout)).revision

    async def delete(self, key: str, *, timeout: float | None = None) -> bool:
        """See `Store.delete`."""
        return (await self.transaction((), (Delete(key),), timeout=timeout)).results[0].deleted > 0

    async def delete_prefix(self, prefix: str, *, timeout: float | None = None) -> int:
        """See `Store.delete_prefix`."""
        return (await self.transaction((), (Delete(prefix, prefix=True),), timeout=timeout)).results[0].deleted

    async def transaction(
        self,
        compare: Sequence[Comparison],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        *,
        timeout: float | None = None,
    ) -> TransactionResult:
        """See `Store.transaction`."""
        check_size(compare, success, failure)
        if self.faults.unavailable:
            raise self._gone(maybe_applied=False)
        writes = any(isinstance(operation, Put) for operation in (*success, *failure))
        if writes and self.server.no_space:
            raise NoSpace("the store's quota is used up", where="memory store", hint="make room and clear the alarm")
        result = self.server.transaction(compare, success, failure)
        await self._answered(timeout)
        if self.faults.lose_answers > 0 and writes:
            self.faults.lose_answers -= 1
            raise self._gone(maybe_applied=True)
        return result

    async def put_if_not_exists(self, key: str, value: bytes, *, lease: Lease | int = 0, timeout: float | None = None) -> bool:
        """See `Store.put_if_not_exists`."""
        return (await self.transaction((version(key) == 0,), (Put(key, value, lease_id(lease)),), timeout=timeout)).succeeded

    async def replace(self, key: str, initial_value: bytes, new_value: bytes, *, timeout: float | None = None) -> bool:
        """See `Store.replace`."""
        return (await self.transaction((value(key) == initial_value,), (Put(key, new_value),), timeout=timeout)).succeeded

    async def lease(self, ttl: float, *, keep_alive: bool = True, timeout: float | None = None) -> MemoryLease:
        """See `Store.lease`."""
        sent_at = self.server.clock.boottime()
        await self._answered(timeout)
        record = self.server.grant(ttl)
        lease = MemoryLease(self, record.id, record.ttl, sent_at, kept=keep_alive)
        self._leases[lease.id] = lease
        if self._automatic and self._ticker is None:
            self._ticker = asyncio.create_task(self._tick_for_ever(), name="memory-store-ticker")
        return lease

    def watch_prefix(self, prefix: str, *, start_revision: int = 0) -> MemoryWatch:
        """See `Store.watch_prefix`."""
        watch = MemoryWatch(self, prefix, start_revision)
        self._watches.add(watch)
        return watch

    async def compact(self, revision: int, *, timeout: float | None = None) -> None:
        """See `Store.compact`."""
        await self._answered(timeout)
        self.server.compact(revision)

    async def status(self, *, timeout: float | None = None) -> StoreStatus:
        """See `Store.status`."""
        await self._answered(timeout)
        alarms = ("NOSPACE",) if self.server.no_space else ()
        return StoreStatus("memory", "memory", 0, 1, 1, self.server.revision, alarms)

    async def close(self) -> None:
        """See `Store.close`."""
        if self._send_keepalives in self.server.before_expiry:
            self.server.before_expiry.remove(self._send_keepalives)
        for watch in tuple(self._watches):
            await watch.aclose()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
            self._ticker = None

    # --- inside

    def forget_watch(self, watch: MemoryWatch) -> None:
        """A watch ended."""
        self._watches.discard(watch)

    async def keep_alive(self, lease: int, timeout: float | None = None) -> float:
        """One keepalive: the TTL, 0 when the lease is gone."""
        await self._answered(timeout)
        return self.server.keep_alive(lease)

    async def revoke(self, lease: int, timeout: float | None = None) -> None:
        """End a lease."""
        await self._answered(timeout)
        self.server.revoke(lease)

    async def _tick_for_ever(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(_TICK_SECONDS)

    def _send_keepalives(self) -> None:
        if self.faults.unavailable:
            return
        now = self.server.clock.boottime()
        for lease in tuple(self._leases.values()):
            if lease.id not in self.server.leases:
                lease.note_lost()
                del self._leases[lease.id]
            elif lease.kept and now - lease.acknowledged_at >= lease.ttl / 3:
                lease.note_acknowledged(now)
                self.server.keep_alive(lease.id)

    async def _answered(self, timeout: float | None) -> None:
        """Wait as long as the faults say; raise what they say."""
        if self.faults.unavailable:
            raise self._gone(maybe_applied=False)
        limit = self._timeout if timeout is None else timeout
        if self.faults.delay > 0:
            await asyncio.sleep(min(self.faults.delay, limit))
            if self.faults.delay >= limit:
                raise self._gone(maybe_applied=True)

    def _gone(self, *, maybe_applied: bool) -> StoreUnavailable:
        return StoreUnavailable("the store does not answer", where="memory store", hint="a fault was set", maybe_applied=maybe_applied)


class MemoryLease:
    """`Lease` of a `MemoryStore`; its keepalives are sent by `MemoryStore.tick`. Set `kept` to False to let it lapse."""

    def __init__(self, store: MemoryStore, number: int, ttl: float, acknowledged_at: float, *, kept: bool) -> None:
        self._store = store
        self._id = number
        self._ttl = ttl
        self._acknowledged_at = acknowledged_at
        self._lost = asyncio.Event()
        self.kept = kept

    @property
    def id(self) -> int:
        """See `Lease.id`."""
        return self._id

    @property
    def ttl(self) -> float:
        """See `Lease.ttl`."""
        return self._ttl

    @property
    def lost(self) -> asyncio.Event:
        """See `Lease.lost`."""
        return self._lost

    @property
    def acknowledged_at(self) -> float:
        """See `Lease.acknowledged_at`, by the store's clock."""
        return self._acknowledged_at

    @property
    def valid_until(self) -> float:
        """See `Lease.valid_until`, by the store's clock."""
        return 0.0 if self._lost.is_set() else self._acknowledged_at + self._ttl

    async def refresh(self) -> float:
        """See `Lease.refresh`."""
        sent_at = self._store.server.clock.boottime()
        ttl = 0.0 if self._lost.is_set() else await self._store.keep_alive(self._id)
        if not ttl:
            self.note_lost()
            raise LeaseLost(f"lease {self._id:x} is gone", where="memory store", hint="grant a new one")
        self.note_acknowledged(sent_at)
        return ttl

    async def revoke(self) -> None:
        """See `Lease.revoke`."""
        self.kept = False
        await self._store.revoke(self._id)
        self.note_lost()

    async def close(self) -> None:
        """See `Lease.close`."""
        self.kept = False

    def note_acknowledged(self, sent_at: float) -> None:
        """A keepalive sent at this boottime was acknowledged."""
        self._acknowledged_at = max(self._acknowledged_at, sent_at)

    def note_lost(self) -> None:
        """The server said that the lease is gone."""
        self.kept = False
        self._lost.set()


class MemoryWatch:
    """`Watch` of a `MemoryStore`."""

    def __init__(self, store: MemoryStore, prefix: str, start_revision: int) -> None:
        self._store = store
        self._prefix = prefix
        self._next = start_revision
        self._known: dict[str, int] | None = {} if start_revision == 0 else None
        self._waker = store.server.waker()
        self._closed = False

    @property
    def connected(self) -> bool:
        """See `Watch.connected`."""
        return not self._store.faults.unavailable and not self._closed

    def __aiter__(self) -> AsyncIterator[WatchBatch]:
        return self

    async def __anext__(self) -> WatchBatch:
        while not self._closed:
            self._waker.clear()
            batch = None if self._store.faults.unavailable else self._take()
            if batch is not None:
                return batch
            await self._waker.wait()
        raise StopAsyncIteration

    def _take(self) -> WatchBatch | None:
        server = self._store.server
        if self._next == 0:
            return self._list()
        if self._known is None:
            self._known = self._known_before(self._next)
        try:
            changes = server.changes(self._prefix, self._next)
        except Compacted:
            return self._list()
        self._next = server.revision + 1
        if not changes:
            return None
        events = tuple(event for _, of_revision in changes for event in of_revision)
        self._note(events)
        return WatchBatch(server.revision, events)

    def _known_before(self, revision: int) -> dict[str, int]:
        try:
            return {item.key: item.mod_revision for item in self._store.server.listing(self._prefix, revision - 1)}
        except Compacted:
            return {}

    def _list(self) -> WatchBatch:
        listing = self._store.server.listing(self._prefix)
        events = difference(self._known or {}, listing)
        self._note(events)
        self._next = listing.revision + 1
        return WatchBatch(listing.revision, events, listing.items)

    def _note(self, events: Sequence[Event]) -> None:
        known = self._known = self._known if self._known is not None else {}
        for event in events:
            if event.kind == "put":
                known[event.key] = event.item.mod_revision
            else:
                known.pop(event.key, None)

    async def aclose(self) -> None:
        """See `Watch.aclose`."""
        self._closed = True
        self._waker.set()
        self._store.forget_watch(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
