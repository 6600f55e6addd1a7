"""Readiness and watchdog of the service manager (the protocol of sd_notify(3)): datagrams to the socket NOTIFY_SOCKET.

The watchdog is fed from the daemon's own loop: a loop that hangs is not fed and is replaced by the manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket

_log = logging.getLogger("regrow.notify")

_FEEDS = 3
"""Feeds within one watchdog limit."""


class Notifier:
    """Talks to the service manager, if there is one."""

    def __init__(self, address: str, watchdog_seconds: float) -> None:
        self._address = address
        self.watchdog_seconds = watchdog_seconds
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def ready(self, status: str) -> None:
        """The daemon serves. Call it inside the loop whose life the watchdog shall watch."""
        self.tell(f"READY=1\nSTATUS={status}")
        if self._address and self.watchdog_seconds > 0 and self._task is None:
            self._task = asyncio.create_task(self._feed(), name="regrow-watchdog")

    def stopping(self) -> None:
        """An orderly end has begun; it may take as long as the unit allows."""
        self.tell("STOPPING=1")
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def tell(self, text: str) -> None:
        """Send one datagram. A manager that does not listen is no reason to fail."""
        if not self._address:
            return
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            self._socket.sendto(text.encode(), address)
        except OSError as error:
            _log.warning("the service manager does not listen at %s: %s", self._address, error)

    async def _feed(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                self.tell("WATCHDOG=1")
                await asyncio.sleep(self.watchdog_seconds / _FEEDS)


def from_environment() -> Notifier:
    """What the manager gave this process, taken out of the environment: children must not speak for their parent."""
    address = os.environ.pop("NOTIFY_SOCKET", "")
    usec = os.environ.pop("WATCHDOG_USEC", "")
    pid = os.environ.pop("WATCHDOG_PID", "")
    meant = usec.isdigit() and pid in ("", str(os.getpid()))
    return Notifier(address, int(usec) / 1e6 if meant else 0.0)
