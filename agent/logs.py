"""Log files of workers: their ends, tracebacks in them, and how many generations are kept."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

TAIL_BYTES = 64 * 1024
MAX_EVIDENCE_BYTES = 8 * 1024
"""Of a traceback or log end that is sent to the leader."""
KEEP_GENERATIONS = 50
"""Generation folders kept of each job; older ones go when a new one starts."""

_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):$", re.MULTILINE)


def tail(path: str | Path, limit: int = TAIL_BYTES) -> str:
    """The end of a file, at most `limit` bytes; empty when it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - limit))
            data = file.read()
    except OSError:
        return ""
    return data.decode(errors="replace")


def last_traceback(text: str) -> str:
    """The last Python traceback of a text, from its headline to the line that names the error; empty without one."""
    found = list(_TRACEBACK.finditer(text))
    if not found:
        return ""
    lines = text[found[-1].start() :].splitlines()
    kept: list[str] = []
    for line in lines:
        kept.append(line)
        if len(kept) > 1 and line and not line.startswith((" ", "\t")):
            break
    return cut("\n".join(kept))


def cut(text: str, limit: int = MAX_EVIDENCE_BYTES) -> str:
    """The end of a text, at most `limit` bytes of UTF-8."""
    data = text.encode()
    return text if len(data) <= limit else "..." + data[-(limit - 3) :].decode(errors="ignore")


def prune(job_folder: Path, keep: int = KEEP_GENERATIONS) -> None:
    """Remove the folders of the oldest generations of a job. Other names are left alone."""
    numbered = [(int(entry.name[1:]), entry) for entry in job_folder.glob("g*") if entry.name[1:].isdigit()]
    for _, folder in sorted(numbered)[:-keep]:
        shutil.rmtree(folder, ignore_errors=True)
