"""A TCP relay between a client and an etcd that can cut, stall and come back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self


class Relay:
    """Listens on a loopback port of its own. Everything that it does wrong is an attribute or a method.

    stalled: bytes are accepted and go nowhere, new connections are accepted and never answered.
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self.num_connections = 0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stall(self) -> None:
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Abort all connections; new ones are accepted as before."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def close_port(self) -> None:
        """Nobody listens any more, and all connections are gone."""
        assert self._server is not None
        self._server.close()
        self.cut()

    async def open_port(self) -> None:
        """Listen again, on the same port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def __aenter__(self) -> Self:
        await self.open_port()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close_port()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            await self._flowing.wait()
            far_reader, far = await asyncio.open_connection("127.0.0.1", self.target_port)
            self._writers.add(far)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far))
                group.create_task(self._pump(far_reader, writer))
        except (OSError, ExceptionGroup):
            pass
        finally:
            for one in (writer, far):
                if one is not None:
                    self._writers.discard(one)
                    one.transport.abort()
                    with contextlib.suppress(OSError):
                        await one.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError("closed")
