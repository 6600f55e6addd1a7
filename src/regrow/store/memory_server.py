"""The state behind `MemoryStore`: revisions, history, compaction and leases, as etcd defines them. No I/O, no tasks."""

from __future__ import annotations

import asyncio
import itertools
import operator
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from regrow.clock import Clock
from regrow.store.base import (
    Compacted,
    Comparison,
    Delete,
    Event,
    Get,
    KeyValue,
    LeaseLost,
    Listing,
    Operation,
    OperationResult,
    Put,
    StoreError,
    TransactionResult,
)
from regrow.store.rules import LEAST_TTL_SECONDS


class LeaseRecord(msgspec.Struct):
    """A lease as the server sees it. Times in seconds of the clock's monotonic()."""

    id: int
    ttl: float
    expires_at: float
    keys: set[str] = msgspec.field(default_factory=set)


class MemoryServer:
    """Keys, history and leases, shared by any number of `MemoryStore` clients in one event loop.

    Args:
        clock: what leases expire by.
        history_limit: revisions kept for watches; older ones are compacted away.
    """

    def __init__(self, clock: Clock, *, history_limit: int = 100_000) -> None:
        self.clock = clock
        self.revision = 1
        self.compacted = 0
        self.leases: dict[int, LeaseRecord] = {}
        self.no_space = False
        self.before_expiry: list[Callable[[], None]] = []
        """Called by `tick` before leases are judged, and again after some expired: the clients' keepalives."""
        self._now: dict[str, KeyValue] = {}
        self._base: dict[str, KeyValue] = {}
        self._history: deque[tuple[int, tuple[Event, ...]]] = deque()
        self._history_limit = history_limit
        self._lease_ids = itertools.count(0x1000)
        self._wakers: weakref.WeakSet[asyncio.Event] = weakref.WeakSet()

    # --- reads

    def get(self, key: str) -> KeyValue | None:
        """The key as it is now."""
        return self._now.get(key)

    def listing(self, prefix: str, revision: int = 0) -> Listing:
        """Keys under a prefix, now or at a revision.

        Raises:
            Compacted: that revision is gone.
        """
        state = self._now if revision in (0, self.revision) else self._at(revision)
        items = tuple(state[key] for key in sorted(state) if key.startswith(prefix))
        return Listing(revision or self.revision, items)

    def _at(self, revision: int) -> dict[str, KeyValue]:
        if revision > self.revision:
            raise StoreError(f"revision {revision} is in the future (now {self.revision})", where="memory store")
        if revision < self.compacted:
            raise Compacted(f"revision {revision} was compacted", where="memory store", compact_revision=self.compacted)
        state = dict(self._base)
        for at, events in self._history:
            if at > revision:
                break
            _replay(state, events)
        return state

    def changes(self, prefix: str, start_revision: int) -> list[tuple[int, tuple[Event, ...]]]:
        """What happened under a prefix from a revision on, one entry per revision.

        Raises:
            Compacted: the beginning is gone.
        """
        if start_revision <= self.compacted:
            raise Compacted(f"revision {start_revision} was compacted", where="memory store", compact_revision=self.compacted)
        found: list[tuple[int, tuple[Event, ...]]] = []
        for at, events in reversed(self._history):
            if at < start_revision:
                break
            mine = tuple(event for event in events if event.key.startswith(prefix))
            if mine:
                found.append((at, mine))
        found.reverse()
        return found

    # --- writes

    def transaction(self, compare: Sequence[Comparison], success: Sequence[Operation], failure: Sequence[Operation]) -> TransactionResult:
        """Compare and apply; see `Store.transaction`."""
        _check_writes(success)
        _check_writes(failure)
        holds = all(_holds(self._now.get(one.key), one) for one in compare)
        operations = success if holds else failure
        self._check_leases(operations)
        at = self.revision + 1
        events: dict[str, Event] = {}
        results = [self._apply(operation, at, events) for operation in operations]
        if events:
            self._publish(at, events)
        return TransactionResult(holds, self.revision, tuple(results))

    def _check_leases(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Put) and operation.lease and operation.lease not in self.leases:
                raise LeaseLost(f"lease {operation.lease:x} is gone", where=operation.key, hint="grant a new one")

    def _apply(self, operation: Operation, at: int, events: dict[str, Event]) -> OperationResult:
        if isinstance(operation, Put):
            old = self._now.get(operation.key)
            created, version = (old.create_revision, old.version + 1) if old else (at, 1)
            item = KeyValue(operation.key, operation.value, created, at, version, operation.lease)
            self._attach(operation.key, old.lease if old else 0, operation.lease)
            self._now[operation.key] = item
            events[operation.key] = Event("put", item)
            return OperationResult()
        if isinstance(operation, Get):
            return OperationResult(tuple(self._now[key] for key in self._matching(operation)))
        gone = self._matching(operation)
        for key in gone:
            self._attach(key, self._now.pop(key).lease, 0)
            events[key] = Event("delete", KeyValue(key, b"", 0, at, 0))
        return OperationResult(deleted=len(gone))

    def _matching(self, operation: Get | Delete) -> list[str]:
        if operation.prefix:
            return sorted(key for key in self._now if key.startswith(operation.key))
        return [operation.key] if operation.key in self._now else []

    def _attach(self, key: str, old: int, new: int) -> None:
        if old in self.leases:
            self.leases[old].keys.discard(key)
        if new:
            self.leases[new].keys.add(key)

    def _publish(self, at: int, events: dict[str, Event]) -> None:
        self.revision = at
        self._history.append((at, tuple(events.values())))
        if len(self._history) > self._history_limit:
            self.compact(self._history[len(self._history) // 2][0])
        self.wake()

    def compact(self, revision: int) -> None:
        """Forget what happened before `revision`; reads at it still work.

        Raises:
            Compacted: done already.
        """
        if revision <= self.compacted:
            raise Compacted(f"revision {revision} was compacted", where="memory store", compact_revision=self.compacted)
        if revision > self.revision:
            raise StoreError(f"revision {revision} is in the future (now {self.revision})", where="memory store")
        while self._history and self._history[0][0] <= revision:
            _replay(self._base, self._history.popleft()[1])
        self.compacted = revision

    # --- leases

    def grant(self, ttl: float) -> LeaseRecord:
        """A new lease."""
        granted = max(ttl, LEAST_TTL_SECONDS)
        record = LeaseRecord(next(self._lease_ids), granted, self.clock.monotonic() + granted)
        self.leases[record.id] = record
        return record

    def keep_alive(self, lease: int) -> float:
        """Start a lease's TTL anew; 0: it is gone."""
        record = self.leases.get(lease)
        if record is None:
            return 0.0
        record.expires_at = self.clock.monotonic() + record.ttl
        return record.ttl

    def revoke(self, lease: int) -> bool:
        """End a lease and delete its keys in one revision; False: it was gone."""
        record = self.leases.get(lease)
        if record is None:
            return False
        self.transaction((), [Delete(key) for key in sorted(record.keys)], ())
        del self.leases[lease]
        self.wake()
        return True

    def restart(self) -> None:
        """What a restart or a change of leader does to leases: each starts its TTL anew."""
        for record in self.leases.values():
            record.expires_at = self.clock.monotonic() + record.ttl

    def tick(self) -> list[int]:
        """Let the clients send their keepalives, then expire what is due. Returns the ids of the expired leases."""
        for keepalives in tuple(self.before_expiry):
            keepalives()
        now = self.clock.monotonic()
        due = [record.id for record in self.leases.values() if record.expires_at <= now]
        for lease in due:
            self.revoke(lease)
        if due:
            for keepalives in tuple(self.before_expiry):
                keepalives()
        return due

    # --- watchers

    def waker(self) -> asyncio.Event:
        """An event that is set at each change, for as long as the caller holds it."""
        event = asyncio.Event()
        self._wakers.add(event)
        return event

    def wake(self) -> None:
        """Set all wakers."""
        for event in tuple(self._wakers):
            event.set()


def _replay(state: dict[str, KeyValue], events: Sequence[Event]) -> None:
    for event in events:
        if event.kind == "put":
            state[event.key] = event.item
        else:
            state.pop(event.key, None)


def _check_writes(operations: Sequence[Operation]) -> None:
    """A key may be written once in a branch, and not deleted as well; etcd judges both branches, whichever will run."""
    puts: set[str] = set()
    for operation in operations:
        if isinstance(operation, Put):
            if operation.key in puts:
                raise StoreError(f"key {operation.key} is written twice in one transaction", where="memory store")
            puts.add(operation.key)
    for operation in operations:
        if isinstance(operation, Delete) and any(_covers(operation, key) for key in puts):
            raise StoreError(f"key {operation.key} is both written and deleted in one transaction", where="memory store")


def _covers(operation: Delete, key: str) -> bool:
    return key.startswith(operation.key) if operation.prefix else key == operation.key


def _holds(item: KeyValue | None, one: Comparison) -> bool:
    if item is None and one.target == "value":
        return False
    actual: bytes | int = 0 if item is None else getattr(item, one.target)
    if type(actual) is not type(one.operand):
        raise TypeError(f"{one.target} of {one.key} cannot be compared with {type(one.operand).__name__}")
    held: dict[str, Callable[[Any, Any], bool]] = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt}
    return held[one.operator](actual, one.operand)
