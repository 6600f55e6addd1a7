"""One seed, and many: the runs of a setup and what they say together."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Sequence
from typing import TextIO

import msgspec

from regrow.supervisor.core import ledger
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.turn import turn
from regrow.supervisor.sim.accounts import LOST, Summary
from regrow.supervisor.sim.faults import Fault
from regrow.supervisor.sim.inject import Injector
from regrow.supervisor.sim.journal import Head
from regrow.supervisor.sim.leader import TurnFunction
from regrow.supervisor.sim.models import JOB, Workload
from regrow.supervisor.sim.setup import Setup
from regrow.supervisor.sim.world import World, policy_of

FaultSource = Callable[[random.Random], tuple[Fault, ...]]
_CALM_SECONDS = 2 * 3600.0
_COOL_DOWN_SECONDS = 3 * 86_400.0
"""Longer than the longest quarantine, its burn-in and its probation."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One seed."""

    seed: int
    summary: Summary
    digest: str
    """Fingerprint of the journal."""
    faults: int
    charges: int
    generations: int
    pages: int
    turns: int
    checks: int
    poisoned: int
    """Restores of a checkpoint that had diverged before the digests could say so."""
    ended: str = ""
    """Why the job ended before the horizon; empty: it did not."""


def run_seed(
    setup: Setup,
    workload: Workload,
    source: FaultSource,
    seed: int,
    *,
    converge: bool = False,
    policy: Policy | None = None,
    decide: TurnFunction = turn,
    journal: TextIO | None = None,
    head: Head | None = None,
    prepare: Callable[[World], None] | None = None,
) -> Result:
    """Simulate one seed.

    Args:
        setup: sizes and times.
        workload: from `models.build`.
        source: makes the faults from the seed's own stream.
        seed: everything random follows from it.
        converge: afterwards, with the faults off, the job must come back to its full strength.
        policy: of the core; default: the production one.
        decide: the turn function, for tests that break it.
        journal: a text file that gets every turn.
        head: its first line; default: the policy and the seed.
        prepare: called with the world before time starts, for tests that break it.

    Raises:
        SafetyError: a checker found something.
    """
    world = World(setup, workload, str(seed), policy=policy, decide=decide)
    if journal is not None:
        world.journal.write_to(journal, head or Head(policy=policy or policy_of(setup), seed=str(seed)))
    if prepare is not None:
        prepare(world)
    faults = source(random.Random(f"{seed}/faults"))  # noqa: S311  # a simulation is to be repeated
    Injector(world).schedule(faults)
    collecting = gc.isenabled()
    gc.disable()
    try:
        world.loop.run(setup.seconds)
        world.life.finish()
        summary = world.accounts.close(nodes=setup.nodes, reserved=setup.reserved + world.borrowed_seconds / setup.seconds)
        charges = ledger.num_charges(world.leader.view.jobs[JOB].ledger) if JOB in world.leader.view.jobs else 0
        if converge:
            _converge(world)
    finally:
        if collecting:
            gc.enable()
            gc.collect()
    return Result(
        seed=seed,
        summary=summary,
        digest=world.journal.digest,
        faults=world.num_faults,
        charges=charges,
        generations=world.num_generations,
        pages=world.num_pages,
        turns=world.journal.num_turns,
        checks=world.checkers.num_checked,
        poisoned=world.num_poisoned,
        ended=world.ended,
    )


def _converge(world: World) -> None:
    """Faults are off and repairs end: the job trains within hours, and at full strength once quarantine is over."""
    world.loop.run(world.now + _CALM_SECONDS)
    if world.ended:
        return
    if not world.training:
        world.checkers.fail(world.now, f"no convergence: nothing trains {_CALM_SECONDS:.0f} s after the last fault: {world.leader.reason}")
    world.loop.run(world.now + _COOL_DOWN_SECONDS)
    run = world.run
    size = run.spec.world_size if run is not None else 0
    if not world.training or size < world.workload.home.world_size:
        world.checkers.fail(
            world.now, f"no convergence: {size} of {world.workload.home.world_size} places train after all repairs: {world.leader.reason}"
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics (Hyndman and Fan's type 7)."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p5, p50 and p95."""
    return {"p5": quantile(values, 0.05), "p50": quantile(values, 0.5), "p95": quantile(values, 0.95)}


def mean_lost(results: Sequence[Result]) -> dict[str, float]:
    """Mean over seeds of lost seconds by phase."""
    return {name: sum(result.summary.lost_seconds[name] for result in results) / len(results) for name in LOST}
