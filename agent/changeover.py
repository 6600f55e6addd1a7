"""Workers that go on in another generation: who can, who is late and is replaced, who was only slow (pure)."""

from __future__ import annotations

import msgspec

from regrow import wire
from regrow.agent import machine as m

_change = msgspec.structs.replace


def keepable(local: m.Local | None, order: wire.StartGeneration) -> dict[int, int]:
    """{rank: rank now} of the workers that can go on in the ordered generation without a new process."""
    if local is None or not order.spec.in_place or local.job != order.spec.job or local.stage != "running":
        return {}
    if local.kill_deadline is not None or local.term_deadline is not None:
        return {}
    now = {worker.local_rank: worker.rank for worker in local.order.workers}
    found = {worker.rank: now[worker.local_rank] for worker in order.workers if worker.local_rank in now}
    return {rank: old for rank, old in found.items() if old in local.live and old in local.watched and old in local.pids}


def keep(local: m.Local, following: m.Local, kept: dict[int, int], deadline: float) -> tuple[m.Local, m.Launch]:
    """The next generation with workers of this one: nothing is stopped; the rest is killed by the shim as it starts."""
    stopped = wire.GenerationPhase(job=following.job, generation=following.generation, phase="stopped", detail={"kept": len(kept)})
    pids = {rank: local.pids[old] for rank, old in kept.items()}
    following = _change(
        following,
        stage="starting",
        kept=kept,
        before=local.generation,
        regroup_deadline=deadline,
        pids=pids,
        told=following.told | {"stopped": stopped},
    )
    return following, m.Launch(following.order, before=local.generation, kept=kept, pids=pids)


def due(state: m.NodeState, at: float) -> m.Outcome:
    """Who was to change over and does not is replaced; who is on his way gets more time, once."""
    local = state.current
    if local is None or local.regroup_deadline is None or (at < local.regroup_deadline and not local.kept.keys() <= local.attached):
        return state, ()
    late = frozenset(local.kept.keys() - local.attached) & local.live
    if local.stage == "starting" and late:  # the order to change over has not gone out yet
        return _change(state, current=_change(local, regroup_deadline=at + state.regroup_seconds)), ()
    patient = frozenset[int]() if local.regroup_last else late & local.changing
    stuck = late - patient
    more = state.regroup_seconds * (state.regroup_factor - 1)
    kept = {rank: old for rank, old in local.kept.items() if rank not in stuck}
    changed = _change(local, regroup_deadline=at + more if patient else None, regroup_last=bool(patient), kept=kept)
    replace = (m.Replace(local.order, stuck, local.before, local.kept, local.pids, local.changing),)
    return _change(state, current=changed), replace if stuck and local.stage == "running" else ()


def moved(state: m.NodeState, event: m.Moved, at: float) -> m.Outcome:
    """Who woke up while it was being looked at is on his way like the others, and gets their time."""
    local = state.current
    if local is None or (local.job, local.generation) != (event.job, event.generation):
        return state, ()
    deadline = at + state.regroup_seconds * (state.regroup_factor - 1)
    return _change(state, current=_change(local, kept=local.kept | event.ranks, regroup_deadline=deadline, regroup_last=True)), ()
