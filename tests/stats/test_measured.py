"""Goodput and ETTR from a journal, counted by hand; windows that the failures bound themselves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from regrow.supervisor.journal import Entry
from regrow.supervisor.stats import history, render, report, source
from regrow.supervisor.stats.story import Story


class Journal:
    """A journal as it would be written, on a clock of its own."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.now = 0.0

    def write(self, kind: str, *, node: str = "", job: str = "gpt", generation: int = 0, **data: Any) -> None:
        number = len(self.entries) + 1
        self.entries.append(
            Entry(id=number, epoch=1, at=self.now, time="", kind=kind, job=job, node=node, generation=generation, data=data)
        )  # fmt: skip

    def join(self, node: str, slots: int) -> None:
        self.write("node_joined", node=node, job="", slots=slots, devices=[])

    def form(self, generation: int, mesh: str, restore: int | None) -> None:
        self.write(
            "record_generation", generation=generation, mesh=mesh, num_nodes=1, restore={"step": restore} if restore is not None else None
        )

    def steps(self, generation: int, first: int, last: int, seconds: float) -> None:
        for step in range(first, last + 1):
            self.now += seconds
            self.write("steps_completed", generation=generation, step=step, step_seconds=seconds, loss=1.0)


def two_generations() -> Journal:
    """Two nodes of two slots. Ten seconds of start-up, 40 steps of 1 s on four, back to step 30, 20 s without steps, 20 of 1.5 s on two."""
    journal = Journal()
    journal.write("leader_started", job="", version="0")
    journal.join("n0", 2)
    journal.join("n1", 2)
    journal.form(1, "dp=4", None)
    journal.now += 10.0
    journal.steps(1, 1, 40, 1.0)
    journal.write("node_disconnected", node="n1", job="", reason="closed")
    journal.now += 20.0
    journal.form(2, "dp=2", 30)
    journal.steps(2, 31, 50, 1.5)
    return journal


def test_goodput_and_ettr_are_those_counted_by_hand() -> None:
    found = source.of_entries(two_generations().entries, job="", name="x").measured
    assert found is not None
    wall = 10 + 40 + 20 + 30
    assert found.lineage_steps == 50
    assert found.best_gpu_seconds_per_step == pytest.approx(1.5 * 2)
    assert found.reserved_gpu_seconds == pytest.approx(4 * wall), "a node that is lost is still reserved"
    assert found.goodput == pytest.approx(50 * 3.0 / (4 * wall))
    assert found.ettr == pytest.approx((30 * 1.0 + 20 * 1.5) / wall), "ten steps were rolled back"


def test_what_was_rolled_back_and_not_done_again_is_no_lineage() -> None:
    journal = two_generations()
    journal.now += 5.0
    journal.form(3, "dp=2", 10)
    journal.steps(3, 11, 11, 1.5)
    found = source.of_entries(journal.entries, job="", name="x").measured
    assert found is not None
    assert found.lineage_steps == 11
    whole = 30.0 + 20 * 1.5
    assert found.ettr == pytest.approx((whole * 10 / 50 + 1.5) / (100 + 5 + 1.5))


def test_another_life_of_the_job_starts_its_count_anew() -> None:
    journal = two_generations()
    journal.form(1, "dp=2", 50)
    journal.steps(1, 51, 60, 1.0)
    assert Story().read(journal.entries).jobs["gpt"].productive_seconds == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("step", "num_steps", "epoch", "lost"),
    [
        pytest.param(41, 1, 1, 0, id="survivors held the newest step"),
        pytest.param(40, 2, 1, 2, id="memory held an older one, told with two steps"),
        pytest.param(31, 1, 1, 10, id="the checkpoint"),
        pytest.param(41, 1, 2, 10, id="a leader that came later heard of the 11th step first"),
    ],
)
def test_what_was_taken_up_from_memory_is_not_lost(step: int, num_steps: int, epoch: int, lost: int) -> None:
    journal = Journal()
    journal.form(1, "dp=4", None)
    journal.steps(1, 1, 40, 1.0)
    seed = {"id": "g1", "kind": "hang", "cause": "unknown", "symptom_at": 40.0, "detected_at": 44.0}
    journal.write("record_generation", generation=2, mesh="dp=4", num_nodes=1, restore={"step": 30}, incident=seed)
    journal.write("steps_completed", generation=2, step=step, num_steps=num_steps, step_seconds=1.0)
    journal.entries[-1] = msgspec.structs.replace(journal.entries[-1], epoch=epoch)
    journal.steps(2, step + 1, 45, 1.0)
    incident = Story().read(journal.entries).jobs["gpt"].cases[0].incident
    assert incident.frontier - (incident.restored_step or 0) == lost
    assert incident.closed


def test_a_corrected_verdict_is_what_the_report_says() -> None:
    journal = Journal()
    journal.form(1, "dp=4", None)
    journal.steps(1, 1, 40, 1.0)
    seed = {
        "id": "g1",
        "kind": "node_lost",
        "cause": "infrastructure",
        "node": "b",
        "symptom_at": 40.0,
        "detected_at": 44.0,
        "text": "b is gone",
    }
    journal.write("record_generation", generation=2, mesh="dp=3", num_nodes=1, restore={"step": 30}, incident=seed)
    journal.steps(2, 31, 45, 1.0)
    journal.write("save_ledger", incident="", corrected="")
    before = Story().read(journal.entries).jobs["gpt"].cases[0].incident
    journal.write("save_ledger", incident="g1", corrected="b answers again")
    after = Story().read(journal.entries).jobs["gpt"].cases[0].incident
    assert (before.cause, before.text) == ("infrastructure", "b is gone")
    assert (after.cause, after.text) == ("unknown", "b is gone; b answers again")


def test_a_generation_that_another_leader_formed_has_an_unknown_mesh_and_is_left_out() -> None:
    """The journal of the leader that took over begins in the middle of it."""
    journal = two_generations()
    later = [entry for entry in journal.entries if entry.kind != "record_generation" or entry.generation != 1]
    found = source.of_entries(later, job="", name="x").measured
    assert found is not None
    assert found.best_gpu_seconds_per_step == pytest.approx(1.5 * 2)


def test_too_few_steps_say_nothing() -> None:
    journal = Journal()
    journal.join("n0", 2)
    journal.form(1, "dp=2", None)
    journal.steps(1, 1, 3, 1.0)
    assert source.of_entries(journal.entries, job="", name="x").measured is None


def test_the_text_has_both_and_fits() -> None:
    found = source.of_entries(two_generations().entries, job="", name="x")
    document = report.build(found.history, gpus=4, end_hours=found.end_hours, exposure_gpu_hours=found.exposure_gpu_hours)
    document["goodput"]["measured"] = found.measured
    shown = render.text(document)
    assert "goodput       0.375: 50 steps of the lineage x 3 GPU-s at best" in shown
    assert max(map(len, shown.splitlines())) <= 80


def _failures(*hours: float, start_at: str = "") -> history.History:
    return history.History(failures=tuple(history.Failure(at_hours=hour) for hour in hours), start_at=start_at)


@pytest.mark.parametrize(
    ("start_at", "start", "end", "words"),
    [
        ("2026-11-30T00:00:00+00:00", None, None, "begins with the first and ends with the last failure, so the rate is too high: give --start and --end"),
        ("2026-11-30T00:00:00+00:00", None, 100.0, "begins with the first failure"),
        ("", None, None, "ends with the last failure"),
        ("", None, 100.0, ""),
        ("2026-11-30T00:00:00+00:00", -1.0, 100.0, ""),
    ],
)  # fmt: skip
def test_a_window_that_the_failures_bound_is_said(start_at: str, start: float | None, end: float | None, words: str) -> None:
    document = report.build(_failures(0.0, 10.0, 20.0, start_at=start_at), gpus=8, start_hours=start, end_hours=end)
    told = [warning for warning in document["warnings"] if "the window" in warning]
    assert (words in told[0]) if words else told == []


def test_a_failure_where_the_observation_begins_is_no_gap_of_zero() -> None:
    document = report.build(_failures(0.0, 10.0, 20.0, 35.0), gpus=8, end_hours=40.0)
    assert document["weibull"]["n"] == 3
    assert document["weibull"]["num_zero_gaps"] == 0
    assert document["survival"]["by_component"]["unknown"]["num_failures"] == 3
