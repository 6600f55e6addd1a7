"""The check before this node joins, as the agent makes it: own parts and an exchange with peers side by side, one report, and later looks
where the first one could not tell."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from regrow.agent import layout, preflight
from regrow.agent.config import AgentSettings
from regrow.agent.health.burnin_result import CheckResult
from regrow.agent.health.preflight_report import PAIRS, PAIRS_OPEN, PAIRS_UNREACHED, Preflight, with_pairs
from regrow.agent.pairs import AGAIN_SECONDS, Pairs

_log = logging.getLogger("regrow.agent")


class Joining:
    """Pre-flight of one agent: `check` before it greets, `run` while it serves."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._pairs: Pairs | None = None
        self._report = Preflight(ok=True, seconds=0.0, checks=())

    async def check(self, pairs: Pairs | None) -> Preflight | None:
        """All checks within the budget, told in the log and in <state>/preflight.json; None: workers may be at work here.

        Args:
            pairs: exchanges with other nodes; None: none.
        """
        self._pairs = pairs
        if await _answers(layout.NodePaths(self._settings.state).shim_socket):
            _log.info("preflight skipped: an earlier agent's workers may be at work")
            return None
        done = asyncio.Event()
        own, exchanged = await asyncio.gather(self._own(done), self._exchange(done))
        self._keep(own if exchanged is None else with_pairs(own, exchanged))
        return self._report

    async def _own(self, done: asyncio.Event) -> Preflight:
        settings = self._settings
        fake = Path(settings.fake_nvml) if settings.fake_nvml else None
        try:
            return await preflight.run(settings.state, fake_state=fake, budget_seconds=settings.preflight_seconds)
        finally:
            done.set()

    async def _exchange(self, done: asyncio.Event) -> CheckResult | None:
        return await self._pairs.check(done, budget_seconds=self._settings.preflight_seconds) if self._pairs is not None else None

    async def run(self, note: Callable[[Preflight], None]) -> None:
        """Exchange again where the first time could not tell, or a later exchange went wrong, until cancelled; `note` gets the report.

        A node that was found bad stays so until its agent starts again: an exchange that passes does not undo two that did not.
        """
        at_once = asyncio.Event()
        at_once.set()
        while self._pairs is not None:
            last = next((one for one in self._report.checks if one.name.startswith(PAIRS)), None)
            if last is not None and last.name == PAIRS and not last.ok:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_SECONDS if last is not None and last.name in (PAIRS_OPEN, PAIRS_UNREACHED) else None):
                    await self._pairs.suspected.wait()
            found = await self._exchange(at_once)
            if found is not None:
                self._keep(with_pairs(self._report, found))
                note(self._report)

    def _keep(self, report: Preflight) -> None:
        self._report = report
        for problem in report.problems:
            _log.warning("preflight problem: %s", problem)
        _log.info("preflight ok=%s seconds=%.1f checks=%s", report.ok, report.seconds, [one.name for one in report.checks])
        try:
            (self._settings.state / "preflight.json").write_bytes(msgspec.json.encode(report))
        except OSError as error:
            _log.warning("preflight report not written: %s", error.strerror)


async def _answers(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return False
    writer.close()
    return True
