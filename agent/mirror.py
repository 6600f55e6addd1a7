"""The second tier of a job on its committing node: after each commit the newest checkpoints are copied to another storage."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys

from regrow import wire
from regrow.processes import lifeline_fd

_log = logging.getLogger("regrow.agent.mirror")
_CLOSE_SECONDS = 3.0
"""What a copy in progress gets to end when the agent ends."""


class Mirror:
    """One child process at a time; commits that come meanwhile are one more pass. A failure costs nothing but the copy."""

    def __init__(self) -> None:
        self.counts = {"mirrored": 0, "failed": 0}
        """Passes of this agent, by outcome."""
        self._policy = wire.CheckpointPolicy()
        self._due = asyncio.Event()
        self._work: asyncio.Task[None] | None = None

    def begin(self, policy: wire.CheckpointPolicy) -> None:
        """A generation starts in which this node commits."""
        self._policy = policy
        if policy.mirror_url and self._work is None:
            self._work = asyncio.create_task(self._run(), name="regrow-mirror")

    def committed(self) -> None:
        """There is a new checkpoint."""
        self._due.set()

    async def close(self) -> None:
        """End. What was not copied is copied by the next pass of whoever mirrors this folder."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            if self._policy.mirror_url:
                await self._pass(self._policy)

    async def _pass(self, policy: wire.CheckpointPolicy) -> None:
        command = (sys.executable, "-m", "regrow.ckpt.mirroring", policy.path, policy.mirror_url, str(policy.mirror_keep))
        kept = lifeline_fd()
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, pass_fds=() if kept is None else (kept,)
        )
        try:
            said, problem = await child.communicate()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            try:
                await asyncio.wait_for(child.wait(), _CLOSE_SECONDS)
            except TimeoutError:
                child.kill()
                await child.wait()
            raise
        self.counts["failed" if child.returncode else "mirrored"] += 1
        if child.returncode:
            _log.warning("not mirrored to %s: %s", policy.mirror_url, problem.decode(errors="replace").strip()[-500:])
        else:
            _log.info("mirrored to %s: %s", policy.mirror_url, said.decode().strip()[:500])
