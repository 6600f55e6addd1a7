"""Events and actions in words: the journal's entries, and agents' messages as events."""

from __future__ import annotations

from typing import Any, assert_never

import msgspec

from regrow import wire
from regrow.release import VERSION
from regrow.supervisor import recent
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.journal import Journal
from regrow.supervisor.keys import decision_mark

_PLAIN = ("at", "event", "action", "job", "node", "generation", "mark")
_LONG_TEXT = 4_000


def event_of(
    node: str,
    message: wire.GenerationPhase
    | wire.HealthChanged
    | wire.CheckpointChanged
    | wire.RestoreRefused
    | wire.StartRefused
    | wire.Leaving
    | wire.Output
    | wire.PeersProbed,
    at: float,
) -> e.Event:
    """An agent's message as a fact."""
    match message:
        case wire.GenerationPhase():
            return e.MemberPhase(at=at, node=node, **_fields(message))
        case wire.HealthChanged():
            return e.NodeHealth(at=at, node=node, verdict=message.verdict)
        case wire.CheckpointChanged():
            return e.CheckpointMoved(at=at, node=node, **_fields(message))
        case wire.RestoreRefused():
            return e.RestoreWasRefused(at=at, node=node, **_fields(message))
        case wire.StartRefused():
            return e.StartWasRefused(at=at, node=node, **_fields(message))
        case wire.Leaving():
            return e.NodeLeaving(at=at, node=node, reason=message.reason, notice_seconds=message.notice_seconds)
        case wire.PeersProbed():
            return e.PeersWereProbed(at=at, node=node, **_fields(message))
        case wire.Output():
            return e.OutputKept(at=at, node=node, **_fields(message))
        case _:
            assert_never(message)


def _fields(message: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def journal_event(journal: Journal, epoch: int, event: e.Event) -> None:
    """Write a fact. Wake-ups are none. Of a checkpoint that is committed an agent tells, and the store: it is written once."""
    if isinstance(event, e.Tick | e.Issued):
        return
    mark = _mark(event)
    if mark in journal.marks:
        if not (isinstance(event, e.CheckpointMoved) and event.evidence):
            return
        mark = ""
    data = _data(event)
    if isinstance(event, e.NodeJoined):
        hello = event.hello
        data = {"address": hello.address, "slots": hello.slots, "incarnation": hello.incarnation, "devices": _devices(hello)}
    elif isinstance(event, e.LeaderStarted):
        data["version"] = VERSION  # of the rules that decide in this term
    node = event.hello.node if isinstance(event, e.NodeJoined) else str(getattr(event, "node", ""))
    job = event.spec.job if isinstance(event, e.JobLoaded) else str(getattr(event, "job", ""))
    generation = getattr(event, "generation", 0)
    journal.write(
        epoch=epoch,
        at=event.at,
        kind=_tag(event),
        job=job,
        node=node,
        generation=generation if isinstance(generation, int) else 0,
        text=_text(event),
        data=data,
        mark=mark,
    )


def journal_action(journal: Journal, epoch: int, seq: int, at: float, action: a.Action, reason: str) -> None:
    """Write an order, with the reason of the decision at its first one."""
    data = _data(action)
    generation = getattr(action, "generation", 0)
    if isinstance(action, a.RecordGeneration):
        generation = action.spec.generation
        data = {"mesh": str(action.spec.mesh), "num_nodes": len(action.members), "nodes": list(action.spec.nodes[:64])}
        data["restore"] = msgspec.to_builtins(action.spec.restore)
        data["incident"] = msgspec.to_builtins(action.incident)
    journal.write(
        epoch=epoch,
        at=at,
        kind=_tag(action),
        job=str(getattr(action, "job", "")),
        node=str(getattr(action, "node", "")),
        generation=generation,
        text=reason or str(getattr(action, "reason", "")),
        data=data | {"seq": seq},
        mark=decision_mark(epoch, seq) if isinstance(action, recent.Change) else "",
    )


def _mark(event: e.Event) -> str:
    """The name that the store has for it (`recent`); empty: none, it changes no record."""
    match event:
        case e.CheckpointMoved() if event.state == "committed" and not event.damaged:
            return wire.checkpoint_mark(event.job, event.generation, event.step)
        case e.CheckpointGone():
            return wire.checkpoint_mark(event.job, event.generation, event.step, gone=True)
        case e.CommandGiven() | e.NodeCommandGiven() | e.AutomationSwitched() | e.JobLoaded():
            return event.mark
        case _:
            return ""


def _devices(hello: wire.Hello) -> list[str]:
    return [device.uuid for device in hello.devices]


def _tag(value: msgspec.Struct) -> str:
    return str(value.__struct_config__.tag)


def _data(value: msgspec.Struct) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(value, str_keys=True)
    return {name: _short(item) for name, item in built.items() if name not in _PLAIN}


def _short(item: Any) -> Any:
    return item[:_LONG_TEXT] if isinstance(item, str) else item


def _text(event: e.Event) -> str:
    """One line for people; empty where kind and fields say it all."""
    match event:
        case e.StepsCompleted():
            loss = f", loss {event.loss:.4f}" if event.loss is not None else ""
            return f"step {event.step} completed{loss}"
        case e.MemberPhase():
            return f"{event.node}: {event.phase}"
        case e.WorkersExited():
            return f"{event.node}: " + "; ".join(_exit_text(found) for found in event.exits[:8])
        case e.CheckpointMoved():
            return f"checkpoint of step {event.step}: {event.state}" + (f" ({event.reason})" if event.reason else "")
        case e.NodeHealth():
            return f"{event.node}: {event.verdict.state} {event.verdict.reason}".strip()
        case e.ProgressStalled():
            return f"no progress since {event.at - event.since:.1f} s (limit {event.limit_seconds:.1f} s)"
        case e.PeersWereProbed():
            missed = f", not {', '.join(event.unreached)}" if event.unreached else ""
            return f"{event.node} reaches {len(event.reached)} peers on the data network{missed}"
        case e.ReplayJudged():
            return f"micro-step repeated: {event.verdict.verdict}: {event.verdict.reason}"
        case e.JobLoaded() if event.unknown:
            return "adopted from agents and storage; not known: " + "; ".join(event.unknown)
        case e.NodeSilent():
            return f"{event.node} is silent since {event.at - event.last_heard_at:.1f} s"
        case _:
            reason = getattr(event, "reason", "") or getattr(event, "problem", "")
            return str(reason)


def _exit_text(found: wire.WorkerExit) -> str:
    how = f"signal {found.signal}" if found.signal else f"exit {found.exit_code}"
    note = " (torn down)" if found.torn_down else " (declared end)" if found.declared_end else ""
    return f"rank {found.rank} {how}{note}"
