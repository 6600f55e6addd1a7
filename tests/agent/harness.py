"""What the agent's tests share: waiting, plain runs, a launcher with its shim."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regrow.agent import protocol
from regrow.agent.launcher import Launcher, ShimDown, ShimOptions, ShimUp

LIMIT = 60.0
"""The one generous deadline of a wait, seconds."""


async def until(condition: Callable[[], Any], limit: float = LIMIT) -> Any:
    """Wait for a condition that nobody signals; polls gently."""
    async with asyncio.timeout(limit):
        while not (value := condition()):  # noqa: ASYNC110  # the conditions are facts of /proc and of files
            await asyncio.sleep(0.01)
        return value


class Harness:
    """A launcher with its shim, and everything that it reported."""

    def __init__(self, state: Path, **options: Any) -> None:
        options = {"imports": False, "spare_store": False} | options
        self.state = state
        self.news: list[Any] = []
        self.changed = asyncio.Event()
        self.launcher = Launcher(ShimOptions(state=state, **options), self._note)
        self.task = asyncio.create_task(self.launcher.run())

    def _note(self, news: Any) -> None:
        self.news.append(news)
        self.changed.set()

    async def next(self, kind: type[Any], count: int = 1) -> list[Any]:
        """Wait until `count` reports of a kind are there; all of them."""
        async with asyncio.timeout(LIMIT):
            while len(found := [item for item in self.news if isinstance(item, kind)]) < count:
                self.changed.clear()
                await self.changed.wait()
        return found

    async def up(self) -> protocol.Ready:
        """The shim's first state."""
        return (await self.next(ShimUp))[0].ready

    async def down(self) -> ShimDown:
        """The report of the shim's death."""
        return (await self.next(ShimDown))[0]

    def worker(self, argv: list[str], rank: int = 0, **changes: Any) -> protocol.WorkerStart:
        """A worker start with this process's environment."""
        values: dict[str, Any] = {
            "rank": rank,
            "local_rank": rank,
            "argv": tuple(argv),
            "cwd": str(self.state),
            "env": {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "RANK": str(rank)},
            "log": str(self.state / f"rank{rank}.out"),
        }
        return protocol.WorkerStart(**(values | changes))

    def script(self, text: str, name: str = "script.py") -> str:
        """A script in the state folder."""
        path = self.state / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    async def start(self, workers: list[protocol.WorkerStart], generation: int = 1, **changes: Any) -> protocol.GenerationState:
        """Start workers of job `toy`."""
        values: dict[str, Any] = {"id": 0, "job": "toy", "epoch": 1, "generation": generation, "workers": tuple(workers)}
        return await self.launcher.start(protocol.StartWorkers(**(values | changes)))

    def output(self, rank: int = 0) -> str:
        """What a rank has printed."""
        path = self.state / f"rank{rank}.out"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    async def leave(self, *, stop_shim: bool = True) -> None:
        """End the launcher (and the shim)."""
        await self.launcher.close(stop_shim=stop_shim)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def plain(script: str, *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> tuple[str, str]:
    """What `python script` prints on stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        script,
        *arguments,
        env=env,
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    return output.decode(), errors.decode()
