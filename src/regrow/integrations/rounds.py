"""Who is in the next round of a torchrun launch: pure rules over a picture of the store. No clock, no I/O, no torch.

A *member* is one torchrun process (one per node). A *round* is one generation: a numbered list of members and the address of the
store that its agents share. A member that wants a round beyond the current one is *waiting*.
"""

from __future__ import annotations

import msgspec

from regrow import wire
from regrow.supervisor.core.quarantine import OUT
from regrow.supervisor.core.records import QuarantineRecord
from regrow.supervisor.effects import Cordon


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """members/<id>, leased: a torchrun process that is alive."""

    id: str
    node: str
    wants: int
    """Least number of the round that it asks to be in."""
    version: int = wire.PROTOCOL_VERSION


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """generation: the fence. It is only ever replaced by a comparison with the revision that its writer read."""

    number: int
    members: tuple[str, ...]
    """Ids in the order of their group ranks; the first one serves the store."""
    nodes: tuple[str, ...]
    address: str
    port: int
    epoch: int
    """Term of the supervisor that led when the round was formed."""
    version: int = wire.PROTOCOL_VERSION


class Seen(msgspec.Struct, frozen=True):
    """A member and the store's order of arrival."""

    member: Member
    arrival: int
    """create_revision of its key."""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """What the store holds about one launch."""

    members: dict[str, Seen]
    current: Round | None = None
    revision: int = 0
    """mod_revision of the current round; 0: there is none."""
    closed: bool = False

    @property
    def number(self) -> int:
        """Number of the current round; 0: there was none yet."""
        return self.current.number if self.current is not None else 0


def waiting(picture: Picture) -> list[str]:
    """Ids that want a round beyond the current one: those that were in it by rank, then the others by arrival."""
    ranks = {name: rank for rank, name in enumerate(picture.current.members)} if picture.current is not None else {}
    found = [seen for seen in picture.members.values() if seen.member.wants > picture.number]
    found.sort(key=lambda seen: (ranks.get(seen.member.id, len(ranks)), seen.arrival))
    return [seen.member.id for seen in found]


def running(picture: Picture) -> list[str]:
    """Ids of the current round that are alive and do not ask for another one."""
    if picture.current is None:
        return []
    return [name for name in picture.current.members if name in picture.members and picture.members[name].member.wants <= picture.number]


def elect(picture: Picture, *, least: int, most: int, settled: bool) -> tuple[str, ...]:
    """Members of the next round by rank; empty: not yet.

    Nobody is left behind who still trains: a round waits until all living members of the current one ask for the next. With `most`
    members it begins at once, with at least `least` as soon as nobody arrived or left for a while (`settled`).
    """
    if picture.closed or running(picture):
        return ()
    ready = waiting(picture)
    if len(ready) >= most or (settled and len(ready) >= least):
        return tuple(ready[:most])
    return ()


def changes(picture: Picture, me: str, mine: int, *, most: int) -> int:
    """How many changes call for a new round, as a member of round `mine` sees it.

    A round that has moved on without this member counts as one: it is fenced and has to ask again. A waiting member of the current
    round, or one that died, always counts; a newcomer only while there is room for it.
    """
    if picture.closed or mine == 0:
        return 0
    current = picture.current
    if current is None or current.number != mine or me not in current.members:
        return 1
    asking = waiting(picture)
    inside = [name for name in current.members if name not in picture.members or name in asking]
    newcomers = [name for name in asking if name not in current.members]
    room = most - len(current.members) + sum(name not in picture.members for name in current.members)
    return len(inside) + min(len(newcomers), max(0, room))


def refusal(
    node: str, record: wire.NodeRecord | None, cordons: tuple[Cordon, ...], held: tuple[QuarantineRecord, ...], *, trains: bool
) -> str:
    """Why a node must not train; empty: it may.

    A cordon keeps a node out of new rounds only (`trains` False); a drain and a quarantine also end what it does. Hardware is known
    by the agent's record of the node; without an agent only by the node's name.
    """
    for order in cordons:
        if order.node == node and (order.drain or not trains):
            return f"{'drained' if order.drain else 'cordoned'} by {order.by or 'an operator'}"
    keys = {f"node:{node}"}
    if record is not None:
        keys |= {device.uuid for device in record.devices} | {device.serial for device in record.devices if device.serial}
        keys |= {record.hardware_id} - {""}
    for entry in held:
        if entry.state in OUT and (entry.key in keys or (record is None and entry.node == node)):
            return f"{entry.state}: {entry.reason or entry.key}"
    return ""
