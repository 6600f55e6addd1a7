"""One turn: fold the event, plan, fold what was decided. Both drivers (real time and simulator) call exactly this."""

from __future__ import annotations

import msgspec

from regrow.supervisor.core.actions import Action, Decision
from regrow.supervisor.core.events import Event, Issued
from regrow.supervisor.core.fold import fold
from regrow.supervisor.core.plan import plan
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import View


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one turn. Dispatch `actions` (already in the view) in order."""

    view: View
    decision: Decision
    actions: tuple[tuple[int, Action], ...]
    """(seq, action): with the epoch the action's id."""


def turn(view: View, events: tuple[Event, ...], policy: Policy, now: float) -> Turn:
    """Fold `events`, decide, and fold the decision before anybody carries it out."""
    for event in events:
        view = fold(view, event)
    decision = plan(view, policy, now)
    issued: list[tuple[int, Action]] = []
    for action in decision.actions:
        seq = view.next_seq
        view = fold(view, Issued(at=now, seq=seq, action=action, reason=decision.reason))
        issued.append((seq, action))
    return Turn(view=view, decision=decision, actions=tuple(issued))
