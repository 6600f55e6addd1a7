"""The beat connection, supervisor's side: TCP, one JSON message a line, TLS when given a context."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from regrow import security, wire
from regrow.errors import ConfigurationError

log = logging.getLogger("regrow.supervisor.beats")

_HELLO_SECONDS = 10.0
_BACKLOG = 4096
_ACCEPTED_AT_ONCE = 16
_ACCEPT_PAUSE_SECONDS = 0.02
"""Sixteen handshakes cost about 30 ms; the pause is over when the event loop has done them."""
_LONGEST_ACCEPT_PAUSE_SECONDS = 1.0
_SILENT_PEER_MS = 20_000
_MAX_UNSENT_BYTES = 32 * 1024 * 1024


class Receiver(Protocol):
    """What happens with what agents say."""

    def greeted(self, hello: wire.Hello, connection: Connection) -> wire.Welcome | wire.Refused:
        """An agent wants in."""
        ...

    def said(self, connection: Connection, message: Any) -> None:
        """An agent that was welcomed said something."""
        ...

    def closed(self, connection: Connection, reason: str) -> None:
        """The connection of an agent that was welcomed is gone."""
        ...


class Connection:
    """One agent's connection."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.node = ""
        self.incarnation = ""
        self._transport = transport

    @property
    def transport(self) -> asyncio.Transport:
        """For what TLS knows of the other side."""
        return self._transport

    def send(self, message: msgspec.Struct) -> bool:
        """Hand a message to the kernel. False: the connection is closing, or its agent does not read."""
        if self._transport.is_closing():
            return False
        self._transport.write(wire.encode(message))
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            log.warning("node=%s does not read: connection dropped", self.node)
            self._transport.abort()
            return False
        return True

    def close(self) -> None:
        """End it; what was sent still goes out."""
        self._transport.close()

    def abort(self) -> None:
        """End it at once."""
        self._transport.abort()


class _Lines(asyncio.Protocol):
    """One connection from its first byte on: a greeting, then whatever the agent says. Lines are taken as the bytes arrive: a task or
    a future for each would cost a leader of thousands more than what is in them."""

    def __init__(self, receiver: Receiver) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is gone."""
        self._receiver = receiver
        self._rest = b""
        self._connection: Connection | None = None
        self._welcomed = False
        self._reason = ""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """After the TLS handshake, where there is one."""
        assert isinstance(transport, asyncio.Transport)
        _tune(transport)
        self._connection = Connection(transport)
        self._deadline = asyncio.get_running_loop().call_later(_HELLO_SECONDS, self._end, f"not within {_HELLO_SECONDS:g} s")

    def data_received(self, data: bytes) -> None:
        """Whole lines are taken, the rest is kept."""
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if self._connection is None or self._connection.transport.is_closing():
                return
            self._line(self._connection, line)
        if len(self._rest) > wire.MAX_MESSAGE_BYTES:
            self._end(f"a line of more than {wire.MAX_MESSAGE_BYTES} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell who was told of it."""
        self._greeted_or_gone()
        if self._welcomed and self._connection is not None:
            self._receiver.closed(self._connection, self._reason or str(exc or "") or "closed by the agent")
        elif not self._reason:
            log.info("a connection did not greet: %s", exc or "closed by the agent")
        if not self.over.done():
            self.over.set_result(None)

    def _line(self, connection: Connection, line: bytes) -> None:
        try:
            message = wire.decode(line, wire.FromAgent)
        except (ValueError, msgspec.MsgspecError) as error:
            self._end(str(error) or type(error).__name__)
            return
        if self._welcomed:
            self._receiver.said(connection, message)
        else:
            self._greeted_or_gone()
            self._greet(connection, message)

    def _greeted_or_gone(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _greet(self, connection: Connection, hello: Any) -> None:
        if not isinstance(hello, wire.Hello):
            self._refuse(connection, wire.Refused(reason=f"greeted with {type(hello).__name__}, not hello", retry=False))
            return
        role, named = security.peer_name(connection.transport)
        if connection.transport.get_extra_info("peercert") and (role, named) != ("node", hello.node):
            log.warning("node=%s shows the certificate of %s %s: refused", hello.node, role or "nobody of ours", named)
            self._refuse(connection, wire.Refused(reason=f"the certificate does not name node {hello.node}: {role} {named}", retry=False))
            return
        connection.node, connection.incarnation = hello.node, hello.incarnation
        answer = self._receiver.greeted(hello, connection)
        if isinstance(answer, wire.Refused):
            log.info("node=%s refused: %s", hello.node, answer.reason)
            self._refuse(connection, answer)
            return
        self._welcomed = True
        connection.send(answer)

    def _refuse(self, connection: Connection, refusal: wire.Refused) -> None:
        self._reason = refusal.reason
        connection.send(refusal)
        connection.close()

    def _end(self, reason: str) -> None:
        if not self._welcomed:
            log.info("a connection did not greet: %s", reason)
        self._reason = reason
        if self._connection is not None:
            self._connection.abort()


class BeatServer:
    """Accepts agents."""

    def __init__(self, receiver: Receiver, *, tls: ssl.SSLContext | None = None, welcomes: Callable[[], bool] = lambda: True) -> None:
        """`welcomes`: False while whoever greets would be refused: then no TLS handshake is paid for."""
        self._receiver = receiver
        self._tls = tls
        self._welcomes = welcomes
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_conversations = 0
        """Connections that were taken as far as a handshake or a greeting, ever."""
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            ConfigurationError: the address is taken or not ours.
        """
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {host}:{port}: {error.strerror or error}", where="--beat", hint="is another supervisor running there?"
            ) from error
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept(self._listener), name="regrow-beats-accept")

    async def stop(self) -> None:
        """Stop listening and end all connections."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
            self._accepting = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        """A few at a time: when thousands of agents come at once, their TLS handshakes must not keep this process from renewing its
        lease, or it loses its term, they all come again, and that never ends. The rest wait in the kernel. When this process comes
        late to its turn, on a busy machine, it waits as long again before it takes more."""
        loop = asyncio.get_running_loop()
        pause = _ACCEPT_PAUSE_SECONDS
        while True:
            try:
                for _ in range(_ACCEPTED_AT_ONCE):
                    accepted, _ = await loop.sock_accept(listener)
                    if self._tls is not None and not self._welcomes():
                        _reset(accepted)
                        continue
                    self.num_conversations += 1
                    task = asyncio.create_task(self._serve(accepted), name="regrow-beats-serve")
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            except OSError as error:  # it was gone again, or there are no descriptors left
                log.warning("no beat connection is taken: %s", error)
            due = loop.time() + pause
            await asyncio.sleep(pause)
            pause = min(_LONGEST_ACCEPT_PAUSE_SECONDS, max(_ACCEPT_PAUSE_SECONDS, loop.time() - due))

    async def _serve(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        limit = _HELLO_SECONDS if self._tls is not None else None
        try:
            transport, lines = await loop.connect_accepted_socket(
                lambda: _Lines(self._receiver), accepted, ssl=self._tls, ssl_handshake_timeout=limit
            )
        except OSError as error:
            log.info("a connection did not greet: %s", error or type(error).__name__)
            accepted.close()
            return
        except asyncio.CancelledError:
            accepted.close()
            raise
        try:
            await lines.over
        finally:
            transport.abort()


def _reset(accepted: socket.socket) -> None:
    """Gone at once, and nothing of it stays in the kernel: the agent comes again after its pause, or with the next leader record."""
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    accepted.close()


def _tune(transport: asyncio.Transport) -> None:
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_PEER_MS)
