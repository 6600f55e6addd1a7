"""The node machine as tables: what it knows, what happens, what it wants done. No clock, no process, no socket."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import msgspec
import pytest

from regrow import wire
from regrow.agent import core
from regrow.agent import machine as m
from regrow.ids import MeshShape

_seq = itertools.count(1)


def order(generation: int, *, epoch: int = 1, job: str = "toy", ranks: tuple[int, ...] = (0, 1)) -> wire.StartGeneration:
    """A start of local ranks in a world of four."""
    spec = wire.GenerationSpec(job=job, epoch=epoch, generation=generation, mesh=MeshShape(dp=4), world_size=4, nodes=("n0", "n1"))
    return wire.StartGeneration(
        epoch=epoch,
        seq=next(_seq),
        spec=spec,
        job_spec=wire.JobSpec(job=job, argv=("train.py",)),
        workers=tuple(wire.WorkerAssignment(rank=rank, local_rank=index) for index, rank in enumerate(ranks)),
        group_rank=0,
        master_address="h:1",
    )


def stop(generation: int, *, epoch: int = 1, grace: float = 0.0) -> wire.StopGeneration:
    """A stop of job `toy`."""
    return wire.StopGeneration(epoch=epoch, seq=next(_seq), job="toy", generation=generation, grace_seconds=grace)


def ended(rank: int, *, code: int = 0, number: int = 0, torn_down: bool = False, declared: bool = False) -> wire.WorkerExit:
    """An exit."""
    return wire.WorkerExit(
        rank=rank, local_rank=rank, pid=100 + rank, exit_code=code, signal=number, torn_down=torn_down, declared_end=declared
    )


class Node:
    """Feeds events and keeps effects."""

    def __init__(self, **state: Any) -> None:
        self.state = m.NodeState(node="n0", connected=True, **state)
        self.at = 100.0

    def feed(self, *events: m.Event) -> list[m.Effect]:
        """Effects of all events."""
        effects: list[m.Effect] = []
        for event in events:
            self.state, more = core.react(self.state, event, self.at)
            effects += more
        return effects

    def order(self, *messages: Any) -> list[m.Effect]:
        """Effects of orders."""
        return self.feed(*(m.Ordered(message) for message in messages))

    def running(self, generation: int = 1, **changes: Any) -> Node:
        """With a generation that runs."""
        made = order(generation, **changes)
        self.order(made)
        pids = {worker.rank: 100 + worker.rank for worker in made.workers}
        self.feed(m.Started(job=made.spec.job, generation=generation, pids=pids))
        return self


def sent(effects: list[m.Effect], kind: type[Any] = msgspec.Struct) -> list[Any]:
    """Messages among effects."""
    return [effect.message for effect in effects if isinstance(effect, m.Send) and isinstance(effect.message, kind)]


def kinds(effects: list[m.Effect]) -> list[str]:
    """Names of effects, messages by their phase."""
    return [
        effect.message.phase
        if isinstance(effect, m.Send) and isinstance(effect.message, wire.GenerationPhase)
        else type(effect.message if isinstance(effect, m.Send) else effect).__name__
        for effect in effects
    ]


def test_a_start_writes_the_fence_first() -> None:
    node = Node()
    effects = node.order(order(1))
    assert kinds(effects) == ["Persist", "fenced", "stopped", "Launch"]
    assert node.state.fences == m.Fences(epoch=1, generations={"toy": 1})
    assert kinds(node.feed(m.Started(job="toy", generation=1, pids={0: 100, 1: 101}))) == ["started"]


def test_older_workers_are_dead_before_newer_ones_start() -> None:
    node = Node().running(1)
    effects = node.order(order(2))
    assert kinds(effects) == ["Persist", "fenced", "Kill"]
    assert effects[-1] == m.Kill(job="toy", generation=1, signal=signal.SIGKILL)
    assert kinds(node.feed(m.Exited(job="toy", generation=1, exits=(ended(0, number=9, torn_down=True),)))) == []
    effects = node.feed(m.Exited(job="toy", generation=1, exits=(ended(1, number=9, torn_down=True),)))
    assert kinds(effects) == ["Forget", "stopped", "Launch"]
    assert sent(effects)[0].generation == 2


def test_a_start_is_idempotent_and_a_later_one_wins_while_waiting() -> None:
    node = Node().running(1)
    node.order(order(2))
    assert kinds(node.order(order(2))) == ["fenced"]
    effects = node.order(order(3))
    assert kinds(effects) == ["Persist", "fenced", "Kill"]
    node.feed(m.Exited(job="toy", generation=1, exits=(ended(0, number=9), ended(1, number=9))))
    assert node.state.current is not None
    assert node.state.current.generation == 3
    assert kinds(node.order(order(3))) == ["fenced", "stopped"]


@pytest.mark.parametrize(
    ("fences", "message", "reason"),
    [
        (m.Fences(epoch=3), order(9, epoch=2), "epoch 2 is behind 3"),
        (m.Fences(epoch=1, generations={"toy": 5}), order(5), "generation 5 is not above 5"),
        (m.Fences(epoch=1, generations={"toy": 5}), order(4), "generation 4 is not above 5"),
        (m.Fences(epoch=1, stopped={"toy": 6}), order(6), "generation 6 is not above 6"),
    ],
)
def test_lower_tokens_are_refused(fences: m.Fences, message: wire.StartGeneration, reason: str) -> None:
    node = Node(fences=fences)
    effects = node.order(message)
    assert kinds(effects) == ["StartRefused"]
    assert sent(effects)[0].fenced
    assert reason in sent(effects)[0].reason
    assert node.state.current is None


def test_jobs_have_generations_of_their_own() -> None:
    node = Node(fences=m.Fences(epoch=1, generations={"other": 7}))
    assert "Launch" in kinds(node.order(order(1)))


def test_orders_of_an_older_term_do_nothing() -> None:
    node = Node().running(1, epoch=3)
    assert node.order(stop(1, epoch=2)) == []
    assert node.order(wire.RequestSave(epoch=2, seq=1, job="toy", generation=1)) == []
    assert node.order(wire.ReleaseNode(epoch=2, seq=1)) == []


def test_a_stop_holds_and_is_told_when_all_are_gone() -> None:
    node = Node().running(1)
    assert kinds(node.order(stop(1))) == ["Persist", "Kill"]
    assert kinds(node.order(stop(1))) == ["Kill"]
    effects = node.feed(m.Exited(job="toy", generation=1, exits=(ended(0, number=9, torn_down=True), ended(1, number=9, torn_down=True))))
    assert kinds(effects) == ["WorkersExited", "stopped"]
    assert kinds(node.order(stop(1))) == ["stopped"]
    assert kinds(node.order(order(1))) == ["StartRefused"]


def test_a_stop_with_grace_ends_in_a_kill() -> None:
    node = Node().running(1)
    assert node.order(stop(1, grace=5.0))[-1] == m.Kill(job="toy", generation=1, signal=signal.SIGTERM)
    assert core.wake_at(node.state) == 105.0
    node.at = 105.0
    assert node.feed(m.Tick()) == [m.Kill(job="toy", generation=1, signal=signal.SIGKILL)]


def test_a_stop_of_a_generation_that_waits_takes_it_away() -> None:
    node = Node().running(1)
    node.order(order(2), stop(2))
    assert node.state.following is None
    effects = node.feed(m.Exited(job="toy", generation=1, exits=(ended(0, number=9), ended(1, number=9))))
    assert "Launch" not in kinds(effects)


def test_a_process_that_cannot_be_killed_makes_the_node_unusable() -> None:
    node = Node(kill_limit_seconds=10.0).running(1)
    node.order(order(2))
    node.feed(m.Exited(job="toy", generation=1, exits=(ended(0, number=9),)))
    assert core.wake_at(node.state) == 110.0
    node.at = 110.0
    effects = node.feed(m.Tick())
    assert kinds(effects) == ["Persist", "StartRefused", "HealthChanged", "Leaving", "Quit"]
    refused, health, _ = sent(effects)
    assert (refused.generation, refused.node_unusable) == (2, True)
    assert "pid 101" in refused.reason
    assert "host needs recycling" in health.verdict.reason
    assert effects[-1] == m.Quit(code=1, reason=refused.reason)
    assert kinds(node.order(order(3))) == ["StartRefused"]


def test_a_start_that_is_not_over_is_not_unkillable() -> None:
    node = Node(kill_limit_seconds=10.0)
    node.order(order(1), order(2))
    node.at = 110.0
    assert node.feed(m.Tick()) == []
    assert core.wake_at(node.state) == 120.0


@pytest.mark.parametrize(
    ("found", "attached", "declared", "torn_down"),
    [
        (ended(0), frozenset[int](), True, False),
        (ended(0), frozenset({0}), False, False),
        (ended(0, declared=True), frozenset({0}), True, False),
        (ended(0, number=9, declared=True), frozenset({0}), False, False),
        (ended(0, code=1), frozenset[int](), False, False),
        (ended(0, number=9, torn_down=True), frozenset[int](), False, True),
        (ended(0, declared=True, torn_down=True), frozenset({0}), True, False),
    ],
)
def test_what_counts_as_an_end(found: wire.WorkerExit, attached: frozenset[int], declared: bool, torn_down: bool) -> None:
    node = Node().running(1)
    effects = node.feed(m.Exited(job="toy", generation=1, exits=(found,), attached=attached))
    told = sent(effects, wire.WorkersExited)[0].exits[0]
    assert (told.declared_end, told.torn_down) == (declared, torn_down)


def test_workers_that_died_with_their_shim_while_being_stopped_are_torn_down() -> None:
    node = Node().running(1)
    node.order(stop(1))
    effects = node.feed(m.Exited(job="toy", generation=1, exits=(ended(0, number=9), ended(1, number=9)), lost=True))
    assert all(found.torn_down for found in sent(effects, wire.WorkersExited)[0].exits)


def test_the_end_of_all_is_a_phase() -> None:
    node = Node().running(1)
    assert kinds(node.feed(m.Exited(job="toy", generation=1, exits=(ended(0),)))) == ["WorkersExited"]
    assert kinds(node.feed(m.Exited(job="toy", generation=1, exits=(ended(1),)))) == ["WorkersExited", "finished"]
    assert kinds(node.feed(m.Exited(job="toy", generation=1, exits=(ended(1),)))) == []


def test_a_new_leader_is_told_all_phases() -> None:
    node = Node().running(1)
    node.feed(m.Disconnected())
    effects = node.feed(m.Connected(epoch=4))
    assert kinds(effects) == ["Persist", "fenced", "stopped", "started"]
    assert node.state.fences.epoch == 4


def test_phases_are_told_once_all_local_ranks_passed_them() -> None:
    node = Node().running(1)
    passed = [wire.WorkerPhase(generation=1, rank=rank, phase="restored", step=7, seconds=1.0 + rank) for rank in (0, 1)]
    assert node.feed(m.Said(passed[0])) == []
    effects = node.feed(m.Said(passed[1]))
    assert [(said.phase, said.step, said.seconds) for said in sent(effects)] == [("restored", 7, 2.0)]
    assert node.feed(m.Said(passed[1])) == []
    assert node.feed(m.Said(wire.WorkerPhase(generation=9, rank=0, phase="model"))) == []
    assert node.feed(m.Said(wire.WorkerPhase(generation=1, rank=3, phase="model"))) == []


def test_step_reports_are_folded_and_late_ones_do_not_wait() -> None:
    node = Node().running(1)
    report = [[wire.StepReport(generation=1, rank=rank, step=step, loss=float(step)) for rank in (0, 1)] for step in (1, 2)]
    assert node.feed(m.Said(report[0][0]), m.Said(report[1][0])) == []
    told = sent(node.feed(m.Said(report[1][1])))
    assert [(steps.step, [found.rank for found in steps.reports]) for steps in told] == [(1, [0]), (2, [0, 1])]


def test_saves_are_folded_to_the_worst() -> None:
    node = Node().running(1)
    node.order(wire.RequestSave(epoch=1, seq=1, job="toy", generation=1, stop_after=True))
    hello = wire.WorkerHello(job="toy", generation=1, rank=1, pid=101)
    assert node.feed(m.Said(hello)) == [
        m.ToWorkers(generation=1, control=wire.Control(save=True, stop_after_save=True), ranks=frozenset({1}))
    ]
    first = wire.SaveReport(generation=1, rank=0, step=5, outcome="snapshot", stall_seconds=0.2)
    second = wire.SaveReport(generation=1, rank=1, step=5, outcome="skipped", reason="no arena", stall_seconds=0.1)
    assert node.feed(m.Said(first)) == []
    told = sent(node.feed(m.Said(second)))[0]
    assert (told.state, told.stall_seconds, told.reason) == ("skipped", 0.2, "no arena")
    assert node.feed(m.Said(hello)) == []


def test_an_interval_is_repeated_to_a_worker_that_comes_back() -> None:
    node = Node().running(1)
    node.order(wire.SetInterval(epoch=1, seq=1, job="toy", generation=1, failures_per_second=0.5))
    (effect,) = node.feed(m.Said(wire.WorkerHello(job="toy", generation=1, rank=0, pid=100)))
    assert isinstance(effect, m.ToWorkers)
    assert effect.control == wire.Control(failures_per_second=0.5)


def test_a_busy_node_leaves_when_released_or_when_the_notice_is_over() -> None:
    for release in (True, False):
        node = Node().running(1)
        effects = node.feed(m.LeaveAsked(reason="SIGTERM", notice_seconds=30.0))
        assert sent(effects) == [wire.Leaving(reason="SIGTERM", notice_seconds=30.0)]
        assert kinds(node.order(order(2))) == ["StartRefused"]
        if not release:
            node.at = 130.0
        effects = node.order(wire.ReleaseNode(epoch=1, seq=1)) if release else node.feed(m.Tick())
        assert [effect.code for effect in effects if isinstance(effect, m.Quit)] == [0]


def test_nobody_is_asked_when_nobody_is_there() -> None:
    node = Node()
    node.feed(m.Disconnected())
    assert kinds(node.feed(m.LeaveAsked(reason="SIGTERM", notice_seconds=30.0))) == ["Leaving", "Quit"]


def test_an_adopted_generation_that_was_stopped_is_killed() -> None:
    node = Node(fences=m.Fences(epoch=1, generations={"toy": 1}, stopped={"toy": 1}))
    assert kinds(node.feed(m.Adopted(order=order(1), pids={0: 100, 1: 101}))) == ["Kill"]
    fresh = Node(fences=m.Fences(epoch=1, generations={"toy": 1}))
    assert fresh.feed(m.Adopted(order=order(1), pids={0: 100, 1: 101})) == []
    assert fresh.state.current is not None
    assert fresh.state.current.live == {0, 1}


def test_a_failed_start_is_told_and_the_next_one_goes_ahead() -> None:
    node = Node()
    node.order(order(1))
    effects = node.feed(m.StartFailed(job="toy", generation=1, reason="no space"))
    assert [(said.reason, said.fenced) for said in sent(effects, wire.StartRefused)] == [("no space", False)]
    assert "Launch" in kinds(node.order(order(2)))


@pytest.mark.parametrize("ranks", [(), (0, 1, 2)])
def test_more_workers_than_slots_or_none_are_refused(ranks: tuple[int, ...]) -> None:
    effects = Node(slots=2).order(order(1, ranks=ranks))
    assert kinds(effects) == ["StartRefused"]
    assert f"{len(ranks)} workers were ordered" in sent(effects)[0].reason


def test_without_a_leader_workers_go_on_for_the_stated_time() -> None:
    node = Node(static_seconds=600.0).running(1)
    node.feed(m.Disconnected())
    assert core.wake_at(node.state) == 700.0
    node.at = 699.0
    assert node.feed(m.Tick()) == []
    node.feed(m.Connected(epoch=1))
    assert core.wake_at(node.state) is None
    node.feed(m.Disconnected())
    node.at = 1299.0
    assert node.feed(m.Tick()) == [m.Kill(job="toy", generation=1, signal=signal.SIGKILL)]
    assert core.wake_at(node.state) == 1309.0
