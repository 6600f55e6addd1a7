"""From a request to the document of `regrow simulate`: many seeds, one or several policies, and what forbids more."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from regrow.errors import ConfigurationError
from regrow.supervisor.sim import faults, models
from regrow.supervisor.sim.checkers import SafetyError
from regrow.supervisor.sim.faults import Fault
from regrow.supervisor.sim.journal import Head
from regrow.supervisor.sim.setup import Setup, check
from regrow.supervisor.sim.simulate import FaultSource, Result, mean_lost, percentiles, run_seed
from regrow.supervisor.sim.world import policy_of

TARGET = 0.97
"""Goodput that the defaults are to reach; below it the output says which phase forbids it."""
_COMPARED = ("fixed-world", "dp-shrink", "replan", "spares:{few}", "spares:{many}")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for."""

    setup: Setup
    trace: str = ""
    """Empty: generated; llama3; or a path."""
    shape: float = 1.0
    rack: int = 0
    rack_share: float = 0.0
    chaos: bool = False
    seeds: int = 5
    first_seed: int = 1
    journal: Path | None = None
    replay: str = ""
    """The command line that repeats a seed; {seed} stands for its number."""


def check_request(request: Request) -> Request:
    """The same request when it makes sense.

    Raises:
        ConfigurationError: before anything is simulated.
    """
    check(request.setup)
    if request.seeds < 1:
        raise ConfigurationError(f"{request.seeds} seeds", where="--seeds", hint="give at least 1")
    if not 0.1 <= request.shape <= 10.0:
        raise ConfigurationError(f"Weibull shape {request.shape}", where="--shape", hint="give 0.1 to 10; 1 is exponential")
    if not 0.0 <= request.rack_share <= 1.0 or request.rack < 0:
        raise ConfigurationError(
            f"{request.rack_share} of the faults in racks of {request.rack}",
            where="--rack-share",
            hint="a share is 0 to 1, a rack 2 or more nodes",
        )
    if request.rack_share > 0 and request.rack < 2:
        raise ConfigurationError("a share of rack faults without racks", where="--rack-size", hint="give the nodes of a rack, as in 16")
    return request


def source_of(request: Request) -> tuple[FaultSource, list[str]]:
    """Where faults come from, and what is to be said about it."""
    setup = request.setup
    if request.chaos:
        return lambda rng: faults.chaos(setup, rng), []
    if request.trace == "llama3":
        return lambda rng: faults.llama3(setup, rng), []
    if request.trace:
        found, notes = faults.from_file(Path(request.trace), setup)
        return lambda _rng: found, notes

    def generate(rng: random.Random) -> tuple[Fault, ...]:
        return faults.generated(setup, rng, shape=request.shape, rack=request.rack, rack_share=request.rack_share)

    return generate, []


def answer(request: Request) -> dict[str, Any]:
    """Simulate all seeds of one policy.

    Raises:
        ConfigurationError: wrong input, before anything is simulated.
        SafetyError: a checker found a violation; the hint is the line that repeats it.
    """
    check_request(request)
    source, notes = source_of(request)
    results = _run(request, source)
    return _document(request, results, notes)


def _run(request: Request, source: FaultSource) -> list[Result]:
    setup = request.setup
    workload = models.build(setup)
    results: list[Result] = []
    for seed in range(request.first_seed, request.first_seed + request.seeds):
        try:
            results.append(_one(request, setup, workload, source, seed))
        except SafetyError as error:
            line = request.replay.replace("{seed}", str(seed)) or f"seed {seed}"
            raise SafetyError(f"seed {seed}: {error.what}", where=error.where, hint=f"repeat it: {line}") from error
    return results


def _one(request: Request, setup: Setup, workload: models.Workload, source: FaultSource, seed: int) -> Result:
    if request.journal is None:
        return run_seed(setup, workload, source, seed, converge=request.chaos)
    path = request.journal if request.seeds == 1 else request.journal.with_suffix(f".{seed}{request.journal.suffix}")
    try:
        with path.open("w", encoding="utf-8") as file:
            return run_seed(
                setup, workload, source, seed, converge=request.chaos, journal=file, head=Head(policy=policy_of(setup), seed=str(seed))
            )
    except OSError as error:
        raise ConfigurationError(f"cannot be written: {error.strerror}", where=str(path), hint="check --journal") from error


def _document(request: Request, results: Sequence[Result], notes: list[str]) -> dict[str, Any]:
    setup = request.setup
    wall = sum(result.summary.wall_seconds for result in results) / len(results)
    lost = mean_lost(results)
    goodput = percentiles([result.summary.goodput for result in results])
    faults_seen = [result.faults for result in results]
    document: dict[str, Any] = {
        "goodput": goodput,
        "ettr": percentiles([result.summary.ettr for result in results]),
        "lost_seconds_by_phase": lost,
        "lost_seconds_by_category": _by_category(results),
        "lost_share_by_phase": {name: seconds / wall for name, seconds in lost.items()},
        "failures": round(sum(faults_seen) / len(faults_seen)),
        "failures_by_seed": faults_seen,
        "policy": setup.policy,
        "seeds": len(results),
        "first_seed": request.first_seed,
        "days": setup.days,
        "nodes": setup.nodes,
        "spares": setup.strategy.spares,
        "gpus": setup.gpus,
        "charges": percentiles([float(result.charges) for result in results]),
        "generations": percentiles([float(result.generations) for result in results]),
        "turns": sum(result.turns for result in results),
        "safety_checks": sum(result.checks for result in results),
        "journal_digests": {str(result.seed): result.digest for result in results},
        "mesh": str(setup.home),
        "target": TARGET,
    }
    document["warnings"] = [*notes, *_warnings(setup, results, goodput, document["lost_share_by_phase"])]
    return document


def _by_category(results: Sequence[Result]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for result in results:
        for name, seconds in result.summary.lost_by_category.items():
            totals[name] = totals.get(name, 0.0) + seconds / len(results)
    totals.pop("none", None)
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _warnings(setup: Setup, results: Sequence[Result], goodput: dict[str, float], shares: dict[str, float]) -> list[str]:
    found: list[str] = []
    if goodput["p50"] < TARGET:
        ordered = sorted(shares.items(), key=lambda item: -item[1])
        worst = ", ".join(f"{name} {share:.2%}" for name, share in ordered[:3])
        missing = 1.0 - TARGET
        alone = [name for name, share in ordered if 1.0 - (sum(shares.values()) - share) >= TARGET]
        note = f"without {alone[0]} it would be reached" if alone else f"no single phase is worth the {missing:.0%}"
        found.append(f"goodput {goodput['p50']:.2%} is below {TARGET:.0%}: {worst}; {note}")
    if len(results) < 20:
        found.append(f"{len(results)} seeds: p5 and p95 are the edges of a small sample; 20 or more say something about tails")
    ended = [result for result in results if result.ended]
    if ended:
        found.append(f"the job ended early in {len(ended)} of {len(results)} seeds: {ended[0].ended}")
    poisoned = sum(result.poisoned for result in results)
    if poisoned:
        found.append(
            f"{poisoned} restores took a checkpoint whose state had diverged before digests were compared: save and compare at the same step"
        )
    unfair = [result for result in results if result.charges > result.faults]
    if unfair:
        found.append(f"the ledger has more charges than faults in {len(unfair)} of {len(results)} seeds")
    if not setup.strategy.elastic:
        found.append(
            "fixed-world takes replacements from a pool: its nodes count as reserved only while they stand in; the cold start has the wait (constant `requeue`)"
        )
    return found


def compare(request: Request) -> dict[str, Any]:
    """All policies on the same faults: the seed of the faults does not depend on the policy, the number of spares apart."""
    check_request(request)
    few = max(1, request.setup.nodes // 512)
    many = max(2, request.setup.nodes // 128)
    names = [name.format(few=few, many=many) for name in _COMPARED]
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(names):
        changed = msgspec.structs.replace(request, setup=msgspec.structs.replace(request.setup, policy=name), journal=None)
        rows.append(answer(changed))
    best = max(rows, key=lambda row: row["goodput"]["p50"])
    chosen = next((row for row in rows if row["policy"] == request.setup.policy), best)
    document = dict(chosen)
    document["compare"] = [
        {
            "policy": row["policy"],
            "goodput": row["goodput"],
            "ettr": row["ettr"],
            "lost_share_by_phase": row["lost_share_by_phase"],
            "generations": row["generations"]["p50"],
        }
        for row in rows
    ]
    document["best_policy"] = best["policy"]
    pool = [text for row in rows if row["policy"] == "fixed-world" for text in row["warnings"] if "pool" in text]
    document["warnings"] = list(dict.fromkeys([*chosen["warnings"], *pool]))
    return document
