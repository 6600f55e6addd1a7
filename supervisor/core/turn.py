"""One turn: fold the event, plan, fold what was decided. Both drivers (real time and simulator) call exactly this."""

from __future__ import annotations

import functools
import itertools

import msgspec

from regrow.errors import InternalError
from regrow.supervisor.core import fold_start
from regrow.supervisor.core.actions import Action, Decision, StartMember
from regrow.supervisor.core.events import Event, Issued
from regrow.supervisor.core.fold import fold
from regrow.supervisor.core.plan import plan
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import View

_MOST_ROUNDS = 16
"""Plans that follow from each other in one turn. More means that two rules undo each other: a bug."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one turn. Dispatch `actions` (already in the view) in order."""

    view: View
    decision: Decision
    actions: tuple[tuple[int, Action], ...]
    """(seq, action): with the epoch the action's id."""


def turn(view: View, events: tuple[Event, ...], policy: Policy, now: float) -> Turn:
    """Fold `events`, decide until nothing more follows, and fold every decision before anybody carries it out.

    Raises:
        InternalError: the plan does not come to rest.
    """
    for event in events:
        view = fold(view, event)
    issued: list[tuple[int, Action]] = []
    reasons: list[str] = []
    for _ in range(_MOST_ROUNDS):
        decision = plan(view, policy, now)
        reasons += [decision.reason] if decision.reason else []
        first = view.next_seq
        view = _fold_decided(view, decision, now)
        issued += enumerate(decision.actions, start=first)
        if not decision.actions:
            whole = Decision(actions=tuple(action for _, action in issued), reason=" | ".join(reasons), wake_at=decision.wake_at)
            return Turn(view=view, decision=whole, actions=tuple(issued))
    raise InternalError(f"no rest after {_MOST_ROUNDS} rounds: {reasons[-1]}", where="turn")


def _fold_decided(view: View, decision: Decision, now: float) -> View:
    """All actions of one decision, in order. A start on thousands of members is folded as one: the same view, one copy of them."""
    actions = decision.actions
    index = 0
    while index < len(actions):
        action = actions[index]
        view = fold(view, Issued(at=now, seq=view.next_seq, action=action, reason=decision.reason))
        index += 1
        if isinstance(action, StartMember):
            more = list(itertools.takewhile(functools.partial(_same_start, action), actions[index:]))
            nodes = [other.node for other in more if isinstance(other, StartMember)]
            view = fold_start.more_members(view, nodes, action, now) if more else view
            index += len(more)
    return view


def _same_start(action: StartMember, other: Action) -> bool:
    return (
        isinstance(other, StartMember)
        and other.generation == action.generation
        and other.job == action.job
        and other.master_address == action.master_address
    )
