"""Trust in hardware: healthy -> suspect -> quarantined -> burn_in -> probation -> healthy.

Keyed by GPU UUID or serial, never by host name where the hardware says who it is. Every state has a way out by time,
by evidence of a repair (another boot) or by an operator.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from regrow.supervisor.core.memo import Memo
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.records import QuarantineRecord
from regrow.supervisor.core.view import NodeView, View

OUT = ("quarantined", "burn_in")
"""States in which hardware is not used."""
SUSPICION_HALF_LIFE_SECONDS = 14 * 86_400.0
SUSPICION_LIMIT = 1.5
"""With this much of it hardware is accused: the second wrong result within two weeks of the first, in any job."""
REPAIR_ACTIONS = ("reset", "reboot", "replace")
"""Health actions that take a node out; watch and restart_app do not."""


def is_bad(node: NodeView) -> bool:
    """The node's own verdict says that it must not train."""
    return node.health.state == "unhealthy" and node.health.action in REPAIR_ACTIONS


def keys(view: View, node: NodeView) -> tuple[str, ...]:
    """All names under which this node's hardware may be in quarantine."""
    found = [device.uuid for device in node.devices]
    found += [device.serial for device in node.devices if device.serial]
    return (*found, chassis(view, node))


def names(node: NodeView) -> list[str]:
    """All keys under which its hardware can be: a superset of `keys`, which costs no look at other nodes."""
    found = [device.uuid for device in node.devices]
    found += [device.serial for device in node.devices if device.serial]
    return [*found, node.hardware_id, f"node:{node.name}"]


def chassis(view: View, node: NodeView) -> str:
    """The node's own key: its chassis serial when no other connected node has the same, else its name."""
    counts = _hardware.get((view.nodes,), None, lambda: Counter(other.hardware_id for other in view.nodes.values()))
    return node.hardware_id if node.hardware_id and counts[node.hardware_id] == 1 else f"node:{node.name}"


_hardware: Memo[Counter[str]] = Memo()
"""How many nodes say that they are a chassis: counted once per change of the nodes, asked for each of them."""


def key_of(view: View, node: NodeView, device_uuid: str = "") -> str:
    """The key to quarantine: the GPU that is named, else the chassis."""
    return device_uuid or chassis(view, node)


def blocked(view: View, node: NodeView) -> QuarantineRecord | None:
    """The record that keeps a node out, if one does."""
    if not view.quarantine:
        return None
    for key in keys(view, node):
        record = view.quarantine.get(key)
        if record is not None and record.state in OUT:
            return record
    return None


def put_out(
    previous: QuarantineRecord | None, *, key: str, node: NodeView, now: float, reason: str, evidence: tuple[str, ...], policy: Policy
) -> QuarantineRecord:
    """Quarantine, with a cool-down that doubles with each strike."""
    strikes = (previous.strikes if previous else 0) + 1
    cooldown = min(policy.quarantine_most_seconds, policy.quarantine_seconds * 2 ** (strikes - 1))
    return msgspec.structs.replace(
        previous or QuarantineRecord(key=key, state="quarantined", since=now),
        state="quarantined",
        since=now,
        until=now + cooldown,
        strikes=strikes,
        reason=reason,
        node=node.name,
        evidence=evidence,
        boot_id=node.boot_id,
    )


def suspect(previous: QuarantineRecord | None, *, key: str, node: NodeView, now: float, reason: str, policy: Policy) -> QuarantineRecord:
    """A soft sign: the first makes a suspect, a second one within the window (or on probation) quarantines."""
    if previous is not None and previous.state in ("suspect", "probation") and (previous.until is None or now < previous.until):
        return put_out(previous, key=key, node=node, now=now, reason=f"{reason} (again: {previous.reason})", evidence=(), policy=policy)
    return msgspec.structs.replace(
        previous or QuarantineRecord(key=key, state="suspect", since=now),
        state="suspect",
        since=now,
        until=now + policy.suspect_seconds,
        reason=reason,
        node=node.name,
        evidence=(),
        boot_id=node.boot_id,
    )


def suspicion(record: QuarantineRecord | None, now: float) -> float:
    """What is left of it: half of it after two weeks, whatever was clean meanwhile."""
    if record is None or record.suspected_at is None:
        return 0.0
    return record.suspicion * 0.5 ** (max(0.0, now - record.suspected_at) / SUSPICION_HALF_LIFE_SECONDS)


def remember(previous: QuarantineRecord | None, *, key: str, node: NodeView, now: float, mark: str) -> QuarantineRecord:
    """One more result that was wrong once; the state stays as it is."""
    known = previous or QuarantineRecord(key=key, state="healthy", since=now, node=node.name, boot_id=node.boot_id)
    return msgspec.structs.replace(known, suspicion=suspicion(previous, now) + 1.0, suspected_at=now, suspected_by=mark)


def next_state(record: QuarantineRecord, node: NodeView | None, policy: Policy, now: float) -> QuarantineRecord | None:
    """The state that follows by time or evidence, when it is due; None: stays.

    quarantined: after the cool-down, or when the host was booted anew, it burns in. burn_in: ends in probation once its node has
    been connected and healthy long enough, and back in quarantine when its verdict is bad. probation and suspect fade.
    """
    change = msgspec.structs.replace
    over = record.until is not None and now >= record.until
    match record.state:
        case "quarantined":
            rebooted = node is not None and bool(record.boot_id) and bool(node.boot_id) and node.boot_id != record.boot_id
            if (over or rebooted) and not (node is not None and is_bad(node)):
                return change(record, state="burn_in", since=now, until=None, boot_id=node.boot_id if node else record.boot_id)
        case "burn_in":
            if node is not None and is_bad(node):
                return put_out(
                    record, key=record.key, node=node, now=now, reason=node.health.reason, evidence=record.evidence, policy=policy
                )
            since = max(record.since, node.joined_at) if node is not None and node.reachable else None
            if since is not None and now >= since + policy.burn_in_seconds:
                return change(record, state="probation", since=now, until=now + policy.probation_seconds)
        case "probation" | "suspect":
            if over:
                return change(record, state="healthy", since=now, until=None)
        case "healthy":
            return None
    return None


def due_at(record: QuarantineRecord, node: NodeView | None, policy: Policy, now: float) -> float | None:
    """When `next_state` may change by time alone; None: only by an event (an old cool-down waits for a good verdict)."""
    due = _due_at(record, node, policy)
    return due if due is not None and due > now else None


def _due_at(record: QuarantineRecord, node: NodeView | None, policy: Policy) -> float | None:
    if record.state == "burn_in":
        return max(record.since, node.joined_at) + policy.burn_in_seconds if node is not None and node.reachable else None
    return None if record.state == "healthy" else record.until


def most_at_once(view: View, policy: Policy) -> int:
    """Nodes that automatic quarantine may take out within its window."""
    return max(policy.breaker_nodes, int(policy.breaker_share * len(view.nodes)))


def breaker_open(view: View, policy: Policy, now: float) -> str:
    """Why automatic quarantine is off: too much of it at once points at the observer. Empty: it is on."""
    since = now - policy.breaker_window_seconds
    recent = {record.node for record in view.quarantine.values() if record.state in OUT and record.since >= since}
    most = most_at_once(view, policy)
    if len(recent) < most:
        return ""
    return f"{len(recent)} of {len(view.nodes)} nodes quarantined within {policy.breaker_window_seconds:.0f} s (limit {most}): look for a common cause"
