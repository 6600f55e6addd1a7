"""When a worker that is left after the program's end counts as hung."""

from __future__ import annotations

from regrow import wire
from regrow.ids import MeshShape
from regrow.supervisor.core import events as e
from regrow.supervisor.core.view import ExitFact, GenerationView, Member
from regrow.supervisor.linger import Linger

LIMIT = 30.0


def generation(exits: dict[int, int]) -> GenerationView:
    """Ranks 0 and 1 on a, 2 and 3 on b, of a script that does not know Regrow; `exits`: {rank: exit code}, all at 10."""
    members = {
        node: Member(
            node=node,
            group_rank=0 if node == "a" else 1,
            workers=tuple(wire.WorkerAssignment(rank=rank, local_rank=rank % 2) for rank in ranks),
        )
        for node, ranks in {"a": (0, 1), "b": (2, 3)}.items()
    }
    spec = wire.GenerationSpec(job="j", generation=1, epoch=1, mesh=MeshShape(dp=4), world_size=4, nodes=("a", "b"))
    facts = {
        rank: ExitFact(
            node="a" if rank < 2 else "b",
            at=10.0,
            exit=wire.WorkerExit(rank=rank, local_rank=rank % 2, pid=1, exit_code=code, last_step=-1),
        )
        for rank, code in exits.items()
    }
    return GenerationView(spec=spec, stage="running", created_at=0.0, members=members, exits=facts)


def watch(linger: Linger, view: GenerationView, cpu: dict[int, tuple[float, float]], begin: float, end: float) -> list[e.ProgressStalled]:
    """Beats and looks every half second; `cpu`: {rank: (seconds at the begin, seconds per second)}."""
    found: list[e.ProgressStalled] = []
    for number in range(int((end - begin) * 2)):
        now = begin + number / 2
        linger.used({rank: first + rate * (now - begin) for rank, (first, rate) in cpu.items()}, now)
        event = linger.look(view, {}, now, LIMIT)
        found += [event] if event is not None else []
    return found


def test_an_idle_rank_is_found_after_the_limit_and_told_once() -> None:
    found = watch(Linger("j", 1), generation({0: 0, 1: 0, 2: 0}), {3: (5.0, 0.0001)}, 10.0, 100.0)
    assert [(event.at, event.since, event.lingering, [item.rank for item in event.ranks]) for event in found] == [(40.0, 10.0, True, [3])]


def test_a_rank_that_works_may_take_as_long_as_it_likes() -> None:
    assert watch(Linger("j", 1), generation({0: 0, 1: 0, 2: 0}), {3: (5.0, 0.02)}, 10.0, 500.0) == []


def test_nothing_is_said_while_the_program_runs_or_after_a_failure_or_without_knowledge() -> None:
    idle = dict.fromkeys(range(4), (5.0, 0.0))
    assert watch(Linger("j", 1), generation({}), idle, 10.0, 100.0) == []
    assert watch(Linger("j", 1), generation({0: 1}), idle, 10.0, 100.0) == []
    assert watch(Linger("j", 1), generation({0: 0, 1: 0}), {3: (5.0, 0.0)}, 10.0, 100.0) == []
    assert watch(Linger("j", 1), generation(dict.fromkeys(range(4), 0)), {}, 10.0, 100.0) == []


def test_a_silent_agent_says_nothing_about_its_workers() -> None:
    linger, view = Linger("j", 1), generation({0: 0, 1: 0, 2: 0})
    assert watch(linger, view, {3: (5.0, 0.0)}, 10.0, 35.0) == []
    assert linger.look(view, {}, 90.0, LIMIT) is None
    assert watch(linger, view, {3: (9.0, 0.0)}, 90.0, 119.0) == []
    assert len(watch(linger, view, {3: (9.0, 0.0)}, 119.0, 121.5)) == 1


def test_one_that_works_after_all_takes_it_back_and_can_be_found_again() -> None:
    linger, view = Linger("j", 1), generation({0: 0, 1: 0, 2: 0})
    assert len(watch(linger, view, {3: (5.0, 0.0)}, 10.0, 41.0)) == 1
    assert [type(event) for event in linger.used({3: 6.0}, 41.5)] == [e.ProgressResumed]
    assert len(watch(linger, view, {3: (6.0, 0.0)}, 42.0, 80.0)) == 1


def test_ranks_that_all_declared_their_end_and_do_not_leave_are_found() -> None:
    linger, view = Linger("j", 1), generation({})
    words = {rank: wire.RankProgress(rank=rank, started_step=9, applied_step=9, phase="finished", age_seconds=1.0) for rank in range(4)}
    linger.used(dict.fromkeys(range(4), 2.0), 10.0)
    linger.used(dict.fromkeys(range(4), 2.0), 12.0)
    assert linger.look(view, words, 12.5, LIMIT) is None
    assert linger.look(view, words, 12.5, 2.0) is not None
