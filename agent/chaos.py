"""Faults on purpose, on this node: what `regrow chaos` and `regrow demo` ask for on S/agent.sock.

One line ``{"type": "inject", "kind": ..., ...}``, one line back. Kinds: kill_worker, stop_worker, continue_worker,
kill_shim, kill_writer, kill_agent, targets (tells pids and does nothing), and worker, which hands `order` to the worker library (flip_bit, nan, hang, slow).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec

from regrow import wire


class Inject(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="inject"):
    """Do something bad."""

    kind: str
    rank: int = -1
    """Rank of the running generation; -1: the lowest on this node."""
    signal: str = "KILL"
    order: dict[str, Any] = {}


class Injected(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="injected"):
    """What was done."""

    done: bool
    detail: str = ""
    rank: int = -1
    pid: int = 0
    shim: int = 0
    writer: int = 0
    """targets: the node's daemons."""
    generation: int = 0
    at_monotonic: float = 0.0
    """CLOCK_MONOTONIC of the host when it was done: ground truth for detection times."""


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to hurt on this node."""

    generation: int
    pids: dict[int, int]
    """Live workers by rank."""
    shim: int = 0
    writer: int = 0


_WORKER_SIGNALS = {"stop_worker": signal.SIGSTOP, "continue_worker": signal.SIGCONT}


def perform(request: Inject, targets: Targets, *, now: float, tell: Callable[[int, wire.Control, frozenset[int]], int]) -> Injected:
    """Do it. `tell` sends an order to ranks of a generation and returns how many heard it."""
    daemon = {"kill_shim": targets.shim, "kill_writer": targets.writer, "kill_agent": os.getpid()}
    if request.kind in daemon:
        return _signal(daemon[request.kind], signal.SIGKILL, Injected(done=True, generation=targets.generation, at_monotonic=now))
    rank = request.rank if request.rank >= 0 else min(targets.pids, default=-1)
    pid = targets.pids.get(rank, 0)
    result = Injected(done=True, rank=rank, pid=pid, generation=targets.generation, at_monotonic=now)
    if not pid:
        return msgspec.structs.replace(result, done=False, detail=f"rank {rank} does not run here")
    if request.kind == "targets":
        return msgspec.structs.replace(result, shim=targets.shim, writer=targets.writer)
    if request.kind == "worker":
        heard = tell(targets.generation, wire.Control(inject=request.order), frozenset({rank}))
        return msgspec.structs.replace(result, done=heard == 1, detail="" if heard else f"rank {rank} is not connected")
    if request.kind == "kill_worker":
        number = getattr(signal, f"SIG{request.signal.upper().removeprefix('SIG')}", None)
        if number is None:
            return msgspec.structs.replace(result, done=False, detail=f"no signal {request.signal!r}")
        return _signal(pid, number, result)
    if request.kind in _WORKER_SIGNALS:
        return _signal(pid, _WORKER_SIGNALS[request.kind], result)
    return msgspec.structs.replace(result, done=False, detail=f"unknown kind {request.kind!r}")


def _signal(pid: int, number: int, result: Injected) -> Injected:
    if not pid:
        return msgspec.structs.replace(result, done=False, detail="it does not run")
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return msgspec.structs.replace(result, done=False, detail=f"pid {pid} is gone")
    return msgspec.structs.replace(result, pid=pid)
