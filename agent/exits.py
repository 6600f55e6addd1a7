"""How a worker ended: the kernel's word, torch elastic's error file, the last traceback, evidence of an OOM kill."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from regrow.agent import logs
from regrow.agent.health import classify
from regrow.agent.progress import Progress
from regrow.agent.protocol import WorkerState
from regrow.wire import WorkerExit

_LAST_LINES = 200
_NOTHING = classify.FileVerdict(kind="benign", action="none", first_line=0)
_OOM_PID = re.compile(r"(?:[Kk]illed process|oom-kill:.*\bpid=)\s*(\d+)")


def describe(
    worker: WorkerState,
    *,
    error_file: Path | None = None,
    progress: Progress | None = None,
    oom_killed: bool = False,
    oom_counted: bool = False,
) -> WorkerExit:
    """Everything that this host can say about an end.

    Args:
        worker: with its wait status.
        error_file: TORCHELASTIC_ERROR_FILE of the worker.
        progress: its last progress word.
        oom_killed: the host says that it was killed for memory; believed only with signal 9.
        oom_counted: the host would have said so.
    """
    status = worker.status if worker.status is not None else 9
    code = os.waitstatus_to_exitcode(status)
    signal = -code if code < 0 else 0
    error = ""
    said = _NOTHING
    if not worker.torn_down and code != 0:
        last = logs.tail(worker.log)
        error = (read_error_file(error_file) if error_file else "") or logs.last_traceback(last)
        said = classify.verdict(classify.classify_lines((*last.splitlines()[-_LAST_LINES:], *error.splitlines())))
    word = progress if progress is not None and progress.sequence else None
    return WorkerExit(
        rank=worker.rank,
        local_rank=worker.local_rank,
        pid=worker.pid,
        exit_code=max(code, 0),
        signal=signal,
        declared_end=word is not None and word.phase == "finished",
        torn_down=worker.torn_down,
        error=error,
        oom_killed=oom_killed and signal == 9 and not worker.torn_down,
        oom_counted=oom_counted,
        said="" if said.kind == "benign" else said.kind,
        said_action="" if said.kind == "benign" else said.action,
        last_step=word.applied_step if word is not None else -1,
    )


def lost_with_shim(worker: WorkerState, reason: str, progress: Progress | None) -> WorkerExit:
    """A worker whose parent died: it died with it, and nobody read its status."""
    found = describe(msgspec.structs.replace(worker, status=9), progress=progress)
    return msgspec.structs.replace(found, error=f"{reason}; its workers died with it", torn_down=worker.torn_down)


def read_error_file(path: Path) -> str:
    """The text of torch elastic's error file: traceback when there is one, else its message; empty when unreadable."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        message = document["message"]
        if isinstance(message, str):
            return logs.cut(message)
        trace = message.get("extraInfo", {}).get("py_callstack", "")
        return logs.cut(str(trace or message.get("message", "")))
    except (OSError, ValueError, KeyError, AttributeError):
        return ""


def oom_kills_of(lines: Iterable[str]) -> frozenset[int]:
    """Pids that these kernel lines say were killed for lack of memory."""
    return frozenset(int(match.group(1)) for line in lines for match in _OOM_PID.finditer(line))


def num_oom_kills() -> int | None:
    """OOM kills counted by this process's memory cgroup (v2, then v1), else by the host; None where they cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                count = _field(Path(f"/sys/fs/cgroup{path}/memory.events"), "oom_kill")
            elif "memory" in controllers.split(","):
                count = _field(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"), "oom_kill")
            else:
                continue
            if count is not None:
                return count
    return host_oom_kills()


def host_oom_kills() -> int | None:
    """OOM kills of the whole host, of all its control groups; None where they cannot be read."""
    return _field(Path("/proc/vmstat"), "oom_kill")


class OomKills(NamedTuple):
    """Counts at one moment; None: cannot be read."""

    own: int | None = None
    """Of this process's control group."""
    host: int | None = None


def count_oom_kills() -> OomKills:
    """The counts of now."""
    return OomKills(own=num_oom_kills(), host=host_oom_kills())


def was_oom(before: OomKills, now: OomKills) -> tuple[bool, bool]:
    """(the kernel killed for memory here, it can be told). A kill in another group of the host leaves it open: a worker may have been moved
    to a group of its own."""
    if before.own is None or now.own is None:
        return False, False
    killed = now.own > before.own
    return killed, killed or now.host == before.host


def _field(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return None
