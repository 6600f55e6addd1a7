"""The score card: what was injected against what was said. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from regrow.chaos.kinds import COSTS, KINDS, Kind

Error = Literal["", "miss", "wrong_rank", "wrong_node", "wrong_kind", "unnamed", "false_alarm", "late", "not_injected", "not_recovered"]


class Shot(msgspec.Struct, frozen=True, kw_only=True):
    """One injected fault and what was observed. Instants: the runner's own monotonic clock, seconds."""

    kind: str
    node: str = ""
    rank: int = -1
    detail: str = ""
    injected: bool = True
    at: float
    deadline_seconds: float
    seen_at: float | None = None
    """When the first incident after it was seen."""
    incident: dict[str, Any] | None = None
    """That incident as `job show` has it, at the end."""
    truth: Kind | None = None
    """What had to be said; None: what its kind says."""
    slow_rank: int | None = None
    """Whom the supervisor named as the straggler; None: nobody."""
    went_on: bool = True
    """The job completed further steps afterwards."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement on one fault."""

    kind: str
    node: str
    rank: int
    detected: bool
    named_right: bool
    recovered: bool
    error: Error = ""
    detect_seconds: float | None = None
    recover_seconds: float | None = None
    lost_steps: int | None = None
    incident: str = ""
    said: str = ""
    detail: str = ""
    """What was done, where the kind does not say it, or why it could not be done."""
    cost: float = 0.0


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """The whole."""

    plan: str
    seed: int
    ok: bool
    marks: tuple[Mark, ...]
    num_expected: int
    num_detected: int
    num_named_right: int
    num_false_alarms: int
    false_alarms_per_day_upper95: float
    observed_hours: float
    cost: float


def judge(shot: Shot) -> Mark:
    """Compare one fault's truth with what was said."""
    truth = _truth(shot)
    said = shot.incident or {}
    seconds = said.get("seconds")
    mark = Mark(
        kind=shot.kind,
        node=shot.node,
        rank=shot.rank,
        detected=bool(said) == bool(truth.incidents) and (not truth.straggler or shot.slow_rank is not None),
        named_right=False,
        recovered=bool(said.get("recovered")) if said else shot.went_on,
        detect_seconds=shot.seen_at - shot.at if shot.seen_at is not None else None,
        recover_seconds=float(seconds) if seconds is not None else None,
        lost_steps=said.get("lost_steps"),
        incident=str(said.get("id", "")),
        detail=shot.detail,
        said=f"{said.get('kind')}: {said.get('text')}" if said else "" if shot.slow_rank is None else f"slow: rank {shot.slow_rank}",
    )
    error = _error(shot, mark)
    return msgspec.structs.replace(
        mark, error=error, named_right=error in ("", "late", "not_recovered"), cost=COSTS.get(error, 5.0 if error else 0.0)
    )


def _error(shot: Shot, mark: Mark) -> Error:
    truth, said = _truth(shot), shot.incident
    if not shot.injected:
        return "not_injected"
    if not truth.incidents:
        if said:
            return "false_alarm"
        if truth.straggler and shot.slow_rank != shot.rank:
            return "miss" if shot.slow_rank is None else "wrong_rank"
        return "" if shot.went_on else "not_recovered"
    if not said:
        return "miss"
    if said.get("node") and shot.node and said["node"] != shot.node and truth.names != "nothing":
        return "wrong_node"
    if truth.names == "node" and not said.get("node"):
        return "unnamed"
    if said.get("kind") not in truth.incidents:
        return "wrong_kind"
    if truth.names == "rank" and said.get("rank") != shot.rank:
        return "wrong_rank"
    if mark.detect_seconds is not None and mark.detect_seconds > shot.deadline_seconds:
        return "late"
    return "" if mark.recovered else "not_recovered"


def _truth(shot: Shot) -> Kind:
    return shot.truth or KINDS[shot.kind]


def card(shots: Sequence[Shot], *, plan: str, seed: int, stray_incidents: int, observed_seconds: float) -> Card:
    """Add up. `stray_incidents`: incidents that belong to no fault."""
    marks = tuple(judge(shot) for shot in shots)
    expected = [mark for mark, shot in zip(marks, shots, strict=True) if _truth(shot).incidents or _truth(shot).straggler]
    alarms = stray_incidents + sum(mark.error == "false_alarm" for mark in marks)
    hours = observed_seconds / 3600
    return Card(
        plan=plan,
        seed=seed,
        ok=not alarms and all(not mark.error for mark in marks),
        marks=marks,
        num_expected=len(expected),
        num_detected=sum(mark.detected for mark in expected),
        num_named_right=sum(mark.named_right for mark in expected),
        num_false_alarms=alarms,
        false_alarms_per_day_upper95=upper95(alarms) / hours * 24 if hours > 0 else 0.0,
        observed_hours=hours,
        cost=sum(mark.cost for mark in marks) + COSTS["false_alarm"] * stray_incidents,
    )


def upper95(count: int) -> float:
    """One-sided 95 % upper bound of a Poisson mean after `count` events (Garwood 1936): the mean at which so few have a probability of 5 %."""
    low, high = float(count), count + 10.0 + 4.0 * math.sqrt(count)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(count, middle) > 0.05 else (low, middle)
    return high


def _at_most(count: int, mean: float) -> float:
    """Probability of `count` events or fewer."""
    return math.fsum(math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) for number in range(count + 1)) if mean else 1.0
