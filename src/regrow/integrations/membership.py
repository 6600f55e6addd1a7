"""One torchrun process as a member of a launch: its lease, its picture of the store, its part in forming rounds. No torch here."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec

from regrow import wire
from regrow.errors import ConfigurationError, OperationalError
from regrow.integrations.rounds import Member, Picture, Round, Seen, changes, elect, refusal, running, waiting
from regrow.store import cas
from regrow.store.base import KeyValue, Lease, Store, StoreError
from regrow.supervisor.core.records import QuarantineRecord
from regrow.supervisor.effects import Cordon
from regrow.supervisor.keys import Keys

log = logging.getLogger("regrow.integrations")

_RETRY_SECONDS = 0.5


class RefusedError(ConfigurationError):
    """Regrow keeps this node out: cordoned, drained or quarantined."""


class ClosedError(OperationalError):
    """The launch is over."""


class LateError(OperationalError):
    """No round came about in time."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """One launch, as this process was told."""

    cluster: str
    run: str
    node: str
    least: int
    """Fewest nodes of a round."""
    most: int
    """Most nodes of a round."""
    ttl_seconds: float = 10.0
    """Silence of a torchrun process after which its node counts as lost."""
    settle_seconds: float = 5.0
    """How long nobody may arrive or leave before a round of fewer than `most` nodes begins."""
    join_seconds: float = 600.0
    """Longest wait for a round."""
    closed_seconds: float = 60.0
    """How long the end of a launch is remembered; after that its name can be used again."""


class Names:
    """Keys of one launch, below the cluster's root."""

    def __init__(self, cluster: str, run: str) -> None:
        self.cluster = Keys(cluster)
        self.root = f"{self.cluster.root}/torchrun/{quote(run, safe='')}/"
        self.members = f"{self.root}members/"
        self.generation = f"{self.root}generation"
        self.closed = f"{self.root}closed"


class Membership:
    """All methods belong to one event loop; `count` may be called from any thread.

    Args:
        store: a client; its owner closes it.
        settings: the launch.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self.settings = settings
        self.id = f"{settings.node}-{uuid.uuid4().hex[:12]}"
        self.mine = 0
        """Number of the round that this process is in; 0: none."""
        self._store = store
        self._names = Names(settings.cluster, settings.run)
        self._lease: Lease | None = None
        self._wants = 0
        self._items: dict[str, KeyValue] = {}
        self._ready: set[str] = set()
        self._changed = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving = False

    async def start(self) -> None:
        """Check that a supervisor leads, and follow the store.

        Raises:
            OperationalError: nobody leads the cluster, or the store does not answer.
        """
        await self._epoch()
        names = self._names
        keys = names.cluster
        prefixes = (names.root, keys.cordons, keys.quarantine, f"{keys.nodes}{self.settings.node}")
        self._tasks += [asyncio.create_task(self._follow(prefix)) for prefix in prefixes]
        async with asyncio.timeout(self.settings.join_seconds), self._changed:
            await self._changed.wait_for(lambda: len(self._ready) == len(prefixes))
        self._tasks.append(asyncio.create_task(self._keep()))

    async def _epoch(self) -> int:
        leader = await self._store.get(self._names.cluster.leader)
        if leader is None:
            raise OperationalError(
                f"no supervisor leads cluster {self.settings.cluster!r}",
                where="--rdzv-endpoint",
                hint="start `regrow supervisor`, or name the cluster with --rdzv-conf cluster=NAME",
            )
        return msgspec.json.decode(leader.value, type=wire.LeaderRecord).epoch

    async def _follow(self, prefix: str) -> None:
        async with self._store.watch_prefix(prefix) as watch:
            async for batch in watch:
                if batch.snapshot is not None:
                    self._items = {key: item for key, item in self._items.items() if not key.startswith(prefix)}
                    self._items |= {item.key: item for item in batch.snapshot}
                else:
                    items = dict(self._items)
                    for event in batch.events:
                        if event.kind == "put":
                            items[event.key] = event.item
                        else:
                            items.pop(event.key, None)
                    self._items = items
                self._ready.add(prefix)
                async with self._changed:
                    self._changed.notify_all()

    def picture(self) -> Picture:
        """The launch as the store has it."""
        names, items = self._names, self._items
        generation = items.get(names.generation)
        seen = [
            Seen(msgspec.json.decode(item.value, type=Member), item.create_revision)
            for key, item in items.items()
            if key.startswith(names.members)
        ]
        return Picture(
            members={entry.member.id: entry for entry in seen},
            current=msgspec.json.decode(generation.value, type=Round) if generation is not None else None,
            revision=generation.mod_revision if generation is not None else 0,
            closed=names.closed in items,
        )

    def refused(self, *, trains: bool) -> str:
        """Why this node must not train; empty: it may. See `rounds.refusal`."""
        keys, items = self._names.cluster, self._items
        node = items.get(f"{keys.nodes}{self.settings.node}")

        def under(prefix: str, kind: Any) -> tuple[Any, ...]:
            return tuple(msgspec.json.decode(item.value, type=kind) for key, item in items.items() if key.startswith(prefix))

        record = msgspec.json.decode(node.value, type=wire.NodeRecord) if node is not None else None
        return refusal(self.settings.node, record, under(keys.cordons, Cordon), under(keys.quarantine, QuarantineRecord), trains=trains)

    def count(self) -> int:
        """How many changes call for a new round; a drain or a quarantine of this node is one."""
        if self.mine == 0:
            return 0
        picture = self.picture()
        if picture.closed:
            return 0
        return changes(picture, self.id, self.mine, most=self.settings.most) or int(bool(self.refused(trains=True)))

    async def join(self, serve: Callable[[], tuple[str, int]]) -> Round:
        """Ask for a round beyond the last one and wait until one is there with this process in it.

        Args:
            serve: starts the store of a round and returns its address and port; called by the member that forms the round.

        Raises:
            RefusedError: the node is cordoned, drained or quarantined.
            ClosedError: the launch is over.
            LateError: nothing came about within `join_seconds` while no round was running.
        """
        loop = asyncio.get_running_loop()
        self.mine = 0
        await self._want(self.picture().number + 1)
        shown: tuple[str, ...] = ()
        changed_at = since = loop.time()
        while True:
            picture = self.picture()
            await self._check(picture)
            found = picture.current
            if found is not None and found.number >= self._wants:
                if self.id in found.members:
                    self.mine = found.number
                    return found
                await self._want(found.number + 1)
                continue
            names = (*running(picture), "", *waiting(picture))
            if names != shown:
                changed_at, shown = loop.time(), names
            if found is not None and running(picture):
                since = loop.time()
            settled = loop.time() - changed_at >= self.settings.settle_seconds
            chosen = elect(picture, least=self.settings.least, most=self.settings.most, settled=settled)
            if chosen and chosen[0] == self.id:
                await self._form(picture, chosen, serve)
                continue
            if loop.time() - since >= self.settings.join_seconds:
                raise LateError(
                    f"{len(waiting(picture))} of at least {self.settings.least} nodes came within {self.settings.join_seconds:.0f} s",
                    where=f"launch {self.settings.run!r}",
                    hint="start torchrun on the other nodes with the same --rdzv-id, or lower --nnodes",
                )
            await self._wait(self.settings.settle_seconds / 4)

    async def _check(self, picture: Picture) -> None:
        if picture.closed:
            raise ClosedError(
                "the launch is over",
                where=f"launch {self.settings.run!r}",
                hint=f"use another --rdzv-id, or wait {self.settings.closed_seconds:.0f} s",
            )
        reason = self.refused(trains=False)
        if reason:
            await self.leave()
            raise RefusedError(
                f"the node may not train: {reason}",
                where=f"node {self.settings.node}",
                hint="`regrow node show NODE` tells why; `regrow node uncordon` or `clear` lets it in again",
            )

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait()

    async def _form(self, picture: Picture, chosen: tuple[str, ...], serve: Callable[[], tuple[str, int]]) -> None:
        address, port = await asyncio.to_thread(serve)
        record = Round(
            number=picture.number + 1,
            members=chosen,
            nodes=tuple(picture.members[name].member.node for name in chosen),
            address=address,
            port=port,
            epoch=await self._epoch(),
        )
        value = msgspec.json.encode(record)
        result = await cas.swap(self._store, self._names.generation, value, expected=picture.revision)
        log.info("round=%d won=%s nodes=%s", record.number, result.won, ",".join(record.nodes))
        async with asyncio.timeout(self.settings.join_seconds):
            while self.picture().revision <= picture.revision:
                await self._wait(self.settings.settle_seconds)

    async def _want(self, number: int) -> None:
        self._wants = number
        async with self._writing:
            if self._lease is None or self._lease.lost.is_set():
                self._lease = await self._store.lease(self.settings.ttl_seconds)
            member = Member(id=self.id, node=self.settings.node, wants=self._wants)
            revision = await self._store.put(f"{self._names.members}{self.id}", msgspec.json.encode(member), lease=self._lease)
        async with asyncio.timeout(self.settings.join_seconds):
            while not self._shows(revision):
                await self._wait(self.settings.settle_seconds)

    def _shows(self, revision: int) -> bool:
        item = self._items.get(f"{self._names.members}{self.id}")
        return item is not None and item.mod_revision >= revision

    async def _keep(self) -> None:
        """Write the member anew when its lease ended (a pause, a long absence of the store): the others may have moved on by then."""
        while not self._leaving:
            if self._lease is None:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            await self._lease.lost.wait()
            if self._leaving:
                return
            log.warning("node=%s lease ended, asking again", self.settings.node)
            try:
                await self._want(self._wants)
            except StoreError as error:
                log.warning("node=%s %s", self.settings.node, error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def close_launch(self) -> None:
        """The launch is over, for all: whoever asks for a round from now on is told so."""
        lease = await self._store.lease(self.settings.closed_seconds, keep_alive=False)
        await self._store.put(self._names.closed, self.id.encode(), lease=lease)

    async def leave(self) -> None:
        """Take this process out; the others form a round without it."""
        self._leaving = True
        if self._lease is not None:
            await self._lease.revoke()

    async def stop(self) -> None:
        """End all tasks of this object."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
