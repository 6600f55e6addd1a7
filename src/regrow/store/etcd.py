"""`Store` on a real etcd (3.4 and later). Why not an existing client: docs/adr/0001."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence

from regrow.clock import Clock, SystemClock
from regrow.store import connection as rpc
from regrow.store import etcd_rpc_pb2 as pb
from regrow.store.base import (
    Compacted,
    Comparison,
    Delete,
    Get,
    KeyValue,
    Lease,
    Listing,
    Operation,
    OperationResult,
    Put,
    RequestTooLarge,
    StoreError,
    StoreStatus,
    TransactionResult,
    value,
    version,
)
from regrow.store.connection import Access, Connection
from regrow.store.etcd_lease import EtcdLease
from regrow.store.etcd_watch import EtcdWatch, WatchLimits
from regrow.store.rules import LEAST_TTL_SECONDS, check_size, lease_id, prefix_end

PAGE_KEYS = 512
"""Keys per page of a listing; fewer when they are so big that a page does not fit into one message."""

_LISTING_ATTEMPTS = 5
_TARGETS = {
    "version": pb.Compare.VERSION,
    "create_revision": pb.Compare.CREATE,
    "mod_revision": pb.Compare.MOD,
    "value": pb.Compare.VALUE,
}
_OPERATORS = {"==": pb.Compare.EQUAL, "!=": pb.Compare.NOT_EQUAL, "<": pb.Compare.LESS, ">": pb.Compare.GREATER}


class EtcdStore:
    """A client of one etcd cluster. Belongs to the event loop it is used in.

    Args:
        access: endpoints and credentials.
        timeout: default limit of a call, in seconds, all attempts included.
        clock: for the instants of keepalives.
        watch_limits: when a silent watch counts as dead, and how often a watch is repaired by a full listing.
    """

    def __init__(
        self, access: Access, *, timeout: float = 6.0, clock: Clock | None = None, watch_limits: WatchLimits | None = None
    ) -> None:
        self._connection = Connection(access, timeout=timeout)
        self._clock = clock or SystemClock()
        self._watch_limits = watch_limits or WatchLimits()
        self._watches: set[EtcdWatch] = set()
        self._leases: set[EtcdLease] = set()

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self._connection.endpoint

    async def get(self, key: str, *, timeout: float | None = None) -> KeyValue | None:
        """See `Store.get`."""
        answer = await self._connection.call(rpc.RANGE, pb.RangeRequest(key=key.encode()), timeout=timeout, retry=True)
        return key_value(answer.kvs[0]) if answer.kvs else None

    async def get_prefix(self, prefix: str, *, revision: int = 0, keys_only: bool = False, timeout: float | None = None) -> Listing:
        """See `Store.get_prefix`. Read in pages, all at the revision of the first one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._connection.timeout if timeout is None else timeout)
        for attempt in range(_LISTING_ATTEMPTS):
            try:
                return await self._pages(prefix, revision, deadline, keys_only=keys_only)
            except Compacted:
                # history was compacted between two pages: begin again at a newer revision
                if revision or attempt == _LISTING_ATTEMPTS - 1:
                    raise
        raise AssertionError("the loop returns or raises")

    async def _pages(self, prefix: str, revision: int, deadline: float, *, keys_only: bool) -> Listing:
        loop = asyncio.get_running_loop()
        start, end, limit = prefix.encode() or b"\0", prefix_end(prefix), PAGE_KEYS
        items: list[KeyValue] = []
        while True:
            request = pb.RangeRequest(key=start, range_end=end, limit=limit, revision=revision, keys_only=keys_only)
            try:
                answer = await self._connection.call(rpc.RANGE, request, timeout=max(0.05, deadline - loop.time()), retry=True)
            except RequestTooLarge:
                if limit == 1:
                    raise
                limit = max(1, limit // 8)
                continue
            revision = revision or answer.header.revision
            items.extend(key_value(item) for item in answer.kvs)
            if not answer.more or not answer.kvs:
                return Listing(revision, tuple(items))
            start = answer.kvs[-1].key + b"\0"

    async def next_keys(self, prefix: str, after: str, limit: int, *, timeout: float | None = None) -> tuple[str, ...]:
        """See `Store.next_keys`."""
        start = (prefix + after).encode() + b"\0"
        request = pb.RangeRequest(key=start, range_end=prefix_end(prefix), limit=limit, keys_only=True)
        answer = await self._connection.call(rpc.RANGE, request, timeout=timeout, retry=True)
        return tuple(item.key.decode() for item in answer.kvs)

    async def put(self, key: str, value: bytes, *, lease: Lease | int = 0, timeout: float | None = None) -> int:
        """See `Store.put`."""
        check_size((), (Put(key, value),), ())
        request = pb.PutRequest(key=key.encode(), value=value, lease=lease_id(lease))
        return (await self._connection.call(rpc.PUT, request, timeout=timeout)).header.revision

    async def delete(self, key: str, *, timeout: float | None = None) -> bool:
        """See `Store.delete`."""
        answer = await self._connection.call(rpc.DELETE_RANGE, pb.DeleteRangeRequest(key=key.encode()), timeout=timeout)
        return answer.deleted > 0

    async def delete_prefix(self, prefix: str, *, timeout: float | None = None) -> int:
        """See `Store.delete_prefix`."""
        request = pb.DeleteRangeRequest(key=prefix.encode() or b"\0", range_end=prefix_end(prefix))
        return (await self._connection.call(rpc.DELETE_RANGE, request, timeout=timeout)).deleted

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
        request = pb.TxnRequest(
            compare=[_comparison(one) for one in compare],
            success=[_operation(one) for one in success],
            failure=[_operation(one) for one in failure],
        )
        reads_only = all(isinstance(one, Get) for one in (*success, *failure))
        answer = await self._connection.call(rpc.TXN, request, timeout=timeout, retry=reads_only)
        return TransactionResult(answer.succeeded, answer.header.revision, tuple(_result(one) for one in answer.responses))

    async def put_if_not_exists(self, key: str, value: bytes, *, lease: Lease | int = 0, timeout: float | None = None) -> bool:
        """See `Store.put_if_not_exists`."""
        return (await self.transaction((version(key) == 0,), (Put(key, value, lease_id(lease)),), timeout=timeout)).succeeded

    async def replace(self, key: str, initial_value: bytes, new_value: bytes, *, timeout: float | None = None) -> bool:
        """See `Store.replace`."""
        return (await self.transaction((value(key) == initial_value,), (Put(key, new_value),), timeout=timeout)).succeeded

    async def lease(self, ttl: float, *, keep_alive: bool = True, timeout: float | None = None) -> EtcdLease:
        """See `Store.lease`. etcd counts whole seconds: the TTL is rounded up."""
        seconds = max(math.ceil(ttl), math.ceil(LEAST_TTL_SECONDS))
        sent_at = self._clock.boottime()
        # an answer that got lost leaves a lease behind that nobody keeps alive: harmless
        answer = await self._connection.call(rpc.LEASE_GRANT, pb.LeaseGrantRequest(ttl=seconds), timeout=timeout, retry=True)
        if answer.error:
            raise StoreError(f"no lease was granted: {answer.error}", where=f"etcd {self.endpoint}")
        lease = EtcdLease(self._connection, self._clock, answer.id, answer.ttl, sent_at, on_close=self._leases.discard)
        self._leases.add(lease)
        if keep_alive:
            lease.start()
        return lease

    def watch_prefix(self, prefix: str, *, start_revision: int = 0) -> EtcdWatch:
        """See `Store.watch_prefix`."""
        watch = EtcdWatch(self._connection, self, prefix, start_revision, self._watch_limits, on_close=self._watches.discard)
        self._watches.add(watch)
        watch.start()
        return watch

    async def compact(self, revision: int, *, timeout: float | None = None) -> None:
        """See `Store.compact`."""
        await self._connection.call(rpc.COMPACT, pb.CompactionRequest(revision=revision, physical=True), timeout=timeout, retry=True)

    async def status(self, *, timeout: float | None = None) -> StoreStatus:
        """See `Store.status`. Served by the member in use from its own knowledge, alarms of the whole cluster included."""
        answer = await self._connection.call(rpc.STATUS, pb.StatusRequest(), timeout=timeout, retry=True)
        endpoint = self.endpoint
        alarms = await self._connection.call(rpc.ALARM, pb.AlarmRequest(action=pb.AlarmRequest.GET), timeout=timeout, retry=True)
        names = tuple(sorted({pb.AlarmType.Name(alarm.alarm) for alarm in alarms.alarms}))
        header = answer.header
        return StoreStatus(endpoint, answer.version, answer.db_size, answer.leader, header.member_id, header.revision, names)

    async def clear_no_space(self, *, timeout: float = 30.0) -> None:
        """Make room as far as compaction can and clear the quota alarm: compact to now, defragment the member in use, disarm.

        Raises:
            StoreError: one of the three failed; the alarm may still be set.
        """
        revision = (await self.status(timeout=timeout)).revision
        with contextlib.suppress(Compacted):
            await self.compact(revision, timeout=timeout)
        await self._connection.call(rpc.DEFRAGMENT, pb.DefragmentRequest(), timeout=timeout)
        alarms = await self._connection.call(rpc.ALARM, pb.AlarmRequest(action=pb.AlarmRequest.GET), timeout=timeout, retry=True)
        for alarm in alarms.alarms:
            if alarm.alarm == pb.NOSPACE:
                request = pb.AlarmRequest(action=pb.AlarmRequest.DEACTIVATE, member_id=alarm.member_id, alarm=pb.NOSPACE)
                await self._connection.call(rpc.ALARM, request, timeout=timeout, retry=True)

    async def close(self) -> None:
        """See `Store.close`."""
        for watch in tuple(self._watches):
            await watch.aclose()
        for lease in tuple(self._leases):
            await lease.close()
        await self._connection.close()


def key_value(item: pb.KeyValue) -> KeyValue:
    """etcd's message as our value."""
    return KeyValue(item.key.decode(), item.value, item.create_revision, item.mod_revision, item.version, item.lease)


def _comparison(one: Comparison) -> pb.Compare:
    message = pb.Compare(key=one.key.encode(), target=_TARGETS[one.target], result=_OPERATORS[one.operator])
    setattr(message, one.target, one.operand)
    return message


def _operation(one: Operation) -> pb.RequestOp:
    key = one.key.encode()
    if isinstance(one, Put):
        return pb.RequestOp(request_put=pb.PutRequest(key=key, value=one.value, lease=one.lease))
    end = prefix_end(one.key) if one.prefix else b""
    if isinstance(one, Delete):
        return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key or b"\0", range_end=end))
    return pb.RequestOp(request_range=pb.RangeRequest(key=key or b"\0", range_end=end))


def _result(one: pb.ResponseOp) -> OperationResult:
    return OperationResult(tuple(key_value(item) for item in one.response_range.kvs), one.response_delete_range.deleted)
