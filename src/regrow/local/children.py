"""Child processes of a launcher: started with a log file, the lifeline and a mark; restarted when they die."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from pathlib import Path

from regrow.processes import LIFELINE


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to start one child. `log` gets stdout and stderr, appended."""

    name: str
    argv: tuple[str, ...]
    log: Path
    env: dict[str, str]


class Child:
    """One restartable child process in a process group of its own."""

    def __init__(self, recipe: Recipe, lifeline: int) -> None:
        self.recipe = recipe
        self.num_starts = 0
        self.wanted = False
        self._lifeline = lifeline
        self._process: asyncio.subprocess.Process | None = None
        self._started_at = 0.0

    @property
    def pid(self) -> int | None:
        """Pid while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def exit_code(self) -> int | None:
        """Exit status of the last run once it ended (negative: signal)."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Start it; says nothing about readiness."""
        self.wanted = True
        self.num_starts += 1
        self._started_at = time.monotonic()
        self.recipe.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self.recipe.env, LIFELINE: str(self._lifeline)}
        with self.recipe.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.recipe.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(self._lifeline,),
                start_new_session=True,
            )

    async def wait(self) -> int:
        """Until it ends; its exit status."""
        assert self._process is not None, "not started"
        return await self._process.wait()

    async def stop(self, grace_seconds: float) -> None:
        """SIGTERM, then SIGKILL after the grace. Not restarted."""
        self.wanted = False
        if self.pid is None:
            return
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """SIGKILL, at once."""
        if self.pid is not None and self._process is not None:
            self._process.kill()

    async def keep(self) -> None:
        """Restart it whenever it ends while wanted. A child that dies at once is restarted more and more slowly."""
        backoff = 0.1
        while True:
            if self._process is not None:
                await self._process.wait()
            if not self.wanted:
                await asyncio.sleep(0.1)
                continue
            if time.monotonic() - self._started_at > 5.0:
                backoff = 0.1
            else:
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, 5.0)
            if self.wanted:
                await self.start()
