"""The checkers are proven by breaking what they watch: each fence is taken away in turn, and must be missed."""

from __future__ import annotations

import msgspec
import pytest

from regrow.ckpt.commit import Collector
from regrow.errors import InternalError
from regrow.supervisor.core import actions as a
from regrow.supervisor.core.turn import turn
from regrow.supervisor.sim import explore, faults
from regrow.supervisor.sim.checkers import SafetyError
from regrow.supervisor.sim.faults import Fault
from regrow.supervisor.sim.simulate import run_seed


def chaos(small, *, prepare=None, decide=turn, seeds=range(1, 13)):
    setup, workload = small(days=1.0)
    for seed in seeds:
        run_seed(setup, workload, lambda rng: faults.chaos(setup, rng), seed, prepare=prepare, decide=decide)


def scripted(small, found, *, prepare=None, decide=turn):
    setup, workload = small(nodes=8, days=0.2)
    return run_seed(setup, workload, lambda _rng: tuple(found), 1, prepare=prepare, decide=decide)


CRASH = Fault(at=3000.0, kind="program", nodes=(3,), component="x")


def test_control_nothing_is_broken(small) -> None:
    assert scripted(small, [CRASH]).charges == 1


def test_commit_without_the_comparison(small) -> None:
    """A save in flight when a worker crashes reaches the store after the next generation was recorded."""

    def drop(world) -> None:
        world.store.fence_holds = lambda _revision: True

    with pytest.raises(SafetyError, match="commits step"):
        chaos(small, prepare=drop)


def stands_still_before_its_record(world) -> None:
    """The first leader stands still between the decision after a crash and the record; a second one leads meanwhile."""
    first = world.leader
    journal = world.journal.turn

    def turn_and_stop(now, leader, events, result):
        journal(now, leader, events, result)
        if leader is first and now > 2900.0 and any(isinstance(action, a.RecordGeneration) for _, action in result.actions):
            leader.paused = True
            world.loop.after(6.0, lambda: world.takeover("s2"))
            world.loop.after(60.0, leader.resume)
            world.loop.after(65.0, lambda: world.retire(leader))

    world.journal.turn = turn_and_stop


def test_a_late_record_is_refused(small) -> None:
    result = scripted(small, [CRASH], prepare=stands_still_before_its_record)
    assert result.generations >= 2


def test_a_record_without_the_comparison(small) -> None:
    """A leader that stood still and goes on writes over its successor."""

    def drop(world) -> None:
        stands_still_before_its_record(world)
        world.store.holds = lambda _epoch, _revision: True

    with pytest.raises(SafetyError, match=r"epoch|recorded"):
        scripted(small, [CRASH], prepare=drop)


def with_old_orders():
    """A turn that, once a later generation has begun to start, sends the orders of the first one again."""
    sent: dict[int, list[tuple[int, a.Action]]] = {}
    began: dict[int, float] = {}

    def decide(view, events, policy, now):
        result = turn(view, events, policy, now)
        for seq, action in result.actions:
            if isinstance(action, a.StartMember):
                sent.setdefault(action.generation, []).append((seq, action))
                began.setdefault(action.generation, now)
        newest = max(began, default=0)
        if newest < 2 or now < began[newest] + 1.0 or 1 not in sent:
            return result
        return msgspec.structs.replace(result, actions=(*result.actions, *sent.pop(1)))

    return decide


def test_old_orders_are_refused(small) -> None:
    assert scripted(small, [CRASH], decide=with_old_orders()).charges == 1


def test_an_agent_without_its_fence(small) -> None:
    def drop(world) -> None:
        world.orders.agent_refuses = lambda _node, _epoch, _generation: ""

    with pytest.raises(SafetyError, match="obeys start"):
        scripted(small, [CRASH], prepare=drop, decide=with_old_orders())


def test_a_core_that_goes_back_too_far(small) -> None:
    def older(view, events, policy, now):
        result = turn(view, events, policy, now)
        changed = tuple(
            (seq, msgspec.structs.replace(action, spec=msgspec.structs.replace(action.spec, restore=None)))
            if isinstance(action, a.RecordGeneration)
            else (seq, action)
            for seq, action in result.actions
        )
        return msgspec.structs.replace(result, actions=changed)

    with pytest.raises(SafetyError, match="starts at step 0 although"):
        scripted(small, [CRASH], decide=older)


def test_a_core_that_charges_twice(small) -> None:
    def greedy(view, events, policy, now):
        result = turn(view, events, policy, now)
        jobs = {
            name: msgspec.structs.replace(job, ledger=msgspec.structs.replace(job.ledger, charges=job.ledger.charges * 2))
            for name, job in result.view.jobs.items()
        }
        return msgspec.structs.replace(result, view=msgspec.structs.replace(result.view, jobs=jobs))

    with pytest.raises(SafetyError, match="charged twice"):
        scripted(small, [CRASH], decide=greedy)


def test_a_core_that_does_not_recover(small) -> None:
    def deaf(view, events, policy, now):
        result = turn(view, events, policy, now)
        if now < 2000.0:
            return result
        return msgspec.structs.replace(result, actions=())

    setup, workload = small(nodes=8, days=0.2)
    with pytest.raises(SafetyError, match="no convergence"):
        run_seed(setup, workload, lambda _rng: (CRASH,), 1, decide=deaf, converge=True)


def test_checkpoint_states_times_crashes_to_the_end() -> None:
    found = explore.explore()
    assert found.states > 10_000
    assert found.crash_points > 10_000
    assert found.endings > 0


def test_the_exploration_leaves_nothing_out() -> None:
    """The same states breadth first, by the moves alone."""
    layer, known = {explore.State()}, {explore.State()}
    while layer:
        layer = {following for state in layer for _, following in explore.moves(state, most_crashes=1)} - known
        known |= layer
    assert explore.explore(most_crashes=1).states == len(known)
    assert {state.crashes for state in known} == {0, 1}


def test_the_exploration_sees_a_missing_fence() -> None:
    with pytest.raises(Exception, match="although generation 2 is current"):
        explore.explore(fenced=False)


class Hasty(Collector):
    """Complete with the first report."""

    def _missing(self, step: int) -> tuple[int, ...]:
        return ()


class Forgiving(Collector):
    """A report of another step counts."""

    def _missing(self, step: int) -> tuple[int, ...]:
        told = {rank for reports in self._reports.values() for report in reports.values() for rank in report.ranks}
        return tuple(rank for rank in range(2) if rank not in told)


@pytest.mark.parametrize("wrong", [Hasty, Forgiving])
def test_the_exploration_sees_a_wrong_collector(monkeypatch: pytest.MonkeyPatch, wrong: type[Collector]) -> None:
    monkeypatch.setattr(explore, "Collector", wrong)
    with pytest.raises(InternalError, match="a shard is missing"):
        explore.explore()
