"""The checkpoint writer of a node: owns the arenas, outlives workers and agent, makes snapshots durable.

Started as ``python -m regrow.ckpt.writer --socket PATH --state FOLDER``. With REGROW_LIFELINE=<fd> it ends when that
descriptor reaches its end of file; without any client for --orphan seconds too. On SIGTERM it finishes what it is
writing, for at most `GRACE_SECONDS`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from pathlib import Path

from regrow.ckpt.channel import ServerChannel
from regrow.ckpt.service import Writer
from regrow.processes import wake_at_lifeline_end

GRACE_SECONDS = 5.0
ORPHAN_SECONDS = 60.0
"""Longer than an agent needs to come back (its shim waits 30 s): what is in the arenas then has nobody to be for."""
_ENDING = (signal.SIGTERM, signal.SIGINT)
log = logging.getLogger("regrow.ckpt.writer")


def main(arguments: list[str] | None = None) -> None:
    """Run until SIGTERM or the end of the lifeline. Exit code 2: another writer has the socket."""
    parser = argparse.ArgumentParser(prog="regrow.ckpt.writer", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to listen on")
    parser.add_argument("--state", type=Path, required=True, help="state folder of the node")
    parser.add_argument("--orphan", type=float, default=ORPHAN_SECONDS, help="seconds without agent and workers after which it ends")
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    options.state.mkdir(parents=True, exist_ok=True)
    wake_at_lifeline_end()
    early: list[int] = []
    for number in _ENDING:  # who sees the socket may send one before the loop can take it
        signal.signal(number, lambda number, _: early.append(number))
    listener = _listen(options.socket)
    if listener is None:
        sys.stderr.write(f"regrow: another checkpoint writer listens on {options.socket}\n")
        sys.exit(2)
    with asyncio.Runner() as runner:
        runner.run(_run(listener, options.orphan, early))
        options.socket.unlink(missing_ok=True)
        sys.stderr.flush()
        os._exit(0)  # a thread that hangs in storage must not hold the process


def _listen(path: Path) -> socket.socket | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.connect(str(path))
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    early = path.with_name(f"{path.name}.{os.getpid()}")  # the name appears when connections are accepted
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(early))
    listener.listen(128)
    listener.setblocking(False)
    early.rename(path)
    return listener


class _Company:
    """Calls `alone` when there has been no client for a while, from the start on."""

    def __init__(self, seconds: float, alone: Callable[[], None]) -> None:
        self._seconds = seconds
        self._alone = alone
        self._clients = 0
        self._timer = asyncio.get_running_loop().call_later(seconds, alone)

    @contextlib.contextmanager
    def client(self) -> Generator[None]:
        """A client is there for the duration of this block."""
        self._clients += 1
        self._timer.cancel()
        try:
            yield
        finally:
            self._clients -= 1
            if not self._clients:
                self._timer = asyncio.get_running_loop().call_later(self._seconds, self._alone)


async def _run(listener: socket.socket, orphan_seconds: float, early: list[int]) -> None:
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    abrupt = asyncio.Event()
    for number in _ENDING:
        loop.add_signal_handler(number, ending.set)
    if early:
        ending.set()
    lifeline = os.environ.get("REGROW_LIFELINE")
    if lifeline:
        loop.add_reader(int(lifeline), lambda: (abrupt.set(), ending.set(), loop.remove_reader(int(lifeline))))
    writer = Writer()
    accepting = asyncio.create_task(_accept(listener, writer, _Company(orphan_seconds, ending.set)))
    log.info("writer ready pid=%d", os.getpid())
    await ending.wait()
    accepting.cancel()
    listener.close()
    if not abrupt.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(writer.drain(), GRACE_SECONDS)


async def _accept(listener: socket.socket, writer: Writer, company: _Company) -> None:
    loop = asyncio.get_running_loop()
    clients: set[asyncio.Task[None]] = set()
    while True:
        sock, _ = await loop.sock_accept(listener)
        task = asyncio.create_task(_serve(ServerChannel(sock), writer, company))
        clients.add(task)
        task.add_done_callback(clients.discard)


async def _serve(channel: ServerChannel, writer: Writer, company: _Company) -> None:
    """Serve a client; the end of its process ends it, even where a child of it holds the socket open."""
    loop = asyncio.get_running_loop()
    try:
        handle = os.pidfd_open(channel.peer_pid())
    except OSError:
        await channel.close()
        return
    loop.add_reader(handle, channel.shut)
    try:
        with company.client():
            await writer.serve(channel)
    finally:
        loop.remove_reader(handle)
        os.close(handle)


if __name__ == "__main__":
    main()
