"""The agent's view of its own health: the monitor behind one small port, or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from regrow.agent.config import AgentSettings
from regrow.agent.health.history import History
from regrow.agent.health.monitor import HealthMonitor
from regrow.agent.health.sample import NodeSample
from regrow.agent.joining import Joining
from regrow.agent.pairs import Pairs
from regrow.wire import Device, HealthVerdict

_PREPARE_SECONDS = 15.0
_TEARDOWN_SECONDS = 15.0
"""XIDs within this time of our own kill are its symptoms."""


class HealthSource(Protocol):
    """Where verdicts on this node come from."""

    def devices(self) -> tuple[Device, ...]:
        """GPUs as last seen."""
        ...

    def verdict(self) -> HealthVerdict:
        """The verdict now."""
        ...

    async def prepare(self, pairs: Pairs | None = None) -> None:
        """The check before joining, with `pairs` against other nodes as well, and the first look; bounded in time."""
        ...

    async def run(self, on_change: Callable[[HealthVerdict], None]) -> None:
        """Watch until cancelled; report changes of the verdict."""
        ...

    def sample(self) -> NodeSample | None:
        """The last look at the GPUs."""
        ...

    def history(self) -> History:
        """What is remembered: XIDs by GPU, open conditions."""
        ...

    def clear(self, *, by: str) -> int:
        """End all open conditions, by word of an operator: how many. What still holds is found again."""
        ...

    def kernel_lines(self) -> tuple[str, ...]:
        """The last lines of the kernel log that may tell why a process ended."""
        ...

    def in_teardown(self) -> bool:
        """Whether what is seen now may be a symptom of our own kill."""
        ...

    def note_kill(self) -> None:
        """We kill workers now."""
        ...

    def note_busy(self, busy: bool) -> None:
        """Whether workers run here."""
        ...


class NoHealth:
    """A node that nobody looks at."""

    def devices(self) -> tuple[Device, ...]:
        """None."""
        return ()

    def verdict(self) -> HealthVerdict:
        """Unknown."""
        return HealthVerdict()

    async def prepare(self, pairs: Pairs | None = None) -> None:
        """Nothing to see."""
        del pairs

    async def run(self, on_change: Callable[[HealthVerdict], None]) -> None:
        """Nothing ever changes."""
        del on_change
        await asyncio.Event().wait()

    def sample(self) -> NodeSample | None:
        """None."""
        return None

    def history(self) -> History:
        """Nothing."""
        return History()

    def clear(self, *, by: str) -> int:
        """Nothing to end."""
        del by
        return 0

    def kernel_lines(self) -> tuple[str, ...]:
        """None."""
        return ()

    def in_teardown(self) -> bool:
        """Of no interest."""
        return False

    def note_kill(self) -> None:
        """Of no interest."""

    def note_busy(self, busy: bool) -> None:
        """Of no interest."""


class MonitoredHealth:
    """A `HealthMonitor` as source."""

    def __init__(self, monitor: HealthMonitor, joining: Joining | None = None) -> None:
        self._monitor = monitor
        self._joining = joining
        self._killed_at: float | None = None

    def devices(self) -> tuple[Device, ...]:
        """GPUs as last seen; `prepare` has seen them first."""
        return self._monitor.devices()

    def verdict(self) -> HealthVerdict:
        """The verdict now."""
        return self._monitor.verdict

    async def prepare(self, pairs: Pairs | None = None) -> None:
        """The check before joining, then the first look; a probe that hangs is a verdict as well."""
        report = await self._joining.check(pairs) if self._joining is not None else None
        if report is not None:
            self._monitor.note_preflight(report)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PREPARE_SECONDS):
                await self._monitor.prepare()

    async def run(self, on_change: Callable[[HealthVerdict], None]) -> None:
        """Watch until cancelled."""

        async def report(verdict: HealthVerdict) -> None:
            on_change(verdict)

        async with asyncio.TaskGroup() as both:
            both.create_task(self._monitor.run(report))
            if self._joining is not None:
                both.create_task(self._joining.run(self._monitor.note_preflight))

    def sample(self) -> NodeSample | None:
        """The last look at the GPUs."""
        return self._monitor.sample

    def history(self) -> History:
        """What is remembered: XIDs by GPU, open conditions."""
        return self._monitor.history

    def clear(self, *, by: str) -> int:
        """End all open conditions; the next look, at once, finds what still holds."""
        return self._monitor.clear(by=by, why="the node was cleared")

    def kernel_lines(self) -> tuple[str, ...]:
        """Also those that were written a moment ago."""
        return self._monitor.kernel_lines()

    def in_teardown(self) -> bool:
        """Whether what is seen now may be a symptom of our own kill."""
        return self._killed_at is not None and time.monotonic() < self._killed_at + _TEARDOWN_SECONDS

    def note_kill(self) -> None:
        """Symptoms of teardown are no faults."""
        self._killed_at = time.monotonic()
        self._monitor.note_teardown(_TEARDOWN_SECONDS)

    def note_busy(self, busy: bool) -> None:
        """A pending reset waits for an idle GPU."""
        self._monitor.note_busy(busy)


def _believed(kernel_log: Path, fake: Path | None) -> bool:
    """A device is this host's: it says nothing on GPUs that are a fake's. A file is whoever wrote it, and may come later."""
    if kernel_log.is_char_device():
        return fake is None and os.access(kernel_log, os.R_OK)
    return fake is not None or os.access(kernel_log, os.R_OK)


def open_health(settings: AgentSettings) -> HealthSource:
    """The source that the settings ask for."""
    if settings.health_seconds <= 0:
        return NoHealth()
    kernel_log = Path(settings.kernel_log) if settings.kernel_log else None
    fake = Path(settings.fake_nvml) if settings.fake_nvml else None
    if kernel_log is not None and not _believed(kernel_log, fake):
        kernel_log = None
    monitor = HealthMonitor(settings.state, period_seconds=settings.health_seconds, fake_state=fake, kmsg=kernel_log)
    return MonitoredHealth(monitor, Joining(settings) if settings.preflight_seconds > 0 else None)
