"""Finding and ending processes by a mark in their environment, and the lifeline between a launcher and its children.

The mark is inherited by everything that a node's agent starts (shim, workers, writer, probe), whoever is the parent
now, so a node can be killed as a whole and leftovers can be found.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path

LIFELINE = "REGROW_LIFELINE"
"""Environment name: number of an inherited descriptor, the read end of a pipe. End of file means: stop and exit."""

MARK = "REGROW_NODE_STATE"
"""Environment name: the state folder of the node that a process belongs to."""

_F_SETSIG = 10
"""fcntl(2); Python has no name for it."""


def lifeline_fd() -> int | None:
    """The inherited lifeline, when there is one and it is open."""
    text = os.environ.get(LIFELINE, "")
    if not text.isdigit():
        return None
    fd = int(text)
    try:
        os.fstat(fd)
    except OSError:
        return None
    return fd


def wake_at_lifeline_end() -> None:
    """Let the kernel send SIGCONT to this process when the lifeline ends: a daemon that was stopped (SIGSTOP) goes on and sees the end
    as any other does; to one that runs SIGCONT means nothing. Without a lifeline nothing happens.

    Raises:
        OSError: as below.
    """
    signal_at_lifeline_end(signal.SIGCONT)


def signal_at_lifeline_end(number: int) -> int | None:
    """Let the kernel send this signal to this process when the lifeline ends.

    Signal-driven I/O belongs to an open file, which all heirs of the pipe share; so the pipe is opened anew here.

    Returns:
        The descriptor of it: closed, no signal comes. None: there is no lifeline.

    Raises:
        OSError: the lifeline is no pipe.
    """
    lifeline = lifeline_fd()
    if lifeline is None:
        return None
    own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, _F_SETSIG, number)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    return own


def marked(mark: str, value: str, *, exact: bool = True) -> list[int]:
    """Pids of live processes whose environment has `mark` = `value` (or starting with it), this process excluded.

    Processes that ended, or that belong to somebody else, are passed over.
    """
    prefix = f"{mark}=".encode()
    wanted = prefix + value.encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            if stat_fields(int(entry.name))[0] == "Z":
                continue
        except OSError:
            continue
        for item in environment.split(b"\0"):
            if item.startswith(prefix) and (item == wanted if exact else item.startswith(wanted)):
                found.append(int(entry.name))
                break
    return found


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state letter (field 3 of proc(5)) on; the command name before it may hold anything.

    Raises:
        OSError: no such process.
    """
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def kill_marked(mark: str, value: str, *, exact: bool = True, limit_seconds: float = 10.0) -> list[int]:
    """SIGKILL all marked processes, again until none is left (they may fork meanwhile).

    Returns:
        Pids that were still there after the limit: processes that cannot be killed.
    """
    deadline = time.monotonic() + limit_seconds
    while True:
        pids = marked(mark, value, exact=exact)
        if not pids or time.monotonic() > deadline:
            return pids
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)
