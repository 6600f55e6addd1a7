"""What the checkpoint writer does: folds what producers submit into files on storage and reports for controllers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from regrow import wire
from regrow.ckpt import leasing
from regrow.ckpt.arenas import Arena, ArenaPool, Contents
from regrow.ckpt.bequests import Bequests
from regrow.ckpt.channel import ServerChannel
from regrow.ckpt.manifest import RankManifest, RankPlan, shard_name
from regrow.ckpt.nodeshards import clear_away, node_file_of, remember, store_file, store_manifest
from regrow.ckpt.peers import Peers
from regrow.ckpt.protocol import (
    Acknowledged,
    Bequeath,
    Bequeathed,
    Borrow,
    ControllerHello,
    CopyTo,
    Gather,
    Held,
    HeldAll,
    Inherit,
    Inherited,
    Listening,
    Locate,
    Located,
    Prepare,
    ProducerHello,
    QueryStatus,
    Ready,
    Recall,
    Rejected,
    Released,
    Remembered,
    Skip,
    Submit,
    ToWriter,
    WriterStatus,
)
from regrow.ckpt.rates import STORAGE
from regrow.ckpt.recycling import Recycler
from regrow.ckpt.saves import Key, Save, Saves
from regrow.ckpt.storing import NodeFile
from regrow.ids import Token
from regrow.wire import ShardsDurable, ShardsFailed

MAX_UNACKNOWLEDGED = 64
CHECKSUM_THREADS = 4
STORE_THREADS = 16
GATE_SECONDS = 0.5
"""Writing of a step begins when all ranks of the node have made their snapshots, or so long after the first."""
log = logging.getLogger("regrow.ckpt.writer")


class Lease:
    """An arena in the hands of a producer. `busy` from its submission until its file is written."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.busy = False
        self.abandoned = False


class Producer:
    """A connected worker and what it has of ours."""

    def __init__(self, channel: ServerChannel, hello: ProducerHello) -> None:
        self.channel = channel
        self.hello = hello
        self.plan: RankPlan | None = None
        self.leases: list[Lease] = []


class Writer:
    """Turns what producers submit into files and reports. Runs on one event loop; files are written by threads."""

    def __init__(self) -> None:
        self._storing = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="store")
        self._threads = ThreadPoolExecutor(CHECKSUM_THREADS, thread_name_prefix="checksum")
        self._pool = ArenaPool()
        self._contents = Contents()
        self._recycler = Recycler()
        self._bequests = Bequests()
        self._saves = Saves()
        self._tokens: dict[str, Token] = {}
        self._producers: set[Producer] = set()
        self._controllers: set[ServerChannel] = set()
        self._reports: dict[Key, ShardsDurable | ShardsFailed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts = {"durable": 0, "failed": 0}
        self._short = {"save": 0, "second_arena": 0}
        self._last_write_seconds = 0.0
        self._bytes_per_second = 0.0
        self._gates: dict[Key, asyncio.Event] = {}
        self._node_files: dict[Key, NodeFile] = {}
        self._peers = Peers(
            self._pool, self._contents, threads=self._storing, checksums=self._threads, newest=self._tokens.get, ask=self._ask_agent
        )

    async def serve(self, channel: ServerChannel) -> None:
        """Talk with one client until it is gone."""
        producer: Producer | None = None
        gathered: list[str] = []
        lent: list[int] = []
        try:
            async for line in channel.lines():
                message = wire.decode(line, ToWriter)
                if isinstance(message, ProducerHello):
                    producer = self._welcome(channel, message)
                elif isinstance(message, Prepare | Submit | Skip):
                    if producer is not None:
                        await self._from_producer(producer, message)
                elif isinstance(message, Borrow):
                    lent += self._lend(channel, message)
                elif isinstance(message, Recall):
                    for one in self._contents.remembered(message.job):
                        channel.send(one)
                    channel.send(HeldAll())
                elif isinstance(message, Bequeath | Bequeathed | Inherit | Inherited):
                    lent += await self._bequests.hear(channel, message)
                elif isinstance(message, Gather):
                    gathered.append(message.directory)
                    await self._gather(channel, message)
                else:
                    self._from_controller(channel, message)
        except msgspec.MsgspecError as error:
            log.warning("client dropped error=%s", error)
        finally:
            self._controllers.discard(channel)
            self._bequests.gone(channel)
            if producer is not None:
                self._lose(producer)
            await channel.close()
            for handle in lent:
                os.close(handle)
            for directory in gathered:
                self._peers.leave(directory)

    async def _gather(self, channel: ServerChannel, message: Gather) -> None:
        for name, image in await self._peers.gather(message, storage_bytes_per_second=self._bytes_per_second):
            channel.send(Held(name=name, size_bytes=image.size_bytes), [image.handle])
        channel.send(HeldAll())

    def _lend(self, channel: ServerChannel, message: Borrow) -> list[int]:
        """Returns the descriptors that are to be closed with the channel."""
        shared = [(name, size, arena.share()) for name, arena, size in self._contents.of(Path(message.directory))]
        lent = [(name, size, handle) for name, size, handle in shared if handle >= 0]
        for name, size, handle in lent:
            channel.send(Held(name=name, size_bytes=size), [handle])
        channel.send(HeldAll())
        return [handle for _, _, handle in lent]

    async def drain(self) -> None:
        """Wait until no write is in progress."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    # --- producers -------------------------------------------------------------------------------------------------

    def _welcome(self, channel: ServerChannel, hello: ProducerHello) -> Producer | None:
        token = Token(hello.epoch, hello.generation)
        highest = self._tokens.get(hello.job, token)
        if token < highest:
            reason = f"epoch {hello.epoch} generation {hello.generation} is behind epoch {highest.epoch} generation {highest.generation}"
            channel.send(Rejected(reason=reason, fenced=True))
            return None
        self._tokens[hello.job] = token
        self._saves.joined(hello)
        self._bequests.outlived(hello.job, hello.generation)
        producer = Producer(channel, hello)
        self._producers.add(producer)
        log.info("producer job=%s generation=%d rank=%d", hello.job, hello.generation, hello.rank)
        return producer

    async def _from_producer(self, producer: Producer, message: Prepare | Submit | Skip) -> None:
        hello = producer.hello
        if Token(hello.epoch, hello.generation) < self._tokens[hello.job]:
            producer.channel.send(Rejected(reason="a later generation has started", fenced=True))
        elif isinstance(message, Prepare):
            await self._prepare(producer, message)
        elif isinstance(message, Skip):
            self._saves.skip(hello, message.step, message.reason)
            self._start(self._finish((hello.job, hello.generation, message.step)))
        else:
            self._submit(producer, message)

    async def _prepare(self, producer: Producer, message: Prepare) -> None:
        self._take_back(producer)
        self._peers.rates.note(STORAGE, message.storage_bytes * len(producer.hello.local_ranks), message.storage_seconds)
        name, room = shard_name(producer.hello.rank), self._peers.copies.make_room
        prefer: Callable[[Arena], bool] = lambda arena: self._contents.place_of(arena)[1] == name  # noqa: E731
        work = functools.partial(leasing.lease, self._pool, room, message.plan.file_bytes, prefer)
        leased = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        if leased.problem:
            self._short["second_arena" if leased.arenas else "save"] += 1
            self._tell_status()
        if not leased.arenas:
            producer.channel.send(Rejected(reason=leased.problem))
            return
        producer.leases = [Lease(arena) for arena in leased.arenas]
        producer.leases.sort(key=lambda lease: self._contents.place_of(lease.arena)[0])  # filled in this order: the newest one last
        producer.plan = message.plan
        ready = Ready(num_arenas=len(producer.leases), arena_bytes=message.plan.file_bytes, problem=leased.problem)
        producer.channel.send(ready, [lease.arena.handle for lease in producer.leases])

    def _take_back(self, producer: Producer) -> None:
        for lease in producer.leases:
            if lease.busy:
                lease.abandoned = True
            else:
                self._pool.give(lease.arena)
        producer.leases = []

    def _lose(self, producer: Producer) -> None:
        self._producers.discard(producer)
        self._take_back(producer)
        if any(other.hello == producer.hello for other in self._producers):
            return  # it connected again before its first connection was seen to end
        for key in self._saves.lost(producer.hello):
            self._start(self._finish(key))

    def _submit(self, producer: Producer, message: Submit) -> None:
        key = (producer.hello.job, producer.hello.generation, message.step)
        leases = producer.leases
        if producer.plan is None or not 0 <= message.arena < len(leases) or leases[message.arena].busy:
            self._saves.skip(producer.hello, message.step, "submitted an arena that it does not hold")
            self._start(self._finish(key))
            return
        lease = leases[message.arena]
        lease.busy = True
        self._contents.forget(lease.arena)
        if message.memory is not None:
            self._start(self._remember(producer, message, lease, producer.plan))
            return
        save = self._saves.submit(producer.hello, message, time.monotonic())
        save.sizes[producer.hello.rank] = producer.plan.file_bytes
        gate = self._gates.setdefault(key, asyncio.Event())
        if save.failure or save.submitted >= set(save.hello.local_ranks):
            if not save.failure and (shared := node_file_of(save)) is not None:
                self._node_files[key] = shared
            gate.set()
        self._start(self._store(producer, message, lease, save, key, gate))

    async def _store(self, producer: Producer, message: Submit, lease: Lease, save: Save, key: Key, gate: asyncio.Event) -> None:
        started = time.monotonic()
        with contextlib.suppress(TimeoutError):  # ranks that still copy need the memory bandwidth more than storage does
            await asyncio.wait_for(gate.wait(), None if save.hello.node_file else GATE_SECONDS)
        result: RankManifest | str = save.failure
        if not result and producer.plan is not None:
            tools = {"threads": self._threads, "recycler": self._recycler, "into": self._node_files.get(key)}
            work = functools.partial(store_file, producer.hello, message, lease.arena, producer.plan, **tools)
            result = await asyncio.get_running_loop().run_in_executor(self._storing, work)
        self._saves.wrote(save, producer.hello.rank, result)
        reason, seconds = result if isinstance(result, str) else "", time.monotonic() - started
        self._start(self._finish(key))
        if isinstance(result, RankManifest):
            self._contents.put(Path(save.hello.folder) / save.directory / result.file, lease.arena, result.size_bytes)
            self._bytes_per_second = result.size_bytes / max(1e-6, seconds)
            if self._peers.buddy(producer.hello.job):
                await self._peers.copy(producer.hello, message, lease.arena, result, write_seconds=seconds)
                self._tell_status()
        outcome: Literal["failed", "durable"] = "failed" if reason else "durable"
        self._release(
            producer, lease, Released(arena=message.arena, step=message.step, outcome=outcome, reason=reason, write_seconds=seconds)
        )

    def _release(self, producer: Producer, lease: Lease, released: Released) -> None:
        lease.busy = False
        if lease.abandoned:
            self._pool.give(lease.arena)
        producer.channel.send(released)

    async def _remember(self, producer: Producer, message: Submit, lease: Lease, plan: RankPlan) -> None:
        """Digest a snapshot that is not to be written, and give the buddy its copy. It is there until its arena is filled anew."""
        hello, started = producer.hello, time.monotonic()
        work = (self._threads, hello, message, lease.arena, plan)
        found = await asyncio.get_running_loop().run_in_executor(self._storing, remember, *work)
        reason, seconds = found if isinstance(found, str) else "", time.monotonic() - started
        if isinstance(found, Remembered):
            self._contents.put(Path(found.directory) / found.manifest.file, lease.arena, plan.file_bytes, found)
            if self._peers.buddy(hello.job):
                await self._peers.copy(hello, message, lease.arena, found.manifest, write_seconds=seconds, note=found.note)
                seconds = time.monotonic() - started
                self._tell_status()
        outcome: Literal["failed", "remembered"] = "failed" if reason else "remembered"
        self._release(
            producer, lease, Released(arena=message.arena, step=message.step, outcome=outcome, reason=reason, write_seconds=seconds)
        )

    # --- reports ---------------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, key: Key) -> None:
        save = self._saves.get(key)
        if save is None:
            return
        verdict = self._saves.verdict(key)
        if verdict == "complete" and not save.reported:
            save.reported = True
            loop = asyncio.get_running_loop()
            report = await loop.run_in_executor(self._threads, store_manifest, key, save, self._peers.buddy(save.hello.job))
            if isinstance(report, str):
                save.failure, save.reported = report, False
                verdict = "failed"
            else:
                self._counts["durable"] += 1
                self._last_write_seconds = report.write_seconds
                self._forget(key)
                self._report(key, report)
                for older in self._saves.supersede(key):
                    self._start(self._finish(older))
                return
        if verdict == "failed":
            save.reported = True
            self._gates.setdefault(key, asyncio.Event()).set()
            self._counts["failed"] += 1
            self._report(key, self._saves.failed_report(key, save))
        if self._saves.is_over(key):
            self._forget(key)
            if save.directory:
                await asyncio.get_running_loop().run_in_executor(self._threads, clear_away, save)

    def _forget(self, key: Key) -> None:
        self._saves.forget(key)
        self._gates.pop(key, None)
        self._node_files.pop(key, None)

    def _report(self, key: Key, report: ShardsDurable | ShardsFailed) -> None:
        self._reports[key] = report
        while len(self._reports) > MAX_UNACKNOWLEDGED:
            self._reports.pop(next(iter(self._reports)))
        for controller in self._controllers:
            controller.send(report)

    # --- controllers -----------------------------------------------------------------------------------------------

    def _from_controller(self, channel: ServerChannel, message: object) -> None:
        if isinstance(message, ControllerHello):
            self._controllers.add(channel)
            for report in self._reports.values():
                channel.send(report)
        elif isinstance(message, Acknowledged):
            self._reports.pop((message.job, message.generation, message.step), None)
        elif isinstance(message, CopyTo):
            self._peers.order(message)
            if self._peers.port:
                channel.send(Listening(port=self._peers.port))
        elif isinstance(message, Located):
            self._peers.located(message)
        elif isinstance(message, QueryStatus):
            channel.send(self._status())

    def _ask_agent(self, question: Locate) -> bool:
        for controller in self._controllers:
            controller.send(question)
        return bool(self._controllers)

    def _tell_status(self) -> None:
        for controller in self._controllers:
            controller.send(self._status())

    def _status(self) -> WriterStatus:
        held = self._peers.copies.status()
        return WriterStatus(
            pid=os.getpid(),
            producers=len(self._producers),
            arenas=self._pool.num_arenas,
            arena_bytes=self._pool.total_bytes,
            writing=self._saves.writing_steps,
            unacknowledged=tuple(key[2] for key in self._reports),
            saves_durable=self._counts["durable"],
            saves_failed=self._counts["failed"],
            last_write_seconds=self._last_write_seconds,
            buddy=self._peers.current_buddy,
            copies_sent=self._peers.num_sent,
            copies_failed=self._peers.num_failed,
            last_copy_seconds=self._peers.last_copy_seconds,
            copies_held=held.num_files,
            copies_held_bytes=held.num_bytes,
            copies_refused=held.num_refused,
            memory_short=self._short | {"copy": held.num_given_up},
        )
