"""`regrow simulate --leader`: how many nodes one leader bears, what it misses first, and what aggregators change."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from regrow.errors import ConfigurationError
from regrow.supervisor.sim.control_plane import (
    DETECTION_SECONDS,
    MOST_CORES,
    SILENCE_SECONDS,
    Answer,
    Load,
    check,
    cores,
    simulate,
)
from regrow.supervisor.sim.crowd import FORMING_SECONDS, greeting_seconds
from regrow.supervisor.sim.leader_costs import Costs

Aim = Literal["cores", "greeting", "detection"]
SIZES = (1024, 2048, 4096, 8192, 16_384)
_MOST_NODES = 131_072
_PRECISION = 64
"""Sizes are found to about one part in so many."""
_FULL = 1.0
"""Cores over which detection is not looked at: the thread is full."""
_UNACKNOWLEDGED_SECONDS = 10.0
"""After so long an agent gives up a connection whose other end says nothing (`agent.beat`)."""
_ANSWER_SECONDS = 1.0
"""After so long it would give up an aggregator that answers each beat."""
_PAUSE_SECONDS = 0.065
"""Longest pause before the first new connection (`agent.beat`)."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked."""

    costs: Costs
    nodes: tuple[int, ...] = SIZES
    group: int = 64
    step_seconds: float = 2.0
    seed: int = 1


def check_request(request: Request) -> Request:
    """The same when it makes sense.

    Raises:
        ConfigurationError: sizes or groups of less than one, an aggregator for one node.
    """
    for nodes in request.nodes:
        check(Load(nodes=nodes, group=request.group, step_seconds=request.step_seconds))
    if request.group < 2:
        raise ConfigurationError("an aggregator for one node", where="--group", hint="give at least 2")
    return request


def missed(answer: Answer, greeting: float) -> list[str]:
    """Aims that a leader of this size misses."""
    found = {
        "cores": answer.cores > MOST_CORES,
        "greeting": greeting > FORMING_SECONDS,
        "detection": answer.detection_p99_seconds > DETECTION_SECONDS,
        "false silence": answer.num_false > 0,
    }
    return [name for name, is_missed in found.items() if is_missed]


def largest(costs: Costs, aim: Aim, *, group: int = 1, step_seconds: float = 2.0, seed: int = 1) -> int:
    """Largest number of nodes that keeps one aim, by halving."""

    def keeps(nodes: int) -> bool:
        load = Load(nodes=nodes, group=group, step_seconds=step_seconds)
        if aim == "cores":
            return cores(costs, load) <= MOST_CORES
        if aim == "greeting":
            if load.senders * costs.greeting > FORMING_SECONDS:
                return False  # not even without anything else to do
            return greeting_seconds(costs, load, seed=seed) <= FORMING_SECONDS
        if cores(costs, load) > _FULL:
            return False
        answer = simulate(costs, load, seed=seed)
        return answer.detection_p99_seconds <= DETECTION_SECONDS and not answer.num_false

    low, high = 0, _MOST_NODES
    while high - low > max(1, low // _PRECISION):
        middle = (low + high) // 2
        if keeps(middle):
            low = middle
        else:
            high = middle
    return low


def answer(request: Request) -> dict[str, Any]:
    """The whole document; infinite times are null.

    Raises:
        ConfigurationError: a request that makes no sense.
    """
    costs, group = check_request(request).costs, request.group
    step, seed = request.step_seconds, request.seed
    aims: tuple[Aim, ...] = ("cores", "greeting", "detection")
    alone = {aim: largest(costs, aim, step_seconds=step, seed=seed) for aim in aims}
    together = {aim: largest(costs, aim, group=group, step_seconds=step, seed=seed) for aim in aims[:2]}
    most = min(together.values())
    return {
        "rows": [_row(request, nodes, size) for size in (1, group) for nodes in request.nodes],
        "largest_nodes": alone | {"all": min(alone.values()), "breaks_first": min(aims, key=lambda aim: alone[aim])},
        "largest_nodes_with_aggregators": together | {"all": most, "breaks_first": min(together, key=lambda aim: together[aim])},
        "at_the_largest_with_aggregators": _row(request, max(1, most), group),
        "aggregator_lost": _deaths(request),
        "group": group,
        "step_seconds": step,
        "limits": {"cores": MOST_CORES, "greeting_seconds": FORMING_SECONDS, "detection_p99_seconds": DETECTION_SECONDS, "num_false": 0},
        "costs_seconds": msgspec.to_builtins(costs),
    }


def _row(request: Request, nodes: int, group: int) -> dict[str, Any]:
    load = Load(nodes=nodes, group=group, step_seconds=request.step_seconds)
    found, greeting = simulate(request.costs, load, seed=request.seed), greeting_seconds(request.costs, load, seed=request.seed)
    values = msgspec.to_builtins(found) | {"greeting_seconds": greeting}
    finite = {name: None if isinstance(value, float) and math.isinf(value) else value for name, value in values.items()}
    return finite | {"missed": missed(found, greeting)}


def _deaths(request: Request) -> list[dict[str, Any]]:
    """One aggregator ends: its nodes greet another one, one after the other, and are heard with that one's next frame, up to a period later."""
    nodes, group = 8 * request.group, request.group
    again = _PAUSE_SECONDS + group * request.costs.greeting
    kinds = {
        "its process ends": again,
        "its host loses power": _UNACKNOWLEDGED_SECONDS + again,
        "its host loses power, agents expect an answer within a second": _ANSWER_SECONDS + again,
    }
    rows: list[dict[str, Any]] = []
    for kind, unheard in kinds.items():
        load = Load(nodes=nodes, group=group, step_seconds=request.step_seconds, unheard_seconds=unheard)
        silent = simulate(request.costs, load, seed=request.seed).num_false
        rows.append({"kind": kind, "unheard_seconds": unheard, "nodes_called_silent": silent})
    return rows


def text(document: dict[str, Any]) -> list[str]:
    """Lines for a terminal."""
    lines = ["nodes   for   cores   detection p99   false   all greeted   missed"]
    lines += [_line(row) for row in [*document["rows"], document["at_the_largest_with_aggregators"]]]
    alone, together = document["largest_nodes"], document["largest_nodes_with_aggregators"]
    each = ", ".join(f"{aim} {alone[aim]:,}" for aim in ("greeting", "cores", "detection"))
    lines += [
        f"one leader alone: {alone['all']:,} nodes, then {alone['breaks_first']} ({each})",
        f"with an aggregator for {document['group']} nodes: {together['all']:,} nodes, then {together['breaks_first']}",
        f"an aggregator ends ({SILENCE_SECONDS:g} s unheard is silent; while steps complete nobody is lost for it):",
    ]
    for row in document["aggregator_lost"]:
        lines.append(f"  {row['kind']}: {row['unheard_seconds']:.1f} s unheard, {row['nodes_called_silent']} of its nodes called silent")
    return lines


def _line(row: dict[str, Any]) -> str:
    late = "never" if row["detection_p99_seconds"] is None else f"{row['detection_p99_seconds']:.2f} s"
    greeted = "never" if row["greeting_seconds"] is None else f"{row['greeting_seconds']:.1f} s"
    return (
        f"{row['nodes']:<7,} {row['group']:>3}   {row['cores']:5.2f} {late:>15} {row['num_false']:>7} {greeted:>13}   {', '.join(row['missed'])}"
    ).rstrip()
