"""Where a snapshot goes: to the node's writer process, or straight to storage when there is none. Torch-free."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Protocol

from regrow import wire
from regrow.ckpt.channel import WorkerChannel
from regrow.ckpt.commit import Collector, publish, write_record
from regrow.ckpt.manifest import NodeManifest, RankPlan, digest, encode, manifest_name, shard_name
from regrow.ckpt.protocol import (
    CELL_BYTES,
    Borrow,
    Gather,
    Held,
    HeldAll,
    Prepare,
    ProducerHello,
    Ready,
    Recall,
    Rejected,
    Released,
    Remembered,
    Skip,
    Submit,
    ToProducer,
    Wanted,
)
from regrow.ckpt.storing import make_directory, store_shard
from regrow.errors import FencedError, OperationalError
from regrow.wire import GenerationSpec, ShardFile, ShardsDurable

log = logging.getLogger("regrow.ckpt.sinks")
BORROW_SECONDS = 5.0
"""A writer that does not say what it holds within this is stuck: storage is read instead."""
GATHER_SECONDS = 10.0
GATHER_BYTES_PER_SECOND = 100e6
"""Parts from other nodes that are not here within these seconds, and one for each so many bytes, are read from storage."""
PREPARE_SECONDS = 15.0
"""A writer that gives no arenas within this and two seconds for each GB is stuck."""


class WriterStuckError(OperationalError):
    """The writer is there and does not answer."""


class Sink(Protocol):
    """A place for snapshots of one rank."""

    released: list[Released]
    """What became of earlier snapshots, oldest first; the owner of the sink empties it."""
    storage_read: tuple[int, float]
    """Bytes and seconds of a restore that storage alone gave: for whoever orders places by their rates."""

    def begin(self, plan: RankPlan) -> None:
        """Ask for arenas and do not wait; `prepare` with the same plan then waits less. Never raises for storage trouble."""
        ...

    def prepare(self, plan: RankPlan) -> list[mmap.mmap]:
        """Arenas for this layout, all free. Earlier ones are not valid any more."""
        ...

    def take(self, wait_seconds: float = 0.0) -> int | None:
        """Number of a free arena, or None when none is free within the time."""
        ...

    def submit(self, message: Submit) -> None:
        """The arena holds a complete snapshot."""
        ...

    def reserve(self, arena: int) -> None:
        """The arena is being filled: `take` does not give it out until it was submitted and written."""
        ...

    def skip(self, step: int, reason: str) -> None:
        """This rank takes no part in the save of a step."""
        ...

    def borrow(self, directory: Path) -> dict[str, int]:
        """Descriptors of files of a checkpoint that are in memory here, by name; the caller closes them. Never raises."""
        ...

    def gather(self, directory: Path, files: Sequence[Wanted], *, stored: bool = True) -> dict[str, int]:
        """As `borrow`, of parts of files that other nodes have in memory. What nobody gave is left out."""
        ...

    def recall(self) -> list[Remembered]:
        """Snapshots of the job that are in this node's memory and were not written. Never raises."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class WriterSink:
    """The node's writer process. When it has died, the next `prepare` finds the new one."""

    def __init__(self, path: str, hello: ProducerHello) -> None:
        self._path = path
        self._hello = hello
        self._channel: WorkerChannel | None = None
        self._free: set[int] = set()
        self._begun: RankPlan | None = None
        self._asked_bytes = 0
        self.released: list[Released] = []
        self.storage_read: tuple[int, float] = (0, 0.0)

    def begin(self, plan: RankPlan) -> None:
        """Send the request for arenas; when there is no writer, the first save will say so."""
        try:
            self._request(plan)
        except OperationalError:
            self.close()

    def _request(self, plan: RankPlan) -> WorkerChannel:
        self.close()
        self._channel = channel = WorkerChannel(self._path)
        channel.send(self._hello)
        (num_bytes, seconds), self.storage_read = self.storage_read, (0, 0.0)
        channel.send(Prepare(plan=plan, storage_bytes=num_bytes, storage_seconds=seconds))
        self._begun = plan
        self._asked_bytes = plan.file_bytes
        return channel

    def prepare(self, plan: RankPlan) -> list[mmap.mmap]:
        """Arenas for this layout.

        Raises:
            FencedError: a later generation has started.
            OperationalError: no writer, or it has no memory.
        """
        channel = self._channel if self._begun == plan else None
        self._begun = None
        if channel is not None:
            try:
                return self._await_ready(channel)
            except FencedError:
                raise
            except OperationalError:
                self.close()  # asked for long ago: that writer may have been replaced
        return self._await_ready(self._request(plan))

    def _await_ready(self, channel: WorkerChannel) -> list[mmap.mmap]:
        allocating = 2 * (self._asked_bytes / 1e9)
        deadline = time.monotonic() + PREPARE_SECONDS + allocating
        while lines := channel.wait(deadline):
            for line in lines:
                message = wire.decode(line, ToProducer)
                if isinstance(message, Ready):
                    return self._map(channel, message)
                if isinstance(message, Rejected):
                    self.close()
                    raise _rejected(message)
        self.close()
        raise WriterStuckError("checkpoint writer gave no arenas in time", where=self._path, hint="see the writer's log; storage may hang")

    def _map(self, channel: WorkerChannel, message: Ready) -> list[mmap.mmap]:
        if message.problem:
            log.warning("%s", message.problem)
        arenas: list[mmap.mmap] = []
        for handle in channel.take_handles(message.num_arenas):
            arenas.append(mmap.mmap(handle, message.arena_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)))
            os.close(handle)
        self._free = set(range(message.num_arenas))
        return arenas

    def take(self, wait_seconds: float = 0.0) -> int | None:
        """Number of a free arena.

        Raises:
            OperationalError: the writer is gone; its arenas with it.
        """
        self._read(0.0)
        deadline = time.monotonic() + wait_seconds
        while not self._free and time.monotonic() < deadline:
            self._read(deadline)
        return min(self._free) if self._free else None

    def submit(self, message: Submit) -> None:
        """Hand an arena over.

        Raises:
            OperationalError: the writer is gone.
        """
        self._connected().send(message)
        self._free.discard(message.arena)

    def reserve(self, arena: int) -> None:
        """Not free any more."""
        self._free.discard(arena)

    def skip(self, step: int, reason: str) -> None:
        """Tell the writer that a step is void."""
        self._connected().send(Skip(step=step, reason=reason))

    def borrow(self, directory: Path) -> dict[str, int]:
        """Files of a checkpoint that this node's writer still has in arenas."""
        return self._ask(Borrow(directory=str(directory.absolute())), BORROW_SECONDS)

    def gather(self, directory: Path, files: Sequence[Wanted], *, stored: bool = True) -> dict[str, int]:
        """Parts of files that this node's writer got from those of other nodes; `stored`: storage has them as well."""
        wanted = sum(len(one.cells) for one in files) * CELL_BYTES
        limit = GATHER_SECONDS + wanted / GATHER_BYTES_PER_SECOND
        return self._ask(Gather(directory=str(directory.absolute()), files=tuple(files), stored=stored), limit)

    def recall(self) -> list[Remembered]:
        """What this node's writer has that was not written."""
        found: list[Remembered] = []
        self._ask(Recall(job=self._hello.job), BORROW_SECONDS, found)
        return found

    def _ask(self, question: Borrow | Gather | Recall, limit_seconds: float, remembered: list[Remembered] | None = None) -> dict[str, int]:
        found: dict[str, int] = {}
        try:
            channel = WorkerChannel(self._path, timeout_seconds=BORROW_SECONDS)
        except OperationalError:
            return found
        try:
            channel.send(question)
            deadline = time.monotonic() + limit_seconds
            while lines := channel.wait(deadline):
                for line in lines:
                    message = wire.decode(line, ToProducer)
                    if isinstance(message, Held):
                        found[message.name] = channel.take_handles(1)[0]
                    elif isinstance(message, Remembered) and remembered is not None:
                        remembered.append(message)
                    elif isinstance(message, HeldAll):
                        return found
        except OperationalError as error:
            log.info("nothing from the writer: %s", error.what)
        finally:
            channel.close()
        return found

    def close(self) -> None:
        """Leave the writer."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._begun = None
        self._free = set()

    def _connected(self) -> WorkerChannel:
        if self._channel is None:
            raise OperationalError("not connected to a checkpoint writer", where=self._path)
        return self._channel

    def _read(self, deadline: float) -> None:
        channel = self._connected()
        try:
            for line in channel.wait(deadline) if deadline else channel.poll():
                message = wire.decode(line, ToProducer)
                if isinstance(message, Released):
                    self._free.add(message.arena)
                    self.released.append(message)
                elif isinstance(message, Rejected):
                    raise _rejected(message)
        except OperationalError:
            self.close()
            raise


def _rejected(message: Rejected) -> OperationalError:
    kind = FencedError if message.fenced else OperationalError
    return kind(f"checkpoint writer refuses: {message.reason}")


class DirectSink:
    """Storage itself, for a single process without an agent: a save returns when it is committed."""

    def __init__(self, spec: GenerationSpec, folder: Path, node: str = "alone") -> None:
        self._spec = spec
        self._folder = folder
        self._node = node
        self._collector = Collector(spec)
        self._plan: RankPlan | None = None
        self._arena: mmap.mmap | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        self.released: list[Released] = []
        self.storage_read: tuple[int, float] = (0, 0.0)

    def begin(self, plan: RankPlan) -> None:
        """Nothing to wait for later."""

    def prepare(self, plan: RankPlan) -> list[mmap.mmap]:
        """One arena."""
        self._plan = plan
        self._arena = mmap.mmap(-1, plan.file_bytes)
        return [self._arena]

    def take(self, wait_seconds: float = 0.0) -> int | None:  # noqa: ARG002
        """Always the one: `submit` returns when it is free again."""
        return 0

    def submit(self, message: Submit) -> None:
        """Write, sync and commit; failures end up in `released`."""
        started = time.monotonic()
        outcome: Literal["durable", "failed"] = "durable"
        reason = ""
        try:
            self._store(message, started)
        except (OSError, OperationalError) as error:
            outcome, reason = "failed", str(error)
        seconds = time.monotonic() - started
        self.released.append(Released(arena=0, step=message.step, outcome=outcome, reason=reason, write_seconds=seconds))

    def reserve(self, arena: int) -> None:
        """There is one, and whoever saves waits for it."""

    def skip(self, step: int, reason: str) -> None:
        """Nothing to tell anybody."""

    def borrow(self, directory: Path) -> dict[str, int]:  # noqa: ARG002
        """Nothing outlives this process."""
        return {}

    def gather(self, directory: Path, files: Sequence[Wanted], *, stored: bool = True) -> dict[str, int]:  # noqa: ARG002
        """There are no other nodes."""
        return {}

    def recall(self) -> list[Remembered]:
        """Nothing outlives this process."""
        return []

    def close(self) -> None:
        """End the checksum thread."""
        self._threads.shutdown()

    def _store(self, message: Submit, started: float) -> None:
        if self._plan is None or self._arena is None:
            raise OperationalError("not prepared")
        if message.memory is not None:
            raise OperationalError("nothing in memory outlives this process", hint="start it with `regrow run`, or save to storage")
        spec = self._spec
        directory = make_directory(self._folder, message.directory)
        path = directory / shard_name(0)
        image = memoryview(self._arena)
        rank = store_shard(path, image, self._plan, rank=0, private=message.private, threads=self._threads)
        manifest = NodeManifest(
            job=spec.job,
            epoch=spec.epoch,
            generation=spec.generation,
            step=message.step,
            samples=message.samples,
            node=self._node,
            world_size=1,
            ranks=(rank,),
            facts=message.facts,
            metrics=message.metrics,
            parent=message.parent,
        )
        data = encode(manifest)
        publish(directory, manifest_name(self._node), data)
        report = ShardsDurable(
            job=spec.job,
            epoch=spec.epoch,
            generation=spec.generation,
            step=message.step,
            node=self._node,
            directory=str(directory),
            ranks=(0,),
            world_size=1,
            samples=message.samples,
            files=(ShardFile(rank=0, name=rank.file, size_bytes=rank.size_bytes, digest=rank.digest),),
            manifest=manifest_name(self._node),
            manifest_digest=digest(data),
            write_seconds=time.monotonic() - started,
            num_bytes=rank.size_bytes,
        )
        collected = self._collector.add(report)
        if collected.pending is not None:
            write_record(collected.pending, written_at=time.time())
