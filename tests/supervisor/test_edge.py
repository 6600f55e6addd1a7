"""The edge: failure detector and step counting, with time passed in."""

from __future__ import annotations

import math

import pytest

from regrow import wire
from regrow.supervisor.core import events as e
from regrow.supervisor.detector import Silence, Stall, look_seconds, next_look
from regrow.supervisor.steps import Steps


def look_until(silence: Silence, start: float, end: float) -> list[e.NodeSilent]:
    found: list[e.NodeSilent] = []
    now = start
    while now < end:
        now += 0.1
        found += silence.look(now)
    return found


def test_silence_is_said_once_and_ends_with_any_word() -> None:
    silence = Silence(silence_seconds=2.0, look_seconds=0.1)
    silence.connected("a", 0.0)
    silence.connected("b", 0.0)
    for tick in range(1, 60):
        silence.heard("a", tick * 0.1)
        silence.look(tick * 0.1)
    assert silence.is_silent("b")
    assert not silence.is_silent("a")
    heard = silence.heard("b", 6.0)
    assert heard is not None
    assert heard.node == "b"
    assert silence.heard("b", 6.1) is None


def test_our_own_pause_makes_nobody_suspect() -> None:
    silence = Silence(silence_seconds=2.0, look_seconds=0.1)
    silence.connected("a", 0.0)
    assert not look_until(silence, 0.0, 0.5)
    assert silence.look(30.0) == []
    assert not silence.is_silent("a")
    assert [item.node for item in look_until(silence, 30.0, 33.0)] == ["a"]


def test_an_observer_that_pauses_again_and_again_sees_all_the_same() -> None:
    """It stands still for 0.6 s in each second: a host without power is silent after 2 s of the time in which it looked."""
    silence = Silence(silence_seconds=2.0, look_seconds=0.1)
    silence.connected("gone", 0.0)
    silence.connected("there", 0.0)
    found: list[tuple[str, float]] = []
    for second in range(12):
        for now in (second + tenth / 10 for tenth in range(5)):
            silence.heard("there", now)
            found += [(item.node, now) for item in silence.look(now)]
    assert [node for node, _ in found] == ["gone"]
    assert found[0][1] == pytest.approx(5.0, abs=1.0)


def test_how_often_is_looked() -> None:
    for silence_seconds, expected in ((0.4, 0.05), (1.0, 0.125), (2.0, 0.25), (10.0, 0.25), (60.0, 0.25)):
        assert look_seconds(silence_seconds) == pytest.approx(expected)
    silence = Silence(silence_seconds=2.0, look_seconds=look_seconds(2.0))
    silence.connected("a", 0.0)
    assert [silence.look(quarter / 4) for quarter in range(1, 8)] == [[]] * 7
    assert silence.look(2.45) == []  # 0.45 s later than it should have looked: that was a pause of ours
    assert silence.look(2.6) == []


def test_what_arrived_in_a_pause_is_read_before_anybody_is_suspect() -> None:
    silence = Silence(silence_seconds=2.0, look_seconds=0.1)
    silence.connected("a", 0.0)
    look_until(silence, 0.0, 1.9)
    assert silence.look(10.0) == []
    assert not look_until(silence, 10.0, 10.2)
    silence.heard("a", 10.25)
    assert not look_until(silence, 10.25, 12.1)


def test_closed_connections_are_not_silent() -> None:
    silence = Silence(silence_seconds=2.0, look_seconds=0.1)
    silence.connected("a", 0.0)
    silence.disconnected("a")
    assert not look_until(silence, 0.0, 5.0)
    assert silence.heard("a", 5.0) is None


def word(rank: int, started: int, applied: int, phase: str = "step", age: float = 0.0) -> wire.RankProgress:
    return wire.RankProgress(rank=rank, started_step=started, applied_step=applied, phase=phase, age_seconds=age)


def test_stall_is_said_once_and_again_after_it_moved() -> None:
    stall = Stall(job="j", generation=1, changed_at=0.0)
    assert stall.look(100.0, 10.0) is None
    stall.words((word(0, 1, 0), word(1, 1, 0)), 100.0)
    assert stall.look(109.0, 10.0) is None
    found = stall.look(110.5, 10.0)
    assert found is not None
    assert found.since == 100.0
    assert [item.age_seconds for item in found.ranks] == [10.5, 10.5]
    assert stall.look(200.0, 10.0) is None
    assert stall.words((word(0, 1, 0),), 201.0) is None
    resumed = stall.words((word(0, 1, 1),), 202.0)
    assert resumed is not None
    assert stall.look(213.0, 10.0) is not None


def test_a_process_found_stopped_is_no_progress_and_its_return_is() -> None:
    stall = Stall(job="j", generation=1, changed_at=0.0)
    stall.words((word(0, 1, 0), word(1, 1, 0)), 1.0)
    stall.words((word(0, 1, 0), word(1, 1, 0, "stopped")), 5.0)
    assert stall.stopped
    assert stall.look(11.0, 10.0) is not None
    assert stall.words((word(0, 1, 0), word(1, 1, 0)), 12.0) is not None
    assert not stall.stopped


def test_a_stopped_process_that_goes_on_gets_the_whole_limit_again() -> None:
    stall = Stall(job="j", generation=1, changed_at=0.0)
    stall.words((word(0, 1, 0), word(1, 1, 0, "stopped")), 1.0)
    stall.words((word(0, 1, 0), word(1, 1, 0, age=19.0)), 20.0)
    assert stall.look(29.0, 10.0) is None
    assert stall.look(30.0, 10.0) is not None


def test_the_limit_counts_from_the_change_and_is_looked_at_when_it_is_over() -> None:
    stall = Stall(job="j", generation=1, changed_at=0.0)
    stall.words((word(0, 5, 4), word(1, 5, 4)), 1.0)
    stall.words((word(0, 6, 5, age=0.09), word(1, 6, 5, age=0.07)), 2.0)
    stall.words((word(0, 6, 6, age=3.0),), 2.02)  # a beat that was held up says nothing newer
    assert stall.look(2.5, 1.0) is None
    assert stall.due_at == pytest.approx(2.93)
    assert next_look(2.5, 0.1, (stall.due_at, 2.4)) == 2.6
    assert next_look(2.9, 0.1, (stall.due_at, 2.4)) == pytest.approx(2.93)
    found = stall.look(stall.due_at, 1.0)
    assert found is not None
    assert found.since == pytest.approx(1.93)
    assert stall.due_at == math.inf


def test_silence_is_looked_at_when_its_limit_is_over() -> None:
    silence = Silence(silence_seconds=2.0, look_seconds=0.1)
    silence.connected("a", 0.03)
    silence.connected("b", 0.09)
    assert look_until(silence, 0.0, 1.95) == []
    assert silence.due_at == pytest.approx(2.03)
    (silent,) = silence.look(silence.due_at)
    assert (silent.node, silence.due_at) == ("a", pytest.approx(2.09))


def test_scripts_without_words_never_stall() -> None:
    stall = Stall(job="j", generation=1, changed_at=0.0)
    stall.words((word(0, 0, 0, "start"),), 1.0)
    assert stall.look(1e9, 10.0) is None
    stall.words((word(0, 1, 0, "step"),), 2.0)
    stall.words((word(0, 9, 9, "finished"),), 3.0)
    assert stall.look(1e9, 10.0) is None


def steps_of(*pairs: tuple[str, tuple[int, ...]]) -> Steps:
    return Steps("j", 1, dict(pairs))


def report(steps: Steps, node: str, step: int, now: float = 0.0, **more: object) -> list[e.Event]:
    ranks = {"a": (0, 1), "b": (2, 3)}[node]
    reports = tuple(wire.StepReport(generation=1, rank=rank, step=step, loss=1.5, samples=step * 4, **more) for rank in ranks)  # type: ignore[arg-type]
    return steps.reported(node, wire.NodeSteps(job="j", generation=1, step=step, reports=reports), now)


def completed(events: list[e.Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, e.StepsCompleted)]


def test_a_step_is_complete_when_every_node_has_applied_it() -> None:
    steps = steps_of(("a", (0, 1)), ("b", (2, 3)))
    assert completed(report(steps, "a", 7)) == []
    assert completed(report(steps, "a", 8)) == []
    assert completed(report(steps, "b", 7)) == [7]
    assert completed(report(steps, "b", 8)) == [8]
    assert steps.completed == 8


def test_a_node_that_cannot_be_heard_does_not_hold_the_count_up() -> None:
    steps = steps_of(("a", (0, 1)), ("b", (2, 3)))
    report(steps, "a", 1)
    report(steps, "b", 1)
    assert completed(report(steps, "a", 2)) == []
    assert completed(steps.heard("b", 1.0, reachable=False)) == [2]
    assert completed(report(steps, "a", 3)) == [3]
    assert steps.heard("b", 2.0, reachable=True) == []
    assert completed(report(steps, "a", 4)) == []
    assert completed(report(steps, "b", 4)) == [4]


def test_words_fill_in_for_lost_reports() -> None:
    steps = steps_of(("a", (0, 1)), ("b", (2, 3)))
    assert steps.words("a", (word(0, 5, 4), word(1, 5, 4)), 0.0) == []
    report(steps, "a", 1)
    report(steps, "b", 1)
    report(steps, "a", 2)
    assert completed(steps.words("b", (word(2, 3, 2), word(3, 2, 1)), 1.0)) == []
    assert completed(steps.words("b", (word(2, 3, 2), word(3, 3, 2)), 1.0)) == [2]


def test_digests_are_compared_when_all_are_there() -> None:
    steps = steps_of(("a", (0, 1)), ("b", (2, 3)))
    assert not [event for event in report(steps, "a", 1, digest="00") if isinstance(event, e.DigestsReported)]
    found = [event for event in report(steps, "b", 1, digest="00") if isinstance(event, e.DigestsReported)]
    assert [event.digests for event in found] == [dict.fromkeys(range(4), "00")]


def test_mismatch_at_rest_is_told_at_once() -> None:
    steps = steps_of(("a", (0, 1)), ("b", (2, 3)))
    found = report(steps, "a", 1, at_rest_mismatch="w")
    assert [event.rank for event in found if isinstance(event, e.AtRestMismatch)] == [0, 1]


def test_what_is_not_finite_is_told_with_its_step() -> None:
    steps = steps_of(("a", (0, 1)), ("b", (2, 3)))
    report(steps, "a", 1, nonfinite="loss")
    found = [event for event in report(steps, "b", 1) if isinstance(event, e.NonFiniteSeen)]
    assert [(event.step, event.ranks) for event in found] == [(1, {0: "loss", 1: "loss"})]


def test_many_nodes_are_counted_in_linear_time() -> None:
    import time

    names = {f"n{index}": (index,) for index in range(2048)}
    steps = Steps("j", 1, names)
    began = time.process_time()
    for step in (1, 2, 3):
        done: list[e.Event] = []
        for index, name in enumerate(names):
            made = wire.NodeSteps(job="j", generation=1, step=step, reports=(wire.StepReport(generation=1, rank=index, step=step),))
            done += steps.reported(name, made, 0.0)
        assert completed(done) == [step]
    assert time.process_time() - began < 2.0


def test_the_first_to_fall_silent_says_who_is_late() -> None:
    silence = Silence(silence_seconds=2.0, look_seconds=0.1)
    for node in ("a", "b", "c", "well"):
        silence.connected(node, 0.0)
    found: list[e.NodeSilent] = []
    for tick in range(1, 21):
        silence.heard("well", tick * 0.1)
        if tick == 4:
            silence.heard("b", 0.4)
        assert (tick == 20) == bool(found := silence.look(tick * 0.1))
    assert [(event.node, event.late) for event in found] == [("a", ("b",)), ("c", ())]
    assert found[0].late_until == 0.4 + 2.0 + 0.1
    silence.heard("well", 2.5)
    (event,) = silence.look(2.45)
    assert (event.node, event.late) == ("b", ())
