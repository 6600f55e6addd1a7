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
    NoSpace,
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
from regrow.supervisor.recent import Recent

log = logging.getLogger("regrow.supervisor.effects")

_CHUNK_NODES = 128
_KEPT_GENERATIONS = 20
_RETRY_SECONDS = 0.3
_MOST_ALONG = 32
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
        self._connections = connections
        self._post = post
        self._now = now
        self._lost = lost
        self._tasks: set[asyncio.Task[None]] = set()
        self.recent = Recent(keys)
        self._dirty: dict[str, bytes | None] = {}
        self._along: dict[str, list[Operation]] = {}
        """{key: what is written in the same transaction}."""
        self._more = asyncio.Event()
        self._flusher: asyncio.Task[None] | None = None
        self.generation_revisions: dict[str, int] = {}
        """mod_revision of each job's generation record as we know it."""

    def start(self) -> None:
        """Begin to write."""
        self._flusher = asyncio.create_task(self._flush(), name="supervisor-flush")

    async def stop(self, *, drain_seconds: float = 0.0) -> None:
        """End all writes; wait up to `drain_seconds` for what is on its way."""
        if drain_seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_seconds):
                    while self._dirty or self._tasks:  # noqa: ASYNC110  # bounded, at the end of a process
                        await asyncio.sleep(0.01)
        tasks = [*self._tasks, *([self._flusher] if self._flusher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def write(self, key: str, value: bytes | None, along: Sequence[Operation] = ()) -> None:
        """Write (None: delete) a key soon, and again until the store took it. The newest value of a key wins. `along` goes into the
        same transaction, whichever value that has."""
        self._dirty[key] = value
        if along:
            self._along.setdefault(key, []).extend(along)
        self._more.set()

    def dispatch(self, seq: int, action: a.Action, view: View) -> None:
        """Carry out one action. What does not come back as a message of an agent comes back through `post`."""
        epoch = view.epoch
        match action:
            case a.RecordGeneration():
                if self._keys.job(action.job, "ledger") in self._dirty:
                    self._ledger(action.job, action.ledger)
                self._spawn(self._record(seq, action, epoch))
            case a.StartMember():
                self._start_member(seq, action, view)
            case a.StopWorkers():
                order = wire.StopGeneration(
                    epoch=epoch,
                    seq=seq,
                    job=action.job,
                    generation=action.generation,
                    grace_seconds=action.grace_seconds,
                    reason=action.reason,
                )
                if not self._send(action.node, order):
                    self._failed(seq, "stop_workers", "not connected", job=action.job, node=action.node, generation=action.generation)
            case a.AskSave() | a.TellRate() | a.AskStacks() | a.ReleaseNode():
                self._order(seq, action, epoch)
            case a.AskReach() | a.AskAgain():
                self._ask_reach(action, view)
            case a.ClearHealth():
                if not self._send(action.node, wire.ClearHealth(epoch=epoch, seq=seq, by="operator")):
                    self._failed(seq, "clear_health", "not connected", job="", node=action.node)
            case a.SetQuarantine():
                changed = msgspec.json.encode(action.record)
                self.write(self._keys.quarantined(action.record.key), changed, self.recent.operations(epoch, seq, action, self._now()))
            case a.SetCheckpoint():
                self._spawn(self._amend_checkpoint(action.job, action.step, action.evidence, action.damaged))
            case a.ParkJob() | a.EndJob() | a.SaveLedger():
                self._ledger(action.job, action.ledger, self.recent.operations(epoch, seq, action, self._now()))
            case a.EndBoundary() | a.Observe() | a.Page():
                _say(action)
            case _:
                assert_never(action)

    # --- orders

    def _order(self, seq: int, action: a.AskSave | a.TellRate | a.AskStacks | a.ReleaseNode, epoch: int) -> None:
        match action:
            case a.AskSave():
                save = wire.RequestSave(
                    epoch=epoch, seq=seq, job=action.job, generation=action.generation, stop_after=action.stop_after, reason=action.reason
                )
                self._send_all(action.nodes, save)
            case a.TellRate():
                rate, tiers = action.failures_per_second, action.tier_rates
                told = wire.SetInterval(
                    epoch=epoch, seq=seq, job=action.job, generation=action.generation, failures_per_second=rate, tier_rates=tiers
                )
                self._send_all(action.nodes, told)
            case a.AskStacks():
                self._send_all(action.nodes, wire.CollectStacks(job=action.job, generation=action.generation))
            case a.ReleaseNode():
                self._send(action.node, wire.ReleaseNode(epoch=epoch, seq=seq, reason=action.reason))
            case _:
                assert_never(action)

    def _ask_reach(self, action: a.AskReach | a.AskAgain, view: View) -> None:
        if isinstance(action, a.AskAgain):
            known = {action.node: view.nodes[action.node].peer_address}
            self._send_all(action.witnesses, wire.ProbePeers(job="", generation=0, peers=known))
            return
        for node, peers in action.peers.items():
            known = {peer: view.nodes[peer].peer_address for peer in peers if peer in view.nodes}
            self._send_all((node,), wire.ProbePeers(job=action.job, generation=action.generation, peers=known))

    def _send(self, node: str, message: msgspec.Struct) -> bool:
        connection = self._connections.get(node)
        return connection is not None and connection.send(message)

    def _send_all(self, nodes: Sequence[str], message: msgspec.Struct) -> None:
        for node in nodes:
            if not self._send(node, message):
                log.info("node=%s does not get %s: not connected", node, type(message).__name__)

    def _start_member(self, seq: int, action: a.StartMember, view: View) -> None:
        job = view.jobs.get(action.job)
        generation = job.generation if job is not None else None
        if job is None or generation is None or generation.number != action.generation:
            return
        order = wire.StartGeneration(
            epoch=view.epoch,
            seq=seq,
            spec=generation.spec,
            job_spec=job.spec,
            workers=generation.members[action.node].workers,
            group_rank=action.group_rank,
            master_address=action.master_address,
        )
        if not self._send(action.node, order):
            self._failed(seq, "start_member", "not connected", job=action.job, node=action.node, generation=action.generation)

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

    async def _amend_checkpoint(self, job: str, step: int, evidence: tuple[str, ...], damaged: str) -> None:
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
                result = await self._store.transaction(compare, [Put(key, msgspec.json.encode(changed))])
                if result.succeeded:
                    return
            except StoreError as error:
                log.warning("job=%s checkpoint step=%d not amended yet: %s", job, step, error.what)
            except msgspec.MsgspecError:
                log.exception("job=%s checkpoint step=%d is not readable", job, step)
                return
            await asyncio.sleep(_RETRY_SECONDS)

    async def _flush(self) -> None:
        """Write what is dirty, newest value of each key, until cancelled."""
        up = True
        while True:
            while not self._dirty:
                self._more.clear()
                await self._more.wait()
            key, value = next(iter(self._dirty.items()))
            along = tuple(self._along.get(key, ())[:_MOST_ALONG])
            try:
                written = await self._guarded([Put(key, value) if value is not None else Delete(key), *along])
            except StoreError as error:
                if up:
                    why = f"{error.what}" + (" (the store is full)" if isinstance(error, NoSpace) else "")
                    self._post(e.StoreChanged(at=self._now(), up=False, reason=why))
                    up = False
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if not up:
                self._post(e.StoreChanged(at=self._now(), up=True))
                up = True
            if not written:
                self._lost("the leader's record is not ours any more")
                return
            left = self._along.pop(key, [])[len(along) :]
            if left:
                self._along[key] = left
            elif self._dirty.get(key, ...) is value:
                del self._dirty[key]

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("an effect failed", exc_info=task.exception())
            self._lost(f"a bug in an effect: {task.exception()}")
