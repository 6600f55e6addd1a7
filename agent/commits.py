"""The committing agent: from the reports of all nodes to a record on storage and a transaction in the store.

durable: the record is on storage. committed: the store has it, in a transaction that compares the generation key's
mod_revision with the one that was read when the generation started here: an agent that was left behind commits nothing.
Without the store a durable checkpoint is pending and tried again; at most `MAX_PENDING` wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from regrow import wire
from regrow.agent.peer import Report, Settled
from regrow.agent.registry import Keys
from regrow.ckpt import commit
from regrow.ckpt.manifest import Record
from regrow.errors import FencedError, OperationalError
from regrow.store import cas
from regrow.store.base import Put, RequestTooLarge, Store, StoreError, mod_revision

_log = logging.getLogger("regrow.agent.commits")

MAX_PENDING = 8
_RETRY_SECONDS = 1.0
_FENCE_SECONDS = 3.0

CheckpointState = Literal["durable", "committed", "pending", "failed"]


class Committer:
    """Commits the checkpoints of one generation."""

    def __init__(
        self,
        spec: wire.GenerationSpec,
        store: Store,
        keys: Keys,
        *,
        report: Callable[[wire.CheckpointChanged], None],
        settle: Callable[[Settled], None],
        after_commit: Callable[[Record, str], Awaitable[None]] | None = None,
    ) -> None:
        self._spec = spec
        self._store = store
        self._keys = keys
        self._report = report
        self._settle = settle
        self._after_commit = after_commit
        self._collector = commit.Collector(spec)
        self._fence: int | None = None
        self._fenced = ""
        self._settled: dict[int, Settled] = {}
        self._queue: deque[commit.PendingCommit] = deque()
        self._more = asyncio.Event()
        self._told_pending: set[int] = set()

    @property
    def spec(self) -> wire.GenerationSpec:
        """The generation whose checkpoints these are."""
        return self._spec

    @property
    def num_pending(self) -> int:
        """Steps that are complete and not committed."""
        return len(self._queue)

    def add(self, message: Report) -> Settled | None:
        """Take a report. Returns the fate of its step when that is known already."""
        known = self._settled.get(message.step)
        if known is not None and message.job == self._spec.job and message.generation == self._spec.generation:
            return known
        if self._fenced:
            return self._verdict(message.step, "refused", self._fenced)
        found = self._collector.add(message)
        for step in found.superseded:
            self._conclude(step, "void", f"superseded by step {found.step}")
        match found.kind:
            case "complete":
                assert found.pending is not None
                self._enqueue(found.pending)
            case "void":
                self._tell(message.step, "failed", reason=found.reason)
                return self._conclude(message.step, "void", found.reason)
            case "refused":
                return self._verdict(message.step, "refused", found.reason)
            case "waiting" | "duplicate":
                pass
        return None

    async def run(self) -> None:
        """Commit what is complete, in order, until cancelled."""
        while True:
            while not self._queue:
                self._more.clear()
                await self._more.wait()
            pending = self._queue[0]
            await self._commit(pending)
            if self._queue and self._queue[0] is pending:
                self._queue.popleft()

    def _enqueue(self, pending: commit.PendingCommit) -> None:
        self._queue.append(pending)
        while len(self._queue) > MAX_PENDING:
            dropped = self._queue[1]
            del self._queue[1]
            self._tell(dropped.step, "failed", reason=f"more than {MAX_PENDING} checkpoints wait for the store")
            self._conclude(dropped.step, "void", "too many wait for the store")
        self._more.set()

    async def _commit(self, pending: commit.PendingCommit) -> None:
        try:
            record = await asyncio.to_thread(commit.write_record, pending, written_at=time.time())
            self._tell(pending.step, "durable", pending=pending, record=record)
            await self._transact(pending, record)
        except FencedError as error:
            self._fenced = error.what
            self._tell(pending.step, "failed", pending=pending, reason=error.what)
            self._conclude(pending.step, "refused", error.what)
        except OperationalError as error:
            _log.warning("step=%d is void: %s", pending.step, error)
            self._tell(pending.step, "failed", pending=pending, reason=error.what)
            self._conclude(pending.step, "void", error.what)
        else:
            self._tell(pending.step, "committed", pending=pending, record=record)
            self._conclude(pending.step, "committed", "")
            if self._after_commit is not None:
                await self._after_commit(record, pending.directory)

    async def _transact(self, pending: commit.PendingCommit, record: Record) -> None:
        job, made = self._spec.job, commit.checkpoint_record(record, pending.directory)
        value, key = msgspec.json.encode(made), self._keys.checkpoint(job, pending.step)
        told = msgspec.json.encode(wire.checkpoint_event(job, made, time.time()))
        event = Put(self._keys.event(wire.checkpoint_mark(job, made.generation, made.step)), told)
        while True:
            try:
                fence = await self._read_fence()
                condition = mod_revision(self._keys.generation(job)) == fence
                result = await cas.guarded(self._store, condition, key, value, along=(event,), timeout=_FENCE_SECONDS)
            except RequestTooLarge:
                raise
            except StoreError as error:
                if pending.step not in self._told_pending:
                    self._told_pending.add(pending.step)
                    _log.warning("step=%d is durable and pending: %s", pending.step, error.what)
                    self._tell(pending.step, "pending", pending=pending, record=record, reason=error.what)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if not result.won:
                self._fence = None
                if await self._still_ours(fence):
                    continue
                raise FencedError(
                    f"generation {self._spec.generation} of job {self._spec.job} is over: its checkpoint of step {pending.step} is not committed"
                )
            return

    async def _still_ours(self, refused: int) -> bool:
        """Whether the key is of this very generation at another revision: a store that was rebuilt has written it anew."""
        try:
            return await self._read_fence() != refused
        except FencedError:
            return False
        except StoreError as error:
            _log.info("fence of generation %d not read yet: %s", self._spec.generation, error.what)
            return True

    async def _read_fence(self) -> int:
        """The generation key's mod_revision, read once; the key must be of this very generation.

        Raises:
            FencedError: the key is of a later generation or epoch.
            StoreError: the store does not answer, or knows only earlier ones: it has lost its memory, and is not rebuilt yet.
        """
        if self._fence is None:
            item = await self._store.get(self._keys.generation(self._spec.job), timeout=_FENCE_SECONDS)
            found = msgspec.json.decode(item.value, type=wire.GenerationRecord) if item is not None else None
            if item is None or found is None or (found.number, found.epoch) != (self._spec.generation, self._spec.epoch):
                now = f"generation {found.number} of epoch {found.epoch}" if found else "none"
                if found is None or (found.number <= self._spec.generation and found.epoch <= self._spec.epoch):
                    raise StoreError(
                        f"the store has {now}, older than generation {self._spec.generation}: it has lost its memory",
                        where=self._keys.generation(self._spec.job),
                        hint="start a supervisor with --adopt",
                    )
                raise FencedError(
                    f"generation {self._spec.generation} of epoch {self._spec.epoch} is not the current one: the store has {now}"
                )
            self._fence = item.mod_revision
        return self._fence

    async def remember_fence(self) -> None:
        """Read the fence early, when the generation starts; a store that does not answer is asked again at the commit."""
        try:
            await self._read_fence()
        except OperationalError as error:
            _log.info("fence of generation %d not read yet: %s", self._spec.generation, error.what)

    def _tell(
        self,
        step: int,
        state: CheckpointState,
        *,
        pending: commit.PendingCommit | None = None,
        record: Record | None = None,
        reason: str = "",
    ) -> None:
        self._report(
            wire.CheckpointChanged(
                job=self._spec.job,
                generation=self._spec.generation,
                step=step,
                state=state,
                directory=pending.directory if pending else "",
                record_digest=record.digest if record else "",
                samples=pending.samples if pending else 0,
                write_seconds=pending.write_seconds if pending else 0.0,
                num_bytes=pending.num_bytes if pending else 0,
                reason=reason,
            )
        )

    def _verdict(self, step: int, outcome: Literal["committed", "void", "refused"], reason: str) -> Settled:
        return Settled(job=self._spec.job, generation=self._spec.generation, step=step, outcome=outcome, reason=reason)

    def _conclude(self, step: int, outcome: Literal["committed", "void", "refused"], reason: str) -> Settled:
        settled = self._settled[step] = self._verdict(step, outcome, reason)
        self._settle(settled)
        return settled
