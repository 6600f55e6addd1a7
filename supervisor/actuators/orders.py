"""Which orders to give, when, and what to do again: pure. Records in the store are the state, so a new leader goes on from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from regrow import wire
from regrow.supervisor.actuators.port import Direction
from regrow.supervisor.core import quarantine
from regrow.supervisor.core.view import View

WINDOW_SECONDS = 3600.0
"""The rate limit looks back so far."""
_FIRST_PAUSE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 300.0
_KEPT_DETAIL = 500

State = Literal["intended", "failed", "done", "left"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """/actuations/<actuator>/<node>: the last order for a node, written before anything is done."""

    node: str
    direction: Direction
    state: State = "intended"
    """intended: to be done, or being done; failed: the last attempt failed, another follows; left: somebody else holds the node out."""
    id: str
    reason: str = ""
    hardware: str = ""
    ordered_at: float
    """Unix seconds of the leader that ordered it."""
    tried_at: float = 0.0
    num_attempts: int = 0
    detail: str = ""
    by_epoch: int = 0
    outs: tuple[float, ...] = ()
    """When the node was ordered out within the last hour, oldest first: what the rate limit counts."""
    version: int = wire.PROTOCOL_VERSION

    @property
    def open(self) -> bool:
        """Something is still to be done."""
        return self.state in ("intended", "failed")


class Wanted(msgspec.Struct, frozen=True):
    """A node that is to be out."""

    node: str
    reason: str
    hardware: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now."""

    intents: tuple[Record, ...] = ()
    """New orders: to be written, then done."""
    again: tuple[Record, ...] = ()
    """Orders whose next attempt is due."""
    forget: tuple[str, ...] = ()
    """Nodes whose record says nothing any more."""
    held: tuple[Wanted, ...] = ()
    """Nodes that would go out if the rate limit let them."""


def wanted_out(view: View) -> dict[str, Wanted]:
    """Nodes whose hardware is in quarantine now: connected ones by the hardware that they have, the others by the record."""
    found: dict[str, Wanted] = {}
    for record in view.quarantine.values():
        if record.state in quarantine.OUT and record.node and record.node not in view.nodes:
            found[record.node] = Wanted(record.node, record.reason, record.key)
    if view.quarantine:
        for name, node in view.nodes.items():
            record = quarantine.blocked(view, node)
            if record is not None:
                found[name] = Wanted(name, record.reason, record.key)
    return found


def pause_seconds(num_attempts: int) -> float:
    """Between an attempt and the next one: 5 s, doubled each time, up to 5 minutes."""
    return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** max(0, min(num_attempts, 16) - 1))


def plan(wanted: Mapping[str, Wanted], records: Mapping[str, Record], *, now: float, epoch: int, per_hour: int) -> Plan:
    """Compare what is wanted with what was ordered.

    A node that comes back is never held: the limit is on taking capacity away.
    """
    since = now - WINDOW_SECONDS
    spent = sum(1 for record in records.values() for at in record.outs if at > since)
    intents: list[Record] = []
    again: list[Record] = []
    held: list[Wanted] = []
    for name, want in sorted(wanted.items()):
        known = records.get(name)
        if known is not None and known.direction == "out":
            again += [known] if _due(known, now) else []
        elif spent >= per_hour:
            held.append(want)
        else:
            spent += 1
            outs = (*_recent(known, since), now)
            intents.append(_order(want, "out", known, now=now, epoch=epoch, outs=outs))
    forget: list[str] = []
    for name, known in sorted(records.items()):
        if name in wanted:
            continue
        if known.direction == "out" and known.state != "left":
            back = Wanted(name, known.reason, known.hardware)
            intents.append(_order(back, "in", known, now=now, epoch=epoch, outs=_recent(known, since)))
        elif known.direction == "in" and known.open:
            again += [known] if _due(known, now) else []
        elif not _recent(known, since):
            forget.append(name)
    return Plan(intents=tuple(intents), again=tuple(again), forget=tuple(forget), held=tuple(held))


def attempted(record: Record, *, now: float, state: State, detail: str) -> Record:
    """The record after an attempt."""
    return msgspec.structs.replace(record, state=state, tried_at=now, num_attempts=record.num_attempts + 1, detail=detail[:_KEPT_DETAIL])


def _due(record: Record, now: float) -> bool:
    if not record.open:
        return False
    return record.num_attempts == 0 or not 0.0 <= now - record.tried_at < pause_seconds(record.num_attempts)


def _recent(record: Record | None, since: float) -> tuple[float, ...]:
    return tuple(at for at in record.outs if at > since) if record is not None else ()


def _order(want: Wanted, direction: Direction, known: Record | None, *, now: float, epoch: int, outs: tuple[float, ...]) -> Record:
    number = int(known.id.rpartition("-")[2]) + 1 if known is not None and known.id.rpartition("-")[2].isdigit() else 1
    return Record(
        node=want.node,
        direction=direction,
        id=f"{epoch}-{want.node}-{number}",
        reason=want.reason,
        hardware=want.hardware,
        ordered_at=now,
        by_epoch=epoch,
        outs=outs,
    )
