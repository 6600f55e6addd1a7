"""The newest decisions in the store: each is written in the transaction of the change that it is about (/events/<epoch>-<seq>).

A supervisor's journal is on its own disk. What is here outlives that disk: the next leader, on another host or after a crash before the
journal's thread had written, adds to its own journal what that does not have.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from typing import assert_never

import msgspec

from regrow import wire
from regrow.store.base import Delete, Operation, Put, Store
from regrow.supervisor.core import actions as a
from regrow.supervisor.journal import Journal
from regrow.supervisor.keys import Keys

log = logging.getLogger("regrow.supervisor.recent")

KEPT = 128
"""Older ones are removed from the store; they are in journals and archives."""
_REMOVED_AT_ONCE = 8
"""An etcd transaction has a limit of operations."""


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """One decision: a generation, a job that was parked or ended, a change of quarantine."""

    kind: str
    at: float
    """Unix seconds of the leader that decided."""
    reason: str = ""
    job: str = ""
    node: str = ""
    generation: int = 0
    version: int = wire.PROTOCOL_VERSION


Change = a.RecordGeneration | a.ParkJob | a.EndJob | a.SetQuarantine | a.SaveLedger
"""Orders that change a record of the store."""


def decision(action: Change, at: float) -> Decided | None:
    """What is kept of an order; `at` in Unix seconds. None: nothing was decided, an account was brought up to date."""
    match action:
        case a.RecordGeneration():
            spec = action.spec
            return Decided(kind="record_generation", at=at, reason=spec.reason, job=action.job, generation=spec.generation)
        case a.ParkJob():
            return Decided(kind="park_job", at=at, reason=f"{action.state}: {action.reason}", job=action.job)
        case a.EndJob():
            return Decided(kind="end_job", at=at, reason=f"{action.state}: {action.reason}", job=action.job)
        case a.SetQuarantine():
            record = action.record
            return Decided(kind="set_quarantine", at=at, reason=f"{record.key} is {record.state}: {record.reason}", node=record.node)
        case a.SaveLedger():
            return None
        case _:
            assert_never(action)


class Recent:
    """One per term. Says what to write along with a change; keeps the number of keys bounded."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._there: deque[str] = deque()

    def begin(self, found: Iterable[tuple[int, int]]) -> None:
        """What earlier leaders left, by (epoch, seq), in order."""
        self._there.extend(self._keys.event(epoch, seq) for epoch, seq in sorted(found))

    def operations(self, epoch: int, seq: int, action: Change, at: float) -> list[Operation]:
        """To be part of the transaction of the change."""
        decided = decision(action, at)
        if decided is None:
            return []
        key = self._keys.event(epoch, seq)
        operations: list[Operation] = [Put(key, msgspec.json.encode(decided))]
        if key not in self._there:
            self._there.append(key)
        while len(self._there) > KEPT and len(operations) <= _REMOVED_AT_ONCE:
            operations.append(Delete(self._there.popleft()))
        return operations


async def load(store: Store, keys: Keys) -> dict[tuple[int, int], Decided]:
    """{(epoch, seq): decision} of earlier terms, in order.

    Raises:
        StoreError: it cannot be read.
    """
    found: dict[tuple[int, int], Decided] = {}
    for item in await store.get_prefix(keys.events):
        epoch, _, seq = item.key.removeprefix(keys.events).partition("-")
        try:
            found[int(epoch), int(seq)] = msgspec.json.decode(item.value, type=Decided)
        except (ValueError, msgspec.MsgspecError) as error:
            log.error("key=%s is not readable: %s", item.key, error)  # noqa: TRY400  # foreign data, not a bug: no traceback
    return dict(sorted(found.items()))


def tell(journal: Journal, found: Mapping[tuple[int, int], Decided]) -> None:
    """Into the journal what it has not."""
    known = journal.last_decided
    for (epoch, seq), decided in found.items():
        if (epoch, seq) <= known:
            continue
        journal.write(
            epoch=epoch,
            at=decided.at,
            kind="decided",
            job=decided.job,
            node=decided.node,
            generation=decided.generation,
            text=f"{decided.kind} by an earlier leader: {decided.reason}",
            data={"seq": seq, "kind": decided.kind},
        )
