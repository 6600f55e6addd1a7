from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from regrow.store.embedded import EmbeddedEtcd

DEADLINE = 90.0


class Processes:
    """Child processes of one test, each with a log of its own; none of them outlives it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._children: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str, *argv: str, **environment: str) -> asyncio.subprocess.Process:
        log = os.open(self.root / f"{name}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        values = {"OMP_NUM_THREADS": "1", "REGROW_SUPERVISOR_BEAT_SECONDS": "0.1", **environment}
        self._children[name] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *argv, env={**os.environ, **values}, stdout=log, stderr=log, cwd=self.root
        )
        os.close(log)
        return self._children[name]

    def log(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    async def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE):
                while True:
                    if condition():
                        return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            logs = "\n".join(f"--- {name}\n{self.log(name)[-3000:]}" for name in self._children)
            pytest.fail(f"not within {DEADLINE} s: {what}\n{logs}")

    async def ends(self, name: str) -> int:
        """Exit code of a child."""
        await self.until(lambda: self._children[name].returncode is not None, f"{name} ends")
        return self._children[name].returncode or 0

    def lose_node(self, name: str) -> None:
        """SIGKILL for a launcher and all that it started: what is left of a host that lost power."""
        found = psutil.Process(self._children[name].pid)
        for process in [found, *found.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    async def stop(self) -> None:
        for name, process in self._children.items():
            if process.returncode is None:
                family = psutil.Process(process.pid).children(recursive=True)
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                try:
                    await asyncio.wait_for(process.wait(), 15)
                except TimeoutError:
                    self.lose_node(name)
                    await process.wait()
                for left in psutil.wait_procs(family, timeout=5)[1]:
                    left.kill()


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[EmbeddedEtcd]:
    member = EmbeddedEtcd(tmp_path / "etcd")
    await member.start()
    yield member
    await member.stop()


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    made = Processes(tmp_path)
    yield made
    await made.stop()
