"""Carrying out actions: store writes by compare-and-swap under the leader's own comparison, orders to agents."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from regrow import wire
from regrow.store.base import (
    Comparison,
    Delete,
    Get,
    KeyValue,
    Operation,
    Put,
    Store,
    StoreError,
    StoreUnavailable,
    mod_revision,
    version,
)
from regrow.supervisor.beat_server import Connection
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core.commits import committed
from regrow.supervisor.core.records import LedgerRecord
from regrow.supervisor.core.view import Incident, View
from regrow.supervisor.keys import Keys
from regrow.supervisor.outbox import Outbox
from regrow.supervisor.recent import Recent
from regrow.supervisor.writes import Writes

log = logging.getLogger("regrow.supervisor.effects")

_CHUNK_NODES = 128
_KEPT_GENERATIONS = 20
_RETRY_SECONDS = 0.3
_RECORD_SECONDS = 4.0


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """/jobs/<job>/members/<generation>/<chunk>: ranks on nodes."""

    nodes: dict[str, tuple[wire.WorkerAssignment, ...]]
    version: int = wire.PROTOCOL_VERSION


class Incidents(msgspec.Struct, frozen=True, kw_only=True):
    """/jobs/<job>/incidents: the newest ones, oldest first, written when one opens, goes over to another generation or closes."""

    items: tuple[Incident, ...]
    version: int = wire.PROTOCOL_VERSION


class Cordon(msgspec.Struct, frozen=True, kw_only=True):
    """/cordons/<node>: an operator's order on a node."""

    node: str
    drain: bool = False
    by: str = ""
    version: int = wire.PROTOCOL_VERSION


def _say(action: a.EndBoundary | a.Observe | a.Page) -> None:
    match action:
        case a.EndBoundary():
            log.info("job=%s %s", action.job, action.reason)
        case a.Observe():
            log.warning("OBSERVED would %s (%s)", action.would, action.why)
        case a.Page():
            log.error("PAGE key=%s %s", action.key, action.reason)
        case _:
            assert_never(action)


class Effects:
    """One per term. `post` gets what came of it; `lost` is called when the store says that the term is over."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        *,
        comparison: Comparison | None,
        connections: dict[str, Connection],
        post: Callable[[e.Event], None],
        now: Callable[[], float],
        lost: Callable[[str], None],
    ) -> None:
        self._store = store
        self._keys = keys
        self.comparison = comparison
        """Holds in the store as long as the term lasts; part of every transaction."""
        self._post = post
        self._now = now
        self._lost = lost
        self._tasks: set[asyncio.Task[None]] = set()
        self.recent = Recent(keys)
        self._outbox = Outbox(connections, self._not_sent)
        self._writes = Writes(store, comparison, post=post, now=now, lost=lost)
        self._writing: asyncio.Task[None] | None = None
        self.generation_revisions: dict[str, int] = {}
        """mod_revision of each job's generation record as we know it."""

    def start(self) -> None:
        """Begin to write."""
        self._writing = asyncio.create_task(self._writes.run(), name="supervisor-writes")

    async def stop(self, *, drain_seconds: float = 0.0) -> None:
        """End all writes; wait up to `drain_seconds` for what is on its way."""
        self._outbox.stop()
        if drain_seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_seconds):
                    while self._writes or self._tasks:  # noqa: ASYNC110  # bounded, at the end of a process
                        await asyncio.sleep(0.01)
        tasks = [*self._tasks, *([self._writing] if self._writing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def write(self, key: str, value: bytes | None, along: Sequence[Operation] = ()) -> None:
        """Write (None: delete) a key soon, and again until the store took it. The newest value of a key wins. `along` goes into the
        same transaction, whichever value that has."""
        self._writes.write(key, value, along)

    def dispatch(self, seq: int, action: a.Action, view: View) -> None:
        """Carry out one action. What does not come back as a message of an agent comes back through `post`."""
        epoch = view.epoch
        match action:
            case a.RecordGeneration():
                if self._keys.job(action.job, "ledger") in self._writes:
                    self._ledger(action.job, action.ledger)
                self._spawn(self._record(seq, action, epoch))
            case a.StartMember():
                self._outbox.start(seq, action, view)
            case (
                a.StopWorkers()
                | a.AskSave()
                | a.TellRate()
                | a.AskStacks()
                | a.ReleaseNode()
                | a.AskReach()
                | a.AskAgain()
                | a.ClearHealth()
            ):
                self._outbox.order(seq, action, view)
            case a.SetQuarantine():
                changed = msgspec.json.encode(action.record)
                self.write(self._keys.quarantined(action.record.key), changed, self.recent.operations(epoch, seq, action, self._now()))
            case a.SetCheckpoint():
                along = self.recent.operations(epoch, seq, action, self._now())
                self._spawn(self._amend_checkpoint(action.job, action.step, action.evidence, action.damaged, along))
            case a.ParkJob() | a.EndJob() | a.SaveLedger():
                self._ledger(action.job, action.ledger, self.recent.operations(epoch, seq, action, self._now()))
            case a.EndBoundary() | a.Observe() | a.Page():
                _say(action)
            case _:
                assert_never(action)

    def _not_sent(self, seq: int, action: a.StartMember | a.StopWorkers | a.ClearHealth, reason: str) -> None:
        kind = str(action.__struct_config__.tag)
        if isinstance(action, a.ClearHealth):
            self._failed(seq, kind, reason, job="", node=action.node)
        else:
            self._failed(seq, kind, reason, job=action.job, node=action.node, generation=action.generation)

    # --- the store

    def _failed(self, seq: int, kind: str, reason: str, *, job: str, node: str = "", generation: int = 0, fenced: bool = False) -> None:
        self._post(
            e.ActionFailed(at=self._now(), seq=seq, kind=kind, job=job, node=node, generation=generation, reason=reason, fenced=fenced)
        )

    def _ledger(self, job: str, ledger: LedgerRecord, along: Sequence[Operation] = ()) -> None:
        self.write(self._keys.job(job, "ledger"), msgspec.json.encode(ledger), along)

    async def _record(self, seq: int, action: a.RecordGeneration, epoch: int) -> None:
        spec = action.spec
        try:
            won, revision, checkpoints = await self._record_once(seq, action, epoch)
        except StoreError as error:
            self._failed(seq, "record_generation", error.what, job=action.job, generation=spec.generation)
            return
        if not won:
            reason = "the generation record was changed by somebody else, or this term is over"
            self._failed(seq, "record_generation", reason, job=action.job, generation=spec.generation, fenced=True)
            self._lost(reason)
            return
        self.generation_revisions[action.job] = revision
        self._late_commits(action, checkpoints)
        for step, why in action.damaged.items():
            self._spawn(self._amend_checkpoint(action.job, step, (), why))
        self._post(e.GenerationRecorded(at=self._now(), job=action.job, generation=spec.generation))

    def _late_commits(self, action: a.RecordGeneration, items: Sequence[KeyValue]) -> None:
        """What was committed between the decision and its record. From the record on, nothing of older generations can be."""
        restored = action.spec.restore.step if action.spec.restore is not None else 0
        for item in items:
            try:
                record = msgspec.json.decode(item.value, type=wire.CheckpointRecord)
            except msgspec.MsgspecError:
                log.warning("key=%s is not readable", item.key)
                continue
            if record.step > restored and record.step not in action.damaged:
                self._post(committed(action.job, record, self._now()))

    async def _record_once(self, seq: int, action: a.RecordGeneration, epoch: int) -> tuple[bool, int, tuple[KeyValue, ...]]:
        """One transaction: generation, ledger, members (early ones before it when they are many), the journal's entry.

        Returns:
            Whether it is in the store, its mod_revision, and the checkpoints that were committed by then.
        """
        spec, keys = action.spec, self._keys
        key = keys.job(action.job, "generation")
        members_hash = hashlib.sha256(msgspec.json.encode(action.members)).hexdigest()[:16]
        record = wire.GenerationRecord(
            number=spec.generation,
            epoch=epoch,
            mesh=spec.mesh,
            committing_node=spec.committing_node,
            num_members=len(spec.nodes),
            members_hash=members_hash,
            spec=spec,
        )
        value = msgspec.json.encode(record)
        names = list(spec.nodes)
        chunks = [names[start : start + _CHUNK_NODES] for start in range(0, len(names), _CHUNK_NODES)]
        puts: list[Operation] = [
            Put(
                keys.members(action.job, spec.generation, index),
                msgspec.json.encode(Members(nodes={name: action.members[name] for name in chunk})),
            )
            for index, chunk in enumerate(chunks)
        ]
        for put in puts[:-1]:
            await self._guarded((put,))
        known = self.generation_revisions.get(action.job)
        old = spec.generation - _KEPT_GENERATIONS
        success: list[Operation] = [
            Put(key, value),
            Put(keys.job(action.job, "ledger"), msgspec.json.encode(action.ledger)),
            *puts[-1:],
            *self.recent.operations(epoch, seq, action, self._now()),
        ]
        if old > 0:
            success.append(Delete(keys.members_of(action.job, old), prefix=True))
        compare = [mod_revision(key) == known if known else version(key) == 0, *([self.comparison] if self.comparison else [])]
        try:
            listing = Get(keys.checkpoints(action.job), prefix=True)
            result = await self._store.transaction(compare, [*success, listing, Get(key)], [listing, Get(key)], timeout=_RECORD_SECONDS)
        except StoreUnavailable as error:
            if not error.maybe_applied:
                raise
            found = await self._store.get(key, timeout=_RECORD_SECONDS)
            if found is not None and found.value == value:
                return True, found.mod_revision, (await self._store.get_prefix(keys.checkpoints(action.job))).items
            raise
        items, checkpoints = result.results[-1].items, result.results[-2].items
        if result.succeeded or (items and items[0].value == value):
            return True, items[0].mod_revision, checkpoints
        return False, 0, ()

    async def _guarded(self, operations: Sequence[Operation]) -> bool:
        compare = [self.comparison] if self.comparison else []
        result = await self._store.transaction(compare, operations, (), timeout=_RECORD_SECONDS)
        return result.succeeded

    async def _amend_checkpoint(
        self, job: str, step: int, evidence: tuple[str, ...], damaged: str, along: Sequence[Operation] = ()
    ) -> None:
        """Add evidence to a checkpoint's record or mark it damaged, by compare-and-swap, until done."""
        key = self._keys.checkpoint(job, step)
        while True:
            try:
                item = await self._store.get(key)
                if item is None:
                    return
                record = msgspec.json.decode(item.value, type=wire.CheckpointRecord)
                changed = msgspec.structs.replace(
                    record, evidence=tuple(dict.fromkeys((*record.evidence, *evidence))), damaged=record.damaged or damaged
                )
                if changed == record:
                    return
                compare = [mod_revision(key) == item.mod_revision, *([self.comparison] if self.comparison else [])]
                result = await self._store.transaction(compare, [Put(key, msgspec.json.encode(changed)), *along])
                if result.succeeded:
                    return
            except StoreError as error:
                log.warning("job=%s checkpoint step=%d not amended yet: %s", job, step, error.what)
            except msgspec.MsgspecError:
                log.exception("job=%s checkpoint step=%d is not readable", job, step)
                return
            await asyncio.sleep(_RETRY_SECONDS)

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("an effect failed", exc_info=task.exception())
            self._lost(f"a bug in an effect: {task.exception()}")
