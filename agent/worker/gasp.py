"""The dying gasp: a worker that is about to be killed in a warm restart leaves its state behind (docs/adr/0018-dying-gasp.md).

It is the main thread that copies: nothing of its own can then write at the same time. Either it comes out of a collective that broke, and
does it by itself before the order; or the agent asks, the collectives are broken, and it does it between two lines of Python, wherever it
is. A process that reaches neither (stopped, or in C) is killed at its limit without.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from regrow import wire
from regrow.agent.worker import bequest, gloo
from regrow.agent.worker.environment import WorkerEnvironment
from regrow.agent.worker.groups import uses_gpu
from regrow.errors import RegrowError

_log = logging.getLogger("regrow.worker")

WAIT_SECONDS = 2.0
"""Whoever left its state waits so long to be killed: a step more would only be computed twice."""
AGAIN_SECONDS = 0.03
"""At this distance collectives are broken again: the script may have begun others."""
_PENDING = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


def wanted(environment: WorkerEnvironment) -> bool:
    """Does this process leave its state behind? On CPUs, unless `--no-gasp`: with GPUs it was never run."""
    return environment.supervised and bool(environment.writer) and os.environ.get("REGROW_GASP") == "1" and not uses_gpu()


class _Gasp:
    """Of one generation of this process."""

    def __init__(self, environment: WorkerEnvironment, tell: Callable[[str, float, int], None]) -> None:
        self.place = place_of(environment)
        self.tell = tell
        self.once = threading.Lock()
        self.is_done = False
        self.hold: Callable[[], Any] = _nothing
        self.still: Callable[[Any], bool] = _never


_current: _Gasp | None = None


def begin(environment: WorkerEnvironment, tell: Callable[[str, float, int], None]) -> None:
    """The process has joined a generation. `tell(phase, seconds, step)` reaches the agent."""
    global _current  # noqa: PLW0603
    _current = _Gasp(environment, tell)


def hold_by(hold: Callable[[], Any], still: Callable[[Any], bool]) -> None:
    """How to get at the state of the last completed step, when it is whole, and whether what was held is as it was."""
    if _current is not None:
        _current.hold, _current.still = hold, still


def end() -> None:
    """The process goes on in another generation: nothing of this one is held on to."""
    global _current  # noqa: PLW0603
    _current = None


def is_done() -> bool:
    """Did it happen, or is there nothing to wait for?"""
    return _current is None or _current.is_done


def now() -> bool:
    """Leave what is held, once. Called by the main thread. False: it was done before, or is being done."""
    one = _current
    if one is None or not one.once.acquire(blocking=False):
        return False
    step = -1
    try:
        held = one.hold()
        if held is not None:
            one.tell(wire.GASPING_PHASE, bequest.seconds_for(held), held.step)
            began = time.perf_counter()
            if bequest.leave(held, one.place, lambda: one.still(held)):
                step = held.step
                _log.info("state of step %d left behind, %.3f s", step, time.perf_counter() - began)
    finally:
        one.is_done = True
        one.tell(wire.GASPED_PHASE, 0.0, step)
    return True


def ask_main(waiters: gloo.Waiters) -> None:
    """Let the main thread do it between two of its lines, and break the collectives that it may be blocked in. Called by another thread,
    and returns when it is done, or not to be had."""
    waiters.forget()
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end and not is_done():
        gloo.shut_down()
        waiters.free()
        ctypes.pythonapi.Py_AddPendingCall(_IN_MAIN, None)
        time.sleep(AGAIN_SECONDS)


def _in_main(_: object) -> int:
    """In the middle of anything, this very work included."""
    try:
        if now():
            time.sleep(WAIT_SECONDS)
    except (RegrowError, RuntimeError, OSError, ValueError, KeyError):  # the state moved while it was looked at
        _log.exception("the state was not left behind")
    return 0


_IN_MAIN = _PENDING(_in_main)


def place_of(environment: WorkerEnvironment) -> bequest.Place:
    """Where the state of this process goes, and where that of the one before it lies."""
    return bequest.Place(writer=environment.writer, slot=environment.local_rank, spec=environment.spec)


def _nothing() -> None:
    """The script has no state that we know of."""


def _never(_: object) -> bool:
    return False
