"""Waiting for what has no event of its own, with one generous limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LIMIT = 60.0


def boottime() -> float:
    """Seconds of CLOCK_BOOTTIME."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def eventually(condition: Callable[[], bool], what: str = "") -> None:
    """Until a condition of this process holds."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, what or "it never came true"
        await asyncio.sleep(0.01)
