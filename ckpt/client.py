"""The agent's end of the writer's socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from regrow import wire
from regrow.ckpt.protocol import (
    Acknowledged,
    ControllerHello,
    CopyTo,
    Listening,
    Locate,
    Located,
    QueryStatus,
    ToController,
    WriterStatus,
)
from regrow.errors import OperationalError
from regrow.wire import ShardsDurable, ShardsFailed


class WriterControl:
    """A controller's connection. Iterate `messages`, acknowledge each report when the committing agent has it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, path: str, node: str) -> WriterControl:
        """Connect and introduce ourselves.

        Raises:
            OperationalError: no writer listens there.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=wire.MAX_MESSAGE_BYTES)
        except OSError as error:
            raise OperationalError(f"no checkpoint writer: {error}", where=path, hint="the agent starts it again by itself") from error
        control = cls(reader, writer)
        await control._send(ControllerHello(node=node))
        return control

    async def messages(self) -> AsyncIterator[ShardsDurable | ShardsFailed | WriterStatus | Listening | Locate]:
        """All messages until the writer is gone."""
        while line := await self._reader.readline():
            message = wire.decode(line, ToController)
            if not isinstance(message, wire.Unknown):
                yield message

    async def acknowledge(self, report: ShardsDurable | ShardsFailed) -> None:
        """The committing agent has this report; the writer may forget it."""
        await self._send(Acknowledged(job=report.job, generation=report.generation, step=report.step))

    async def query_status(self) -> None:
        """Ask for a WriterStatus, which comes as a message."""
        await self._send(QueryStatus())

    async def tell(self, message: CopyTo | Located) -> None:
        """Where copies go, and where a node's writer is."""
        await self._send(message)

    async def close(self) -> None:
        """Close the connection. The writer keeps what was not acknowledged."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return

    async def _send(self, message: msgspec.Struct) -> None:
        self._writer.write(wire.encode(message))
        await self._writer.drain()
