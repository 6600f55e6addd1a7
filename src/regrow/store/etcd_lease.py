"""A lease on etcd, kept alive on a stream of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from regrow.clock import Clock
from regrow.store import connection as rpc
from regrow.store import etcd_rpc_pb2 as pb
from regrow.store.base import LeaseLost, StoreError, StoreUnavailable
from regrow.store.connection import Connection, is_stale_login, translate
from regrow.store.stream import TimedStream

log = logging.getLogger("regrow.store")

_KeepAliveStream = TimedStream[pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse]


class EtcdLease:
    """`Lease` on etcd. `start` begins the keepalives: each third of the TTL, sooner after a failure, on whatever endpoint answers.

    They go on past the TTL when the store is away: a lease starts anew in full when etcd restarts or changes its leader, so
    only the store can say that it is gone.
    """

    def __init__(
        self, connection: Connection, clock: Clock, number: int, ttl: float, sent_at: float, *, on_close: Callable[[EtcdLease], None]
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._id = number
        self._ttl = float(ttl)
        self._acknowledged_at = sent_at
        self._on_close = on_close
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stream: _KeepAliveStream | None = None
        self._turn = asyncio.Lock()

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
        """See `Lease.acknowledged_at`."""
        return self._acknowledged_at

    @property
    def valid_until(self) -> float:
        """See `Lease.valid_until`."""
        return 0.0 if self._lost.is_set() else self._acknowledged_at + self._ttl

    def start(self) -> None:
        """Begin to keep it alive, with a first keepalive at once."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep_alive(), name=f"lease-{self._id:x}")

    async def refresh(self) -> float:
        """See `Lease.refresh`."""
        if self._lost.is_set():
            raise self._gone()
        async with self._turn:
            limit = min(2.0, max(0.5, self._ttl / 3))
            sent_at = self._clock.boottime()
            try:
                if self._stream is None:
                    self._stream = await TimedStream.open(self._connection, rpc.LEASE_KEEP_ALIVE, limit=limit)
                answer = await self._stream.exchange(pb.LeaseKeepAliveRequest(id=self._id), limit)
            except grpc.aio.AioRpcError as error:
                if is_stale_login(error):
                    self._connection.forget_login()
                raise await self._failed(translate(error, self._connection.endpoint)) from error
            except StoreUnavailable as error:
                raise await self._failed(error) from error
            except asyncio.CancelledError:
                await self._drop_stream()
                raise
            if answer.ttl <= 0:
                self._lost.set()
                raise self._gone()
            self._ttl = float(answer.ttl)
            self._acknowledged_at = max(self._acknowledged_at, sent_at)
            return self._ttl

    async def revoke(self) -> None:
        """See `Lease.revoke`."""
        await self.close()
        if self._lost.is_set():
            return
        with contextlib.suppress(LeaseLost):
            await self._connection.call(rpc.LEASE_REVOKE, pb.LeaseRevokeRequest(id=self._id), retry=True)
        self._lost.set()

    async def close(self) -> None:
        """See `Lease.close`."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._drop_stream()
        self._on_close(self)

    async def _keep_alive(self) -> None:
        pause = 0.05
        while not self._lost.is_set():
            try:
                ttl = await self.refresh()
                pause = 0.05
                await asyncio.sleep(ttl / 3)
            except LeaseLost:
                log.warning("lease=%x lost, seconds_since_acknowledged=%.1f", self._id, self._clock.boottime() - self._acknowledged_at)
            except StoreError as error:
                log.info("lease=%x keepalive failed: %s", self._id, error.what)
                await asyncio.sleep(pause)
                pause = min(0.5, pause * 2)
        await self._drop_stream()
        self._on_close(self)

    async def _failed(self, error: StoreError) -> StoreError:
        endpoint = self._stream.endpoint if self._stream else self._connection.endpoint
        await self._drop_stream()
        if isinstance(error, StoreUnavailable):
            self._connection.give_up_on(endpoint)
        if isinstance(error, LeaseLost):
            self._lost.set()
        return error

    async def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()

    def _gone(self) -> LeaseLost:
        return LeaseLost(f"lease {self._id:x} is gone", where=f"etcd {self._connection.endpoint}", hint="grant a new one")
