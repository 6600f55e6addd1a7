"""Workers that stand ready: forked, clean and warm before anybody needs them, so that a recovery waits only for the script.

A fork copies pages as they are written to, and what every worker does first writes to thousands of them: 50 of the 66 ms of
CPU time from the fork to the first step (benchmarks/recovery.py's light job). A parked process has that behind it. It is a
leaf: nothing is forked from it but by the user's own script, so it may run tensor operations where the shim may not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from regrow import wire
from regrow.agent import child, preload
from regrow.agent.protocol import WorkerStart
from regrow.agent.roster import process_state

REST_SECONDS = 1.0
"""After a start the new workers have the cores to themselves for so long before others are parked."""
_HAND_OVER_SECONDS = 1.0
_LENGTH = struct.Struct("=Q")


class Parking:
    """The shim's parked children. Pids are those of children that were not reaped yet."""

    def __init__(self) -> None:
        self._lines: dict[int, socket.socket] = {}
        """{pid: our end of its line}, oldest first."""
        self._wanted = 0
        self._next_at = 0.0

    @property
    def pids(self) -> frozenset[int]:
        """All that are parked."""
        return frozenset(self._lines)

    def started(self, count: int) -> None:
        """So many workers run on this node now: as many are to stand ready, a little later (none with REGROW_NO_PARKED=1)."""
        if os.environ.get("REGROW_NO_PARKED") == "1":
            return
        self._wanted = max(self._wanted, count)
        self._next_at = time.monotonic() + REST_SECONDS

    def waits(self) -> list[float]:
        """Seconds until one more is to be forked; empty: enough are there."""
        return [max(0.0, self._next_at - time.monotonic())] if len(self._lines) < self._wanted else []

    def keep(self, *, safe: Callable[[], preload.Check]) -> None:
        """Park one more when it is time. Raises `child.Forked` in it. A shim that became unsafe to fork parks none any more."""
        if self.waits() != [0.0]:
            return
        if not safe().safe:
            self._wanted = 0
            return
        ours, its = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            raise child.Forked(child.Task(parent=parent, group=0, parked=its.detach()))
        its.close()
        self._lines[pid] = ours

    def hand_over(self, worker: WorkerStart, group: int) -> int:
        """Let a parked process that is ready become this worker, in this process group (0: its own). Returns its pid; 0: none is ready."""
        for pid, line in tuple(self._lines.items()):
            if process_state(pid) in ("T", "t"):
                self._lines.pop(pid).close()
                self._kill(pid)
                continue
            try:
                if not line.recv(1, socket.MSG_DONTWAIT):
                    continue  # it ended, and is reaped soon
            except BlockingIOError:
                continue  # not ready yet
            except OSError:
                continue
            with self._lines.pop(pid), contextlib.suppress(OSError):
                os.setpgid(pid, group or pid)
                line.settimeout(_HAND_OVER_SECONDS)
                data = msgspec.json.encode(worker)
                line.sendall(_LENGTH.pack(len(data)) + data)
                return pid
            self._kill(pid)  # it did not take its orders: it is stopped, or just died
        return 0

    def gone(self, pid: int) -> None:
        """A child was reaped."""
        line = self._lines.pop(pid, None)
        if line is not None:
            line.close()
            self._next_at = time.monotonic() + REST_SECONDS

    def clear(self) -> None:
        """End all: they lack what the shim has now."""
        for pid in tuple(self._lines):
            self._lines.pop(pid).close()
            self._kill(pid)
        self._next_at = time.monotonic()

    def abandon(self) -> None:
        """In a child of the shim: close its copies of the lines."""
        for line in self._lines.values():
            line.close()

    @staticmethod
    def _kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)


def stand_ready(line: int) -> WorkerStart | None:
    """In the child: rehearse, say that we are ready, and wait for the orders. None: they never come."""
    rehearse()
    with socket.socket(fileno=line) as connection:
        connection.sendall(b"1")
        head = _exactly(connection, _LENGTH.size)
        data = _exactly(connection, *_LENGTH.unpack(head)) if head else b""
    return msgspec.json.decode(data, type=WorkerStart) if data else None


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes; nothing when the shim closed the line."""
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            return b""
        data += more
    return data


def rehearse() -> None:
    """Do once what every worker does, so that its pages are this process's own.

    Nothing of it stays: random streams are put back. No backward pass: a script that forks before its own first one could not run
    one in the child. No tensor operation where there are GPUs: an optimizer looks for CUDA, and which devices are seen is said later.
    """
    for known in (wire.GenerationSpec, wire.JobSpec, wire.ToWorker):
        msgspec.json.Decoder(known)
    torch = sys.modules.get("torch")
    if torch is None or Path("/dev/nvidiactl").exists():
        return
    random = torch.get_rng_state()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    loss = torch.nn.functional.mse_loss(model(torch.randn(8, 64)), torch.zeros(8, 1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    del loss
    torch.set_rng_state(random)
