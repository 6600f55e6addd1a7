"""A TCP relay between nodes and what they talk to, with weather: cut, one direction silent, delay, a limited rate.

What a lost packet does to TCP is that nothing more arrives until it is sent again: a silent direction holds bytes back and
lets them go when it is over. A cut ends connections and takes no new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Generator
from typing import Literal

Direction = Literal["up", "down"]
"""up: from the node."""
_CHUNK = 65_536
_FIRST_LINE_BYTES = 16 * 1024 * 1024


class Weather:
    """What the link of one node is like now. Times in seconds, rate in bytes a second (0: unlimited)."""

    def __init__(self) -> None:
        self.cut = False
        self.silent: frozenset[Direction] = frozenset()
        self.delay_seconds = 0.0
        self.rate = 0.0
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()

    def set(self, *, cut: bool = False, silent: frozenset[Direction] = frozenset(), delay_seconds: float = 0.0, rate: float = 0.0) -> None:
        """Change it; without arguments it is fine again."""
        self.cut, self.silent, self.delay_seconds, self.rate = cut, silent, delay_seconds, rate
        if cut:
            for writer in self._writers:
                writer.transport.abort()
        self._changed.set()
        self._changed = asyncio.Event()

    async def passage(self, direction: Direction, size: int) -> None:
        """Wait until so many bytes may pass."""
        while direction in self.silent:
            await self._changed.wait()
        if self.rate > 0:
            await asyncio.sleep(size / self.rate)

    @contextlib.contextmanager
    def connection(self, *writers: asyncio.StreamWriter) -> Generator[None]:
        """While a connection lasts: a cut ends it."""
        self._writers.update(writers)
        try:
            yield
        finally:
            self._writers.difference_update(writers)


class Relay:
    """Listens on one address and passes connections on to another.

    Args:
        target: where to, asked for at each connection.
        weather: of a node.
        node: whose connections these are; empty: the first line says it, as JSON with a field `node` (an agent's greeting).
    """

    def __init__(self, target: Callable[[], tuple[str, int]], weather: Callable[[str], Weather], node: str = "") -> None:
        self._target = target
        self._weather = weather
        self._node = node
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_FIRST_LINE_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
                await self._relay(reader, writer)
        except asyncio.CancelledError:
            pass  # the relay stops
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = b""
        node = self._node
        if not node:
            first = await reader.readuntil(b"\n")
            node = str(json.loads(first).get("node", ""))
        weather = self._weather(node)
        if weather.cut:
            return
        far_reader, far_writer = await asyncio.open_connection(*self._target())
        try:
            with weather.connection(writer, far_writer):
                await _both(
                    _pump(reader, far_writer, weather, "up", first),
                    _pump(far_reader, writer, weather, "down", b""),
                )
        finally:
            far_writer.transport.abort()


async def _both(*pumps: Awaitable[None]) -> None:
    """Until one ends: half-closed connections are closed, as by a middlebox."""
    tasks = [asyncio.ensure_future(pump) for pump in pumps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, weather: Weather, direction: Direction, first: bytes) -> None:
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)

    async def deliver() -> None:
        while True:
            due, data = await queue.get()
            if not data:
                return
            await asyncio.sleep(max(0.0, due - loop.time()))
            await weather.passage(direction, len(data))
            writer.write(data)
            await writer.drain()

    async def collect() -> None:
        data = first or await reader.read(_CHUNK)
        while data:
            await queue.put((loop.time() + weather.delay_seconds, data))
            data = await reader.read(_CHUNK)
        await queue.put((loop.time(), b""))

    collecting = asyncio.ensure_future(collect())
    try:
        await deliver()
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
