"""S/agent.sock: lines of workers in, orders to workers out, and admin lines of `regrow chaos` and `regrow demo`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from regrow import wire
from regrow.agent.chaos import Inject, Injected

_log = logging.getLogger("regrow.agent.sockets")

_FROM_SOCKET = wire.WorkerHello | wire.WorkerPhase | wire.StepReport | wire.SaveReport | wire.RestoreFailed | wire.WorkerWatch | Inject


LOOK_SECONDS = 1.0
"""Between two looks at the socket's file."""


class _Worker:
    """A connected worker."""

    def __init__(self, generation: int, rank: int, writer: asyncio.StreamWriter) -> None:
        self.generation = generation
        self.rank = rank
        self.writer = writer
        self.ended = asyncio.Event()


class WorkerSocket:
    """Serves the socket. Lines of one worker are reported in order."""

    def __init__(self, path: Path, *, on_line: Callable[[Any], None], on_inject: Callable[[Inject], Awaitable[Injected]]) -> None:
        self._path = path
        self._on_line = on_line
        self._on_inject = on_inject
        self._workers: dict[tuple[int, int], _Worker] = {}
        self._watches: dict[tuple[int, int], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self._bound: tuple[int, int] | None = None
        self._clients: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Bind; a socket that an earlier agent left is replaced (the folder's lock says that it is dead)."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self._path), limit=wire.MAX_MESSAGE_BYTES)
        self._path.chmod(0o600)
        self._bound = _identity(self._path)

    async def keep_bound(self) -> None:
        """Bind anew when the file is gone or another one is in its place, until cancelled. What is connected stays so; nobody new could
        reach an agent whose socket was deleted."""
        failed = ""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._server is None or _identity(self._path) == self._bound:
                continue
            deaf = self._server
            try:
                await self.start()
            except OSError as error:
                if failed != str(error):
                    _log.warning("%s is gone and cannot be bound anew: %s", self._path, error)
                failed = str(error)
                continue
            failed = ""
            deaf.close()
            _log.warning("%s was gone: bound anew", self._path)

    async def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
            for client in list(self._clients):
                client.close()
            self._path.unlink(missing_ok=True)

    def tell(self, generation: int, control: wire.Control, ranks: frozenset[int] | None = None) -> int:
        """Send an order to connected workers of a generation. Returns how many."""
        line = wire.encode(control)
        told = 0
        for worker in self._workers.values():
            if worker.generation == generation and (ranks is None or worker.rank in ranks):
                worker.writer.write(line)
                told += 1
        return told

    def regroup(self, generation: int, rank: int, order: wire.Regroup) -> bool:
        """Tell a worker that can change its generation in place to do so. False: it has no connection for that."""
        watch = self._watches.pop((generation, rank), None)
        if watch is None:
            return False
        watch.write(wire.encode(order))
        return True

    def ask_gasp(self, generation: int, rank: int) -> bool:
        """Ask a worker to leave its state behind. False: it has no connection for that."""
        watch = self._watches.get((generation, rank))
        if watch is None:
            return False
        watch.write(wire.encode(wire.Gasp(generation=generation)))
        return True

    async def until_ended(self, generation: int, rank: int, limit_seconds: float) -> None:
        """Wait until all lines of a worker that is dead were read: its end of file, at most `limit_seconds`."""
        worker = self._workers.get((generation, rank))
        if worker is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_seconds):
                    await worker.ended.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker: _Worker | None = None
        self._clients.add(writer)
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                message = self._decode(line)
                if isinstance(message, wire.WorkerHello):
                    worker = _Worker(message.generation, message.rank, writer)
                    self._workers[(message.generation, message.rank)] = worker
                if isinstance(message, wire.WorkerWatch) and not message.changing:
                    self._watches[(message.generation, message.rank)] = writer
                if isinstance(message, Inject):
                    writer.write(wire.encode(await self._on_inject(message)))
                elif message is not None:
                    self._on_line(message)
        except (OSError, ValueError) as error:
            _log.info("worker connection ended: %s", error)
        finally:
            if worker is not None:
                worker.ended.set()
                if self._workers.get((worker.generation, worker.rank)) is worker:
                    del self._workers[(worker.generation, worker.rank)]
            for key in [key for key, watch in self._watches.items() if watch is writer]:
                del self._watches[key]
            self._clients.discard(writer)
            writer.close()

    def _decode(self, line: bytes) -> Any:
        try:
            message = wire.decode(line, _FROM_SOCKET)
        except msgspec.MsgspecError as error:
            _log.warning("line of a worker is not understood: %s", error)
            return None
        if isinstance(message, wire.Unknown):
            _log.warning("line of a worker is of unknown kind %s", message.kind)
            return None
        return message


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None: there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
