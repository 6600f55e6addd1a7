"""What Regrow would have done with a site's own history: hours saved with an interval, and evictions that were wrong.

The losses that the site had are read from its step log: from the last step before an interruption to the moment at which the
same step was reached again. What Regrow would have lost is simulated by the production `turn()` on the same interruptions.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from regrow.errors import ConfigurationError
from regrow.supervisor.sim import models
from regrow.supervisor.sim.constants import Constants
from regrow.supervisor.sim.faults import Fault
from regrow.supervisor.sim.history import Attempt, Evidence, Progress
from regrow.supervisor.sim.setup import Setup, check
from regrow.supervisor.sim.simulate import quantile, run_seed

EVIDENCE_SECONDS = 1800.0
"""A kernel line within this time of an interruption belongs to it."""
_HANG_SECONDS = 300.0
_GOOD = ("COMPLETED", "DONE")
_BY_HAND = ("CANCELLED",)
"""A person ended the attempt and started another: nothing that a supervisor would have saved, and nothing it is charged with."""
_KINDS = {"NODE_FAIL": ("host", "reboot"), "PREEMPTED": ("leave", "maintenance"), "TIMEOUT": ("leave", "maintenance")}
_NOT_LOST = ("spares",)


class Interruption(msgspec.Struct, frozen=True, kw_only=True):
    """One stop of a job that was followed by another start."""

    at: float
    job: str
    kind: str
    repair: str
    node: str
    why: str
    lost_seconds: float
    measured: bool
    """False: without steps after it only the gap between the attempts is known, which is less than what was lost."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One job of the history."""

    job: str
    start: float
    end: float
    nodes: tuple[str, ...]
    num_nodes: int
    gpus_per_node: int
    gpus_known: bool
    """False: the accounting does not say, and eight a node are assumed."""
    step_seconds: float
    interruptions: tuple[Interruption, ...]
    wrong: tuple[Evidence, ...]
    """Lines for which Regrow would have drained a node that went on training without an interruption."""
    num_verdicts: int
    by_hand: int = 0
    """Ends by a person, which are not counted."""


def cases(attempts: Sequence[Attempt], progress: Sequence[Progress], evidence: Sequence[Evidence]) -> list[Case]:
    """The jobs that were interrupted at least once, or that would have been.

    Raises:
        ConfigurationError: no job has two attempts or a kernel line: there is nothing to compare.
    """
    found: list[Case] = []
    for job in dict.fromkeys(attempt.job for attempt in attempts):
        mine = sorted((attempt for attempt in attempts if attempt.job == job), key=lambda attempt: attempt.start)
        steps = sorted((one for one in progress if one.job == job), key=lambda one: one.at)
        made = _case(mine, steps, evidence)
        if made.interruptions or made.num_verdicts:
            found.append(made)
    if not found:
        raise ConfigurationError(
            "no job was started again after an end, and no kernel line condemns a node",
            where="--jobs",
            hint="attempts of one run need the same value in column `job`",
        )
    return found


def _case(attempts: list[Attempt], steps: list[Progress], evidence: Sequence[Evidence]) -> Case:
    first, last = attempts[0], attempts[-1]
    interruptions = tuple(
        _interruption(before, after, steps, evidence)
        for before, after in itertools.pairwise(attempts)
        if before.state.upper() not in (*_GOOD, *_BY_HAND)
    )
    during = [
        one for one in evidence if any(attempt.start <= one.at <= attempt.end and _runs_on(attempt, one.node) for attempt in attempts)
    ]
    fatal = _incidents(during)
    wrong = tuple(one for one in fatal if not any(abs(stop.at - one.at) <= EVIDENCE_SECONDS for stop in interruptions))
    wrong = tuple(one for one in wrong if one.at + EVIDENCE_SECONDS <= last.end)
    names = tuple(dict.fromkeys(name for attempt in attempts for name in attempt.nodes))
    num_nodes = max(1, *(attempt.num_nodes for attempt in attempts))
    return Case(
        job=first.job,
        start=first.start,
        end=last.end,
        nodes=names,
        num_nodes=num_nodes,
        gpus_per_node=max(1, first.gpus // num_nodes) if first.gpus else 8,
        gpus_known=first.gpus > 0,
        step_seconds=_step_seconds(steps),
        interruptions=interruptions,
        wrong=wrong,
        num_verdicts=len(fatal),
        by_hand=sum(before.state.upper() in _BY_HAND for before, _ in itertools.pairwise(attempts)),
    )


def _runs_on(attempt: Attempt, node: str) -> bool:
    return not attempt.nodes or not node or node in attempt.nodes


def _incidents(lines: list[Evidence]) -> list[Evidence]:
    """Lines of one node within half an hour are one verdict."""
    found: list[Evidence] = []
    for line in sorted(lines, key=lambda line: line.at):
        if not any(line.node == other.node and line.at - other.at <= EVIDENCE_SECONDS for other in found):
            found.append(line)
    return found


def _step_seconds(steps: list[Progress]) -> float:
    """Median seconds a step; 0 when it cannot be told."""
    paces = [
        (later.at - one.at) / (later.step - one.step)
        for one, later in itertools.pairwise(steps)
        if later.step > one.step and later.at > one.at
    ]
    return statistics.median(paces) if paces else 0.0


def _interruption(before: Attempt, after: Attempt, steps: list[Progress], evidence: Sequence[Evidence]) -> Interruption:
    earlier = [one for one in steps if before.start <= one.at <= before.end]
    last = max(earlier, key=lambda one: one.step, default=None)
    again = next((one for one in steps if last is not None and one.at >= after.start and one.step >= last.step), None)
    stopped = last.at if last is not None else before.end
    lost = again.at - stopped if again is not None else max(0.0, after.start - stopped)
    near = [one for one in evidence if abs(one.at - before.end) <= EVIDENCE_SECONDS and _runs_on(before, one.node)]
    kind, repair, node, why = _cause(before, near, before.end - stopped)
    return Interruption(
        at=stopped, job=before.job, kind=kind, repair=repair, node=node, why=why, lost_seconds=lost, measured=again is not None
    )


def _cause(before: Attempt, near: list[Evidence], still_seconds: float) -> tuple[str, str, str, str]:
    """(kind, repair, node, why): kernel lines first, then the scheduler's state, then a long silence before the end."""
    if near:
        line = min(near, key=lambda line: line.at)
        return (
            "gpu",
            "replace" if line.action == "replace" else "reset",
            line.node,
            f"kernel: {line.kind} on {line.node or 'an unnamed node'}",
        )
    state = before.state.upper()
    if state in _KINDS:
        kind, repair = _KINDS[state]
        return kind, repair, before.failed_node, f"scheduler: {state}"
    if still_seconds > _HANG_SECONDS:
        return "hang", "", before.failed_node, f"no step for {still_seconds:.0f} s before it ended as {state or 'unknown'}"
    return "program", "", before.failed_node, f"ended as {state or 'unknown'}, no kernel line near it"


# --- what Regrow would have lost


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What the site's history does not say."""

    constants: Constants
    policy: str = "replan"
    save_seconds: float = 30.0
    stall_seconds: float = 1.0
    step_seconds: float = 0.0
    """For jobs without a step log."""


def simulated_lost(case: Case, costs: Costs, seed: int) -> float:
    """Wall seconds that Regrow would have lost on this job: all recovery phases, recomputed steps, stalls of saves, a smaller mesh,
    and a drain for each wrong eviction."""
    step = case.step_seconds or costs.step_seconds
    if step <= 0:
        raise ConfigurationError(f"the step time of {case.job} is not known", where="--steps", hint="give a step log, or --step-seconds")
    exposure = case.num_nodes * case.gpus_per_node * (case.end - case.start) / 3600.0
    setup = check(
        Setup(
            constants=costs.constants,
            nodes=case.num_nodes,
            gpus_per_node=case.gpus_per_node,
            days=(case.end - case.start) / 86_400.0,
            policy=costs.policy,
            save_seconds=costs.save_seconds,
            stall_seconds=costs.stall_seconds,
            step_seconds=step,
            rate_per_gpu_hour=max(1, len(case.interruptions)) / exposure,
        )
    )
    workload = models.build(setup)
    result = run_seed(setup, workload, lambda rng: _faults(case, setup, rng), seed)
    return sum(seconds for name, seconds in result.summary.lost_seconds.items() if name not in _NOT_LOST)


def _faults(case: Case, setup: Setup, rng: random.Random) -> tuple[Fault, ...]:
    index = {name: place % setup.reserved for place, name in enumerate(case.nodes)}

    def place(node: str) -> tuple[int, ...]:
        return (index[node] if node in index else rng.randrange(setup.reserved),)

    found = [
        Fault(at=stop.at - case.start, kind=stop.kind, repair=stop.repair, nodes=place(stop.node), component=stop.why, category=stop.kind)
        for stop in case.interruptions
    ]
    found += [
        Fault(at=line.at - case.start, kind="leave", repair="reset", nodes=place(line.node), component=line.kind, category="wrong eviction")
        for line in case.wrong
    ]
    return tuple(sorted(found, key=lambda fault: fault.at))


def backtest(found: list[Case], costs: Costs, *, seeds: int) -> dict[str, Any]:
    """The document of `regrow backtest`."""
    observed = sum(stop.lost_seconds for case in found for stop in case.interruptions)
    totals = [sum(simulated_lost(case, costs, seed) for case in found) for seed in range(1, seeds + 1)]
    rng = random.Random("backtest")  # noqa: S311  # a resampling that is to be repeated
    saved: list[float] = []
    stops = [stop.lost_seconds for case in found for stop in case.interruptions]
    for total in totals:
        for _ in range(20):
            again = sum(rng.choices(stops, k=len(stops))) if stops else 0.0
            saved.append(again - total)
    verdicts, wrong = sum(case.num_verdicts for case in found), sum(len(case.wrong) for case in found)
    unmeasured = sum(not stop.measured for case in found for stop in case.interruptions)
    gpus = {case.job: case.num_nodes * case.gpus_per_node for case in found}
    centre = observed - quantile(totals, 0.5)
    mean_gpus = sum(gpus.values()) / len(gpus)
    return {
        "jobs": [
            {"job": case.job, "nodes": case.num_nodes, "gpus": gpus[case.job], "hours": (case.end - case.start) / 3600.0,
             "step_seconds": case.step_seconds, "interruptions": [msgspec.to_builtins(stop) for stop in case.interruptions]}
            for case in found
        ],
        "interruptions": len(stops),
        "lost_hours": {"observed": observed / 3600.0, "regrow": {name: quantile(totals, share) / 3600.0 for name, share in (("p5", 0.05), ("p50", 0.5), ("p95", 0.95))}},
        "saved_hours": {"point": centre / 3600.0, "low": quantile(saved, 0.05) / 3600.0, "high": quantile(saved, 0.95) / 3600.0},
        "saved_gpu_hours": centre / 3600.0 * mean_gpus,
        "evictions": {
            "verdicts": verdicts,
            "wrong": wrong,
            "upper95": wrong_share_upper95(wrong, verdicts),
            "lines": [msgspec.to_builtins(line) for case in found for line in case.wrong],
        },
        "policy": costs.policy,
        "seeds": seeds,
        "warnings": _warnings(found, unmeasured, len(stops), verdicts),
    }  # fmt: skip


def wrong_share_upper95(wrong: int, verdicts: int) -> float:
    """Upper bound of the true share with 95 % confidence, one-sided: exact (Clopper and Pearson 1934); about 3 / n for none of n."""
    if wrong >= verdicts:
        return 1.0
    low, high = wrong / verdicts, 1.0
    for _ in range(50):
        share = (low + high) / 2.0
        if _at_most(wrong, verdicts, share) > 0.05:
            low = share
        else:
            high = share
    return high


def _at_most(wrong: int, verdicts: int, share: float) -> float:
    """Chance of so few or fewer, binomial. `share` lies strictly between 0 and 1."""
    logs = (
        math.lgamma(verdicts + 1)
        - math.lgamma(k + 1)
        - math.lgamma(verdicts - k + 1)
        + k * math.log(share)
        + (verdicts - k) * math.log1p(-share)
        for k in range(wrong + 1)
    )
    return sum(math.exp(value) for value in logs)


def _warnings(cases: Sequence[Case], unmeasured: int, stops: int, verdicts: int) -> list[str]:
    found: list[str] = []
    if not all(case.gpus_known for case in cases):
        found.append("the accounting has no column gpus: 8 a node are assumed")
    by_hand = sum(case.by_hand for case in cases)
    if by_hand:
        found.append(f"{by_hand} attempts were cancelled by a person: they count for nobody")
    if unmeasured:
        found.append(f"{unmeasured} of {stops} interruptions have no step after them: only the gap until the next start is counted as lost")
    if stops < 10:
        found.append(f"{stops} interruptions: an interval over so few says little")
    if not verdicts:
        found.append("no kernel line condemns a node: nothing is known about wrong evictions")
    return found
