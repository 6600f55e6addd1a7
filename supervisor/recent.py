"""The newest events in the store: each is written in the transaction of the change that it is about (/events/<mark>).

A supervisor's journal is on its own disk. What is here outlives that disk: the next leader, on another host or after a crash before the
journal's thread had written, adds to its own journal what that does not have. Three kinds of change: what a leader decided, what an
operator ordered, and checkpoints, whose entries the agents write that commit and remove them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import assert_never

import msgspec

from regrow.store.base import Delete, Operation, Put, Store
from regrow.supervisor.core import actions as a
from regrow.supervisor.journal import Journal
from regrow.supervisor.keys import Keys, decision_mark, order_mark
from regrow.wire import EventRecord

log = logging.getLogger("regrow.supervisor.recent")

KEPT = 128
"""Older ones are removed from the store; they are in journals and archives."""
KEPT_CHECKPOINTS = 128
"""As many of those that agents wrote: they are no reason to forget a decision."""
_REMOVED_AT_ONCE = 8
"""An etcd transaction has a limit of operations."""
_OF_CHECKPOINTS = "checkpoints/"


Change = a.RecordGeneration | a.ParkJob | a.EndJob | a.SetQuarantine | a.SaveLedger | a.SetCheckpoint
"""Orders that change a record of the store."""


def decision(action: Change, at: float) -> EventRecord | None:
    """What is kept of an order; `at` in Unix seconds. None: nothing was decided, an account was brought up to date."""
    match action:
        case a.RecordGeneration():
            spec = action.spec
            damaged = [f"checkpoint of step {step} is damaged: {why}" for step, why in sorted(action.damaged.items())]
            reason = "; ".join((spec.reason, *damaged))
            return EventRecord(kind="record_generation", at=at, reason=reason, job=action.job, generation=spec.generation)
        case a.ParkJob():
            return EventRecord(kind="park_job", at=at, reason=f"{action.state}: {action.reason}", job=action.job)
        case a.EndJob():
            return EventRecord(kind="end_job", at=at, reason=f"{action.state}: {action.reason}", job=action.job)
        case a.SetQuarantine():
            record = action.record
            return EventRecord(kind="set_quarantine", at=at, reason=f"{record.key} is {record.state}: {record.reason}", node=record.node)
        case a.SetCheckpoint():
            what = f"damaged: {action.damaged}" if action.damaged else ", ".join(action.evidence)
            reason = f"checkpoint of step {action.step}: {what}"
            return EventRecord(kind="set_checkpoint", at=at, reason=reason, job=action.job, generation=action.generation)
        case a.SaveLedger():
            return None
        case _:
            assert_never(action)


class Recent:
    """One per term. Says what to write along with a change; keeps the number of keys bounded."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._there: deque[str] = deque()
        self._of_checkpoints: deque[str] = deque()
        self._num_orders = 0

    def begin(self, found: Iterable[str]) -> None:
        """Marks of what is in the store, oldest first."""
        for mark in found:
            (self._of_checkpoints if mark.startswith(_OF_CHECKPOINTS) else self._there).append(self._keys.event(mark))

    def operations(self, epoch: int, seq: int, action: Change, at: float) -> list[Operation]:
        """To be part of the transaction of the change."""
        decided = decision(action, at)
        return [] if decided is None else self._along(decision_mark(epoch, seq), msgspec.structs.replace(decided, epoch=epoch))

    def order(self, epoch: int, seq: int, given: EventRecord) -> tuple[str, list[Operation]]:
        """The mark of an operator's order that was given after the action `seq`, and what is to be part of its transaction."""
        self._num_orders += 1
        mark = order_mark(epoch, seq, self._num_orders)
        return mark, self._along(mark, msgspec.structs.replace(given, epoch=epoch))

    def _along(self, mark: str, event: EventRecord) -> list[Operation]:
        key = self._keys.event(mark)
        operations: list[Operation] = [Put(key, msgspec.json.encode(event))]
        if key not in self._there:
            self._there.append(key)
        while len(self._there) > KEPT and len(operations) <= _REMOVED_AT_ONCE:
            operations.append(Delete(self._there.popleft()))
        return operations

    def of_checkpoint(self, mark: str, remove: Callable[[str], None]) -> None:
        """An agent wrote one. `remove` gets the keys that are too many by now. A record that is written again has the same mark."""
        key = self._keys.event(mark)
        if key in self._of_checkpoints:
            return
        self._of_checkpoints.append(key)
        while len(self._of_checkpoints) > KEPT_CHECKPOINTS:
            remove(self._of_checkpoints.popleft())


async def load(store: Store, keys: Keys) -> dict[str, EventRecord]:
    """{mark: event} of what is in the store, in the order in which it happened.

    Raises:
        StoreError: it cannot be read.
    """
    found: dict[str, EventRecord] = {}
    for item in sorted(await store.get_prefix(keys.events), key=lambda item: (item.mod_revision, item.key)):
        mark = item.key.removeprefix(keys.events)
        try:
            event = msgspec.json.decode(item.value, type=EventRecord)
            # a version before this one wrote decisions only, and their epoch in the key alone
            found[mark] = event if event.epoch else msgspec.structs.replace(event, epoch=int(mark.partition("-")[0]))
        except (ValueError, msgspec.MsgspecError) as error:
            log.error("key=%s is not readable: %s", item.key, error)  # noqa: TRY400  # foreign data, not a bug: no traceback
    return found


def tell(journal: Journal, found: Mapping[str, EventRecord]) -> None:
    """Into the journal what it has not."""
    known = journal.marks.known(found)
    for mark, event in found.items():
        if mark in known:
            continue
        journal.write(
            epoch=event.epoch,
            at=event.at,
            kind="decided",
            job=event.job,
            node=event.node,
            generation=event.generation,
            text=f"{event.kind} under an earlier leader: {event.reason}",
            data={"mark": mark, "kind": event.kind},
            mark=mark,
        )
