"""Lines and descriptors over a Unix socket: the writer's side (asyncio) and a worker's side (no thread, no loop)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import AsyncIterator

import msgspec

from regrow import wire
from regrow.errors import OperationalError

_READ_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 28
"""A plan of a rank with a million tensors; longer lines end the connection."""


class ServerChannel:
    """One accepted client. Writes are queued and sent in order by a task of their own."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._queue: asyncio.Queue[tuple[bytes, list[int]]] = asyncio.Queue()
        self._pump = asyncio.create_task(self._send_queued())

    def peer_pid(self) -> int:
        """Process that connected."""
        return struct.unpack("3i", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]

    def send(self, message: msgspec.Struct, handles: list[int] | None = None) -> None:
        """Queue a message; `handles` must stay open as long as the client does."""
        self._queue.put_nowait((wire.encode(message), handles or []))

    async def lines(self) -> AsyncIterator[bytes]:
        """Lines until the client is gone."""
        loop = asyncio.get_running_loop()
        buffer = bytearray()
        while True:
            try:
                data = await loop.sock_recv(self._sock, _READ_BYTES)
            except OSError:
                return
            if not data:
                return
            buffer += data
            if b"\n" not in data:
                if len(buffer) > MAX_LINE_BYTES:
                    return
                continue
            *complete, rest = bytes(buffer).split(b"\n")
            buffer = bytearray(rest)
            for line in complete:
                yield line

    async def close(self) -> None:
        """Stop sending and close."""
        self._pump.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._pump
        self._sock.close()

    def shut(self) -> None:
        """Make `lines` end: the process behind it is known to be dead."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    async def _send_queued(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data, handles = await self._queue.get()
            try:
                if handles:
                    data = data[socket.send_fds(self._sock, [data], handles) :]
                await loop.sock_sendall(self._sock, data)
            except OSError:
                return


class WorkerChannel:
    """A worker's connection to the writer. `poll` never blocks; `wait` does, with a limit."""

    def __init__(self, path: str, *, timeout_seconds: float = 10.0) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._timeout = timeout_seconds
        self._buffer = b""
        self._handles: list[int] = []
        try:
            self._sock.settimeout(timeout_seconds)
            self._sock.connect(path)
        except OSError as error:
            self._sock.close()
            raise OperationalError(f"no checkpoint writer: {error}", where=path, hint="the agent starts it again by itself") from error

    def send(self, message: msgspec.Struct) -> None:
        """Send one message.

        Raises:
            OperationalError: the writer is gone or stuck.
        """
        try:
            self._sock.settimeout(self._timeout)
            self._sock.sendall(wire.encode(message))
        except OSError as error:
            raise OperationalError(f"checkpoint writer does not answer: {error}", hint="the agent starts it again by itself") from error

    def poll(self) -> list[bytes]:
        """Lines that have arrived.

        Raises:
            OperationalError: the writer is gone.
        """
        self._sock.setblocking(False)
        while True:
            try:
                data, handles, _, _ = socket.recv_fds(self._sock, _READ_BYTES, 16)
            except BlockingIOError:
                break
            except OSError as error:
                raise OperationalError(f"checkpoint writer is gone: {error}") from error
            if not data:
                raise OperationalError("checkpoint writer is gone", hint="the agent starts it again by itself")
            self._buffer += data
            self._handles += handles
        *lines, self._buffer = self._buffer.split(b"\n")
        return lines

    def wait(self, deadline: float) -> list[bytes]:
        """Lines, as soon as there is one; none when the monotonic deadline has passed."""
        while not (lines := self.poll()):
            left = deadline - time.monotonic()
            if left <= 0:
                return []
            select.select([self._sock], [], [], left)
        return lines

    def take_handles(self, count: int) -> list[int]:
        """Descriptors that came with a line; the caller closes them.

        Raises:
            OperationalError: fewer came.
        """
        if len(self._handles) < count:
            raise OperationalError(f"{count} arenas announced, {len(self._handles)} received")
        taken, self._handles = self._handles[:count], self._handles[count:]
        return taken

    def close(self) -> None:
        """Close; the writer takes the arenas back."""
        for handle in self._handles:
            os.close(handle)
        self._sock.close()
