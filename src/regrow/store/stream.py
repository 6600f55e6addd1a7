"""Reading and writing grpc streams with time limits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from regrow.store.base import StoreUnavailable
from regrow.store.connection import Connection, Method

Request = TypeVar("Request")
Response = TypeVar("Response")
T = TypeVar("T")


class TimedStream(Generic[Request, Response]):
    """A bidirectional stream on one endpoint whose reads can time out without ending it.

    (Cancelling a pending read of grpc.aio cancels the whole call; so a read goes on in a task of its own until it is done.)
    """

    def __init__(self, call: grpc.aio.StreamStreamCall[Request, Response], endpoint: str) -> None:
        self._call = call
        self._reading: asyncio.Task[Any] | None = None
        self.endpoint = endpoint

    @classmethod
    async def open(cls, connection: Connection, method: Method[Request, Response], *, limit: float) -> TimedStream[Request, Response]:
        """Open a stream on the endpoint in use.

        Args:
            limit: seconds that a login may take.
        """
        endpoint = connection.endpoint
        return cls(await connection.stream(method, endpoint, limit=limit), endpoint)

    async def write(self, request: Request, limit: float) -> None:
        """Send a message; a stream that takes none within `limit` seconds is dead.

        Raises:
            StoreUnavailable: not accepted in time.
            grpc.aio.AioRpcError: the stream has ended.
        """
        task = asyncio.ensure_future(self._started(self._call.write(request)))
        try:
            done, _ = await asyncio.wait({task}, timeout=limit)
        finally:
            if not task.done():
                self.cancel()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if not done:
            raise self._silent(limit)
        self._unwrap(task)

    async def read(self, limit: float) -> Response | None:
        """The next message, or None when none came within `limit` seconds (the stream stays usable).

        Raises:
            StoreUnavailable: the server ended the stream.
            grpc.aio.AioRpcError: the stream failed.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._started(self._call.read()))
        done, _ = await asyncio.wait({self._reading}, timeout=limit)
        if not done:
            return None
        task, self._reading = self._reading, None
        message = self._unwrap(task)
        if message is grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
            raise StoreUnavailable("the server ended the stream", where=f"etcd {self.endpoint}")
        return message

    async def exchange(self, request: Request, limit: float) -> Response:
        """Send a message and take the next one that comes back, within `limit` seconds.

        Raises:
            StoreUnavailable: no answer in time.
            grpc.aio.AioRpcError: the stream failed.
        """
        await self.write(request, limit)
        message = await self.read(limit)
        if message is None:
            raise self._silent(limit)
        return message

    async def close(self) -> None:
        """End the call and what still reads from it."""
        self.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None

    def cancel(self) -> None:
        """End the call at once."""
        self._call.cancel()

    def _unwrap(self, task: asyncio.Task[T]) -> T:
        """The task's result. grpc.aio says CancelledError when the *call* was cancelled, InvalidStateError when it had ended."""
        where = f"etcd {self.endpoint}"
        if task.cancelled():
            raise StoreUnavailable("the stream was closed", where=where)
        try:
            return task.result()
        except asyncio.InvalidStateError as error:
            raise StoreUnavailable("the stream had ended", where=where) from error

    @staticmethod
    async def _started(operation: Coroutine[Any, Any, T]) -> T:
        return await operation

    def _silent(self, limit: float) -> StoreUnavailable:
        return StoreUnavailable(
            f"no answer on a stream within {limit:.1f} s",
            where=f"etcd {self.endpoint}",
            hint="is it stopped, or cut off?",
            maybe_applied=True,
        )
