"""The agent's link to the checkpoint writer: one that stands still is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.agent.harness import until

from regrow.agent import writerlink
from regrow.agent.roster import process_state
from regrow.agent.writerlink import WriterLink


@pytest.fixture
async def link() -> AsyncIterator[WriterLink]:
    """Of a real writer, looked at twenty times a second."""
    with tempfile.TemporaryDirectory(prefix="rg") as folder:  # socket paths have to be short
        async for one in _link(Path(folder)):
            yield one


async def _link(folder: Path) -> AsyncIterator[WriterLink]:
    one = WriterLink(folder / "w.sock", folder, "n0", lambda _report: None, look_seconds=0.05)
    running = asyncio.create_task(one.run())
    await until(lambda: bool(one.pid))
    yield one
    one.stop()
    await one.reap(5.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_stopped_writer_is_replaced(link: WriterLink) -> None:
    """Otherwise the first save of the next generation waits for it, and the whole job with it: seen as a hang of that node's rank."""
    first = link.pid
    os.kill(first, signal.SIGSTOP)
    await until(lambda: bool(link.pid) and link.pid != first)
    await until(lambda: process_state(first) in ("", "Z"))


async def test_a_writer_that_is_stopped_for_a_moment_stays(link: WriterLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writerlink, "STOPPED_LOOKS", 1000)
    first = link.pid
    os.kill(first, signal.SIGSTOP)
    await until(lambda: process_state(first) == "T")
    os.kill(first, signal.SIGCONT)
    await until(lambda: process_state(first) == "S")
    await until(lambda: link.num_unanswered <= 1)
    assert link.pid == first


async def test_a_writer_that_does_not_answer_is_replaced(link: WriterLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alive by the process table, and silent: here it is stopped, and that evidence is taken away."""
    monkeypatch.setattr(writerlink, "STOPPED_LOOKS", 1000)
    monkeypatch.setattr(writerlink, "SILENT_LOOKS", 3)
    first = link.pid
    os.kill(first, signal.SIGSTOP)
    await until(lambda: bool(link.pid) and link.pid != first)
