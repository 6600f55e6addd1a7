"""A launcher that is told to end while it ends a child: the child's end does not swallow that."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable
from pathlib import Path

from regrow.local.children import Child, Recipe
from regrow.local.launch import Follower
from regrow.local.live import LiveView

LIMIT = 30.0


async def cancelled_in_the_moment(work: Awaitable[object], moment: Awaitable[object]) -> bool:
    """Cancel `work` in the turn of the event loop in which what it waits for is there. True: it was cancelled."""
    task = asyncio.ensure_future(work)
    async with asyncio.timeout(LIMIT):
        await moment
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return task.cancelled()


async def test_a_cancellation_in_the_moment_of_a_childs_end_counts(tmp_path: Path) -> None:
    """`asyncio.wait_for` of Python 3.11 returns the result then, and the one who cancelled waits for ever."""
    lifeline, held = os.pipe()
    try:
        child = Child(Recipe("sleeper", (sys.executable, "-c", "import time; time.sleep(600)"), tmp_path / "log", {}), lifeline)
        await child.start()
        assert await cancelled_in_the_moment(child.stop(LIMIT), child.wait())
        assert child.pid is None
    finally:
        os.close(lifeline)
        os.close(held)


class _Api:
    """Answers once with a job that has ended."""

    async def get(self, path: str) -> dict[str, object]:
        return {"state": "done", "path": path}


async def test_a_cancellation_in_the_moment_of_a_jobs_end_counts() -> None:
    follower = Follower(_Api(), "j", LiveView(title="", plain=True))  # type: ignore[arg-type]
    waiting = asyncio.create_task(follower.until(lambda _: True, "its end", LIMIT))
    await asyncio.sleep(0)
    assert await cancelled_in_the_moment(waiting, follower._follow())
