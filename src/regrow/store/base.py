"""The store as a port: what the supervisor and the agents ask of etcd, and nothing more.

Names follow the etcd3 package where they fit (get, get_prefix, put, delete, lease, watch_prefix, transaction,
put_if_not_exists, replace), as coroutines with typed results. Keys are str, values are bytes. Every read is linearizable,
every call has a timeout. A write that timed out *may have been applied*: `StoreUnavailable.maybe_applied` says so, and the
helpers in `regrow.store.cas` re-read before they conclude anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Literal, Protocol, Self

import msgspec

from regrow.errors import OperationalError

MAX_OPERATIONS = 128
"""Most operations in one transaction (etcd's default)."""
MAX_REQUEST_BYTES = 1_500_000
"""Largest request that etcd takes by default is 1.5 MiB; this leaves room for the envelope."""

# --- errors ----------------------------------------------------------------------------------------------------


class StoreError(OperationalError):
    """Any failure of the store. Raised itself for answers that no subclass fits."""


class StoreUnavailable(StoreError):
    """No answer within the time limit, from any endpoint. The caller may try again.

    `maybe_applied` is True when the request left this process: a write may have taken effect, or may yet.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "", maybe_applied: bool = False) -> None:
        super().__init__(what, where=where, hint=hint)
        self.maybe_applied = maybe_applied


class LeaseLost(StoreError):
    """The lease is gone (expired or revoked), and every key attached to it. Grant a new one and write them again."""


class Compacted(StoreError):
    """The revision asked for was compacted away. Watches handle it themselves; a read at an old revision raises it."""

    def __init__(self, what: str, *, where: str = "", hint: str = "", compact_revision: int = 0) -> None:
        super().__init__(what, where=where, hint=hint)
        self.compact_revision = compact_revision


class NoSpace(StoreError):
    """The store's quota is used up: it refuses writes until somebody makes room and clears the alarm. Reads go on."""


class AuthFailed(StoreError):
    """Wrong user, password, certificate, or no permission on this key."""


class RequestTooLarge(StoreError):
    """Over MAX_OPERATIONS operations or MAX_REQUEST_BYTES bytes: split it. Never sent again as it is."""


# --- values ----------------------------------------------------------------------------------------------------


class KeyValue(msgspec.Struct, frozen=True):
    """A key as it was at one revision."""

    key: str
    value: bytes
    create_revision: int
    """Revision that created this life of the key."""
    mod_revision: int
    """Revision of the last change: what a compare-and-swap compares."""
    version: int
    """1 on creation, one more with each put."""
    lease: int = 0
    """Id of the lease that the key is attached to; 0: none."""


class Listing(msgspec.Struct, frozen=True):
    """All keys under a prefix at one revision, in key order. Watch from `revision + 1` to miss nothing."""

    revision: int
    items: tuple[KeyValue, ...]

    def __iter__(self) -> Iterator[KeyValue]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def values(self) -> dict[str, bytes]:
        """The items as {key: value}."""
        return {item.key: item.value for item in self.items}


class Event(msgspec.Struct, frozen=True):
    """One change of one key. Of a deleted key only `key` and `mod_revision` (the deletion's) are known."""

    kind: Literal["put", "delete"]
    item: KeyValue

    @property
    def key(self) -> str:
        """The key that changed."""
        return self.item.key

    @property
    def value(self) -> bytes:
        """The new value; empty for a deletion."""
        return self.item.value


class WatchBatch(msgspec.Struct, frozen=True):
    """Changes that belong together: apply all of them, in order, then look at the result.

    A batch never splits a revision (a transaction's changes come together).
    """

    revision: int
    """State up to and including this revision is now known."""
    events: tuple[Event, ...]
    snapshot: tuple[KeyValue, ...] | None = None
    """Not None: the watch listed everything anew (its start, a compaction, a repair). `events` is then the difference to what
    this watch delivered before; keys that are not in the snapshot do not exist."""


class TransactionResult(msgspec.Struct, frozen=True):
    """What a transaction did."""

    succeeded: bool
    """True: all comparisons held and `success` ran; False: `failure` ran."""
    revision: int
    results: tuple[OperationResult, ...]
    """One per operation that ran, in order."""


class OperationResult(msgspec.Struct, frozen=True):
    """Result of one operation: the items of a Get, the number of keys that a Delete removed."""

    items: tuple[KeyValue, ...] = ()
    deleted: int = 0


class StoreStatus(msgspec.Struct, frozen=True):
    """Health of the store as one endpoint reports it."""

    endpoint: str
    version: str
    database_bytes: int
    leader: int
    """Raft id of the leader; 0: the member knows none."""
    member: int
    revision: int
    alarms: tuple[str, ...] = ()


# --- transactions ----------------------------------------------------------------------------------------------

CompareTarget = Literal["value", "version", "create_revision", "mod_revision"]
CompareOperator = Literal["==", "!=", "<", ">"]


class Comparison(msgspec.Struct, frozen=True):
    """One condition of a transaction. Made by `version(key) == 0` and its like. A missing key has version,
    create_revision and mod_revision 0, and its value compares false with everything."""

    key: str
    target: CompareTarget
    operator: CompareOperator
    operand: bytes | int


class _Operand:
    """Left side of a comparison; the operators make the `Comparison`, as in the etcd3 package."""

    __slots__ = ("_key", "_target")

    def __init__(self, key: str, target: CompareTarget) -> None:
        self._key = key
        self._target: CompareTarget = target

    __hash__ = None  # type: ignore[assignment]  # == does not compare

    def __eq__(self, operand: bytes | int) -> Comparison:  # type: ignore[override]
        return Comparison(self._key, self._target, "==", operand)

    def __ne__(self, operand: bytes | int) -> Comparison:  # type: ignore[override]
        return Comparison(self._key, self._target, "!=", operand)

    def __lt__(self, operand: bytes | int) -> Comparison:
        return Comparison(self._key, self._target, "<", operand)

    def __gt__(self, operand: bytes | int) -> Comparison:
        return Comparison(self._key, self._target, ">", operand)


def value(key: str) -> _Operand:
    """The value of a key, to be compared: ``value(key) == b"..."``."""
    return _Operand(key, "value")


def version(key: str) -> _Operand:
    """The version of a key, to be compared: ``version(key) == 0`` holds when it does not exist."""
    return _Operand(key, "version")


def create_revision(key: str) -> _Operand:
    """The revision that created a key, to be compared: ``create_revision(key) == n``."""
    return _Operand(key, "create_revision")


def mod_revision(key: str) -> _Operand:
    """The revision of the last change of a key, to be compared: ``mod_revision(key) == n``."""
    return _Operand(key, "mod_revision")


class Put(msgspec.Struct, frozen=True):
    """Write a key, in a transaction."""

    key: str
    value: bytes
    lease: int = 0


class Delete(msgspec.Struct, frozen=True):
    """Delete a key (or, with `prefix`, everything that begins with it), in a transaction."""

    key: str
    prefix: bool = False


class Get(msgspec.Struct, frozen=True):
    """Read a key (or, with `prefix`, everything that begins with it), in a transaction."""

    key: str
    prefix: bool = False


Operation = Put | Delete | Get

# --- ports -----------------------------------------------------------------------------------------------------


class Lease(Protocol):
    """A lease that is kept alive in the background until `close` or `revoke`.

    The store is the judge of a lease's life: `lost` is set when it said that the lease is gone. A holder that must not
    outlive its lease (a leader) goes by `valid_until` instead, which needs no answer.
    """

    @property
    def id(self) -> int:
        """The store's number of the lease."""
        ...

    @property
    def ttl(self) -> float:
        """Seconds that the store granted; it may be more than was asked for (least: 2 s)."""
        ...

    @property
    def lost(self) -> asyncio.Event:
        """Set, for good, once the store has said that the lease is gone."""
        ...

    @property
    def acknowledged_at(self) -> float:
        """CLOCK_BOOTTIME seconds at the *sending* of the last keepalive (or grant) that the store acknowledged."""
        ...

    @property
    def valid_until(self) -> float:
        """CLOCK_BOOTTIME seconds before which the lease cannot have expired: acknowledged_at + ttl; 0 once lost."""
        ...

    async def refresh(self) -> float:
        """Send a keepalive now. Returns the TTL in seconds.

        Raises:
            LeaseLost: the store says that it is gone.
            StoreUnavailable: no answer in time.
        """
        ...

    async def revoke(self) -> None:
        """Stop keeping it alive and end it, with all its keys. One that is gone already is no error."""
        ...

    async def close(self) -> None:
        """Stop keeping it alive; it ends by itself after the TTL."""
        ...


class Watch(Protocol):
    """An endless iterator of batches. It reconnects, resumes and re-lists by itself, for ever; `aclose` ends it."""

    @property
    def connected(self) -> bool:
        """True while the store answers on this watch."""
        ...

    def __aiter__(self) -> AsyncIterator[WatchBatch]: ...

    async def __anext__(self) -> WatchBatch: ...

    async def aclose(self) -> None:
        """End the watch; a pending `__anext__` raises StopAsyncIteration."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


class Store(Protocol):
    """A linearizable key-value store with leases and watches.

    `timeout` is in seconds for the whole call, retries included; None takes the store's default. All methods raise
    StoreUnavailable, AuthFailed or StoreError; writes also NoSpace and LeaseLost.
    """

    async def get(self, key: str, *, timeout: float | None = None) -> KeyValue | None:
        """The key as it is now, or None."""
        ...

    async def get_prefix(self, prefix: str, *, revision: int = 0, keys_only: bool = False, timeout: float | None = None) -> Listing:
        """All keys that begin with `prefix`, at one revision (0: now), in key order.

        Raises:
            Compacted: `revision` is gone.
        """
        ...

    async def next_keys(self, prefix: str, after: str, limit: int, *, timeout: float | None = None) -> tuple[str, ...]:
        """At most `limit` (> 0) keys that begin with `prefix`, in key order from behind `prefix` + `after` on, and no values."""
        ...

    async def put(self, key: str, value: bytes, *, lease: Lease | int = 0, timeout: float | None = None) -> int:
        """Write a key; returns the revision."""
        ...

    async def delete(self, key: str, *, timeout: float | None = None) -> bool:
        """Delete a key; True when it existed."""
        ...

    async def delete_prefix(self, prefix: str, *, timeout: float | None = None) -> int:
        """Delete all keys that begin with `prefix`; returns their number."""
        ...

    async def transaction(
        self,
        compare: Sequence[Comparison],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        *,
        timeout: float | None = None,
    ) -> TransactionResult:
        """Run `success` when all comparisons hold, else `failure`, atomically.

        Raises:
            RequestTooLarge: more than MAX_OPERATIONS operations or MAX_REQUEST_BYTES bytes.
        """
        ...

    async def put_if_not_exists(self, key: str, value: bytes, *, lease: Lease | int = 0, timeout: float | None = None) -> bool:
        """Create a key; False when it exists already. See `cas.create` for one that survives a lost answer."""
        ...

    async def replace(self, key: str, initial_value: bytes, new_value: bytes, *, timeout: float | None = None) -> bool:
        """Swap a key's value if it is `initial_value`; False when it is not. See `cas.swap` for one by revision."""
        ...

    async def lease(self, ttl: float, *, keep_alive: bool = True, timeout: float | None = None) -> Lease:
        """Grant a lease of `ttl` seconds (at least 2) and, unless told otherwise, keep it alive from now on."""
        ...

    def watch_prefix(self, prefix: str, *, start_revision: int = 0) -> Watch:
        """Follow all changes under `prefix`.

        With start_revision 0 the first batch is a snapshot of what is there (it may be empty), then come the changes.
        With a start_revision only the changes from that revision on; if it was compacted already, a snapshot.
        """
        ...

    async def compact(self, revision: int, *, timeout: float | None = None) -> None:
        """Forget history before `revision`."""
        ...

    async def status(self, *, timeout: float | None = None) -> StoreStatus:
        """Health of the store."""
        ...

    async def close(self) -> None:
        """End watches and keepalives of this client and free its connections. Leases are not revoked."""
        ...
