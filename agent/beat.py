"""The beat connection: one TCP stream to the leader, with liveness and progress out and orders in.

Lost, it is made again with a small back-off, for ever; meanwhile what must be told is kept, within bounds. The agent never
judges the leader by silence alone: unacknowledged bytes end the connection after TCP_USER_TIMEOUT.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from collections import deque
from typing import Any, Protocol

import msgspec

from regrow import security, wire

_log = logging.getLogger("regrow.agent.beat")

MAX_KEPT = 2_000
"""Messages kept while there is no leader; over it the oldest step reports go first."""
_MAX_UNSENT_BYTES = 16 * 1024 * 1024
_WELCOME_SECONDS = 5.0
_CONNECT_SECONDS = 3.0
_SILENT_PEER_MS = 10_000
_BACKOFF_SECONDS = (0.05, 1.0)
_REFUSED_SECONDS = (0.5, 8.0)
"""Between attempts at a supervisor that refuses; the longer one for one that does not lead: a new leader's record ends the wait at
once, and thousands of agents that try each second would keep a supervisor from leading."""


class BeatSource(Protocol):
    """What the connection needs of the agent."""

    def hello(self) -> wire.Hello:
        """What this node is and runs, now."""
        ...

    def beat_message(self, seq: int) -> wire.Beat:
        """Progress, now."""
        ...

    def welcomed(self, welcome: wire.Welcome) -> bool:
        """A leader accepted us; False when its epoch is behind what this node has seen."""
        ...

    def ordered(self, message: Any) -> None:
        """The leader said something else."""
        ...

    def disconnected(self) -> None:
        """The connection that was welcomed is gone."""
        ...

    def refused(self, refusal: wire.Refused) -> None:
        """The leader does not take this node."""
        ...


class Outbox:
    """Messages that wait for a leader."""

    def __init__(self, limit: int = MAX_KEPT) -> None:
        self._limit = limit
        self._kept: deque[msgspec.Struct] = deque()
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, message: msgspec.Struct) -> None:
        """Keep a message; when full, the oldest step report goes, else the oldest message."""
        self._kept.append(message)
        if len(self._kept) > self._limit:
            victim = next((index for index, kept in enumerate(self._kept) if isinstance(kept, wire.NodeSteps)), 0)
            del self._kept[victim]
            self.num_dropped += 1

    def take(self) -> list[msgspec.Struct]:
        """Everything, once. Exits are left out: the greeting has them."""
        taken = [message for message in self._kept if not isinstance(message, wire.WorkersExited)]
        self._kept.clear()
        return taken


class BeatConnection:
    """Keeps the connection to whoever leads."""

    def __init__(self, source: BeatSource, *, tls: security.Tls | None = None) -> None:
        self._source = source
        self._tls = tls
        self._leader: wire.LeaderRecord | None = None
        self._changed = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._welcomed = False
        self._outbox = Outbox()
        self._beat_now = asyncio.Event()
        self._unsent: list[bytes] = []
        self._seq = 0
        self._pause = 0.0
        self._refused = 0.0
        self.last_beat_at: float | None = None
        """Loop time of the last beat that was handed to the kernel."""

    @property
    def connected(self) -> bool:
        """True between a welcome and the end of the connection."""
        return self._welcomed

    @property
    def num_kept(self) -> int:
        """Messages that wait for a leader."""
        return len(self._outbox)

    @property
    def num_dropped(self) -> int:
        """Messages that were given up because too many waited."""
        return self._outbox.num_dropped

    def set_leader(self, leader: wire.LeaderRecord) -> None:
        """Whoever leads by the store. Another address or term replaces the connection."""
        if leader == self._leader:
            return
        _log.info("leader=%s epoch=%d beat=%s", leader.supervisor, leader.epoch, leader.beat_address)
        self._leader = leader
        self._pause = self._refused = 0.0
        self._changed.set()

    def send(self, message: msgspec.Struct) -> None:
        """Send now, or when there is a leader."""
        writer = self._writer
        if not self._welcomed or writer is None or writer.is_closing():
            self._outbox.keep(message)
            return
        self._write(writer, message)

    def beat_soon(self) -> None:
        """Send a beat at once: something in it has changed."""
        self._beat_now.set()

    def tell_progress(self) -> None:
        """Progress as it is now, before what is sent next: reports of the last half second may still be with the workers."""
        writer = self._writer
        if self._welcomed and writer is not None and not writer.is_closing():
            self._beat(writer)

    async def flush(self, limit_seconds: float) -> None:
        """Wait until what was sent has left this process."""
        writer = self._writer
        if writer is not None and not writer.is_closing():
            self._send_out(writer, self._unsent)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(limit_seconds):
                    while writer.transport.get_write_buffer_size():  # noqa: ASYNC110  # the transport has no such event
                        await asyncio.sleep(0.005)

    async def run(self) -> None:
        """Connect, serve, and again, until cancelled. A new leader record ends the session with the old one at once."""
        while True:
            self._changed.clear()
            leader = self._leader
            if leader is not None:
                await self._serve_until_changed(leader)
                self._pause = min(_BACKOFF_SECONDS[1], max(_BACKOFF_SECONDS[0], self._pause * 2))
            longest = max(self._pause, self._refused)
            pause = None if leader is None else longest * random.uniform(0.7, 1.3)  # noqa: S311  # spreads a crowd, guards nothing
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()

    async def _serve_until_changed(self, leader: wire.LeaderRecord) -> None:
        session = asyncio.create_task(self._session(leader), name="regrow-beat-session")
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait((session, changed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.cancel()
            changed.cancel()
            (ended, _) = await asyncio.gather(session, changed, return_exceptions=True)
        if isinstance(ended, OSError | TimeoutError | msgspec.MsgspecError | ValueError):
            _log.info("no beat connection to %s: %s", leader.beat_address, ended or type(ended).__name__)
        elif isinstance(ended, Exception):
            raise ended

    async def _session(self, leader: wire.LeaderRecord) -> None:
        host, _, port = leader.beat_address.rpartition(":")
        tls = self._tls.connecting() if self._tls is not None else None
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=wire.MAX_MESSAGE_BYTES, ssl=tls)
        self._writer = writer
        self._unsent = []
        self._seq = 0
        _tune(writer)
        try:
            security.expect_role(writer, "supervisor")
            writer.write(wire.encode(self._source.hello()))
            async with asyncio.timeout(_WELCOME_SECONDS):
                answer = wire.decode(await _line(reader), wire.ToAgent)
            if isinstance(answer, wire.Refused):
                longest = _REFUSED_SECONDS[0] if answer.leading else _REFUSED_SECONDS[1]
                self._refused = min(longest, max(_REFUSED_SECONDS[0], self._refused * 2))
                self._source.refused(answer)
                return
            if not isinstance(answer, wire.Welcome):
                raise ConnectionAbortedError(f"the leader greeted with {type(answer).__name__}")
            if not self._source.welcomed(answer):
                return
            await self._converse(reader, writer, answer)
        finally:
            self._writer = None
            if self._welcomed:
                self._welcomed = False
                self._source.disconnected()
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, welcome: wire.Welcome) -> None:
        self._welcomed = True
        self._pause = self._refused = 0.0
        for message in self._outbox.take():
            self._write(writer, message)
        beats = asyncio.create_task(self._beats(writer, welcome.beat_seconds), name="regrow-beats")
        try:
            while True:
                self._source.ordered(wire.decode(await _line(reader), wire.ToAgent))
        finally:
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)

    async def _beats(self, writer: asyncio.StreamWriter, every_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._beat_now.clear()
            self._beat(writer)
            self.last_beat_at = loop.time()
            due = max(due + every_seconds, loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._beat_now.wait()

    def _beat(self, writer: asyncio.StreamWriter) -> None:
        self._seq += 1
        self._write(writer, self._source.beat_message(self._seq))

    def _write(self, writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
        """What one turn of the loop has to say goes out together: the leader wakes once for it."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_out, writer, self._unsent)
        self._unsent.append(wire.encode(message))

    def _send_out(self, writer: asyncio.StreamWriter, unsent: list[bytes]) -> None:
        """`unsent`: of the session that `writer` belongs to."""
        data = b"".join(unsent)
        unsent.clear()
        if not data or writer.is_closing():
            return
        writer.write(data)
        if writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            _log.warning("the leader does not read: connection dropped")
            writer.transport.abort()


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise ConnectionResetError("closed by the leader")
    return line


def _tune(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_PEER_MS)
