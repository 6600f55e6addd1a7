"""The agent's part in peer memory: chooses the node that keeps copies of this node's arenas, and finds writers of other nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from regrow import wire
from regrow.agent.config import AgentSettings
from regrow.agent.registry import Keys
from regrow.ckpt import replicate
from regrow.ckpt.protocol import CopyTo, Listening, Locate, Located, WriterStatus
from regrow.errors import OperationalError
from regrow.store.base import Store

_log = logging.getLogger("regrow.agent.buddies")

_FIND_SECONDS = 3.0
_MAX_LOOKUPS = 16
"""Records that are read at most to find a node in another failure domain."""
_RETRY_SECONDS = 5.0


class Buddies:
    """Speaks with the writer of this node through `send`, and looks nodes up in the store."""

    def __init__(self, settings: AgentSettings, store: Store, keys: Keys, *, send: Callable[[msgspec.Struct], None]) -> None:
        self._settings = settings
        self._store = store
        self._keys = keys
        self._send = send
        self._order: CopyTo | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.status: WriterStatus | None = None
        """What the writer said last."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when this node's record in the store is out of date."""
        self.port = 0
        """Where writers of other nodes reach this node's; 0: not at all."""

    def begin(self, spec: wire.GenerationSpec, policy: wire.CheckpointPolicy) -> None:
        """A generation starts here: with peer memory, its arenas get a buddy. So they do with snapshots that stay in memory: replicas
        share the writing, so that a rank finds a part of its state with the other nodes' writers only."""
        if (policy.peer_memory or policy.memory_tier) and len(spec.nodes) > 1:
            self._start(self._choose(spec))
            return
        if policy.peer_memory:
            _log.warning("generation %d has one node: no other keeps copies of its checkpoints", spec.generation)
        if self._order is not None and self._order.job == spec.job:
            self._tell(msgspec.structs.replace(self._order, generation=spec.generation, buddy=""))

    def connected(self) -> None:
        """A writer is there, perhaps a new one."""
        if self._order is not None:
            self._send(self._order)

    def heard(self, message: object) -> None:
        """The writer's words that are ours."""
        if isinstance(message, Locate):
            self._start(self._locate(message.node))
        elif isinstance(message, Listening):
            if message.port != self.port:
                self.port = message.port
                self.on_change()
        elif isinstance(message, WriterStatus):
            self.status = message

    async def close(self) -> None:
        """End what runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell(self, order: CopyTo) -> None:
        self._order = order
        self._send(order)

    async def _choose(self, spec: wire.GenerationSpec) -> None:
        settings = self._settings
        order = CopyTo(
            job=spec.job,
            generation=spec.generation,
            node=settings.node,
            buddy="",
            host=settings.address,
            tls_certificate=settings.tls_certificate,
            tls_key=settings.tls_key,
            tls_ca=settings.tls_ca,
        )
        self._tell(order)  # at once: this node can keep copies of others, and those of an earlier generation go nowhere
        while self._order is not None and (self._order.job, self._order.generation) == (spec.job, spec.generation):
            found, complete = await self._best(spec)
            if found is not None:
                self._tell(msgspec.structs.replace(order, buddy=found))
                return
            if complete:
                _log.warning("generation %d: no node to keep copies of this node's checkpoints", spec.generation)
                return
            await asyncio.sleep(_RETRY_SECONDS)

    async def _best(self, spec: wire.GenerationSpec) -> tuple[str | None, bool]:
        """The best buddy, and whether all records that were looked at could be read."""
        own, best, complete = self._settings, (4, ""), True
        for candidate in replicate.candidates(spec.nodes, spec.mesh, own.node)[:_MAX_LOOKUPS]:
            record = await self._record(candidate.node)
            if record is None:
                complete = False
                continue
            best = min(
                best, (replicate.rank_of(candidate, record.failure_domain, own.failure_domain), candidate.node), key=lambda one: one[0]
            )
            if best[0] == 0:
                break
        if best[0] in (2, 3):
            _log.warning("buddy %s is in the same failure domain %r as this node", best[1], own.failure_domain)
        return best[1] or None, complete

    async def _locate(self, node: str) -> None:
        record = await self._record(node)
        self._send(Located(node=node, address=record.copies_address if record is not None else ""))

    async def _record(self, node: str) -> wire.NodeRecord | None:
        try:
            item = await self._store.get(self._keys.node(node), timeout=_FIND_SECONDS)
            return msgspec.json.decode(item.value, type=wire.NodeRecord) if item is not None else None
        except (OperationalError, msgspec.DecodeError) as error:
            _log.info("record of node %s cannot be read: %s", node, error)
            return None
