"""What an agent has in the store: its own key under a lease, and an eye on who leads.

With the store gone nothing here raises: it tries again, the workers go on, the last known leader stays known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from regrow import wire
from regrow.errors import OperationalError
from regrow.store.base import Lease, Store, WatchBatch

_log = logging.getLogger("regrow.agent.registry")

_RETRY_SECONDS = (0.2, 3.0)


class Keys:
    """Names under /regrow/<cluster>/."""

    def __init__(self, cluster: str) -> None:
        self._root = f"/regrow/{cluster}"

    @property
    def leader(self) -> str:
        """Who leads."""
        return f"{self._root}/leader"

    def node(self, node: str) -> str:
        """A node's registration."""
        return f"{self._root}/nodes/{node}"

    def offer(self, node: str) -> str:
        """A node that starts and asks others for an exchange of bytes."""
        return f"{self._root}/preflight/{node}"

    def generation(self, job: str) -> str:
        """A job's generation record: the fence of the data path."""
        return f"{self._root}/jobs/{job}/generation"

    def checkpoint(self, job: str, step: int) -> str:
        """A committed checkpoint."""
        return f"{self._root}/jobs/{job}/checkpoints/{step}"

    def event(self, mark: str) -> str:
        """An entry for the journal of whoever leads."""
        return f"{self._root}/events/{mark}"

    def status(self, job: str, node: str) -> str:
        """What a node runs of a job."""
        return f"{self._root}/jobs/{job}/status/{node}"


class Registry:
    """Keeps the node's key in the store and follows the leader's."""

    def __init__(self, store: Store, keys: Keys, *, ttl_seconds: float, on_leader: Callable[[wire.LeaderRecord], None]) -> None:
        self._store = store
        self._keys = keys
        self._ttl = ttl_seconds
        self._on_leader = on_leader
        self._lease: Lease | None = None
        self._status: wire.StatusRecord | None = None
        self._status_changed = asyncio.Event()
        self._record_changed = asyncio.Event()
        self.store_up = False
        """Whether the store answered last."""

    async def follow_leader(self) -> None:
        """Report every leader record. A record that goes away is no news: the next one is."""
        watch = self._store.watch_prefix(self._keys.leader)
        async with watch:
            async for batch in watch:
                self._look(batch)

    def _look(self, batch: WatchBatch) -> None:
        items = [event.item for event in batch.events if event.kind == "put"]
        if batch.snapshot is not None:
            items = list(batch.snapshot)
        for item in items:
            if item.key != self._keys.leader:
                continue
            try:
                self._on_leader(msgspec.json.decode(item.value, type=wire.LeaderRecord))
            except msgspec.DecodeError as error:
                _log.warning("leader record is not readable: %s", error)

    async def keep_registered(self, record: Callable[[], wire.NodeRecord]) -> None:
        """Write the node's key under a lease, and again whenever the lease is lost, until cancelled."""
        pause = _RETRY_SECONDS[0]
        while True:
            try:
                self._record_changed.clear()
                made = record()
                self._lease = self._lease or await self._store.lease(self._ttl)
                await self._store.put(self._keys.node(made.node), msgspec.json.encode(made), lease=self._lease)
            except OperationalError as error:
                self._note(up=False, why=error.what)
                await self._drop_lease()
                await asyncio.sleep(pause)
                pause = min(_RETRY_SECONDS[1], pause * 2)
                continue
            self._note(up=True, why="registered")
            self._status_changed.set()
            pause = _RETRY_SECONDS[0]
            if await self._lost_or_changed(self._lease):
                _log.warning("lease lost: registering again")
                await self._drop_lease()

    def record_changed(self) -> None:
        """What the node's key says is out of date: `keep_registered` writes it anew."""
        self._record_changed.set()

    async def _lost_or_changed(self, lease: Lease) -> bool:
        """True: the lease is lost. False: the record is to be written anew."""
        waits = [asyncio.create_task(event.wait()) for event in (lease.lost, self._record_changed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        return lease.lost.is_set()

    def set_status(self, status: wire.StatusRecord) -> None:
        """What the node runs has changed; `keep_status` writes it."""
        self._status = status
        self._status_changed.set()

    async def keep_status(self, applied_step: Callable[[], int]) -> None:
        """Write the newest status, under the node's lease, until cancelled. Intermediate ones may be passed over."""
        while True:
            await self._status_changed.wait()
            self._status_changed.clear()
            status, lease = self._status, self._lease
            if status is None:
                continue
            value = msgspec.json.encode(msgspec.structs.replace(status, applied_step=applied_step()))
            try:
                await self._store.put(self._keys.status(status.job, status.node), value, lease=lease or 0)
            except OperationalError as error:
                _log.debug("status not written: %s", error.what)
                await asyncio.sleep(_RETRY_SECONDS[1])
                self._status_changed.set()

    def _note(self, *, up: bool, why: str) -> None:
        if up != self.store_up:
            _log.log(logging.INFO if up else logging.WARNING, "store up=%s %s", up, why)
        self.store_up = up

    async def _drop_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.close()

    async def deregister(self, limit_seconds: float = 1.0) -> None:
        """End the lease, and the node's key with it; when the store does not answer it ends by itself."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            async with asyncio.timeout(limit_seconds):
                await lease.revoke()
        except (OperationalError, TimeoutError):
            await lease.close()
