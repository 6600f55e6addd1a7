"""Workers that go on in another generation: the node machine as tables, the shim with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.agent.harness import Harness, until
from tests.agent.test_core import Node, ended, order, sent

from regrow import wire
from regrow.agent import machine as m
from regrow.agent import protocol
from regrow.agent.dispatch import Dispatcher
from regrow.agent.roster import process_state, start_time


def in_place(generation: int, **changes: Any) -> wire.StartGeneration:
    """An order that keeps processes."""
    made = order(generation, **changes)
    return msgspec.structs.replace(made, spec=msgspec.structs.replace(made.spec, in_place=True))


def watch(generation: int, rank: int) -> m.Said:
    """A worker says that it can change over."""
    return m.Said(wire.WorkerWatch(job="toy", generation=generation, rank=rank, pid=100 + rank))


def hello(generation: int, rank: int) -> m.Said:
    """A worker is there."""
    return m.Said(wire.WorkerHello(job="toy", generation=generation, rank=rank, pid=100 + rank))


def launches(effects: list[m.Effect]) -> list[m.Launch]:
    """Starts among effects."""
    return [effect for effect in effects if isinstance(effect, m.Launch)]


def test_survivors_are_kept_and_nothing_is_killed() -> None:
    node = Node().running(1)
    node.feed(watch(1, 0), watch(1, 1), m.Exited(job="toy", generation=1, exits=(ended(0, number=9),)))
    effects = node.order(in_place(2))
    assert not [effect for effect in effects if isinstance(effect, m.Kill)]
    (launch,) = launches(effects)
    assert (launch.before, launch.kept, launch.pids) == (1, {1: 1}, {1: 101})
    assert [phase.phase for phase in sent(effects, wire.GenerationPhase)] == ["fenced", "stopped"]
    assert isinstance(effects[0], m.Persist), "the fence is on disk before anybody is told"
    assert node.state.current is not None
    assert node.state.current.generation == 2


def test_ranks_may_move_workers_are_known_by_their_slot() -> None:
    node = Node().running(1, ranks=(2, 3))
    node.feed(watch(1, 2), watch(1, 3))
    (launch,) = launches(node.order(in_place(2, ranks=(0, 1))))
    assert launch.kept == {0: 2, 1: 3}
    assert launch.pids == {0: 102, 1: 103}


def test_workers_that_cannot_change_over_are_killed_as_ever() -> None:
    node = Node().running(1)
    effects = node.order(in_place(2))
    assert [effect.signal for effect in effects if isinstance(effect, m.Kill)] == [signal.SIGKILL]
    assert not launches(effects)


def test_an_order_that_does_not_keep_kills() -> None:
    node = Node().running(1)
    node.feed(watch(1, 0), watch(1, 1))
    assert [effect for effect in node.order(order(2)) if isinstance(effect, m.Kill)]


def test_a_refused_fence_keeps_nobody() -> None:
    node = Node().running(3)
    node.feed(watch(3, 0), watch(3, 1))
    effects = node.order(in_place(2))
    assert not launches(effects)
    assert sent(effects, wire.StartRefused)[0].fenced


def test_who_does_not_say_hello_in_time_is_replaced_and_only_he() -> None:
    node = Node().running(1)
    node.feed(watch(1, 0), watch(1, 1))
    node.order(in_place(2))
    node.feed(m.Started(job="toy", generation=2, pids={0: 100, 1: 101}))
    node.feed(hello(2, 0))
    node.at += node.state.regroup_seconds - 0.01
    assert not [effect for effect in node.feed(m.Tick()) if isinstance(effect, m.Replace)]
    node.at += 0.02
    (replace,) = [effect for effect in node.feed(m.Tick()) if isinstance(effect, m.Replace)]
    assert replace.ranks == {1}
    assert (replace.before, replace.pids[1]) == (1, 101)
    node.at += 100
    assert not [effect for effect in node.feed(m.Tick()) if isinstance(effect, m.Replace)], "once"


def test_who_was_forked_by_the_start_itself_is_not_replaced_again() -> None:
    node = Node().running(1)
    node.feed(watch(1, 0), watch(1, 1))
    node.order(in_place(2))
    node.feed(m.Started(job="toy", generation=2, pids={0: 100, 1: 999}))
    node.feed(hello(2, 0))
    node.at += 100
    assert not [effect for effect in node.feed(m.Tick()) if isinstance(effect, m.Replace)]


def test_who_is_on_his_way_gets_more_time_once_and_who_is_stuck_does_not() -> None:
    node = Node().running(1)
    node.feed(watch(1, 0), watch(1, 1))
    node.order(in_place(2))
    node.feed(m.Started(job="toy", generation=2, pids={0: 100, 1: 101}))
    node.feed(m.Said(wire.WorkerWatch(job="toy", generation=2, rank=0, pid=100, changing=True)))
    node.at += node.state.regroup_seconds + 0.01
    (replace,) = [effect for effect in node.feed(m.Tick()) if isinstance(effect, m.Replace)]
    assert replace.ranks == {1}
    node.at += node.state.regroup_seconds * (node.state.regroup_factor - 1) - 0.1
    assert not [effect for effect in node.feed(m.Tick()) if isinstance(effect, m.Replace)]
    node.at += 0.2
    (replace,) = [effect for effect in node.feed(m.Tick()) if isinstance(effect, m.Replace)]
    assert replace.ranks == {0}, "the other one was replaced before"


def test_who_moved_before_it_could_be_killed_gets_the_time_of_those_on_their_way_and_no_more() -> None:
    node = Node().running(1)
    node.feed(watch(1, 0), watch(1, 1))
    node.order(in_place(2))
    node.feed(m.Started(job="toy", generation=2, pids={0: 100, 1: 101}), hello(2, 0))
    node.at += node.state.regroup_seconds + 0.01
    (replace,) = [effect for effect in node.feed(m.Tick()) if isinstance(effect, m.Replace)]
    assert (replace.ranks, replace.changing) == ({1}, frozenset())
    node.feed(m.Said(wire.WorkerWatch(job="toy", generation=2, rank=1, pid=101, changing=True)))
    node.feed(m.Moved(job="toy", generation=2, ranks={1: 1}))
    node.at += node.state.regroup_seconds * (node.state.regroup_factor - 1) - 0.1
    assert not [effect for effect in node.feed(m.Tick()) if isinstance(effect, m.Replace)]
    node.at += 0.2
    (replace,) = [effect for effect in node.feed(m.Tick()) if isinstance(effect, m.Replace)]
    assert (replace.ranks, replace.changing) == ({1}, {1}), "that it is on its way saves it once"
    assert (replace.kept, replace.pids[1]) == ({0: 0, 1: 1}, 101)
    node.feed(m.Moved(job="toy", generation=1, ranks={1: 1}))
    assert node.state.current is not None
    assert node.state.current.regroup_deadline is None, "of a generation that is over"


def test_the_generation_before_is_forgotten_when_all_are_in_the_next_one() -> None:
    """Its store with it: there is no stop order in place that would end it, and they piled up."""
    node = Node().running(1)
    node.feed(watch(1, 0), watch(1, 1))
    effects = node.order(in_place(2))
    effects += node.feed(m.Started(job="toy", generation=2, pids={0: 100, 1: 101}), hello(2, 0), hello(2, 1))
    effects += node.feed(m.Said(wire.WorkerPhase(generation=2, rank=0, phase="first_step")))
    assert not [effect for effect in effects if isinstance(effect, m.Forget)], "rank 1 may still be in the one before"
    effects = node.feed(m.Said(wire.WorkerPhase(generation=2, rank=1, phase="first_step")))
    assert [effect for effect in effects if isinstance(effect, m.Forget)] == [m.Forget(job="toy", generation=1)]
    effects = node.feed(m.Said(wire.WorkerPhase(generation=2, rank=1, phase="first_step")))
    assert not [effect for effect in effects if isinstance(effect, m.Forget)], "once"


def test_the_leader_is_told_once_all_workers_of_the_node_can_change_over() -> None:
    node = Node().running(1)
    assert not sent(node.feed(watch(1, 0)), wire.GenerationPhase)
    (told,) = sent(node.feed(watch(1, 1)), wire.GenerationPhase)
    assert (told.phase, told.generation) == (wire.IN_PLACE_PHASE, 1)
    assert not sent(node.feed(watch(1, 1)), wire.GenerationPhase)


def test_all_there_in_time_nobody_is_replaced() -> None:
    node = Node().running(1)
    node.feed(watch(1, 0), watch(1, 1))
    node.order(in_place(2))
    node.feed(m.Started(job="toy", generation=2, pids={0: 100, 1: 101}), hello(2, 0), hello(2, 1))
    node.at += 100
    assert not [effect for effect in node.feed(m.Tick()) if isinstance(effect, m.Replace)]


SLEEPS = "import time\nprint('up', flush=True)\ntime.sleep(1000)\n"


async def test_the_shim_keeps_replaces_and_ends_them(tmp_path: Path) -> None:
    shim = Harness(tmp_path)
    try:
        await shim.up()
        script = shim.script(SLEEPS)
        workers = [shim.worker([script], rank) for rank in range(3)]
        first = await shim.start(workers)
        before = {worker.rank: worker.pid for worker in first.workers}
        await until(lambda: all(shim.output(rank) for rank in range(3)))
        os.kill(before[0], signal.SIGKILL)
        await shim.next(protocol.WorkerEnded)

        second = await shim.start(workers, generation=2, keep={1: before[1], 0: before[0]})
        pids = {worker.rank: worker.pid for worker in second.workers}
        assert pids[1] == before[1]
        assert [worker.method for worker in second.workers] == ["warm", "in_place", "warm"]
        assert pids[0] != before[0], "a process that died before the change is forked anew"
        assert pids[2] != before[2], "a worker that was not to be kept is not left running"
        await until(lambda: not start_time(before[2]))
        assert len(await shim.next(protocol.WorkerEnded)) == 1, "nobody hears of the end of what was not kept"

        third = await shim.launcher.replace(protocol.ReplaceWorkers(id=0, job="toy", generation=2, workers=(workers[1],)))
        replaced = {worker.rank: worker.pid for worker in third.workers}
        assert replaced[1] != pids[1]
        assert {rank: replaced[rank] for rank in (0, 2)} == {rank: pids[rank] for rank in (0, 2)}
        await until(lambda: not start_time(pids[1]))

        assert set(await shim.launcher.stop("toy", 2)) == set(replaced.values()), "whatever group they were started in"
        found = await shim.next(protocol.WorkerEnded, 4)
        assert {item.worker.pid for item in found[1:]} == set(replaced.values())
        assert all(item.worker.torn_down and item.generation == 2 for item in found[1:])
    finally:
        await shim.leave()


@pytest.mark.parametrize(
    ("at_first", "meanwhile", "state"),
    [
        ("current", "current", "T"),
        ("superseded", "superseded", "S"),
        ("ended", "ended", "S"),
        ("none", "none", "S"),
        ("current", "superseded", "S"),
        ("current", "none", "S"),
    ],
)
async def test_only_a_live_rank_of_the_current_generation_is_left_stopped(at_first: str, meanwhile: str, state: str) -> None:
    """Looking at stacks takes seconds: what was late by then may be over, and its pid somebody else's."""
    node = Node().running(1)
    assert node.state.current is not None
    local = msgspec.structs.replace(node.state.current, order=in_place(2))
    states = {
        "current": local,
        "superseded": msgspec.structs.replace(local, order=in_place(3)),
        "ended": msgspec.structs.replace(local, exits={1: ended(1)}),
        "none": None,
    }
    looks = iter([states[at_first]])

    class Agent:
        @property
        def state(self) -> m.NodeState:
            return msgspec.structs.replace(node.state, current=next(looks, states[meanwhile]))

    process = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        await until(lambda: process_state(process.pid) == "S")
        replace = m.Replace(local.order, frozenset({1}), before=1, kept={1: 1}, pids={1: process.pid})
        assert await Dispatcher(Agent(), {})._moved(replace) == {}  # type: ignore[arg-type]
        await until(lambda: process_state(process.pid) == state)
    finally:
        process.kill()
        await process.wait()
