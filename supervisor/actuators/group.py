"""All actuators of one supervisor: begun with a term, ended with it."""

from __future__ import annotations

import asyncio
from typing import Any

from regrow.supervisor.actuators import config as settings
from regrow.supervisor.actuators.loop import Actuation, Tenure


class Actuators:
    """Those that the settings name; none by default."""

    def __init__(self, config: settings.ActuatorConfig) -> None:
        """Set them up.

        Raises:
            ConfigurationError: one cannot be set up.
        """
        self._config = config
        self._made = settings.build(config)
        self._running: list[tuple[Actuation, asyncio.Task[None]]] = []

    def begin(self, tenure: Tenure) -> None:
        """A term begins."""
        for actuator in self._made:
            one = Actuation(actuator, tenure, dry_run=self._config.mode == "dry-run", per_hour=self._config.per_hour)
            task = asyncio.create_task(one.run(), name=f"actuator-{actuator.name}")
            task.add_done_callback(one.ended)
            self._running.append((one, task))

    async def end(self) -> None:
        """The term is over. A program that runs is killed: its order is in the store, the next leader gives it again."""
        running, self._running = self._running, []
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)

    def document(self) -> dict[str, Any]:
        """For the API."""
        return {"mode": self._config.mode, "actuators": [one.document() for one, _ in self._running]}

    def counts(self) -> dict[str, int]:
        """Orders of all of them by state: open, failed, done, held."""
        found = {"open": 0, "failed": 0, "done": 0, "held": 0}
        for one, _ in self._running:
            for state, count in one.counts().items():
                found[state] += count
        return found
