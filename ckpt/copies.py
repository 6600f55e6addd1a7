"""Copies of other nodes' arenas in this node's memory: what may come in, how much is kept, and when it goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import msgspec

from regrow.ckpt.arenas import Arena, ArenaPool, Contents
from regrow.ckpt.budget import spare_memory
from regrow.ckpt.manifest import Chunk, RankManifest, RankPlan, file_digest
from regrow.ckpt.peer_wire import Push
from regrow.ckpt.protocol import Remembered
from regrow.ckpt.storing import checksum, gap_digest
from regrow.ids import Token

KEEP = 2
"""Of each file the newest two: the newest may be of a step that never becomes a checkpoint."""
EXPIRY_SECONDS = 3600.0
"""Copies of a job from which nothing came for so long are given up."""


class RefusedError(Exception):
    """A push that is not taken, with the reason."""


class Held(msgspec.Struct):
    """A copy that is verified."""

    push: Push
    arena: Arena
    at: float

    @property
    def path(self) -> Path:
        """Of the file that it is the image of."""
        return Path(self.push.directory) / self.push.manifest.file


class CopiesStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept for others."""

    num_files: int = 0
    num_bytes: int = 0
    num_refused: int = 0
    num_given_up: int = 0
    """For arenas of the node's own ranks."""


class Copies:
    """Safe for several threads. A push begins, its bytes are received into the arena that it got, and it finishes."""

    def __init__(
        self,
        pool: ArenaPool,
        contents: Contents,
        threads: Executor,
        *,
        newest: Callable[[str], Token | None],
        available: Callable[[], int] | None = None,
    ) -> None:
        """`newest` tells the highest token that this node has seen of a job, `available` the bytes of memory that are free."""
        self._pool = pool
        self._contents = contents
        self._threads = threads
        self._newest = newest
        self._available = available or spare_memory
        self._lock = threading.Lock()
        self._held: list[Held] = []
        self._tokens: dict[str, Token] = {}
        self._last: dict[tuple[str, str], tuple[str, int]] = {}
        self._retired: set[str] = set()
        self._num_refused = self._num_given_up = 0

    def status(self) -> CopiesStatus:
        """Counts and bytes."""
        with self._lock:
            size = sum(one.arena.num_bytes for one in self._held)
            return CopiesStatus(num_files=len(self._held), num_bytes=size, num_refused=self._num_refused, num_given_up=self._num_given_up)

    def begin(self, push: Push) -> Arena:
        """Memory for a push that may come in.

        Raises:
            RefusedError: it is of an older generation, was sent before, is held already, or there is no memory.
        """
        with self._lock:
            try:
                self._check(push)
            except RefusedError:
                self._num_refused += 1
                raise
            files = [one for one in self._held if (one.push.job, one.push.node, one.push.manifest.file) == _file_of(push)]
            dropped = files[: max(0, len(files) - KEEP + 1)]
            for one in dropped:
                self._drop(one)
        try:
            return self._take(push.manifest.size_bytes)
        except RefusedError:
            with self._lock:
                self._num_refused += 1
            raise

    def _check(self, push: Push) -> None:
        token = Token(push.epoch, push.generation)
        highest = max(filter(None, (self._newest(push.job), self._tokens.get(push.job), token)))
        if token < highest:
            raise RefusedError(f"generation {push.generation} is over: generation {highest.generation} has started")
        self._tokens[push.job] = token
        incarnation, sequence = self._last.get((push.job, push.node), ("", 0))
        if push.incarnation in self._retired or (push.incarnation == incarnation and push.sequence <= sequence):
            raise RefusedError(f"push {push.sequence} of this writer came before")
        if incarnation and incarnation != push.incarnation:
            self._retired.add(incarnation)
        self._last[(push.job, push.node)] = (push.incarnation, push.sequence)
        path = Path(push.directory) / push.manifest.file
        if any(one.path == path for one in self._held):
            raise RefusedError("this file is held already")

    def _take(self, num_bytes: int) -> Arena:
        arena = self._pool.reuse(num_bytes)
        if arena is None and num_bytes > self._available():
            raise RefusedError(f"no memory for {num_bytes} bytes")
        try:
            arena = arena or self._pool.take(num_bytes)
        except OSError as error:
            raise RefusedError(f"no memory for {num_bytes} bytes: {error.strerror}") from error
        self._contents.forget(arena)
        return arena

    def finish(self, push: Push, arena: Arena) -> None:
        """All bytes are in the arena: verify and keep them.

        Raises:
            RefusedError: they are not what the digests say.
        """
        problem = verify(push.manifest, arena, self._threads)
        if problem:
            self.abandon(arena)
            with self._lock:
                self._num_refused += 1
            raise RefusedError(problem)
        with self._lock:
            held = Held(push, arena, time.monotonic())
            self._held.append(held)
            steps = {one.push.step for one in self._held if (one.push.job, one.push.generation) == (push.job, push.generation)}
            for one in list(self._held):
                if len(steps) > 1 and one.push.job == push.job and one.push.generation < push.generation:
                    self._drop(one)
        self._contents.put(held.path, arena, push.manifest.size_bytes, _remembered(push))

    def abandon(self, arena: Arena) -> None:
        """The bytes of a push that had begun did not come."""
        self._pool.give(arena)

    def expire(self, now: float) -> int:
        """Give up copies of jobs that have been silent for `EXPIRY_SECONDS` (`now`: monotonic); returns how many."""
        with self._lock:
            newest: dict[str, float] = {}
            for one in self._held:
                newest[one.push.job] = max(newest.get(one.push.job, 0.0), one.at)
            old = [one for one in self._held if now - newest[one.push.job] > EXPIRY_SECONDS]
            for one in old:
                self._drop(one)
        return len(old)

    def make_room(self, num_bytes: int) -> int:
        """Give up the oldest copies, of so many bytes at least if there are so many; returns how many files."""
        with self._lock:
            dropped: list[Held] = []
            for one in sorted(self._held, key=lambda held: held.at):
                if sum(gone.arena.num_bytes for gone in dropped) >= num_bytes:
                    break
                dropped.append(one)
            for one in dropped:
                self._drop(one)
            self._num_given_up += len(dropped)
        return len(dropped)

    def _drop(self, one: Held) -> None:
        self._held.remove(one)
        self._contents.forget(one.arena)
        self._pool.give(one.arena)


def _remembered(push: Push) -> Remembered | None:
    if push.note is None:
        return None
    return Remembered(
        job=push.job,
        epoch=push.epoch,
        generation=push.generation,
        step=push.step,
        node=push.node,
        directory=push.directory,
        manifest=push.manifest,
        note=push.note,
    )


def _file_of(push: Push) -> tuple[str, str, str]:
    return push.job, push.node, push.manifest.file


def verify(manifest: RankManifest, arena: Arena, threads: Executor) -> str:
    """What is wrong with a copy; empty: every byte is what the manifest says."""
    bare: tuple[Chunk, ...] = tuple(msgspec.structs.replace(chunk, blocks=()) for chunk in manifest.chunks)
    names = tuple({chunk.name for chunk in bare})
    plan = RankPlan(file_bytes=manifest.size_bytes, chunks=bare, may_be_infinite=names)
    image = memoryview(arena.memory)[: manifest.size_bytes]
    done = tuple(chunk for portion in checksum(image, plan, threads) for chunk in portion.result())
    for found, sent in zip(done, manifest.chunks, strict=True):
        if found.blocks != sent.blocks:
            return f"the copy of tensor {sent.name} is not what was sent"
    found_digest = file_digest(done, gap_digest(image, plan))
    return "" if found_digest == manifest.digest else "the copy is not what was sent"
