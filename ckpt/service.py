"""What the checkpoint writer does: folds what producers submit into files on storage and reports for controllers."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from regrow import wire
from regrow.ckpt import faults
from regrow.ckpt.arenas import Arena, ArenaPool, Contents
from regrow.ckpt.channel import ServerChannel
from regrow.ckpt.commit import publish
from regrow.ckpt.manifest import NodeManifest, RankManifest, RankPlan, digest, encode, manifest_name, shard_name
from regrow.ckpt.protocol import (
    ARENAS_PER_PRODUCER,
    Acknowledged,
    Borrow,
    ControllerHello,
    Held,
    HeldAll,
    Prepare,
    ProducerHello,
    QueryStatus,
    Ready,
    Rejected,
    Released,
    Skip,
    Submit,
    ToWriter,
    WriterStatus,
)
from regrow.ckpt.saves import Key, Save, Saves
from regrow.ckpt.storing import make_directory, remove_own, store_shard
from regrow.ids import Token
from regrow.wire import ShardFile, ShardsDurable, ShardsFailed

MAX_UNACKNOWLEDGED = 64
CHECKSUM_THREADS = 4
STORE_THREADS = 16
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
        self._saves = Saves()
        self._tokens: dict[str, Token] = {}
        self._producers: set[Producer] = set()
        self._controllers: set[ServerChannel] = set()
        self._reports: dict[Key, ShardsDurable | ShardsFailed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts = {"durable": 0, "failed": 0}
        self._last_write_seconds = 0.0

    async def serve(self, channel: ServerChannel) -> None:
        """Talk with one client until it is gone."""
        producer: Producer | None = None
        try:
            async for line in channel.lines():
                message = wire.decode(line, ToWriter)
                if isinstance(message, ProducerHello):
                    producer = self._welcome(channel, message)
                elif isinstance(message, Prepare | Submit | Skip):
                    if producer is not None:
                        await self._from_producer(producer, message)
                elif isinstance(message, Borrow):
                    self._lend(channel, message)
                else:
                    self._from_controller(channel, message)
        except msgspec.MsgspecError as error:
            log.warning("client dropped error=%s", error)
        finally:
            self._controllers.discard(channel)
            if producer is not None:
                self._lose(producer)
            await channel.close()

    def _lend(self, channel: ServerChannel, message: Borrow) -> None:
        for name, arena, size in self._contents.of(Path(message.directory)):
            channel.send(Held(name=name, size_bytes=size), [arena.handle])
        channel.send(HeldAll())

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
        loop = asyncio.get_running_loop()
        try:
            for _ in range(ARENAS_PER_PRODUCER):
                arena = await loop.run_in_executor(self._threads, self._pool.take, message.plan.file_bytes)
                producer.leases.append(Lease(arena))
        except OSError as error:
            self._take_back(producer)
            producer.channel.send(Rejected(reason=f"no memory for arenas of {message.plan.file_bytes} bytes: {error.strerror}"))
            return
        producer.plan = message.plan
        ready = Ready(num_arenas=len(producer.leases), arena_bytes=message.plan.file_bytes)
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
        save = self._saves.submit(producer.hello, message, time.monotonic())
        self._start(self._store(producer, message, lease, save, key))

    async def _store(self, producer: Producer, message: Submit, lease: Lease, save: Save, key: Key) -> None:
        started = time.monotonic()
        result: RankManifest | str = save.failure
        if not result and producer.plan is not None:
            task = (producer.hello, message, lease.arena, producer.plan)
            result = await asyncio.get_running_loop().run_in_executor(self._storing, self._store_file, *task)
        self._saves.wrote(save, producer.hello.rank, result)
        if isinstance(result, RankManifest):
            self._contents.put(Path(save.hello.folder) / save.directory / result.file, lease.arena, result.size_bytes)
        lease.busy = False
        if lease.abandoned:
            self._pool.give(lease.arena)
        reason = result if isinstance(result, str) else ""
        producer.channel.send(
            Released(
                arena=message.arena,
                step=message.step,
                outcome="failed" if reason else "durable",
                reason=reason,
                write_seconds=time.monotonic() - started,
            )
        )
        await self._finish(key)

    def _store_file(self, hello: ProducerHello, message: Submit, arena: Arena, plan: RankPlan) -> RankManifest | str:
        try:
            directory = make_directory(Path(hello.folder), message.directory)
            image = memoryview(arena.memory)
            path = directory / shard_name(hello.rank)
            return store_shard(path, image, plan, rank=hello.rank, private=message.private, threads=self._threads)
        except OSError as error:
            log.warning("shard failed rank=%d step=%d error=%s", hello.rank, message.step, error)
            return f"rank {hello.rank}: {error.strerror or error} ({error.filename or hello.folder})"

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
            report = await loop.run_in_executor(self._threads, self._store_manifest, key, save)
            if isinstance(report, str):
                save.failure, save.reported = report, False
                verdict = "failed"
            else:
                self._counts["durable"] += 1
                self._last_write_seconds = report.write_seconds
                self._saves.forget(key)
                self._report(key, report)
                for older in self._saves.supersede(key):
                    self._start(self._finish(older))
                return
        if verdict == "failed":
            save.reported = True
            self._counts["failed"] += 1
            self._report(key, self._saves.failed_report(key, save))
        if self._saves.is_over(key):
            self._saves.forget(key)
            names = [shard_name(rank) for rank in save.written]
            if save.directory:
                await asyncio.get_running_loop().run_in_executor(self._threads, remove_own, Path(save.hello.folder) / save.directory, names)

    def _store_manifest(self, key: Key, save: Save) -> ShardsDurable | str:
        hello = save.hello
        ranks = tuple(save.written[rank] for rank in sorted(save.written))
        manifest = NodeManifest(
            job=hello.job,
            epoch=hello.epoch,
            generation=hello.generation,
            step=key[2],
            samples=save.samples,
            node=hello.node,
            world_size=hello.world_size,
            ranks=ranks,
            facts=save.facts,
            parent=save.parent,
        )
        data = encode(manifest)
        name = manifest_name(hello.node)
        directory = Path(hello.folder) / save.directory
        try:
            publish(directory, name, data)
        except OSError as error:
            return f"manifest: {error.strerror or error}"
        faults.point("node.durable")
        return ShardsDurable(
            job=hello.job,
            epoch=hello.epoch,
            generation=hello.generation,
            step=key[2],
            node=hello.node,
            directory=str(directory),
            ranks=tuple(rank.rank for rank in ranks),
            world_size=hello.world_size,
            samples=save.samples,
            files=tuple(ShardFile(rank=rank.rank, name=rank.file, size_bytes=rank.size_bytes, digest=rank.digest) for rank in ranks),
            manifest=name,
            manifest_digest=digest(data),
            write_seconds=time.monotonic() - save.started_at,
            num_bytes=sum(rank.size_bytes for rank in ranks),
        )

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
        elif isinstance(message, QueryStatus):
            channel.send(
                WriterStatus(
                    pid=os.getpid(),
                    producers=len(self._producers),
                    arenas=self._pool.num_arenas,
                    arena_bytes=self._pool.total_bytes,
                    writing=self._saves.writing_steps,
                    unacknowledged=tuple(key[2] for key in self._reports),
                    saves_durable=self._counts["durable"],
                    saves_failed=self._counts["failed"],
                    last_write_seconds=self._last_write_seconds,
                )
            )
