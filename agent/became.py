"""When this process became the worker that it is: at its start, or later, where it stood ready or came from another generation."""

from __future__ import annotations

import time

_at: float | None = None


def now() -> None:
    """It is this worker from now on."""
    global _at  # noqa: PLW0603  # a process is one worker at a time
    _at = time.time()


def seconds() -> float:
    """Since then, at least 0; a process that nobody said anything of began when it was created."""
    if _at is not None:
        return max(0.0, time.time() - _at)
    import psutil  # only workers ask

    return max(0.0, time.time() - psutil.Process().create_time())
