"""The writer's part in peer memory: copies its arenas to a buddy node, and fetches for a restore what other nodes hold."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import msgspec

from regrow import security
from regrow.ckpt import copy_client
from regrow.ckpt.arenas import Arena, ArenaPool, Contents
from regrow.ckpt.copies import Copies
from regrow.ckpt.copy_client import Image
from regrow.ckpt.copy_server import CopyServer
from regrow.ckpt.manifest import Note, RankManifest
from regrow.ckpt.peer_wire import PeerSocket, Push
from regrow.ckpt.protocol import CopyTo, Gather, Locate, Located, ProducerHello, Submit, Wanted
from regrow.ckpt.rates import STORAGE, Rates, order
from regrow.errors import ConfigurationError
from regrow.ids import Token

LOCATE_SECONDS = 4.0
"""An agent that does not say where a node is within this does not know."""
GIVE_UP_FACTOR = 2.0
GIVE_UP_SECONDS = 2.0
"""A copy holds an arena for at most the factor times what writing it took, and these seconds."""
SLOWER_THAN_STORAGE = 0.5
SHARE_SECONDS = 15.0
"""What was fetched for one rank stays so long for the others of its node."""
_EXPIRE_EVERY_SECONDS = 60.0
log = logging.getLogger("regrow.ckpt.peers")


class _Gathered(msgspec.Struct):
    """Parts of one checkpoint's files that ranks of this node share while they restore it."""

    images: dict[str, Image]
    users: int = 0
    lock: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)


class Peers:
    """Lives on the writer's event loop; what blocks runs in `threads`."""

    def __init__(
        self,
        pool: ArenaPool,
        contents: Contents,
        *,
        threads: Executor,
        checksums: Executor,
        newest: Callable[[str], Token | None],
        ask: Callable[[Locate], bool],
    ) -> None:
        """`newest` tells the highest token of a job here; `ask` sends to the agent, False when there is none."""
        self._threads = threads
        self.rates = Rates(time.monotonic)
        """Of other nodes' memory and of storage, as restores found them."""
        self._copies = Copies(pool, contents, checksums, newest=newest)
        self._server = CopyServer(self._copies, contents)
        self._ask = ask
        self._incarnation = uuid.uuid4().hex
        self._sequence = 0
        self._orders: dict[str, CopyTo] = {}
        self._tls: security.Tls | None = None
        self._addresses: dict[str, str] = {}
        self._asked: dict[str, asyncio.Future[str]] = {}
        self._gathered: dict[str, _Gathered] = {}
        self._expiring: asyncio.TimerHandle | None = None
        self.num_sent = 0
        self.num_failed = 0
        self.last_copy_seconds = 0.0

    @property
    def port(self) -> int:
        """Where other writers reach this one; 0: not at all."""
        return self._server.port

    @property
    def copies(self) -> Copies:
        """What is kept for others."""
        return self._copies

    def buddy(self, job: str) -> str:
        """Node that keeps the copies of a job's arenas; empty: none."""
        order = self._orders.get(job)
        return order.buddy if order is not None else ""

    @property
    def current_buddy(self) -> str:
        """Of the job that was ordered last."""
        return next((order.buddy for order in reversed(self._orders.values())), "")

    # --- the agent's words -----------------------------------------------------------------------------------------

    def order(self, order: CopyTo) -> None:
        """Copy a job's arenas there from now on. The first order opens the port."""
        self._addresses.clear()
        self._orders.pop(order.job, None)
        self._orders[order.job] = order
        try:
            if self._tls is None and order.tls_certificate:
                files = security.Files(order.tls_certificate, order.tls_key, order.tls_ca)
                self._tls = security.Tls(files, "client")
                listening = security.Tls(files, "server")
            else:
                listening = None
            if not self._server.port:
                self._server.start(order.host, listening)
                self._expiring = asyncio.get_running_loop().call_later(_EXPIRE_EVERY_SECONDS, self._expire)
        except (OSError, ConfigurationError) as error:
            log.warning("no copies in peer memory: %s", error)
            self._orders[order.job] = msgspec.structs.replace(order, buddy="")
            return
        log.info("copies of job=%s generation=%d go to buddy=%s", order.job, order.generation, order.buddy or "none")

    def located(self, answer: Located) -> None:
        """Where a node's writer is."""
        self._addresses[answer.node] = answer.address
        waiting = self._asked.pop(answer.node, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.address)

    def _expire(self) -> None:
        gone = self._copies.expire(time.monotonic())
        if gone:
            log.info("copies given up after long silence: %d", gone)
        self._expiring = asyncio.get_running_loop().call_later(_EXPIRE_EVERY_SECONDS, self._expire)

    async def _locate(self, node: str) -> str:
        known = self._addresses.get(node, "")
        if known:
            return known
        waiting = self._asked.get(node)
        if waiting is None:
            if not self._ask(Locate(node=node)):
                return ""
            waiting = self._asked[node] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), LOCATE_SECONDS)
        except TimeoutError:
            self._asked.pop(node, None)
            return ""

    # --- copies ----------------------------------------------------------------------------------------------------

    async def copy(
        self, hello: ProducerHello, message: Submit, arena: Arena, manifest: RankManifest, *, write_seconds: float, note: Note | None = None
    ) -> str:
        """Copy an arena to the buddy; returns why there is no copy, empty when the buddy has verified it. `note`: it is not written."""
        buddy = self.buddy(hello.job)
        if not buddy:
            return ""
        started = time.monotonic()
        self._sequence += 1
        push = Push(
            job=hello.job,
            epoch=hello.epoch,
            generation=hello.generation,
            step=message.step,
            node=hello.node,
            incarnation=self._incarnation,
            sequence=self._sequence,
            directory=str(Path(hello.folder) / message.directory),
            manifest=manifest,
            note=note,
        )
        problem = await self._push(buddy, push, arena, GIVE_UP_FACTOR * write_seconds + GIVE_UP_SECONDS)
        self.last_copy_seconds = time.monotonic() - started
        if problem:
            self.num_failed += 1
            log.warning("no copy at buddy=%s rank=%d step=%d reason=%s", buddy, hello.rank, message.step, problem)
        else:
            self.num_sent += 1
        return problem

    async def _push(self, buddy: str, push: Push, arena: Arena, limit_seconds: float) -> str:
        address = await self._locate(buddy)
        if not address:
            return "nobody knows where its writer listens"
        connections: list[PeerSocket] = []
        image = memoryview(arena.memory)[: push.manifest.size_bytes]
        loop = asyncio.get_running_loop()
        sending = loop.run_in_executor(self._threads, copy_client.push, address, self._tls, push, image, connections.append)
        timer = loop.call_later(limit_seconds, lambda: [one.abort() for one in connections])
        try:
            return await sending
        except OSError as error:
            self._addresses.pop(buddy, None)  # a writer that started anew listens elsewhere
            return f"{error or type(error).__name__} ({address})"
        finally:
            timer.cancel()
            image.release()

    # --- restores --------------------------------------------------------------------------------------------------

    async def gather(self, message: Gather, *, storage_bytes_per_second: float) -> list[tuple[str, Image]]:
        """Fetch parts of a checkpoint's files from the memory of other nodes. Call `leave` when the asker is gone.

        Args:
            message: What is wanted. Ranks of one node share what they fetch.
            storage_bytes_per_second: What storage gives here as far as known, 0: not known. A peer with less than half of it is given up.
        """
        own = {order.node for order in self._orders.values()}
        shared = self._gathered.setdefault(message.directory, _Gathered({}))
        shared.users += 1
        async with shared.lock:
            left = {one.name: one for one in message.files}
            known = {place: rate for place, rate in self.rates.known().items() if message.stored or place != STORAGE}
            for one in message.files:
                image = shared.images.get(one.name)
                if image is not None and image.cells.issuperset(one.cells):
                    del left[one.name]  # another rank of this node has fetched it
            floor = storage_bytes_per_second if message.stored else 0.0
            holders = {one.name: order([node for node in one.holders if node not in own], known) for one in message.files}
            for turn in range(max(map(len, holders.values()), default=0)):
                by_holder: dict[str, list[Wanted]] = {}
                for one in left.values():
                    if turn < len(holders[one.name]):
                        by_holder.setdefault(holders[one.name][turn], []).append(one)
                work = [self._fetch(node, message.directory, shared, files, floor) for node, files in by_holder.items()]
                for names in await asyncio.gather(*work):
                    for name in names:
                        del left[name]
            return [(one.name, shared.images[one.name]) for one in message.files if one.name not in left]

    def leave(self, directory: str) -> None:
        """A rank that gathered is gone. The memory is freed a while after the last one: others of the node may come yet."""
        self._gathered[directory].users -= 1
        asyncio.get_running_loop().call_later(SHARE_SECONDS, self._free, directory)

    def _free(self, directory: str) -> None:
        shared = self._gathered.get(directory)
        if shared is None or shared.users:
            return
        for image in shared.images.values():
            os.close(image.handle)
        del self._gathered[directory]

    async def _fetch(self, node: str, directory: str, shared: _Gathered, files: list[Wanted], storage: float) -> set[str]:
        for one in files:
            if one.name not in shared.images:
                shared.images[one.name] = Image.make(one.size_bytes)
        ready = {one.name for one in files if shared.images[one.name].cells.issuperset(one.cells)}
        missing = [(one, shared.images[one.name]) for one in files if one.name not in ready]
        address = await self._locate(node) if missing else ""
        if not address:
            return ready
        loop = asyncio.get_running_loop()
        floor = storage * SLOWER_THAN_STORAGE
        told = functools.partial(self.rates.note, node)
        work = functools.partial(copy_client.pull, address, self._tls, directory, missing, floor_bytes_per_second=floor, measured=told)
        with contextlib.suppress(KeyError):
            try:
                return ready | await loop.run_in_executor(self._threads, work)
            except OSError as error:
                log.warning("nothing from node=%s directory=%s reason=%s", node, Path(directory).name, error or type(error).__name__)
                self._addresses.pop(node, None)
        return ready | {one.name for one, image in missing if image.cells.issuperset(one.cells)}
