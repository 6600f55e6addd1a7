"""Who may be in the next generation, and in which order."""

from __future__ import annotations

from operator import is_

import msgspec

from regrow import wire
from regrow.supervisor.core import quarantine
from regrow.supervisor.core.memo import Changes, Memo
from regrow.supervisor.core.records import QuarantineRecord
from regrow.supervisor.core.view import JobView, NodeView, View


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A node that can take workers."""

    node: str
    slots: int


def why_not(view: View, node: NodeView, job: JobView) -> str:
    """Why a node cannot be in a generation of this job; empty when it can."""
    if not node.connected:
        return "not connected"
    if node.silent_since is not None:
        return "silent"
    if node.unusable:
        return node.unusable
    if node.leaving:
        return f"leaving: {node.leaving}"
    if node.name in view.drains:
        return "drained by an operator"
    if node.name in view.cordoned:
        return "cordoned"
    if quarantine.is_bad(node):
        return f"unhealthy: {node.health.reason}"
    out = out_records(view)
    record = quarantine.blocked(view, node) if out and not out.keys().isdisjoint(quarantine.names(node)) else None
    if record is not None:
        return f"{record.state}: {record.reason}"
    if slots_for(node, job.spec) < 1:
        return "no slots"
    return ""


class _Answer(msgspec.Struct, frozen=True):
    """Why each blocked node is blocked, and what the choice of members goes by."""

    why: dict[str, str]
    ground: object
    """The same object while nothing changed that the choice of members looks at: who is blocked, slots, TCPStores."""
    seats: dict[str, Seat]
    """Of every node, blocked or not."""


_blocked: Memo[_Answer] = Memo()
_eligible: Memo[tuple[Seat, ...]] = Memo()


def blocked(view: View, job: JobView) -> dict[str, str]:
    """{node: why not} of the nodes that cannot be in a generation of this job. Do not change it: it is remembered."""
    return _answer(view, job).why


def _answer(view: View, job: JobView) -> _Answer:
    parts = (view.nodes, view.quarantine, view.cordoned, view.drains, job.spec)
    return _blocked.get(parts, None, lambda: _scan.answer(view, job))


class _Scan:
    """The last scan over all nodes: of thousands few change from one to the next."""

    def __init__(self) -> None:
        self._rules: tuple[object, ...] = ()
        self._nodes: Changes[NodeView] = Changes()
        self._places: dict[str, int] = {}
        self._owners: dict[str, set[int]] | None = None
        """{key of hardware: places of nodes that have or had it}; None until hardware moves in its trust."""
        self._out: dict[str, QuarantineRecord] = {}
        self._last = _Answer(why={}, ground=object(), seats={})

    def answer(self, view: View, job: JobView) -> _Answer:
        """Ask the nodes that differ from the last scan, or whose hardware does in its trust.

        Everything is looked at again when a node appears, goes or has other hardware: that may change whose chassis serial is
        unique, and with it others' answers.
        """
        rules = (view.cordoned, view.drains, job.spec)
        before = self._nodes.values
        changed = self._nodes.look(view.nodes)
        values = self._nodes.values
        out, moved = out_records(view), self._moved(view)
        same_rules = len(rules) == len(self._rules) and all(map(is_, rules, self._rules))
        self._rules, self._out = rules, out
        if changed is None or not same_rules or any(values[place].hardware_id != before[place].hardware_id for place in changed):
            return self._whole(view, job)
        ground, seats = self._last.ground, self._last.seats
        for place in changed:
            if self._owners is not None:
                _own(self._owners, place, values[place])
            if values[place].slots != before[place].slots:
                seats = seats | {values[place].name: _seat(values[place], job)}
            if values[place].slots != before[place].slots or bool(values[place].spare_store) != bool(before[place].spare_store):
                ground = object()
        asked = {*changed, *(self._holders(moved) if moved else ())}
        why = self._last.why
        again = {(node := values[place]).name: why_not(view, node, job) for place in sorted(asked)}
        if any(why.get(name, "") != text for name, text in again.items()):
            ground = ground if all((name in why) == bool(text) for name, text in again.items()) else object()
            merged = why | again
            why = {name: text for name in sorted(merged, key=self._places.__getitem__) if (text := merged[name])}
        self._last = _Answer(why=why, ground=ground, seats=seats)
        return self._last

    def _whole(self, view: View, job: JobView) -> _Answer:
        self._owners, self._places = None, {name: place for place, name in enumerate(view.nodes)}
        why = {name: text for name, node in view.nodes.items() if (text := why_not(view, node, job))}
        seats = {name: _seat(node, job) for name, node in view.nodes.items()}
        self._last = _Answer(why=why, ground=object(), seats=seats)
        return self._last

    def _holders(self, keys: frozenset[str]) -> set[int]:
        """Places of the nodes with this hardware."""
        owners = self._owners
        if owners is None:
            owners = self._owners = {}
            for place, node in enumerate(self._nodes.values):
                _own(owners, place, node)
        return {place for key in keys for place in owners.get(key, ())}

    def _moved(self, view: View) -> frozenset[str]:
        """Keys of hardware that is kept out now and was not, or the other way round, or for another reason."""
        now = out_records(view)
        if now is self._out:
            return frozenset()
        return frozenset(key for key in now.keys() | self._out.keys() if now.get(key) is not self._out.get(key))


def _own(owners: dict[str, set[int]], place: int, node: NodeView) -> None:
    for key in quarantine.names(node):
        owners.setdefault(key, set()).add(place)


_scan = _Scan()
_out_records: Memo[dict[str, QuarantineRecord]] = Memo()


def out_records(view: View) -> dict[str, QuarantineRecord]:
    """{key: record} of the hardware that is kept out."""
    return _out_records.get(
        (view.quarantine,), None, lambda: {key: record for key, record in view.quarantine.items() if record.state in quarantine.OUT}
    )


def _seat(node: NodeView, job: JobView) -> Seat:
    return Seat(node=node.name, slots=slots_for(node, job.spec))


def slots_for(node: NodeView, spec: wire.JobSpec) -> int:
    """Workers of this job that a node takes."""
    return min(node.slots, spec.nproc_per_node)


def eligible(view: View, job: JobView, taken: frozenset[str], *, without: frozenset[str] = frozenset()) -> tuple[Seat, ...]:
    """Nodes that can be members, at most max_nodes: members of the last generation in rank order, then others by name.

    Newcomers to a job that has run must be ready to start workers at once: they have an unused TCPStore standing.

    Args:
        taken: nodes that other jobs use.
        without: nodes that this decision leaves out.
    """
    generation = job.generation.spec if job.generation else None
    parts = (_answer(view, job).ground, job.spec, generation)
    return _eligible.get(parts, (taken, without), lambda: _find_eligible(view, job, taken, without))


def _find_eligible(view: View, job: JobView, taken: frozenset[str], without: frozenset[str]) -> tuple[Seat, ...]:
    answer, nodes = _answer(view, job), view.nodes
    previous = job.generation.spec.nodes if job.generation else ()
    known = set(previous)
    kept_out = answer.why.keys() | taken | without
    most = max(job.spec.max_nodes, job.spec.min_nodes)
    names = [name for name in previous if name in nodes and name not in kept_out][:most]
    stay = dict(zip(names, map(answer.seats.__getitem__, names), strict=True))
    fresh: list[Seat] = []
    for name in sorted(nodes.keys() - known - kept_out):
        if len(names) + len(fresh) == most:
            break
        if job.generation is None or nodes[name].spare_store:  # a running job does not wait for a shim that is not ready
            fresh.append(answer.seats[name])
    return _in_places(job, previous, stay, fresh)


def _in_places(job: JobView, previous: tuple[str, ...], stay: dict[str, Seat], fresh: list[Seat]) -> tuple[Seat, ...]:
    """A spare takes the place of a member that is gone, with the same ranks; survivors keep their order."""
    if not fresh or job.generation is None:
        return (*stay.values(), *fresh)
    placed = list(map(stay.get, previous))
    for place in [place for place, seat in enumerate(placed) if seat is None]:
        slots = len(job.generation.members[previous[place]].workers)
        found = next((index for index, seat in enumerate(fresh) if seat.slots == slots), None)
        placed[place] = fresh.pop(found) if found is not None else None
    return (*(seat for seat in placed if seat is not None), *fresh)


_places: Memo[int] = Memo()


def places(seats: tuple[Seat, ...]) -> int:
    """Workers that fit on these seats."""
    return _places.get((seats,), None, lambda: sum(seat.slots for seat in seats))


FEW = "usable nodes"
"""In the reason of a job that is parked for lack of nodes, behind their number."""


def may_form(previous: tuple[str, ...], seats: tuple[Seat, ...], min_nodes: int) -> str:
    """Why these nodes may not form; empty when they may.

    An explicit lower bound fences the rest out (only one leader writes the generation record). Without one a majority of
    the previous generation is needed.
    """
    if len(seats) < max(1, min_nodes):
        return f"{len(seats)} {FEW}, at least {max(1, min_nodes)} needed"
    if min_nodes < 1 and previous:
        kept = sum(1 for seat in seats if seat.node in previous)
        if 2 * kept <= len(previous):
            return f"{kept} of {len(previous)} previous members are there: no majority, and no lower bound is set"
    return ""


def assign(seats: tuple[Seat, ...], world_size: int, nodes: dict[str, NodeView]) -> dict[str, tuple[wire.WorkerAssignment, ...]]:
    """Ranks 0..world_size-1 on the seats in order. Seats that are not needed stay spares and are left out."""
    result: dict[str, tuple[wire.WorkerAssignment, ...]] = {}
    rank = 0
    for seat in seats:
        count = min(seat.slots, world_size - rank)
        if count < 1:
            break
        devices = nodes[seat.node].devices
        result[seat.node] = tuple(
            wire.WorkerAssignment(rank=rank + index, local_rank=index, device_uuid=devices[index].uuid if index < len(devices) else "")
            for index in range(count)
        )
        rank += count
    if rank != world_size:
        raise ValueError(f"{world_size} workers do not fit on the {rank} slots of {len(seats)} nodes")
    return result
