"""The last words of a training process: torch elastic's error file, stacks on demand, exit codes (torch-free)."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

_log = logging.getLogger("regrow.worker")

EXIT_RESTORE_FAILED = 75
"""Exit code of a worker that could not load its restore point (EX_TEMPFAIL): the leader takes an older one."""
STACKS_SIGNAL = signal.SIGUSR2
MAX_TRACEBACK_BYTES = 64 * 1024

_stacks_file: TextIO | None = None
before_the_end: Callable[[BaseException], None] | None = None
"""What to do with an error of the script before it is told."""


def register_stacks(folder: Path, rank: int) -> Path:
    """Let SIGUSR2 append the Python stacks of all threads to ``<folder>/stacks-<rank>.txt``, also when the process is blocked.

    faulthandler writes them in the signal handler itself, so a collective or a lock that never returns does not matter.
    """
    global _stacks_file  # noqa: PLW0603 - faulthandler keeps the descriptor; the file must live as long as the process
    path = folder / f"stacks-{rank}.txt"
    if _stacks_file is not None:
        _stacks_file.close()
    _stacks_file = path.open("a", encoding="utf-8")
    faulthandler.register(STACKS_SIGNAL, file=_stacks_file, all_threads=True, chain=False)
    return path


def error_document(error: BaseException, *, rank: int, step: int, generation: int, node: str) -> dict[str, Any]:
    """torch elastic's error file: ``message.message`` and ``message.extraInfo``, with our fields added to the latter."""
    text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_BYTES:]
    return {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": text,
                "timestamp": str(int(time.time())),
                "rank": rank,
                "step": step,
                "generation": generation,
                "node": node,
                "pid": os.getpid(),
            },
        }
    }


def write_error_file(path: str, document: dict[str, Any]) -> None:
    """Write it in one piece; a failure to do so is logged and never hides the error that it is about."""
    try:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f"{target.name}.{os.getpid()}")
        fresh.write_text(json.dumps(document), encoding="utf-8")
        fresh.replace(target)
    except OSError as error:
        _log.warning("error file not written path=%s error=%s", path, error)


class UncaughtHook:
    """Chained in front of sys.excepthook: tells `on_error` first, then lets the old hook print the traceback.

    `@record` of torch elastic writes the same file before it re-raises; ours comes later and has rank and step too.
    """

    def __init__(self, on_error: Callable[[BaseException], None], pause: Callable[[BaseException], None]) -> None:
        """`pause` is called by who runs the script (`agent.child`), before anything is made of the error. By that name in this module:
        torch puts a hook of its own in front of ours when the process joins a group."""
        global before_the_end  # noqa: PLW0603
        before_the_end = pause
        self._on_error = on_error
        self._old = sys.excepthook
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, SystemExit):
            self._on_error(value)
        self._old(kind, value, trace)

    def remove(self) -> None:
        """Take the hook out again, when it is still the one installed."""
        global before_the_end  # noqa: PLW0603
        before_the_end = None
        if sys.excepthook is self:
            sys.excepthook = self._old


def stop_on_sigterm(request: Callable[[], None]) -> None:
    """The first SIGTERM calls `request` (save and stop at one step of all ranks); the second one kills, as it would without us."""

    def ask(number: int, frame: object) -> None:
        del frame
        request()
        signal.signal(number, signal.SIG_DFL)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        with contextlib.suppress(ValueError):  # not the main thread: the script keeps its own rules
            signal.signal(signal.SIGTERM, ask)


def leave_sigterm() -> None:
    """Take the handler out again, when it is still the one installed."""
    if getattr(signal.getsignal(signal.SIGTERM), "__module__", "") == __name__:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
