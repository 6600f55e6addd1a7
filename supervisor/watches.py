"""What the store tells a leader: leases that expired, checkpoints that agents committed or removed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from regrow import wire
from regrow.store.base import Event, Store
from regrow.supervisor.core import events as e
from regrow.supervisor.core.commits import committed
from regrow.supervisor.core.view import CheckpointView, View
from regrow.supervisor.effects import Effects
from regrow.supervisor.keys import Keys

log = logging.getLogger("regrow.supervisor.watches")


class Watches:
    """One per term."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        effects: Effects,
        *,
        look: Callable[[], View],
        post: Callable[[e.Event], None],
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._keys = keys
        self._effects = effects
        self._look = look
        self._post = post
        self._now = now

    async def nodes(self) -> None:
        """Leases that expired: the backstop of the beat connections."""
        async with self._store.watch_prefix(self._keys.nodes) as watch:
            async for batch in watch:
                for event in batch.events:
                    if event.kind == "delete":
                        self._post(e.LeaseExpired(at=self._now(), node=event.key.removeprefix(self._keys.nodes)))

    async def checkpoints(self) -> None:
        """Commits and removals by the committing agents, whoever was told of them."""
        async with self._store.watch_prefix(self._keys.jobs) as watch:
            async for batch in watch:
                if batch.snapshot is not None and not self._look().jobs:
                    continue
                for event in batch.events:
                    job, _, rest = event.key.removeprefix(self._keys.jobs).partition("/")
                    if rest.startswith("checkpoints/"):
                        self._checkpoint(job, rest.removeprefix("checkpoints/"), event)

    def _checkpoint(self, job: str, step: str, event: Event) -> None:
        if not step.isdigit():
            return
        view = self._look().jobs.get(job)
        known = view.checkpoints.get(int(step)) if view is not None else None
        if event.kind == "delete":
            self._gone(job, int(step), known)
            return
        try:
            record = msgspec.json.decode(event.value, type=wire.CheckpointRecord)
        except msgspec.MsgspecError:
            log.warning("job=%s checkpoint record of step %s is not readable", job, step)
            return
        self._of_agent(wire.checkpoint_mark(job, record.generation, record.step))
        if known is None or (known.directory, known.evidence, known.damaged) != (record.directory, record.evidence, record.damaged):
            self._post(committed(job, record, self._now()))

    def _gone(self, job: str, step: int, known: CheckpointView | None) -> None:
        generation = known.generation if known is not None else 0
        if known is not None:
            self._of_agent(wire.checkpoint_mark(job, generation, step, gone=True))
        self._post(e.CheckpointGone(at=self._now(), job=job, step=step, generation=generation))

    def _of_agent(self, mark: str) -> None:
        self._effects.recent.of_checkpoint(mark, lambda key: self._effects.write(key, None))
