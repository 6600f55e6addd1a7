"""Time for workers to leave their newest state behind before they are killed in a warm restart (pure; docs/adr/0018-dying-gasp.md).

Only those are waited for that said they can, hold something, and have not done it by themselves: mostly nobody, for whoever comes out of
a broken collective leaves its state while the leader still decides.
"""

from __future__ import annotations

import msgspec

from regrow import wire
from regrow.agent import machine as m

_change = msgspec.structs.replace

ANSWER_SECONDS = 0.3
"""A worker that has not begun within this is blocked: it is killed without."""
LIMIT_SECONDS = 2.0
"""Nobody is waited for longer, however much it copies."""


def awaited(local: m.Local) -> frozenset[int]:
    """Ranks whose state may still come."""
    hold = local.phases.get("first_step", frozenset()) | local.phases.get("restored", frozenset())
    return (local.live & local.gasps & hold) - local.phases.get(wire.GASPED_PHASE, frozenset())


def ask(state: m.NodeState, order: wire.StartGeneration, at: float) -> m.Outcome | None:
    """Let the workers that run leave their state to those of `order`; None: nobody has anything to leave, or it is not wanted."""
    local = state.current
    if local is None or local.job != order.spec.job or not order.spec.gasp or local.stage != "running":
        return None
    ranks = awaited(local)
    if not ranks or local.term_deadline is not None or local.kill_deadline is not None:
        return None
    local = _change(local, stage="stopping", gasp_began=at)
    pids = {rank: local.pids[rank] for rank in ranks if rank in local.pids}
    return _change(state, current=local), (m.AskGasp(generation=local.generation, pids=pids),)


def deadline(local: m.Local) -> float | None:
    """When they are killed at the latest; None: nobody was asked. Who began has as long as it said that it takes."""
    if local.gasp_began is None:
        return None
    return local.gasp_began + min(LIMIT_SECONDS, ANSWER_SECONDS + local.phase_seconds.get(wire.GASPING_PHASE, 0.0))


def are_over(local: m.Local, at: float) -> bool:
    """Has everybody who was asked done it, or is the time over?"""
    end = deadline(local)
    return end is not None and (at >= end or not awaited(local))
