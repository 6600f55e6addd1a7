"""Two replicas differ and neither has a majority: the step comes again, on devices that have not done it yet where there are any.

What each device gave is kept with the job's ledger, so that the question outlives the leader. A device is accused when the others contradict
it: the step done again gives what one of two had before; or of three devices two have the same; or of two the one repeats itself to the bit
and the other does not. A step that gives something else each time accuses nobody. Pure.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import msgspec

from regrow import wire
from regrow.ids import MeshShape
from regrow.supervisor.core import membership, sdc
from regrow.supervisor.core.records import Place, Try, Undecided
from regrow.supervisor.core.view import GenerationView, JobView, View

_change = msgspec.structs.replace
MOST_TRIES = 4
"""So often the same step is asked; then what is known is that it cannot be told."""
_GROUPS_KEPT = 64
"""Positions whose digests are kept: those that differ, and others, for a step that gives something else each time."""
_RANKS_KEPT = 384
"""Of all these positions together: they lie in a record of the store, with the ledger."""
_MOST_EXCHANGES = 256
"""Pairs of nodes that are looked at: a leader has other things to do."""
Members = dict[str, tuple[wire.WorkerAssignment, ...]]


def ask(before: Undecided | None, current: GenerationView, step: int, digests: dict[int, str]) -> Undecided:
    """The question with one more answer; another step or mesh is another question."""
    mesh = current.spec.mesh
    answer = Try(digests=_kept(mesh, digests), places=places(current, digests))
    answer = _change(answer, places={rank: place for rank, place in answer.places.items() if rank in answer.digests})
    if before is None or before.step != step or before.mesh != mesh:
        return Undecided(step=step, mesh=mesh, tries=(answer,))
    return _change(before, tries=(*before.tries, answer)[-MOST_TRIES:])


def places(current: GenerationView, digests: dict[int, str]) -> dict[int, Place]:
    """Where each of these ranks runs."""
    return {
        worker.rank: Place(node=name, device=worker.device_uuid, slot=worker.local_rank)
        for name, member in current.members.items()
        for worker in member.workers
        if worker.rank in digests
    }


def judge(asked: Undecided) -> tuple[Place, ...]:
    """Which devices were wrong; empty: it cannot be told, or they are on several nodes."""
    wrong: set[Place] = set()
    for group in _answers(asked):
        values = {value for one in group for value in one.values()}
        if len(values) < 2 or (len(group) < 2 and len(asked.tries) > 1):
            continue  # nothing differs; or this position was seen once: no second answer to hold it against
        truth = _truth(group)
        if not truth:
            return ()
        wrong |= {place for one in group for place, value in one.items() if value != truth}
    found = tuple(sorted(wrong, key=lambda place: (place.node, place.slot)))
    return found if len({place.node for place in found}) == 1 else ()


def _truth(group: list[dict[Place, str]]) -> str:
    """What a position's digest should have been, by all answers {device: digest}; empty: it cannot be told."""
    given: dict[Place, list[str]] = {}
    for one in group:
        for place, value in one.items():
            given.setdefault(place, []).append(value)
    last = set(group[-1].values())
    earlier = {value for one in group[:-1] for value in one.values()}
    truth = ""
    steady = {place: values[0] for place, values in given.items() if len(set(values)) == 1}
    if len(last) == 1 and last <= earlier:
        truth = next(iter(last))
    elif len(given) > 2 and steady:
        value, count = Counter(steady.values()).most_common(1)[0]
        truth = value if 2 * count > len(given) else ""
    elif len(given) == 2 and len(steady) == 1 and all(len(values) > 1 for values in given.values()):
        truth = next(iter(steady.values()))
    agreed = (set(one.values()) for one in group)
    return "" if any(len(values) == 1 and values != {truth} for values in agreed) else truth


def _answers(asked: Undecided) -> Iterator[list[dict[Place, str]]]:
    """For each position that must hold the same bytes: what each answer has of it."""
    for ranks in sdc.groups(asked.mesh, asked.tries[-1].digests):
        found = [
            {one.places[rank]: one.digests[rank] for rank in ranks if rank in one.places and one.digests.get(rank)} for one in asked.tries
        ]
        group = [one for one in found if len(one) == len(ranks)]
        if group and not any(wire.AT_REST in one.values() for one in group):
            yield group


def _kept(mesh: MeshShape, digests: dict[int, str]) -> dict[int, str]:
    """The digests of the positions that differ, and of some that do not."""
    found = sdc.groups(mesh, digests)
    found.sort(key=lambda ranks: len({digests.get(rank) for rank in ranks}) < 2)
    kept: dict[int, str] = {}
    for ranks in found[:_GROUPS_KEPT]:
        if len(kept) + len(ranks) <= _RANKS_KEPT:
            kept |= {rank: digests[rank] for rank in ranks if rank in digests}
    return kept


def swap_out(view: View, job: JobView, generation: GenerationView, taken: frozenset[str], without: frozenset[str]) -> str:
    """A member whose replica a spare shall compute once; empty: no spare can take its place, or there is nothing to settle."""
    asked = open_question(job, generation)
    if asked is None:
        return ""
    tried = {place.node for one in asked.tries for place in one.places.values()}
    for name in sorted({place.node for places in _differing(asked) for place in places}):
        member = generation.members.get(name)
        seats = membership.eligible(view, job, taken, without=without | {name})
        new = [seat for seat in seats if seat.node not in tried and member is not None and seat.slots == len(member.workers)]
        room = membership.places(seats) >= generation.spec.world_size
        if new and room and not membership.may_form(generation.spec.nodes, seats, job.spec.min_nodes):
            return name
    return ""


def arrange(job: JobView, mesh: MeshShape, members: Members) -> Members:
    """The members' ranks, moved so that each position in question is computed by a device that has not done it yet; as they are, where
    no turn within the nodes and no exchange of two nodes does that.

    Args:
        members: {node: workers} in rank order.
    """
    generation = job.generation
    asked = open_question(job, generation) if generation is not None else None
    if asked is None or asked.mesh != mesh or _fresh(asked, members):
        return members
    turned = {name: _turn(workers) for name, workers in members.items()}
    if _fresh(asked, turned):
        return turned
    names = list(members)
    asked_nodes = {place.node for places in _differing(asked) for place in places}
    pairs = (
        (first, second)
        for first, one in enumerate(names)
        for second in range(first + 1, len(names))
        if len(members[one]) == len(members[names[second]]) and not asked_nodes.isdisjoint({one, names[second]})
    )
    for first, second in itertools.islice(pairs, _MOST_EXCHANGES):
        exchanged = _exchange(members, first, second)
        if _fresh(asked, exchanged):
            return exchanged
    return members


def is_turned(members: Members) -> bool:
    """Whether ranks were moved within a node: its processes must not go on with others' devices."""
    return any(
        worker.rank - workers[0].rank != worker.local_rank - workers[0].local_rank for workers in members.values() for worker in workers
    )


def open_question(job: JobView, generation: GenerationView) -> Undecided | None:
    """What the divergence of this generation left open; None: nothing, or it was asked often enough."""
    asked, found = job.ledger.undecided, generation.divergence
    if asked is None or found is None or found.rank >= 0 or found.step != asked.step or len(asked.tries) >= MOST_TRIES:
        return None
    return asked


def _differing(asked: Undecided) -> list[set[Place]]:
    """The devices of each position whose last answers differ."""
    return [set(group[-1]) for group in _answers(asked) if len(set(group[-1].values())) > 1]


def _fresh(asked: Undecided, members: Members) -> bool:
    """Whether each position in question gets a device that has not done it."""
    here = {
        worker.rank: Place(node=name, device=worker.device_uuid, slot=worker.local_rank)
        for name, workers in members.items()
        for worker in workers
    }
    last = asked.tries[-1]
    for ranks in sdc.groups(asked.mesh, last.digests):
        if len({last.digests.get(rank) for rank in ranks}) < 2:
            continue
        tried = {one.places.get(rank) for one in asked.tries for rank in ranks}
        if all(here.get(rank) in tried for rank in ranks):
            return False
    return True


def _turn(workers: tuple[wire.WorkerAssignment, ...]) -> tuple[wire.WorkerAssignment, ...]:
    """Each device of a node does what its neighbour did; in the order of ranks."""
    devices = (*workers[1:], *workers[:1])
    return tuple(
        _change(worker, local_rank=device.local_rank, device_uuid=device.device_uuid)
        for worker, device in zip(workers, devices, strict=True)
    )


def _exchange(members: Members, first: int, second: int) -> Members:
    """Two nodes with as many workers each change places."""
    order = list(members)
    order[first], order[second] = order[second], order[first]
    return {
        name: tuple(
            _change(there, local_rank=own.local_rank, device_uuid=own.device_uuid)
            for there, own in zip(workers, members[name], strict=True)
        )
        for name, workers in zip(order, members.values(), strict=True)
    }
