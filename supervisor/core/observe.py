"""Trust is earned: what an automatic action would have done, where it may only be written down."""

from __future__ import annotations

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import quarantine
from regrow.supervisor.core.draft import Draft
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import JobView, View

KINDS = ("quarantine", "growth", "drain", "recovery")
"""Kinds of automatic action that can be observed instead of done. `recovery` leaves a failed generation as it is."""

EVICTION_WINDOW_SECONDS = 3600.0
_EVICTIONS = ("unhealthy", "slow")


def held(view: View, policy: Policy, kind: str) -> str:
    """Why an automatic action of this kind is only written down; empty: it is done. Recovery goes on with automation off."""
    if kind in policy.observe_only:
        return f"{kind} is observed only"
    return "automation is off" if not view.automation and kind != "recovery" else ""


def note(view: View, draft: Draft, *, kind: str, key: str, would: str, why: str, job: str = "", node: str = "") -> None:
    """Write down what would have been done, once for each occasion (`key`)."""
    draft.say(f"would {would} ({why})")
    if key not in view.observed:
        draft.act(a.Observe(key=key, kind=kind, would=would, why=why, job=job, node=node), because=f"would {would} ({why})")


def shadow(view: View, draft: Draft, made: Draft, *, kind: str, key: str, why: str, job: str) -> None:
    """Write down the actions of a draft that is not carried out, and keep its wake-ups."""
    decision = made.decision()
    draft.look(decision.wake_at)
    if decision.actions:
        names = ", ".join(dict.fromkeys(type(action).__name__ for action in decision.actions))
        note(view, draft, kind=kind, key=key, would=f"{names}: {decision.reason}"[:1_000], why=why, job=job)
    else:
        draft.say(decision.reason)


def evicted(view: View, job: JobView, now: float) -> set[str]:
    """Nodes that automatic decisions took out within the last hour: drained for their health, moved for being slow, or quarantined."""
    since = now - EVICTION_WINDOW_SECONDS
    out = {record.node for record in view.quarantine.values() if record.state in quarantine.OUT and record.since >= since}
    return out | {item.node for item in job.incidents if item.kind in _EVICTIONS and item.decided_at >= since}


def most_evictions(view: View, policy: Policy) -> int:
    """Nodes that may be taken out of a job in an hour by automatic decisions."""
    return max(policy.evictions_per_hour, int(policy.breaker_share * len(view.nodes)))
