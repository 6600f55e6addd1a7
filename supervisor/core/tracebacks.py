"""What a Python traceback says in one line."""

from __future__ import annotations

import re

_MARGIN = re.compile(r"^\s*\|\s?")
"""Of an exception group's traceback."""


def error_line(traceback: str) -> str:
    """The line that names the exception: the first one after the last frame that is not indented, else the last line.

    A message of several lines ends with a hint or a detail as a rule; its first line is the one that says what happened.
    Empty for an empty text.
    """
    lines = [_MARGIN.sub("", line) for line in traceback.splitlines() if line.strip()]
    if not lines:
        return ""
    frames = [number for number, line in enumerate(lines) if line.lstrip().startswith("File ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    return next((line for line in after if not line.startswith((" ", "\t"))), lines[-1]).strip()
