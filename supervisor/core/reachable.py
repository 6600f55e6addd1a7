"""A host that was put out because the others could not reach it on the data network comes back when they can."""

from __future__ import annotations

import itertools

import msgspec

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import links, quarantine
from regrow.supervisor.core.draft import Draft
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.records import QuarantineRecord
from regrow.supervisor.core.view import NodeView, View

_WITNESSES = 3


def plan(view: View, record: QuarantineRecord, node: NodeView | None, policy: Policy, now: float, draft: Draft) -> bool:
    """Let others try it now and then; burn it in before its cool-down is over when most of them reach it. True: it is burnt in."""
    if record.state != "quarantined" or links.EVIDENCE not in record.evidence or node is None or not policy.reach_again_seconds:
        return False
    if not node.reachable or quarantine.is_bad(node):
        return False
    asked = node.asked_again if node.asked_again is not None and node.asked_again.at >= record.since else None
    if asked is not None:
        good = sum(asked.found.values())
        if good >= links.LEAST_WITNESSES:  # of three at most: more than half
            record = msgspec.structs.replace(record, state="burn_in", since=now, until=None, boot_id=node.boot_id)
            why = f"{record.key}: {good} of {len(asked.witnesses)} nodes reach {node.name} on the data network again"
            draft.act(a.SetQuarantine(record=record), because=why)
            return True
    due = (asked.at if asked is not None else record.since) + policy.reach_again_seconds * 2 ** (record.strikes - 1)
    if now < due:
        draft.look(due)
        return False
    witnesses = _witnesses(view, node)
    if len(witnesses) < links.LEAST_WITNESSES:
        draft.look(now + policy.reach_again_seconds)
        return False
    draft.act(
        a.AskAgain(node=node.name, witnesses=witnesses),
        because=f"can {node.name} be reached on the data network again? {len(witnesses)} nodes try",
    )
    return False


def _witnesses(view: View, node: NodeView) -> tuple[str, ...]:
    """Nodes that can be heard and are trusted themselves, the first by name."""
    fit = (
        name
        for name in sorted(view.nodes)
        if name != node.name and (other := view.nodes[name]).reachable and not other.leaving and quarantine.blocked(view, other) is None
    )
    return tuple(itertools.islice(fit, _WITNESSES))
