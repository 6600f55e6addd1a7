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
from regrow.ckpt.protocol import Acknowledged, ControllerHello, QueryStatus, ToController
from regrow.processes import lifeline_fd, stat_fields

_log = logging.getLogger("regrow.agent.writer")

_RETRY_SECONDS = 0.05
LOOK_SECONDS = 1.0
STOPPED_LOOKS = 4
"""A writer seen stopped (SIGSTOP) in so many looks in a row is ended: a worker's first save waits for it, and with it the whole job. Looks,
not seconds: an agent that stood still itself has not looked."""
SILENT_LOOKS = 30
"""The same for one that runs and does not answer: its snapshots are lost with it, so it gets longer than a slow host needs."""


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
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """`on_other` gets everything that is not a report. `look_seconds`: how often the writer is looked at."""
        self._path = socket_path
        self._state = state
        self._node = node
        self._on_report = on_report
        self._on_connected = on_connected
        self._on_other = on_other
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self.num_unanswered = 0
        """Questions to the writer since its last word."""
        self._look_seconds = look_seconds
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
            watching = asyncio.create_task(self._watch(writer, self.pid))
            try:
                await self._converse(reader, writer)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                _log.warning("writer connection ended: %s", error)
            finally:
                watching.cancel()
                self._writer = None
                self.pid = 0
                writer.close()

    async def _watch(self, writer: asyncio.StreamWriter, pid: int) -> None:
        """End a writer that stands still, so that another takes its place. It has no child, so SIGKILL leaves nothing behind."""
        stopped = self.num_unanswered = 0
        while True:
            await asyncio.sleep(self._look_seconds)
            writer.write(wire.encode(QueryStatus()))
            self.num_unanswered += 1
            stopped = stopped + 1 if _is_stopped(pid) else 0
            if stopped >= STOPPED_LOOKS or self.num_unanswered > SILENT_LOOKS:
                _log.warning("writer pid=%d ended: %s", pid, "it is stopped" if stopped else f"no answer to {SILENT_LOOKS} questions")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return

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
            self.num_unanswered = 0
            message = wire.decode(line, ToController)
            if isinstance(message, wire.ShardsDurable | wire.ShardsFailed):
                self._on_report(message)
            elif not isinstance(message, wire.Unknown):
                self._on_other(message)


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    connection = writer.get_extra_info("socket")
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def _is_stopped(pid: int) -> bool:
    try:
        return stat_fields(pid)[0] == "T"
    except OSError:
        return False
