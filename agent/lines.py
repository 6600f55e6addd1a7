"""What the shim's single-threaded loop waits on: a non-blocking stream socket that carries lines, and signals."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time

from regrow.wire import MAX_MESSAGE_BYTES

_MAX_PENDING = 4 * MAX_MESSAGE_BYTES


class LineConnection:
    """One client. Registered with a selector as its own `data`."""

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self._socket = connection
        self._selector = selector
        self._received = bytearray()
        self._pending = bytearray()
        self.closed = False
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, self)

    def handle(self, mask: int) -> list[bytes]:
        """Do what the selector says is possible; returns whole lines that came in, without their ends."""
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if not mask & selectors.EVENT_READ or self.closed:
            return []
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.close()
            return []
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        if len(rest) > MAX_MESSAGE_BYTES:
            self.close()
        return [bytes(line) for line in lines if line]

    def send(self, line: bytes) -> None:
        """Queue a line and write what fits. A client that does not read is dropped."""
        if self.closed:
            return
        self._pending += line
        self._flush()
        if len(self._pending) > _MAX_PENDING:
            self.close()

    def flush_and_close(self, limit_seconds: float = 0.5) -> None:
        """Write what is queued, for a short time, then close."""
        deadline = time.monotonic() + limit_seconds
        while self._pending and not self.closed and time.monotonic() < deadline:
            self._flush()
        self.close()

    def close(self) -> None:
        """Close; again is no error."""
        if self.closed:
            return
        self.closed = True
        self._selector.unregister(self._socket)
        self._socket.close()

    def abandon(self) -> None:
        """Close the descriptor only: for a forked child, whose selector is the parent's."""
        self.closed = True
        self._socket.close()

    def _flush(self) -> None:
        try:
            while self._pending:
                sent = self._socket.send(self._pending)
                del self._pending[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._pending else 0)
        self._selector.modify(self._socket, wanted, self)


def wake_by_signals(selector: selectors.BaseSelector) -> None:
    """Make signals, SIGCHLD too, end a wait of this selector; its entry's data is what to call."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _no_action)
    selector.register(reader, selectors.EVENT_READ, lambda: _drain(reader))


def _no_action(_number: int, _frame: object) -> None:
    """SIGCHLD only has to wake the selector."""


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        return
