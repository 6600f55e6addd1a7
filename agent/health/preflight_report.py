"""The report of the check before a node joins, and what it holds against the node. Pure."""

from __future__ import annotations

import msgspec

from regrow.agent.health.burnin_result import CheckResult
from regrow.agent.health.findings import Finding

_ELSEWHERE = ("gpus", "peer")
"""Checks whose problems the everyday probe, or the other side, judges."""
UNFINISHED = "burn_in"


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """The report. `ok` only when every check ran and passed within the budget."""

    ok: bool
    seconds: float
    checks: tuple[CheckResult, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What failed, one line each."""
        return tuple(f"{one.name}: {one.detail}" for one in self.checks if not one.ok)


def findings_of(report: Preflight) -> tuple[Finding, ...]:
    """A wrong answer makes the node unhealthy; a check that did not end in time may be a busy host, and is to be watched."""
    bad = [one for one in report.checks if not one.ok and not one.name.startswith(_ELSEWHERE)]
    wrong = [one for one in bad if one.name != UNFINISHED]
    found: list[Finding] = []
    if wrong:
        reason = "; ".join(f"{one.name}: {one.detail}" for one in wrong)[:400]
        found.append(Finding(kind="preflight_failed", action="reboot", reason=reason, evidence=report.problems))
    elif bad:
        found.append(Finding(kind="preflight_late", action="watch", state="degraded", reason=bad[0].detail, evidence=report.problems))
    return tuple(found)
