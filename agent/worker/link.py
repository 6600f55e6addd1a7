"""The line to the node's agent: never blocks, survives the agent's restart, needs no thread (torch-free)."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections import deque
from collections.abc import Callable

import msgspec

from regrow import wire

_log = logging.getLogger("regrow.worker")

HOLD_SECONDS = 0.5
"""Step reports of short steps go out together, at most this far apart: each wakes the agent and the leader. Which step was applied is also
in the progress word, which the agent tells with each beat, before an exit and before it carries out an order."""
SETTLE_SECONDS = 5.0
"""In the first seconds of a generation nothing is held: a recovery ends with a report."""
RECONNECT_SECONDS = 0.2
"""Least time between two attempts to reach an agent that is away."""
MAX_QUEUED_BYTES = 4 * 1024 * 1024
"""Lines kept while the agent is away or slow; over it the oldest step reports go first (the progress word has the step)."""


class AgentLink:
    """A Unix stream socket to the agent, driven at step boundaries by `send` and `receive`.

    With an empty path nothing is sent (standalone). After a reconnection the greeting is sent first, then every line
    that had been marked `keep`, then what was queued: an agent that was restarted learns what the old one knew. A line may
    so arrive twice; lines are facts about (generation, rank, step), so that does no harm.
    """

    def __init__(self, path: str, greeting: msgspec.Struct | None = None, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._greeting = wire.encode(greeting) if greeting is not None else b""
        self._monotonic = monotonic
        self._socket: socket.socket | None = None
        self._queue: deque[tuple[bytes, bool]] = deque()
        self._queued_bytes = 0
        self._sent_of_first = 0
        self._kept: list[bytes] = []
        self._incoming = bytearray()
        self._next_attempt = 0.0
        self._flushed_at = monotonic() + SETTLE_SECONDS - HOLD_SECONDS
        self.connections = 0
        """How often a connection was made; more than 1 after an agent's restart."""

    @property
    def connected(self) -> bool:
        """True while there is a connection, as far as the last call saw."""
        return self._socket is not None

    def send(self, message: msgspec.Struct, *, keep: bool = False, droppable: bool = False) -> None:
        """Queue a line and send what the socket takes. `keep`: sent again after each reconnection. `droppable`: may wait for the next
        one, `HOLD_SECONDS` at most, and is the first to go when the agent is away for long."""
        if not self._path:
            return
        line = wire.encode(message)
        if keep:
            self._kept.append(line)
        self._queue.append((line, droppable))
        self._queued_bytes += len(line)
        self._shed()
        now = self._monotonic()
        if droppable and 0.0 <= now - self._flushed_at < HOLD_SECONDS:
            return
        self._flushed_at = max(self._flushed_at, now)
        self.flush()

    def receive(self) -> list[wire.Control]:
        """All orders that have arrived. Never waits."""
        if not self._path or not self._ensure():
            return []
        assert self._socket is not None
        while True:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                break
            except InterruptedError:
                continue
            except OSError as error:
                self._lost(error)
                break
            if not data:
                self._lost(ConnectionResetError(errno.ECONNRESET, "closed by the agent"))
                break
            self._incoming += data
        return self._orders()

    def flush(self) -> None:
        """Send as much of the queue as the socket takes now."""
        if not self._ensure():
            return
        assert self._socket is not None
        while self._queue:
            line, _ = self._queue[0]
            try:
                self._sent_of_first += self._socket.send(memoryview(line)[self._sent_of_first :])
            except BlockingIOError:
                return
            except InterruptedError:
                continue
            except OSError as error:
                self._lost(error)
                return
            if self._sent_of_first == len(line):
                self._pop_first()

    def drain(self, seconds: float) -> bool:
        """Flush with a deadline, for the last words of a process. True when all is sent."""
        deadline = self._monotonic() + seconds
        while self._path and self._queue and self._monotonic() < deadline:
            self.flush()
            if self._queue:
                time.sleep(0.005)
        return not self._queue

    def close(self) -> None:
        """Close the connection. What is queued stays unsent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _pop_first(self) -> None:
        line, _ = self._queue.popleft()
        self._queued_bytes -= len(line)
        self._sent_of_first = 0

    def _shed(self) -> None:
        while self._queued_bytes > MAX_QUEUED_BYTES:
            first = 1 if self._sent_of_first else 0
            victim = next((index for index, entry in enumerate(self._queue) if index >= first and entry[1]), None)
            if victim is None:
                return
            self._queued_bytes -= len(self._queue[victim][0])
            del self._queue[victim]

    def _ensure(self) -> bool:
        if self._socket is not None:
            return True
        now = self._monotonic()
        if not self._path or now < self._next_attempt:
            return False
        self._next_attempt = now + RECONNECT_SECONDS
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(self._path)
        except OSError:
            connection.close()
            return False
        self._socket = connection
        self.connections += 1
        if self.connections > 1:
            _log.info("agent reached again connections=%d", self.connections)
        self._requeue()
        return True

    def _requeue(self) -> None:
        """The greeting, the kept lines, then what was queued and is not among them."""
        queued = [entry for entry in self._queue if entry[0] not in self._kept]
        again = [(line, False) for line in ([self._greeting] if self._greeting else []) + self._kept]
        self._queue = deque(again + queued)
        self._queued_bytes = sum(len(line) for line, _ in self._queue)
        self._sent_of_first = 0
        self._incoming.clear()

    def _lost(self, error: OSError) -> None:
        _log.info("agent away error=%s", error)
        self.close()
        self._sent_of_first = 0
        self._next_attempt = self._monotonic() + RECONNECT_SECONDS

    def _orders(self) -> list[wire.Control]:
        orders: list[wire.Control] = []
        while (end := self._incoming.find(b"\n")) >= 0:
            line = bytes(self._incoming[:end])
            del self._incoming[: end + 1]
            try:
                message = wire.decode(line, wire.ToWorker)
            except msgspec.DecodeError as error:
                _log.warning("order not understood error=%s", error)
                continue
            if isinstance(message, wire.Control):
                orders.append(message)
        return orders
