"""Which alerts fired, when, and whether they cleared: read back from Prometheus."""

from __future__ import annotations

from typing import Any

import msgspec

from regrow.observe.stack import Stack

_FIRING = 'ALERTS{alertstate="firing",severity=~"page|ticket"}'
_ENDS = 'ALERTS{alertstate="firing",alertname="RegrowClusterTeardown"}'
_MOST_POINTS = 10_000


class Fired(msgspec.Struct, frozen=True, kw_only=True):
    """One alert with its labels. Times in seconds after the begin of the look."""

    alert: str
    severity: str
    labels: dict[str, str]
    from_seconds: float
    to_seconds: float
    cleared: bool
    silenced: bool
    """It began while the cluster came to its end on our own order: Alertmanager sent nothing."""


_OWN = ("__name__", "alertname", "alertstate", "severity", "scope")


async def fired(stack: Stack, begin: float, end: float, step_seconds: float) -> list[Fired]:
    """All alerts (facts that only silence are left out) between two instants, seconds since 1970, oldest first."""
    step = max(step_seconds, (end - begin) / _MOST_POINTS)
    found = await stack.query(_FIRING, start=begin, end=end, step=step)
    ends = await stack.query(_ENDS, start=begin, end=end, step=step)
    ended_at = {series["metric"].get("cluster", ""): float(series["values"][0][0]) for series in ends}
    still = [series["metric"] for series in await stack.query(_FIRING, time=end)]
    result: list[Fired] = []
    for series in found:
        labels: dict[str, Any] = series["metric"]
        first, last = float(series["values"][0][0]), float(series["values"][-1][0])
        result.append(
            Fired(
                alert=labels["alertname"],
                severity=labels["severity"],
                labels={name: text for name, text in labels.items() if name not in _OWN},
                from_seconds=first - begin,
                to_seconds=last - begin,
                cleared=labels not in still,
                silenced=first >= ended_at.get(labels.get("cluster", ""), float("inf")),
            )
        )
    return sorted(result, key=lambda one: (one.from_seconds, one.alert))
