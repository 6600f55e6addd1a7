"""The agent's side of the checkpoint writer: keeps one running, takes its reports, acknowledges what is settled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from regrow import wire
from regrow.agent.peer import Report
from regrow.ckpt.protocol import Acknowledged, ControllerHello, ToController
from regrow.processes import lifeline_fd

_log = logging.getLogger("regrow.agent.writer")

_RETRY_SECONDS = 0.05


class WriterLink:
    """Starts a writer where none serves the socket, stays connected to it, for ever. The writer outlives the agent."""

    def __init__(
        self,
        socket_path: Path,
        state: Path,
        node: str,
        on_report: Callable[[Report], None],
        *,
        on_connected: Callable[[], None] = lambda: None,
        on_other: Callable[[object], None] = lambda _message: None,
    ) -> None:
        """`on_other` gets everything that is not a report."""
        self._path = socket_path
        self._state = state
        self._node = node
        self._on_report = on_report
        self._on_connected = on_connected
        self._on_other = on_other
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self.pid = 0
        """Pid of the writer that serves now; 0: none."""

    async def run(self) -> None:
        """Keep a writer connected until cancelled or stopped."""
        pause = _RETRY_SECONDS
        while not self._closing:
            try:
                reader, writer = await asyncio.open_unix_connection(str(self._path), limit=wire.MAX_MESSAGE_BYTES)
            except OSError:
                if self._process is None or self._process.poll() is not None:
                    self._process = await asyncio.to_thread(self._spawn)
                await asyncio.sleep(pause)
                pause = min(1.0, pause * 1.5)
                continue
            pause = _RETRY_SECONDS
            self._writer = writer
            self.pid = _peer_pid(writer)
            try:
                await self._converse(reader, writer)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                _log.warning("writer connection ended: %s", error)
            finally:
                self._writer = None
                self.pid = 0
                writer.close()

    def acknowledge(self, job: str, generation: int, step: int) -> None:
        """The step is settled: the writer may forget its report."""
        if self._writer is not None:
            self._writer.write(wire.encode(Acknowledged(job=job, generation=generation, step=step)))

    def send(self, message: msgspec.Struct) -> None:
        """Say something to the writer; without one it is lost."""
        if self._writer is not None:
            self._writer.write(wire.encode(message))

    def stop(self) -> None:
        """SIGTERM: it finishes what it is writing, then exits. No other is started."""
        self._closing = True
        started = self._process.pid if self._process is not None and self._process.poll() is None else 0
        for pid in {self.pid, started} - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    async def reap(self, limit_seconds: float) -> None:
        """Wait for the end of a writer that this agent started; SIGKILL after the limit."""
        process = self._process
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, limit_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    def _spawn(self) -> subprocess.Popen[bytes]:
        lifeline = lifeline_fd()
        with (self._state / "writer.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "regrow.ckpt.writer", "--socket", str(self._path), "--state", str(self._state)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._state,
                start_new_session=True,
                pass_fds=() if lifeline is None else (lifeline,),
            )
        _log.info("writer started pid=%d", process.pid)
        return process

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.encode(ControllerHello(node=self._node)))
        self._on_connected()
        while (line := await reader.readline()).endswith(b"\n"):
            message = wire.decode(line, ToController)
            if isinstance(message, wire.ShardsDurable | wire.ShardsFailed):
                self._on_report(message)
            elif not isinstance(message, wire.Unknown):
                self._on_other(message)


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    connection = writer.get_extra_info("socket")
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
