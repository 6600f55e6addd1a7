"""Who may be in the next generation, and in which order."""

from __future__ import annotations

import msgspec

from regrow import wire
from regrow.supervisor.core import quarantine
from regrow.supervisor.core.memo import Memo
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


_blocked: Memo[dict[str, str]] = Memo()
_eligible: Memo[tuple[Seat, ...]] = Memo()


def blocked(view: View, job: JobView) -> dict[str, str]:
    """{node: why not} of the nodes that cannot be in a generation of this job. Do not change it: it is remembered."""
    parts = (view.nodes, view.quarantine, view.cordoned, view.drains, job.spec)
    return _blocked.get(parts, None, lambda: _find_blocked(view, job))


class _Scan:
    """The last scan over all nodes: of thousands few change from one to the next."""

    def __init__(self) -> None:
        self.rules: tuple[object, ...] = ()
        self.nodes: dict[str, NodeView] = {}
        self.found: dict[str, str] = {}
        self.out: dict[str, QuarantineRecord] = {}

    def changed(self, view: View, rules: tuple[object, ...]) -> list[NodeView] | None:
        """Nodes that differ from the last scan, or whose hardware does in its trust; None: everything has to be looked at again.

        A node that appears, goes or has other hardware may change whose chassis serial is unique, and with it others' answers.
        """
        if len(rules) != len(self.rules) or any(one is not other for one, other in zip(rules, self.rules, strict=True)):
            return None
        before = self.nodes
        if len(before) != len(view.nodes):
            return None
        found: list[NodeView] = []
        moved = self._moved(view)
        for name, node in view.nodes.items():
            known = before.get(name)
            if known is node:
                if moved and not moved.isdisjoint(quarantine.names(node)):
                    found.append(node)
                continue
            if known is None or known.hardware_id != node.hardware_id:
                return None
            found.append(node)
        return found

    def _moved(self, view: View) -> frozenset[str]:
        """Keys of hardware that is kept out now and was not, or the other way round, or for another reason."""
        now = out_records(view)
        if now is self.out:
            return frozenset()
        return frozenset(key for key in now.keys() | self.out.keys() if now.get(key) is not self.out.get(key))


_scan = _Scan()
_out_records: Memo[dict[str, QuarantineRecord]] = Memo()


def out_records(view: View) -> dict[str, QuarantineRecord]:
    """{key: record} of the hardware that is kept out."""
    return _out_records.get(
        (view.quarantine,), None, lambda: {key: record for key, record in view.quarantine.items() if record.state in quarantine.OUT}
    )


def _find_blocked(view: View, job: JobView) -> dict[str, str]:
    rules = (view.cordoned, view.drains, job.spec)
    changed = _scan.changed(view, rules)
    if changed is None:
        found = {name: why for name, node in view.nodes.items() if (why := why_not(view, node, job))}
    else:
        again = {node.name: why_not(view, node, job) for node in changed}
        merged = _scan.found | again
        found = {name: why for name in view.nodes if (why := merged.get(name))} if again else _scan.found
    _scan.rules, _scan.nodes, _scan.found, _scan.out = rules, view.nodes, found, out_records(view)
    return found


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
    parts = (view.nodes, view.quarantine, view.cordoned, view.drains, job.spec, generation)
    return _eligible.get(parts, (taken, without), lambda: _find_eligible(view, job, taken, without))


def _find_eligible(view: View, job: JobView, taken: frozenset[str], without: frozenset[str]) -> tuple[Seat, ...]:
    out = blocked(view, job)
    previous = list(job.generation.spec.nodes) if job.generation else []
    known = set(previous)
    order = [name for name in previous if name in view.nodes] + sorted(name for name in view.nodes if name not in known)
    kept_out = out.keys() | taken | without
    seats: list[Seat] = []
    most, each, nodes, fresh_start = (
        max(job.spec.max_nodes, job.spec.min_nodes),
        job.spec.nproc_per_node,
        view.nodes,
        job.generation is None,
    )
    for name in order:
        if name in kept_out:
            continue
        node = nodes[name]
        if not fresh_start and not node.spare_store and name not in known:
            continue  # its shim is not ready: a running job does not wait for it
        seats.append(Seat(node=name, slots=min(node.slots, each)))
        if len(seats) == most:
            break
    return _in_places(job, previous, seats)


def _in_places(job: JobView, previous: list[str], seats: list[Seat]) -> tuple[Seat, ...]:
    """A spare takes the place of a member that is gone, with the same ranks; survivors keep their order."""
    known = set(previous)
    fresh = [seat for seat in seats if seat.node not in known]
    if not fresh or job.generation is None:
        return tuple(seats)
    stay = {seat.node: seat for seat in seats if seat.node in known}
    placed: list[Seat] = []
    for name in previous:
        seat = stay.get(name)
        if seat is None:
            slots = len(job.generation.members[name].workers)
            seat = next((seat for seat in fresh if seat.slots == slots), None)
            fresh = [other for other in fresh if other is not seat]
        if seat is not None:
            placed.append(seat)
    return (*placed, *fresh)


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
