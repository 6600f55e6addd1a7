"""Retention: after each commit the committing agent, and nobody else, deletes what the policy does not keep."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import msgspec

from regrow import wire
from regrow.agent.registry import Keys
from regrow.ckpt import retention
from regrow.ckpt.manifest import Record
from regrow.errors import OperationalError
from regrow.store.base import Delete, Put, Store, mod_revision

_log = logging.getLogger("regrow.agent.cleaning")


class Cleaner:
    """Applies the retention policy of a job. Failures are logged: a full disk shows up in the next save."""

    def __init__(self, spec: wire.GenerationSpec, policy: wire.CheckpointPolicy, store: Store, keys: Keys) -> None:
        self._spec = spec
        self._policy = policy
        self._store = store
        self._keys = keys

    async def clean(self, record: Record, directory: str) -> None:
        """Delete old checkpoints, then their keys. Called after a commit, so never while the store is away.

        Protected: the restore point of this generation and the newest checkpoint with evidence that it is good.
        """
        del record
        folder = Path(directory).parent
        prefix = self._keys.checkpoint(self._spec.job, 0).rpartition("/")[0] + "/"
        try:
            listing = await self._store.get_prefix(prefix)
            known = [(item.key, item.mod_revision, msgspec.json.decode(item.value, type=wire.CheckpointRecord)) for item in listing]
            choices = await asyncio.to_thread(
                retention.prune,
                folder,
                self._retention(),
                generation=self._spec.generation,
                protected=self._protected([found for _, _, found in known]),
                barred={Path(found.directory).name for _, _, found in known if found.damaged},
                recycle=True,
            )
            removed = {choice.name for choice in choices if not choice.keep}
            for key, revision, found in known:
                if Path(found.directory).name in removed:
                    mark = wire.checkpoint_mark(self._spec.job, found.generation, found.step, gone=True)
                    told = msgspec.json.encode(wire.checkpoint_event(self._spec.job, found, time.time(), gone=True))
                    await self._store.transaction([mod_revision(key) == revision], [Delete(key), Put(self._keys.event(mark), told)])
        except (OperationalError, msgspec.DecodeError) as error:
            _log.warning("retention: %s", error)
            return
        if removed:
            _log.info("retention removed=%d kept=%d", len(removed), len(choices) - len(removed))

    def _retention(self) -> retention.Retention:
        policy = self._policy
        return retention.Retention(
            keep_last=policy.keep_last,
            keep_every_seconds=policy.keep_every_hours * 3600.0,
            keep_best=policy.keep_best,
            best_metric=policy.best_metric,
            best_is_highest=policy.best_is_highest,
        )

    def _protected(self, records: list[wire.CheckpointRecord]) -> set[str]:
        names = {Path(self._spec.restore.directory).name} if self._spec.restore and self._spec.restore.directory else set[str]()
        verified = [record for record in records if record.evidence and not record.damaged]
        if verified:
            names.add(Path(max(verified, key=lambda record: record.step).directory).name)
        return names
