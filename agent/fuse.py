"""A bound on how long a worker may take to end after it failed.

A rank that raised has told its story; what is left is the interpreter's own end: `atexit`, threads that are joined, memory
that is freed. Where that stands still (out of address space, a lock that a dead thread holds) the sockets stay open and its
peers wait: a failure with a name becomes a hang. A timer of the kernel and a handler in C end it: no thread, no
memory, and no lock of the interpreter is needed for that.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable

VARIABLE = "REGROW_EXIT_SECONDS"
DEFAULT_SECONDS = 5.0
"""Shorter than any hang limit that is learned, longer than an `atexit` that closes files."""

_CLOCK_MONOTONIC = 1
_SIGEV_SIGNAL = 0
_SIGNAL = signal.SIGHUP  # its number is the exit code of an uncaught exception: the handler is _exit(number)


class _Event(ctypes.Structure):
    """struct sigevent."""

    _fields_ = (("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int), ("rest", ctypes.c_char * 48))


class _Times(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_seconds", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Fuse:
    """Made while there is memory; lit when the program has failed. It ends the process with exit code 1."""

    def __init__(self, seconds: float) -> None:
        """Args:
            seconds: from lighting it to the end; 0 or less: never.

        Raises:
            OSError: the kernel has no more timers for this user.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        library = libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)  # glibc before 2.34
        self._timer = ctypes.c_void_p()
        self._times = _Times(0, 0, int(seconds), int(seconds % 1 * 1e9)) if seconds > 0 else None
        self._exit = ctypes.cast(libc._exit, ctypes.c_void_p)  # noqa: SLF001  # the C function's name
        self._set_handler, self._start = libc.signal, library.timer_settime
        event = _Event(signo=_SIGNAL, notify=_SIGEV_SIGNAL)
        if library.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)) != 0:
            raise OSError(ctypes.get_errno(), "timer_create")

    def light(self) -> None:
        """From now on the process has that long."""
        if self._times is None:
            return
        self._set_handler(_SIGNAL, self._exit)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {_SIGNAL})
        self._start(self._timer, 0, ctypes.byref(self._times), None)


def laid(text: str) -> Callable[[], None]:
    """What lights a fuse that is ready.

    Args:
        text: of the environment variable; the default where it is empty or no number of seconds.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = DEFAULT_SECONDS
    try:
        return Fuse(seconds).light
    except OSError as error:  # the user's timers are used up: no reason not to train
        sys.stderr.write(f"regrow: no bound on the end of a failed rank: {error}\n")
        return _nothing


def _nothing() -> None:
    return None
