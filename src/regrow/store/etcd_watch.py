"""A watch on etcd that survives restarts, compactions, cut-off members and silent proxies."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, Self

import grpc
import grpc.aio

from regrow.store import connection as rpc
from regrow.store import etcd_rpc_pb2 as pb
from regrow.store.base import AuthFailed, Compacted, Event, KeyValue, Listing, StoreError, StoreUnavailable, WatchBatch
from regrow.store.connection import Connection, translate
from regrow.store.rules import difference, prefix_end
from regrow.store.stream import TimedStream

log = logging.getLogger("regrow.store")

_QUEUE_BATCHES = 64
"""Batches that wait for a slow consumer; then the stream is not read any more and etcd holds the backlog."""


@dataclasses.dataclass(frozen=True)
class WatchLimits:
    """Time limits of watches, in seconds."""

    quiet: float = 5.0
    """A stream that was silent for so long is asked for its progress."""
    answer: float = 5.0
    """It must answer within this, else it is dead."""
    repair: float = 300.0
    """A full listing each so often finds what was missed, whatever the cause. 0: never."""


class _Lister(Protocol):
    async def get_prefix(self, prefix: str, *, revision: int = 0, keys_only: bool = False, timeout: float | None = None) -> Listing: ...


class EtcdWatch:
    """`Watch` on etcd.

    Resumes from the last *event's* mod_revision + 1, after the whole response was handled, never from a header's revision
    (which may be ahead of the events). After a compaction, and when the store's history went back (restored from a snapshot,
    or emptied), it lists anew and delivers the difference.
    """

    def __init__(
        self,
        connection: Connection,
        lister: _Lister,
        prefix: str,
        start_revision: int,
        limits: WatchLimits,
        *,
        on_close: Callable[[EtcdWatch], None],
    ) -> None:
        self._connection = connection
        self._lister = lister
        self._prefix = prefix
        self._limits = limits
        self._on_close = on_close
        self._next = start_revision
        self._known: dict[str, int] | None = {} if start_revision == 0 else None
        self._queue: asyncio.Queue[WatchBatch | StoreError | None] = asyncio.Queue(_QUEUE_BATCHES)
        self._task: asyncio.Task[None] | None = None
        self._connected = False
        self._closed = False
        self._logins = 1

    @property
    def connected(self) -> bool:
        """See `Watch.connected`."""
        return self._connected

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._run(), name=f"watch-{self._prefix}")

    def __aiter__(self) -> AsyncIterator[WatchBatch]:
        return self

    async def __anext__(self) -> WatchBatch:
        if self._closed and self._queue.empty():
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, WatchBatch):
            return item
        self._closed = True
        if item is None:
            raise StopAsyncIteration
        raise item

    async def aclose(self) -> None:
        """See `Watch.aclose`."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        while not self._queue.empty():
            self._queue.get_nowait()
        self._closed = True
        self._queue.put_nowait(None)
        self._on_close(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # --- the pump

    async def _run(self) -> None:
        pause = 0.05
        while True:
            before = self._next
            try:
                await self._follow()
            except Compacted:
                log.warning("watch prefix=%s revision=%d is gone, listing anew", self._prefix, self._next)
                self._next = 0
                continue
            except StoreUnavailable as error:
                log.info("watch prefix=%s interrupted: %s", self._prefix, error.what)
            except StoreError as error:
                await self._queue.put(error)
                return
            finally:
                self._connected = False
            pause = 0.05 if self._next > before else min(1.0, pause * 2)
            await asyncio.sleep(pause * random.uniform(0.7, 1.0))  # noqa: S311  (spreads reconnections)

    async def _follow(self) -> None:
        """List if need be, then read one stream until it fails."""
        if self._next == 0:
            await self._list(always=True)
        elif self._known is None:
            self._known = await self._known_before(self._next)
        stream = await self._open()
        try:
            await self._read(stream)
        except grpc.aio.AioRpcError as error:
            self._connection.give_up_on(stream.endpoint)
            raise translate(error, stream.endpoint) from error
        except StoreUnavailable:
            self._connection.give_up_on(stream.endpoint)
            raise
        finally:
            await stream.close()

    async def _open(self) -> TimedStream[pb.WatchRequest, pb.WatchResponse]:
        endpoint = self._connection.endpoint
        try:
            return await TimedStream.open(self._connection, rpc.WATCH, limit=self._limits.answer)
        except grpc.aio.AioRpcError as error:  # the login failed
            self._connection.give_up_on(endpoint)
            raise translate(error, endpoint) from error

    async def _list(self, *, always: bool) -> None:
        listing = await self._lister.get_prefix(self._prefix)
        events = difference(self._known or {}, listing)
        if events or always:
            await self._deliver(WatchBatch(listing.revision, events, listing.items))
        self._next = listing.revision + 1

    async def _known_before(self, revision: int) -> dict[str, int]:
        """What a caller who starts at `revision` has seen, so that a later difference can name what was deleted."""
        try:
            listing = await self._lister.get_prefix(self._prefix, revision=revision - 1, keys_only=True)
        except Compacted:
            return {}
        return {item.key: item.mod_revision for item in listing.items}

    async def _read(self, stream: TimedStream[pb.WatchRequest, pb.WatchResponse]) -> None:
        create = pb.WatchCreateRequest(
            key=self._prefix.encode() or b"\0", range_end=prefix_end(self._prefix), start_revision=self._next, fragment=True
        )
        await stream.write(pb.WatchRequest(create_request=create), self._limits.answer)
        loop = asyncio.get_running_loop()
        repair_at = loop.time() + (self._limits.repair or float("inf"))
        fragments: list[Event] = []
        while True:
            response = await self._next_response(stream)
            if response.canceled:
                raise self._canceled(response, stream.endpoint)
            if response.created and response.header.revision < self._next - 1:
                await self._check_history()
            self._connected = True
            fragments.extend(_event(event) for event in response.events)
            if response.fragment:
                continue
            if fragments:
                self._logins = 1
                last = fragments[-1].item.mod_revision
                await self._deliver(WatchBatch(last, tuple(fragments)))
                self._next = last + 1
                fragments.clear()
            if loop.time() >= repair_at:
                await self._list(always=False)
                return

    async def _check_history(self) -> None:
        """A member is behind what we have seen. It may catch up; or the store was emptied, or restored from a snapshot."""
        listing = await self._lister.get_prefix(self._prefix)
        if listing.revision >= self._next - 1:
            return
        log.warning("watch prefix=%s: the store's history went back from %d to %d", self._prefix, self._next - 1, listing.revision)
        # revisions are counted anew, so an equal one means nothing: all that is there is news
        self._known = dict.fromkeys(self._known or {}, 0)
        raise Compacted("the store's history went back", where=f"etcd {self._connection.endpoint}")

    async def _next_response(self, stream: TimedStream[pb.WatchRequest, pb.WatchResponse]) -> pb.WatchResponse:
        response = await stream.read(self._limits.quiet if self._connected else self._limits.answer)
        if response is None and self._connected:
            await stream.write(pb.WatchRequest(progress_request=pb.WatchProgressRequest()), self._limits.answer)
            response = await stream.read(self._limits.answer)
        if response is None:
            raise StoreUnavailable("the watch is silent", where=f"etcd {stream.endpoint}", hint="is it stopped, or cut off?")
        return response

    def _canceled(self, response: pb.WatchResponse, endpoint: str) -> StoreError:
        where = f"etcd {endpoint}"
        if response.compact_revision:
            return Compacted("the watch fell behind", where=where, compact_revision=response.compact_revision)
        reason = response.cancel_reason or "canceled by the server"
        lowered = reason.lower()
        if "permission denied" not in lowered and "permissiondenied" not in lowered and "auth" not in lowered:
            return StoreUnavailable(reason, where=where)
        # a member that restarted has forgotten the token, and says no more than this
        if self._logins and self._connection.access.user:
            self._logins -= 1
            self._connection.forget_login()
            return StoreUnavailable(reason, where=where)
        return AuthFailed(reason, where=where, hint=f"the role needs read permission on the prefix {self._prefix}")

    async def _deliver(self, batch: WatchBatch) -> None:
        self._note(batch.events)
        await self._queue.put(batch)

    def _note(self, events: Sequence[Event]) -> None:
        known = self._known = self._known if self._known is not None else {}
        for event in events:
            if event.kind == "put":
                known[event.key] = event.item.mod_revision
            else:
                known.pop(event.key, None)


def _event(event: pb.Event) -> Event:
    kv = event.kv
    if event.type == pb.Event.DELETE:
        return Event("delete", KeyValue(kv.key.decode(), b"", 0, kv.mod_revision, 0))
    return Event("put", KeyValue(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease))
