"""The open conditions of a node and how they open, worsen and end. One `Book` serves one turn of the policy."""

from __future__ import annotations

from typing import Literal

import msgspec

from regrow.agent.health.findings import Finding
from regrow.agent.health.history import Cleared, Condition, History
from regrow.agent.health.policy import Policy
from regrow.agent.health.xid import rank

_MAX_EVIDENCE = 8
_PENDING = "pending "

State = Literal["degraded", "unhealthy"]
Clears = Literal["quiet", "reset", "reboot"]


def state_of(action: str) -> State:
    """A node that needs no more than a restart of the program is degraded; one that needs a reset is unhealthy."""
    return "unhealthy" if rank(action) >= rank("reset") else "degraded"


def clears_of(action: str) -> Clears:
    """What ends a condition that was told by an event."""
    if action == "reset":
        return "reset"
    return "reboot" if action in ("reboot", "replace") else "quiet"


def entry_of(one: Condition, at: float, by: str, why: str) -> Cleared:
    """The audit entry of an ended condition."""
    return Cleared(incident=one.incident, kind=one.kind, uuid=one.uuid, action=one.action, at=at, by=by, why=why)


def with_evidence(condition: Condition, *lines: str) -> Condition:
    """The condition with more evidence: each line once, the first few are kept."""
    new = tuple(line for line in lines if line not in condition.evidence)
    return msgspec.structs.replace(condition, evidence=(*condition.evidence, *new)[:_MAX_EVIDENCE])


class Book:
    """Conditions by (uuid, kind) while one turn works on them."""

    def __init__(self, history: History, policy: Policy, at: float) -> None:
        self.at = at
        self.policy = policy
        self.boot_id = history.boot_id
        self.open = {(one.uuid, one.kind): one for one in history.conditions}
        self.pending = dict(history.pending)
        self.audit = list(history.audit)
        self.next_incident = history.next_incident
        self.found: set[tuple[str, str]] = set()
        self.opened: list[Condition] = []
        self.cleared: list[Cleared] = []

    def find(self, finding: Finding) -> None:
        """Open a condition, or keep and worsen the one that is open."""
        key = (finding.uuid, finding.kind)
        if finding.after_seconds > 0 and not self._lasted(key, finding.after_seconds):
            return
        self.found.add(key)
        old = self.open.get(key)
        if old is None:
            self._open(finding)
        else:
            worse = rank(finding.action) > rank(old.action) or (finding.state == "unhealthy" and old.state == "degraded")
            if worse or (
                finding.clears == "level" and old.clears == "level" and (finding.state, finding.action) != (old.state, old.action)
            ):
                old = msgspec.structs.replace(old, action=finding.action, state=finding.state, clears=finding.clears, reason=finding.reason)
            self.open[key] = with_evidence(msgspec.structs.replace(old, last_at=self.at), *finding.evidence)

    def _lasted(self, key: tuple[str, str], seconds: float) -> bool:
        name = f"{key[0]} {key[1]}"
        self.found.add((key[0], _PENDING + key[1]))
        since = self.pending.setdefault(name, self.at)
        return self.at - since >= seconds

    def _open(self, finding: Finding) -> None:
        action, note = self._escalated(finding)
        condition = Condition(
            incident=f"h{int(self.at)}-{self.next_incident}",
            kind=finding.kind,
            uuid=finding.uuid,
            action=action,
            state=finding.state,
            reason=finding.reason + note,
            evidence=finding.evidence[:_MAX_EVIDENCE],
            boot_id=self.boot_id,
            since_at=self.at,
            last_at=self.at,
            clears="operator" if action == "replace" and finding.clears != "level" else finding.clears,
        )
        self.next_incident += 1
        self.open[finding.uuid, finding.kind] = condition
        self.opened.append(condition)

    def _escalated(self, finding: Finding) -> tuple[str, str]:
        """The same fault after it was repaired asks for more: reset, then reboot, and replace only after several."""
        if rank(finding.action) < rank("reset") or finding.state != "unhealthy":
            return finding.action, ""
        since = self.at - self.policy.escalation.hours * 3600
        repaired = [
            one
            for one in self.audit
            if (one.uuid, one.kind) == (finding.uuid, finding.kind)
            and one.at > since
            and one.by in ("reset", "reboot")
            and rank(one.action) >= rank("reset")
        ]
        if not repaired or not finding.uuid:
            return finding.action, ""
        action = "replace" if len(repaired) + 1 >= self.policy.escalation.replace_after else "reboot"
        if rank(action) <= rank(finding.action):
            return finding.action, ""
        return action, f" (again after {len(repaired)} repairs)"

    def expire(self, *, answered: bool) -> None:
        """End what a probe no longer finds and what has been quiet for long enough."""
        asked_recovery = {key[0] for key in self.open if key[1] == "gpu_recovery_action"}
        for key, one in list(self.open.items()):
            if key in self.found:
                continue
            if one.clears == "quiet" and self.at - one.last_at >= self.policy.xid.quiet_seconds:
                self.end(key, "quiet", f"not seen for {self.policy.xid.quiet_seconds:.0f} s")
            elif one.clears == "level" and answered:
                self.end(key, "level", "no longer found")
        for uuid in asked_recovery - {key[0] for key in self.open if key[1] == "gpu_recovery_action"}:
            for key, one in list(self.open.items()):
                if key[0] == uuid and one.clears == "reset" and one.last_at < self.at:
                    self.end(key, "reset", "the driver no longer asks for a recovery action")
        if answered:
            held = {f"{uuid} {kind.removeprefix(_PENDING)}" for uuid, kind in self.found if kind.startswith(_PENDING)}
            self.pending = {name: since for name, since in self.pending.items() if name in held}

    def end(self, key: tuple[str, str], by: str, why: str) -> None:
        """Close a condition with an audit entry."""
        entry = entry_of(self.open.pop(key), self.at, by, why)
        self.audit.append(entry)
        self.cleared.append(entry)
