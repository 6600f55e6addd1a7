"""What workers say, folded over the ranks of a node (pure)."""

from __future__ import annotations

from typing import assert_never

import msgspec

from regrow import wire
from regrow.agent import machine as m

_change = msgspec.structs.replace

PHASE_NAMES = {
    "imported": "imported",
    "rendezvous": "rendezvous",
    "model": "model",
    "restored": "restored",
    "first_step": "first_step",
    wire.REPLICAS_PHASE: wire.REPLICAS_PHASE,
    "finished": "finished",
}
"""Phases that the leader is told when all ranks of a node passed them."""
MAX_OPEN_STEPS = 64
"""Steps of which some rank has not reported yet; over it the oldest is told as it is."""
_WORST = {"snapshot": 0, "skipped": 1, "failed": 2}


def said(
    state: m.NodeState,
    message: wire.WorkerHello | wire.WorkerPhase | wire.StepReport | wire.SaveReport | wire.RestoreFailed | wire.WorkerWatch,
) -> m.Outcome:
    """Fold one line of a worker. Lines of other generations, and of ranks that are not ours, have no effect."""
    local = state.current
    if local is None or message.generation != local.generation or message.rank not in local.ranks:
        return state, ()
    match message:
        case wire.WorkerHello():
            local, effects = _hello(local, message)
        case wire.WorkerWatch():
            local, effects = _watch(local, message)
        case wire.WorkerPhase():
            local, effects = _phase(local, message)
        case wire.StepReport():
            local, effects = _step(local, message)
        case wire.SaveReport():
            local, effects = _save(local, message)
        case wire.RestoreFailed():
            effects = (
                m.Send(
                    wire.RestoreRefused(
                        job=local.job, generation=local.generation, rank=message.rank, step=message.step, problem=message.problem
                    )
                ),
            )
        case _:
            assert_never(message)
    return _change(state, current=local), effects


def _hello(local: m.Local, message: wire.WorkerHello) -> tuple[m.Local, tuple[m.Effect, ...]]:
    """A worker (re)connected: repeat the orders that still hold."""
    controls = [control for control in (local.interval, local.pending_save) if control is not None]
    ranks = frozenset({message.rank})
    effects = tuple(m.ToWorkers(generation=local.generation, control=control, ranks=ranks) for control in controls)
    return _change(local, attached=local.attached | {message.rank}), effects


def _watch(local: m.Local, message: wire.WorkerWatch) -> tuple[m.Local, tuple[m.Effect, ...]]:
    """A worker can change its generation in place; the leader is told when all of the node can."""
    if message.changing:
        return _change(local, changing=local.changing | {message.rank}), ()
    local = _change(local, gasps=local.gasps | {message.rank}) if message.gasps else local
    if not message.in_place:
        return local, ()
    local = _change(local, watched=local.watched | {message.rank})
    if wire.IN_PLACE_PHASE in local.told or local.watched != local.ranks:
        return local, ()
    told = wire.GenerationPhase(job=local.job, generation=local.generation, phase=wire.IN_PLACE_PHASE)
    return _change(local, told=local.told | {wire.IN_PLACE_PHASE: told}), (m.Send(told),)


def _phase(local: m.Local, message: wire.WorkerPhase) -> tuple[m.Local, tuple[m.Effect, ...]]:
    passed = local.phases.get(message.phase, frozenset()) | {message.rank}
    seconds = max(message.seconds, local.phase_seconds.get(message.phase, 0.0))
    local = _change(local, phases=local.phases | {message.phase: passed}, phase_seconds=local.phase_seconds | {message.phase: seconds})
    if message.phase == wire.LOST_PEER_PHASE and message.phase not in local.told:
        lost = wire.GenerationPhase(job=local.job, generation=local.generation, phase=message.phase, step=message.step)
        return _change(local, told=local.told | {message.phase: lost}), (m.Send(lost),)
    if message.phase not in PHASE_NAMES or message.phase in local.told or passed != local.ranks:
        return local, ()
    name = PHASE_NAMES[message.phase]
    told = wire.GenerationPhase(
        job=local.job, generation=local.generation, phase=name, step=message.step, seconds=seconds, detail=message.detail
    )
    effects: tuple[m.Effect, ...] = (m.Send(told),)
    if message.phase == "first_step" and local.before:  # everybody is in this generation now: nobody needs the store of the one before
        effects += (m.Forget(job=local.job, generation=local.before),)
    return _change(local, told=local.told | {message.phase: told}), effects


def _step(local: m.Local, message: wire.StepReport) -> tuple[m.Local, tuple[m.Effect, ...]]:
    reports = local.steps.get(message.step, {}) | {message.rank: message}
    steps = local.steps | {message.step: reports}
    complete = len(reports) == len(local.ranks)
    ready = [step for step in sorted(steps) if complete and step <= message.step]
    if not ready and len(steps) > MAX_OPEN_STEPS:
        ready = [min(steps)]
    effects = tuple(m.Send(_folded(local, step, steps[step])) for step in ready)
    return _change(local, steps={step: found for step, found in steps.items() if step not in ready}), effects


def _folded(local: m.Local, step: int, reports: dict[int, wire.StepReport]) -> wire.NodeSteps:
    ordered = tuple(reports[rank] for rank in sorted(reports))
    return wire.NodeSteps(job=local.job, generation=local.generation, step=step, reports=ordered)


def _save(local: m.Local, message: wire.SaveReport) -> tuple[m.Local, tuple[m.Effect, ...]]:
    """One word a node and step: the worst outcome, the longest stall."""
    reports = local.saves.get(message.step, {}) | {message.rank: message}
    local = _change(local, pending_save=None)
    if len(reports) < len(local.ranks):
        return _change(local, saves=local.saves | {message.step: reports}), ()
    worst = max(reports.values(), key=lambda report: _WORST[report.outcome])
    changed = wire.CheckpointChanged(
        job=local.job,
        generation=local.generation,
        step=message.step,
        state=worst.outcome,
        stall_seconds=max(report.stall_seconds for report in reports.values()),
        reason=worst.reason,
        tiers=next((report.tiers for report in reports.values() if report.tiers), ()),
    )
    open_saves = {step: found for step, found in local.saves.items() if step > message.step}
    return _change(local, saves=open_saves), (m.Send(changed),)
