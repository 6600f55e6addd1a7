"""Agent to agent: what is durable on a node, told to the committing agent of the generation; and exchanges of known bytes (pairs.py).

A report is kept and sent again on every new connection until the committing agent has settled its step (committed, void
or refused): nothing is lost when either side restarts, and repeated reports are harmless.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from regrow import security, wire

_log = logging.getLogger("regrow.agent.peer")

_BACKOFF_SECONDS = (0.1, 2.0)
MAX_UNSETTLED = 64

Report = wire.ShardsDurable | wire.ShardsFailed
PairHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, wire.PairCheck], Awaitable[None]]


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="settled"):
    """The fate of a step is known: the reporting node may forget it."""

    job: str
    generation: int
    step: int
    outcome: Literal["committed", "void", "refused"]
    reason: str = ""


class PeerServer:
    """The committing agent's port."""

    def __init__(
        self,
        host: str,
        port: int,
        handle: Callable[[Report], Awaitable[Settled | None]],
        *,
        pair: PairHandler | None = None,
        tls: security.Tls | None = None,
    ) -> None:
        """`pair` takes a connection over when its other side asks for an exchange of known bytes."""
        self._host = host
        self._port = port
        self._handle = handle
        self._pair = pair
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.StreamWriter] = set()
        self.address = ""

    async def start(self, *, preferred_port: int = 0) -> None:
        """Bind: the port that was asked for, else the preferred one (an earlier agent's, which peers know), else any.

        Raises:
            OSError: the port that was asked for is in use.
        """
        ports = [self._port] if self._port else [preferred_port, 0] if preferred_port else [0]
        for port in ports:
            try:
                self._server = await asyncio.start_server(
                    self._serve, self._host, port, limit=wire.MAX_MESSAGE_BYTES, ssl=self._tls.listening if self._tls is not None else None
                )
                break
            except OSError:
                if port == ports[-1]:
                    raise
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    async def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
            for client in list(self._clients):
                client.close()

    def settle(self, settled: Settled) -> None:
        """Tell all that are connected."""
        for client in self._clients:
            client.write(wire.encode(settled))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        try:
            security.expect_role(writer, "node")
            while (line := await reader.readline()).endswith(b"\n"):
                message = wire.decode(line, wire.PeerMessage)
                if isinstance(message, wire.Unknown):
                    _log.warning("a peer sent something unknown: %s", message.kind)
                    continue
                if isinstance(message, wire.PairCheck):
                    if self._pair is not None:
                        await self._pair(reader, writer, message)
                    break
                settled = await self._handle(message)
                if settled is not None:
                    writer.write(wire.encode(settled))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            _log.info("peer connection ended: %s", error)
        finally:
            self._clients.discard(writer)
            writer.close()


class PeerClient:
    """Reports to one committing agent, for as long as it is the one."""

    def __init__(
        self,
        address: str,
        on_settled: Callable[[Settled], None],
        *,
        find: Callable[[], Awaitable[str]] | None = None,
        tls: security.Tls | None = None,
    ) -> None:
        """`find` tells where the committing agent is now, when it is not at `address` any more (empty: not known)."""
        self.address = address
        self._on_settled = on_settled
        self._find = find
        self._tls = tls
        self._unsettled: dict[tuple[str, int, int], Report] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    def report(self, report: Report) -> None:
        """Send, and keep until it is settled. Over `MAX_UNSETTLED` the oldest goes."""
        self._unsettled[(report.job, report.generation, report.step)] = report
        while len(self._unsettled) > MAX_UNSETTLED:
            del self._unsettled[next(iter(self._unsettled))]
        if self._writer is not None:
            self._writer.write(wire.encode(report))
        elif self._task is None:
            self._task = asyncio.create_task(self._run(), name="regrow-peer")

    async def close(self) -> None:
        """Stop; what is unsettled stays with the writer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause = _BACKOFF_SECONDS[0]
        while True:
            host, _, port = self.address.rpartition(":")
            try:
                reader, writer = await asyncio.open_connection(
                    host.strip("[]"),
                    int(port),
                    limit=wire.MAX_MESSAGE_BYTES,
                    ssl=self._tls.connecting() if self._tls is not None else None,
                )
                _expect_node(writer)
            except OSError as error:
                if pause == _BACKOFF_SECONDS[0]:
                    _log.info("committing agent %s: %s", self.address, error)
                self.address = (await self._find() if self._find is not None else "") or self.address
            else:
                pause = _BACKOFF_SECONDS[0]
                with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
                    await self._converse(reader, writer)
            await asyncio.sleep(pause)
            pause = min(_BACKOFF_SECONDS[1], pause * 2)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        try:
            for report in self._unsettled.values():
                writer.write(wire.encode(report))
            while (line := await reader.readline()).endswith(b"\n"):
                settled = wire.decode(line, Settled)
                if isinstance(settled, Settled):
                    self._unsettled.pop((settled.job, settled.generation, settled.step), None)
                    self._on_settled(settled)
        finally:
            self._writer = None
            writer.close()


def _expect_node(writer: asyncio.StreamWriter) -> None:
    try:
        security.expect_role(writer, "node")
    except ConnectionRefusedError:
        writer.close()
        raise
