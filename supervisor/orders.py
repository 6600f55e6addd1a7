"""Operators' orders: the change of the store and the journal's entry of it are one transaction; then the core is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import msgspec

from regrow.store.base import Operation, Store, StoreError, StoreUnavailable
from regrow.supervisor.core import events as e
from regrow.supervisor.keys import Keys
from regrow.supervisor.term import Term
from regrow.wire import EventRecord

Order = e.CommandGiven | e.NodeCommandGiven | e.AutomationSwitched | e.JobLoaded
"""What comes from outside and changes a record."""


def entry(order: Order) -> EventRecord:
    """What the store keeps of it."""
    match order:
        case e.CommandGiven():
            return EventRecord(kind="command_given", at=order.at, job=order.job, reason=f"{order.command} by {order.by}")
        case e.NodeCommandGiven():
            return EventRecord(kind="node_command_given", at=order.at, node=order.node, reason=f"{order.command} by {order.by}")
        case e.AutomationSwitched():
            return EventRecord(kind="automation_switched", at=order.at, reason=f"{'on' if order.on else 'off'} by {order.by}")
        case e.JobLoaded():
            how = "submitted" if order.submitted else "adopted from agents and storage"
            return EventRecord(kind="job_loaded", at=order.at, job=order.spec.job, reason=how)
        case _:
            assert_never(order)


async def write(term: Term, store: Store, keys: Keys, operations: Sequence[Operation], order: Order) -> tuple[str, int]:
    """Write an order's change. The mark of its entry, for the event that tells the core, and the store's revision.

    Raises:
        StoreError: the store did not take it, or this term is over.
    """
    mark, along = term.effects.recent.order(term.view.epoch, term.view.next_seq - 1, entry(order))
    compare = [term.effects.comparison] if term.effects.comparison is not None else []
    try:
        result = await store.transaction(compare, [*operations, *along])
    except StoreUnavailable as error:
        told = await store.get(keys.event(mark)) if error.maybe_applied else None
        if told is None:
            raise
        return mark, told.mod_revision
    if not result.succeeded:
        raise StoreError("this supervisor's term is over", where=keys.leader, hint="ask the new leader")
    return mark, result.revision


async def give(term: Term, store: Store, keys: Keys, operations: Sequence[Operation], order: Order) -> None:
    """Write an order's change, then tell the core.

    Raises:
        StoreError: the store did not take it, or this term is over.
    """
    mark, _ = await write(term, store, keys, operations, order)
    term.post(msgspec.structs.replace(order, mark=mark))
