"""Fault hooks: places where a test can make storage fail, slow down, or kill the process, by environment only.

REGROW_CKPT_FAULTS is a list of ``place:action[:nth[+]]`` separated by commas. The action happens at the nth passage of
the place (1: the first; 0: every passage; 2+: the second and all later ones). Actions: kill (SIGKILL to this process), stop (SIGSTOP), enospc, eio, erofs,
hang (for ever), slow=SECONDS. Without the variable `point` costs one comparison.

``@PATH`` instead of a list: the list is in this file, read again when it changed; no file: no faults. So a running process can
be hurt and healed.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path

import msgspec

VARIABLE = "REGROW_CKPT_FAULTS"
FILE_MARK = "@"
_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO, "erofs": errno.EROFS}


class _Fault(msgspec.Struct):
    place: str
    action: str
    nth: int = 1
    later: bool = False
    seen: int = 0


def parse(text: str) -> list[_Fault]:
    """Read the variable's value.

    Raises:
        ValueError: not of the form above.
    """
    faults: list[_Fault] = []
    for part in filter(None, text.split(",")):
        words = part.split(":")
        if len(words) not in (2, 3):
            raise ValueError(f"{VARIABLE}: {part!r} is not place:action[:nth[+]]")
        nth = words[2] if len(words) == 3 else "1"
        faults.append(_Fault(words[0], words[1], int(nth.removesuffix("+")), nth.endswith("+")))
    return faults


class Faults:
    """The faults of one process."""

    def __init__(self, text: str) -> None:
        self._path = text.removeprefix(FILE_MARK) if text.startswith(FILE_MARK) else ""
        self._seen_at = -1
        self._faults: list[_Fault] = [] if self._path else parse(text)
        self._lock = threading.Lock()

    def point(self, place: str) -> None:
        """Pass a place: nothing, or the fault that was asked for."""
        if self._path:
            self._refresh()
        if not self._faults:
            return
        for fault in self._faults:
            if fault.place == place:
                with self._lock:
                    fault.seen += 1
                    due = fault.nth in (0, fault.seen) or (fault.later and fault.seen >= fault.nth)
                if due:
                    _act(fault.action, place)

    def _refresh(self) -> None:
        changed_at = _changed_at(self._path)
        with self._lock:
            if changed_at == self._seen_at:
                return
            self._seen_at = changed_at
            self._faults = parse(Path(self._path).read_text(encoding="ascii").strip()) if changed_at else []


def _changed_at(path: str) -> int:
    """0: there is no such file."""
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116 - once a write call
    except FileNotFoundError:
        return 0


def _act(action: str, place: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "hang":
        threading.Event().wait()
    elif action.startswith("slow="):
        time.sleep(float(action[5:]))
    elif action in _ERRORS:
        raise OSError(_ERRORS[action], os.strerror(_ERRORS[action]), place)
    else:
        raise ValueError(f"{VARIABLE}: unknown action {action!r}")


_process = Faults(os.environ.get(VARIABLE, ""))


def point(place: str) -> None:
    """Pass a place with the faults of this process's environment."""
    _process.point(place)
