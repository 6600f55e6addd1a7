"""The report of the check before a node joins, and what it holds against the node. Pure."""

from __future__ import annotations

import msgspec

from regrow.agent.health.burnin_result import CheckResult
from regrow.agent.health.findings import Finding

_ELSEWHERE = "gpus"
"""The check whose problems the everyday probe judges."""
UNFINISHED = "burn_in"
SLOW = "burn_in_slow"
"""The same, but it was still at work: this host has no time for it."""
PAIRS = "pairs"
"""Known bytes exchanged with other nodes: right, nobody was there, or wrong with two of which one is known to be good."""
PAIRS_UNREACHED = "pairs_unreached"
"""No exchange came to an end, with several nodes."""
PAIRS_OPEN = "pairs_open"
"""An exchange failed, and whose fault it was could not be found out."""


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """The report. `ok` only when every check ran and passed within the budget."""

    ok: bool
    seconds: float
    checks: tuple[CheckResult, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What failed, one line each."""
        return tuple(f"{one.name}: {one.detail}" for one in self.checks if not one.ok)


def with_pairs(report: Preflight, pairs: CheckResult) -> Preflight:
    """The report with this result in place of an earlier exchange."""
    checks = (*(one for one in report.checks if not one.name.startswith(PAIRS)), pairs)
    return Preflight(ok=all(one.ok for one in checks), seconds=max(report.seconds, pairs.seconds), checks=checks)


def findings_of(report: Preflight) -> tuple[Finding, ...]:
    """A wrong answer makes the node unhealthy; a check that stood still is to be watched; one that was merely slow says nothing about the
    node. To be watched is also one whose exchanges failed through nobody knows whose fault; one that reaches nobody cannot be in a job, and needs no repair to come back.
    """
    bad = [one for one in report.checks if not one.ok and one.name != _ELSEWHERE]
    wrong = [one for one in bad if one.name not in (UNFINISHED, SLOW, PAIRS_UNREACHED, PAIRS_OPEN)]
    late = [one for one in bad if one.name == UNFINISHED]
    found: list[Finding] = []
    if wrong:
        reason = "; ".join(f"{one.name}: {one.detail}" for one in wrong)[:400]
        found.append(Finding(kind="preflight_failed", action="reboot", reason=reason, evidence=report.problems))
    elif late:
        found.append(Finding(kind="preflight_late", action="watch", state="degraded", reason=late[0].detail, evidence=report.problems))
    for one in bad:
        if one.name == PAIRS_UNREACHED:
            found.append(Finding(kind="preflight_unreached", action="watch", reason=one.detail[:400]))
        elif one.name == PAIRS_OPEN:
            found.append(Finding(kind="preflight_open", action="watch", state="degraded", reason=one.detail[:400]))
    return tuple(found)
