"""The budget stops what brings nothing, not what is big: long jobs at high failure rates, and machines that speak late."""

from __future__ import annotations

import msgspec
import pytest
from world import POLICY, World, running, spec

from regrow import wire
from regrow.supervisor.core import events as e
from regrow.supervisor.core import ledger
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.records import Charge, LedgerRecord

HOUR = 3600.0


def charge(at: float, step: int, *, cause: str = "infrastructure", **changes: object) -> Charge:
    values: dict[str, object] = {"at": at, "cause": cause, "generation": 1, "incident": f"i{at}", "step": step}
    return Charge(**(values | changes))  # type: ignore[arg-type]


def history(gaps: list[tuple[float, int]], cause: str = "infrastructure") -> list[Charge]:
    """Charges by (seconds since the last one, steps made in between)."""
    at, step, found = 0.0, 0, list[Charge]()
    for seconds, steps in gaps:
        at, step = at + seconds, step + steps
        found.append(charge(at, step, cause=cause))
    return found


USEFUL, USELESS = (1080.0, 60), (1080.0, 1)
"""Eighteen minutes with ten of progress at 10 s a step; and with ten seconds of it."""


@pytest.mark.parametrize(
    ("gaps", "cause", "step_seconds", "allowed", "words"),
    [
        ([USEFUL] * 80, "infrastructure", 10.0, True, "restart 1 of 20 by cause infrastructure (79 more paid back by progress)"),
        ([USELESS] * 20, "infrastructure", 10.0, True, "restart 20 of 20"),
        ([USELESS] * 21, "infrastructure", 10.0, False, "restart 21 of 20 by cause infrastructure"),
        ([USEFUL] * 30 + [USELESS] * 21, "infrastructure", 10.0, False, "restart 22 of 20"),
        ([USELESS] * 20 + [USEFUL] * 3, "infrastructure", 10.0, True, "restart 20 of 20"),
        ([USEFUL] * 80, "preemption", 10.0, True, "restart 1 of 20"),
        ([USEFUL] * 3, "program", 10.0, False, "restart 3 of 2 by cause program"),
        ([USEFUL] * 3, "unknown", 10.0, False, "restart 3 of 2 by cause unknown"),
        ([USEFUL] * 21, "infrastructure", None, False, "restart 21 of 20"),
    ],
)
def test_machines_are_charged_for_what_brought_nothing(
    gaps: list[tuple[float, int]], cause: str, step_seconds: float | None, allowed: bool, words: str
) -> None:
    charges = history(gaps, cause)
    past = ledger.Past(since=0.0, step_seconds=step_seconds)
    verdict = ledger.judge(LedgerRecord(charges=tuple(charges[:-1])), charges[-1], spec(max_restarts=2), Policy(), past)
    assert verdict.allowed == allowed
    assert words in verdict.reason


def test_a_script_without_steps_pays_by_the_time_it_ran() -> None:
    charges = [charge(1000.0 * number, 0, ran_seconds=900.0) for number in range(1, 40)]
    assert ledger.judge(
        LedgerRecord(charges=tuple(charges[:-1])), charges[-1], spec(max_restarts=2), Policy(), ledger.Past(since=0.0)
    ).allowed
    short = [charge(1000.0 * number, 0, ran_seconds=10.0) for number in range(1, 40)]
    assert not ledger.judge(
        LedgerRecord(charges=tuple(short[:-1])), short[-1], spec(max_restarts=2), Policy(), ledger.Past(since=0.0)
    ).allowed


@pytest.mark.parametrize(
    ("before", "streak", "gap", "allowed"),
    [
        (0, 5, 60.0, True),
        (0, 6, 60.0, False),  # a young job: six in a row are the program's
        (400, 6, 300.0, True),  # a failure each 18 minutes for days: six within 25 minutes happen
        (400, 30, 300.0, False),  # thirty in a row do not
        (400, 6, 5.0, False),  # nor six within half a minute
        (3, 6, 60.0, False),
    ],
)
def test_a_row_without_progress_is_held_against_the_rate_before_it(before: int, streak: int, gap: float, allowed: bool) -> None:
    period = 1080.0
    charges = [charge(period * (number + 1), 10 * (number + 1), cause="unknown") for number in range(before)]
    begin = max(period * (before + 1), HOUR)
    charges += [charge(begin + gap * number, 10_000, cause="unknown") for number in range(streak)]
    past = ledger.Past(since=0.0, step_seconds=10.0)
    verdict = ledger.judge(LedgerRecord(charges=tuple(charges[:-1])), charges[-1], spec(max_restarts=1000), Policy(), past)
    assert verdict.allowed == allowed, verdict.reason
    if not allowed:
        assert f"no progress: {streak} failures" in verdict.reason


@pytest.mark.parametrize(
    ("least", "mean", "probability"),
    [
        (0, 1.0, 1.0),
        (1, 1.0, 0.6321205588),
        (3, 1.0, 0.0803013970),
        (10, 0.1, 2.516e-17),
        (1, 0.0, 0.0),
        (50, 100.0, 1.0),
        (5, 5.0, 0.5595067149),
    ],
)
def test_poisson_tail(least: int, mean: float, probability: float) -> None:
    assert ledger.poisson_tail(least, mean) == pytest.approx(probability, rel=1e-3)


CUDA = "Traceback (most recent call last):\nRuntimeError: CUDA error: uncorrectable ECC error encountered"
BROKEN = wire.HealthVerdict(state="unhealthy", action="reset", reason="XID 48", device_uuids=("GPU-b-0",))


def failed_at_once() -> World:
    """A rank of b leaves with an error before the first step of the job."""
    world = running("a", "b", "c", steps=0, commit=None)
    world.exit(2, exit_code=1, error=CUDA, last_step=-1)
    world.wait(POLICY.coalesce_seconds + 0.01)
    return world


def test_before_the_program_is_blamed_the_machine_may_speak() -> None:
    world = failed_at_once()
    assert world.job.outcome is None
    assert "for the health of b" in world.reason
    world.now += 0.3
    world.tell(e.NodeHealth(at=world.now, node="b", verdict=BROKEN))
    world.wait(2)
    assert world.job.outcome is None
    assert world.generation.spec.nodes == ("a", "c")
    assert [item.cause for item in world.job.ledger.charges] == ["infrastructure"]


def test_a_machine_that_says_nothing_leaves_it_with_the_program() -> None:
    world = failed_at_once()
    world.wait(POLICY.verdict_seconds)
    assert world.job.outcome is not None
    assert "the program failed before the first step" in world.job.outcome.reason


def test_a_ledger_of_a_long_job_fits_into_the_store() -> None:
    book = LedgerRecord()
    for number in range(5000):
        book = ledger.add(book, charge(1080.0 * number, number, cause="unknown" if number % 10 == 0 else "infrastructure", text="x" * 500))
    assert len(msgspec.json.encode(book)) < 1_000_000
    assert ledger.num_charges(book) == 5000
    assert ledger.num_charges(book, "unknown") == 500
    assert [item.step for item in book.charges[-2:]] == [4998, 4999]
    again = ledger.add(book, charge(1.0, 4999, incident=book.charges[-1].incident))
    assert ledger.num_charges(again) == 5000, "one incident is one charge"
