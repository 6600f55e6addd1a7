"""A healthy long job at a high failure rate is stopped by no rule of its own."""

from __future__ import annotations

import random

import pytest

from regrow.supervisor.sim import constants, models
from regrow.supervisor.sim.faults import Fault
from regrow.supervisor.sim.setup import Setup
from regrow.supervisor.sim.simulate import Result, run_seed

PERIOD_SECONDS = 18 * 60.0
"""Between failures of 100,000 GPUs (arXiv:2602.00277), as a Poisson process here."""
DAYS = 5.0
QUIET = dict.fromkeys(("silence", "exit_report", "message", "record", "commit", "stop", "rendezvous", "restore", "first_step"), 0.0)


def simulate(kind: str, component: str, restart_seconds: float) -> Result:
    """Four nodes, days, whose faults are all of one kind, with production rules."""
    setup = Setup(
        constants=constants.load(None, **QUIET, start_cold=restart_seconds, requeue=0.0),
        nodes=4,
        days=DAYS,
        policy="fixed-world",
        step_seconds=1.0,
        save_seconds=0.0,
        stall_seconds=0.0,
        interval_seconds=10.0,
        rate_per_gpu_hour=3600.0 / PERIOD_SECONDS / 32,
    )

    def faults(rng: random.Random) -> tuple[Fault, ...]:
        found: list[Fault] = []
        at = 3600.0 + rng.expovariate(1 / PERIOD_SECONDS)  # after the first step: before it, a program error ends a job
        while at < setup.seconds:
            found.append(Fault(at=at, kind=kind, nodes=(rng.randrange(4),), component=component))  # type: ignore[arg-type]
            at += rng.expovariate(1 / PERIOD_SECONDS)
        return tuple(found)

    return run_seed(setup, models.build(setup), faults, 1)


@pytest.mark.parametrize(
    ("kind", "component", "restart_seconds", "least"),
    [("gpu", "gpu", 180.0, 0.75), ("program", "crash", 600.0, 0.45)],
)
def test_days_at_a_failure_each_eighteen_minutes(kind: str, component: str, restart_seconds: float, least: float) -> None:
    result = simulate(kind, component, restart_seconds)
    assert result.ended == ""
    assert result.faults > 350
    assert result.summary.ettr > least
