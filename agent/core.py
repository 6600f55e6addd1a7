"""The node machine: given what it knows and what happens, what it knows then and what is to be done (pure).

Rules: an order with a lower (epoch, generation) than one that was obeyed is refused; fences are written before effects;
older workers are dead before newer ones start; a process that cannot be killed makes the node unusable; no leader and no
store means that the workers go on.
"""

from __future__ import annotations

import signal
from typing import assert_never

import msgspec

from regrow import wire
from regrow.agent import changeover, lastwords, reports
from regrow.agent import machine as m

_change = msgspec.structs.replace
_IDLE_LEAVE_SECONDS = 1.0
"""A node that runs nothing waits this long for the leader's word before it goes."""


def react(state: m.NodeState, event: m.Event, at: float) -> m.Outcome:
    """One turn. `at` is the agent's monotonic clock, seconds."""
    match event:
        case m.Ordered():
            outcome = _ordered(state, event.message, at)
        case m.Connected():
            outcome = _connected(state, event)
        case m.Disconnected():
            outcome = _change(state, connected=False, alone_since=at), ()
        case m.Started():
            outcome = _started(state, event, at)
        case m.StartFailed():
            outcome = _start_failed(state, event)
        case m.Exited():
            outcome = _exited(state, event, at)
        case m.Moved():
            outcome = changeover.moved(state, event, at)
        case m.Adopted():
            outcome = _adopted(state, event, at)
        case m.Said():
            outcome = reports.said(state, event.message)
        case m.LeaveAsked():
            outcome = _leave(state, event, at)
        case m.Tick():
            outcome = state, ()
        case _:
            assert_never(event)
    return _due(*outcome, at)


def wake_at(state: m.NodeState) -> float | None:
    """When a `Tick` is due at the latest; None when nothing waits for time."""
    times = [state.leaving.deadline] if state.leaving and not state.quitting else []
    if state.current is not None and state.current.live and state.alone_since is not None and state.current.kill_deadline is None:
        times.append(state.alone_since + state.static_seconds)
    if state.current is not None:
        local = state.current
        deadlines = (local.kill_deadline, local.term_deadline, local.regroup_deadline, lastwords.deadline(local))
        times += [time for time in deadlines if time is not None]
    return min(times) if times else None


# --- orders ------------------------------------------------------------------------------------------------------


def _ordered(state: m.NodeState, message: wire.Action | wire.CollectStacks | wire.Acknowledge, at: float) -> m.Outcome:
    if isinstance(message, wire.Action) and message.epoch < state.fences.epoch:
        return state, _refuse(message, f"epoch {message.epoch} is behind {state.fences.epoch}, which this node has seen")
    match message:
        case wire.StartGeneration():
            return _start(state, message, at)
        case wire.StopGeneration():
            return _stop(state, message, at)
        case wire.RequestSave():
            control = wire.Control(save=True, stop_after_save=message.stop_after)
            return _tell(state, message.job, message.generation, control, save=True)
        case wire.SetInterval():
            seconds = message.save_interval_seconds or None
            rates = message.tier_rates
            control = wire.Control(save_interval_seconds=seconds, failures_per_second=message.failures_per_second, tier_rates=rates)
            return _tell(state, message.job, message.generation, control, save=False)
        case wire.CollectStacks():
            local = _running(state, message.job, message.generation)
            if local is None:
                return state, ()
            pids = {rank: pid for rank, pid in local.pids.items() if rank in local.live}
            return state, (m.DumpStacks(job=local.job, generation=local.generation, pids=pids),)
        case wire.Acknowledge():
            local = _running(state, message.job, message.generation)
            if local is None:
                return state, ()
            return _change(state, current=_change(local, acknowledged=local.acknowledged | set(message.ranks))), ()
        case wire.ReleaseNode():
            if state.leaving is None:
                return state, ()
            return _quit(state, 0, f"released: {message.reason}" if message.reason else "released by the leader")
        case _:
            return state, ()


def _running(state: m.NodeState, job: str, generation: int) -> m.Local | None:
    local = state.current
    return local if local is not None and (local.job, local.generation) == (job, generation) else None


def _refuse(message: wire.Action, reason: str) -> tuple[m.Effect, ...]:
    if not isinstance(message, wire.StartGeneration):
        return ()
    return (m.Send(wire.StartRefused(job=message.spec.job, generation=message.spec.generation, reason=reason, fenced=True)),)


def _start(state: m.NodeState, order: wire.StartGeneration, at: float) -> m.Outcome:
    job, number = order.spec.job, order.spec.generation
    refused = wire.StartRefused(job=job, generation=number, reason="")
    if state.fences.unusable:
        return state, (m.Send(_change(refused, reason=state.fences.unusable, node_unusable=True)),)
    if state.leaving is not None:
        return state, (m.Send(_change(refused, reason=f"node is leaving: {state.leaving.reason}")),)
    if not order.workers or 0 < state.slots < len(order.workers):
        reason = f"{len(order.workers)} workers were ordered, this node has {state.slots} slots"
        return state, (m.Send(_change(refused, reason=reason)),)
    for known in (state.current, state.following):
        if known is not None and (known.job, known.generation) == (job, number) and known.stage not in ("stopping", "stopped"):
            return state, tuple(m.Send(phase) for phase in known.told.values())
    if number <= state.fences.stopped.get(job, 0) or number <= state.fences.generations.get(job, 0):
        reason = f"generation {number} is not above {state.fences.highest(job)}, which this node has seen"
        return state, (m.Send(_change(refused, reason=reason, fenced=True)),)
    fences = _change(state.fences, epoch=max(order.epoch, state.fences.epoch), generations=state.fences.generations | {job: number})
    fenced = wire.GenerationPhase(job=job, generation=number, phase="fenced")
    following = m.Local(order=order, ordered_at=at, told={"fenced": fenced})
    effects: list[m.Effect] = [m.Persist(fences), m.Send(fenced)]
    kept = changeover.keepable(state.current, order)
    if kept and state.current is not None:
        following, launch = changeover.keep(state.current, following, kept, at + state.regroup_seconds)
        return _change(state, fences=fences, current=following, following=None), (*effects, m.Send(following.told["stopped"]), launch)
    state = _change(state, fences=fences, following=following)
    state, kills = lastwords.ask(state, order, at) or _kill_current(state, at)
    return state, (*effects, *kills)


def _kill_current(state: m.NodeState, at: float) -> m.Outcome:
    local = state.current
    if local is None or not local.live:
        return state, ()
    deadline = local.kill_deadline if local.kill_deadline is not None else at + state.kill_limit_seconds
    local = _change(local, stage="stopping", kill_deadline=deadline, term_deadline=None, gasp_began=None)
    return _change(state, current=local), (m.Kill(job=local.job, generation=local.generation, signal=signal.SIGKILL),)


def _stop(state: m.NodeState, order: wire.StopGeneration, at: float) -> m.Outcome:
    job = order.job
    stopped = max(order.generation, state.fences.stopped.get(job, 0))
    fences = _change(state.fences, epoch=max(order.epoch, state.fences.epoch), stopped=state.fences.stopped | {job: stopped})
    effects: list[m.Effect] = [] if fences == state.fences else [m.Persist(fences)]
    state = _change(state, fences=fences)
    if state.following is not None and state.following.job == job and state.following.generation <= order.generation:
        state = _change(state, following=None)
    local = state.current
    if local is None or local.job != job or local.generation > order.generation or not local.live:
        done = wire.GenerationPhase(job=job, generation=order.generation, phase="stopped", detail={"reason": order.reason})
        return state, (*effects, m.Send(done))
    if order.grace_seconds > 0 and local.kill_deadline is None:
        local = _change(local, stage="stopping", term_deadline=at + order.grace_seconds)
        kill = m.Kill(job=job, generation=local.generation, signal=signal.SIGTERM)
        return _change(state, current=local), (*effects, kill)
    state, kills = _kill_current(state, at)
    return state, (*effects, *kills)


def _tell(state: m.NodeState, job: str, generation: int, control: wire.Control, *, save: bool) -> m.Outcome:
    local = _running(state, job, generation)
    if local is None:
        return state, ()
    local = _change(local, pending_save=control) if save else _change(local, interval=control)
    return _change(state, current=local), (m.ToWorkers(generation=generation, control=control),)


# --- the leader comes and goes -----------------------------------------------------------------------------------


def _connected(state: m.NodeState, event: m.Connected) -> m.Outcome:
    """Tell a leader what it may have missed; everything told is a fact that may be told twice."""
    effects: list[m.Effect] = []
    fences = state.fences
    if event.epoch > fences.epoch:
        fences = _change(fences, epoch=event.epoch)
        effects.append(m.Persist(fences))
    for local in (state.current, state.following):
        if local is not None and local.stage != "stopped":
            effects += [m.Send(phase) for phase in local.told.values()]
    if state.leaving is not None:
        effects.append(m.Send(wire.Leaving(reason=state.leaving.reason)))
    return _change(state, connected=True, alone_since=None, fences=fences), tuple(effects)


def _leave(state: m.NodeState, event: m.LeaveAsked, at: float) -> m.Outcome:
    if state.leaving is not None:  # asked twice: now
        return _quit(state, 0, f"{event.reason} again")
    busy = state.current is not None and bool(state.current.live)
    wait = event.notice_seconds if busy else min(event.notice_seconds, _IDLE_LEAVE_SECONDS if state.connected else 0.0)
    state = _change(state, leaving=m.Leave(reason=event.reason, deadline=at + wait))
    return state, (m.Send(wire.Leaving(reason=event.reason, notice_seconds=wait)),)


def _quit(state: m.NodeState, code: int, reason: str) -> m.Outcome:
    if state.quitting:
        return state, ()
    return _change(state, quitting=True), (m.Quit(code=code, reason=reason),)


# --- workers start and end ---------------------------------------------------------------------------------------


def _started(state: m.NodeState, event: m.Started, at: float) -> m.Outcome:
    local = _running(state, event.job, event.generation)
    if local is None:
        return state, ()
    kept = {rank: old for rank, old in local.kept.items() if event.pids.get(rank) == local.pids.get(rank)}  # others died, or are stopped
    local = _change(local, kept=kept, pids=event.pids, stage="running" if local.stage == "starting" else local.stage)
    told = wire.GenerationPhase(
        job=local.job, generation=local.generation, phase="started", seconds=at - local.ordered_at, detail=dict(event.detail)
    )
    local = _change(local, told=local.told | {"started": told})
    return _change(state, current=local), (m.Send(told),)


def _start_failed(state: m.NodeState, event: m.StartFailed) -> m.Outcome:
    local = _running(state, event.job, event.generation)
    if local is None:
        return state, ()
    refused = wire.StartRefused(job=local.job, generation=local.generation, reason=event.reason)
    return _change(state, current=_change(local, stage="stopped", kill_deadline=None, term_deadline=None)), (m.Send(refused),)


def _adopted(state: m.NodeState, event: m.Adopted, at: float) -> m.Outcome:
    local = m.Local(order=event.order, stage="running", ordered_at=at, pids=event.pids)
    started = wire.GenerationPhase(job=local.job, generation=local.generation, phase="started", detail={"adopted": True})
    state = _change(state, current=_change(local, told={"started": started}))
    if local.generation <= state.fences.stopped.get(local.job, 0):
        return _kill_current(state, at)
    return state, ()


def _exited(state: m.NodeState, event: m.Exited, at: float) -> m.Outcome:
    local = _running(state, event.job, event.generation)
    if local is None:
        return state, ()
    new: dict[int, wire.WorkerExit] = {}
    for found in event.exits:
        if found.rank in local.exits or found.rank not in local.ranks:
            continue
        if event.lost and local.stage == "stopping":
            found = _change(found, torn_down=True)
        new[found.rank] = _judge(local, found, attached=found.rank in event.attached or found.rank in local.attached)
    local = _change(local, exits=local.exits | new)
    effects: list[m.Effect] = []
    replaced = local.stage == "stopping" and state.following is not None
    if new and not replaced:
        effects.append(m.Send(wire.WorkersExited(job=local.job, generation=local.generation, exits=tuple(new.values()))))
    state = _change(state, current=local)
    if local.live:
        return state, tuple(effects)
    return _all_ended(state, local, effects, at)


def _judge(local: m.Local, found: wire.WorkerExit, *, attached: bool) -> wire.WorkerExit:
    """Without the worker library, an exit status of 0 is all that a program can say about its end."""
    clean = found.exit_code == 0 and found.signal == 0
    said = found.declared_end or found.rank in local.phases.get("finished", frozenset())
    return _change(found, declared_end=clean and (said or not attached), torn_down=found.torn_down and not (clean and said))


def _all_ended(state: m.NodeState, local: m.Local, effects: list[m.Effect], at: float) -> m.Outcome:
    if local.stage == "stopping":
        local = _change(local, stage="stopped", kill_deadline=None, term_deadline=None)
        if state.following is None:
            effects.append(m.Send(wire.GenerationPhase(job=local.job, generation=local.generation, phase="stopped")))
    else:
        local = _change(local, stage="ended")
        if all(found.declared_end for found in local.exits.values()) and "finished" not in local.told:
            finished = wire.GenerationPhase(job=local.job, generation=local.generation, phase="finished", seconds=at - local.ordered_at)
            local = _change(local, told=local.told | {"finished": finished})
            effects.append(m.Send(finished))
    return _change(state, current=local), tuple(effects)


# --- what is due -------------------------------------------------------------------------------------------------


def _due(state: m.NodeState, effects: tuple[m.Effect, ...], at: float) -> m.Outcome:
    """Start what waited for an end; act on deadlines."""
    state, more = _next(state, at)
    effects += more
    state, more = changeover.due(state, at)
    effects += more
    local = state.current
    if local is not None and (lastwords.are_over(local, at) or (local.term_deadline is not None and at >= local.term_deadline)):
        state, more = _kill_current(state, at)
        effects += more
    local = state.current
    if local is not None and local.live and local.kill_deadline is not None and at >= local.kill_deadline:
        state, more = _unkillable(state, local, at)
        effects += more
    local = state.current
    alone = state.alone_since is not None and at >= state.alone_since + state.static_seconds
    if alone and local is not None and local.live and local.kill_deadline is None:
        state, more = _kill_current(state, at)
        effects += more
    if state.leaving is not None and at >= state.leaving.deadline:
        state, more = _quit(state, 0, f"{state.leaving.reason}: nobody needs this node, or the notice is over")
        effects += more
    return state, effects


def _next(state: m.NodeState, at: float) -> m.Outcome:
    following = state.following
    if following is None or (state.current is not None and state.current.live) or state.quitting:
        return state, ()
    effects: list[m.Effect] = []
    if state.current is not None:
        effects.append(m.Forget(job=state.current.job, generation=state.current.generation))
    told = wire.GenerationPhase(
        job=following.job, generation=following.generation, phase="stopped", seconds=max(0.0, at - following.ordered_at)
    )
    following = _change(following, stage="starting", told=following.told | {"stopped": told})
    effects += [m.Send(told), m.Launch(following.order)]
    return _change(state, current=following, following=None), tuple(effects)


def _unkillable(state: m.NodeState, local: m.Local, at: float) -> m.Outcome:
    pids = sorted(local.pids[rank] for rank in local.live if rank in local.pids)
    if not pids:  # the start itself is not over yet
        return _change(state, current=_change(local, kill_deadline=at + state.kill_limit_seconds)), ()
    names = ", ".join(map(str, pids))
    reason = f"host needs recycling: pid {names} of generation {local.generation} cannot be killed within {state.kill_limit_seconds:g} s"
    fences = _change(state.fences, unusable=reason, unusable_pids=dict.fromkeys(pids, 0))
    verdict = wire.HealthVerdict(state="unhealthy", action="reboot", reason=reason, evidence=tuple(f"pid {pid}" for pid in pids))
    job, number = (state.following or local).job, (state.following or local).generation
    effects: list[m.Effect] = [
        m.Persist(fences),
        m.Send(wire.StartRefused(job=job, generation=number, reason=reason, node_unusable=True)),
        m.Send(wire.HealthChanged(verdict=verdict)),
        m.Send(wire.Leaving(reason=reason)),
    ]
    state = _change(state, fences=fences, following=None, current=_change(local, kill_deadline=None))
    state, more = _quit(state, 1, reason)
    return state, (*effects, *more)
