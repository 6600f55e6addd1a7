from __future__ import annotations

import msgspec
import pytest
from world import POLICY, running

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core import rates
from regrow.supervisor.core.policy import Policy


def command(world: object, name: str) -> None:
    world.tell(e.CommandGiven(at=world.now, job="j", command=name))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "grace", "code"), [("stop", POLICY.stop_grace_seconds, 0), ("abort", 0.0, 1)])
def test_stop_and_abort(name: str, grace: float, code: int) -> None:
    world = running("a", "b")
    command(world, name)
    assert [(stop.node, stop.grace_seconds) for stop in world.take(a.StopWorkers)] == [("a", grace), ("b", grace)]
    assert world.job.outcome is not None
    assert (world.job.outcome.state, world.job.outcome.exit_code) == ("stopped", code)


def test_save_and_stop_waits_for_commit_and_exits() -> None:
    world = running("a")
    command(world, "save-and-stop")
    asked = world.take(a.AskSave)
    assert [item.stop_after for item in asked] == [True]
    world.step(4)
    world.commit(4)
    assert world.job.outcome is None
    for rank in (0, 1):
        world.exit(rank, exit_code=0, last_step=4)
    assert world.job.outcome is not None
    assert world.job.outcome.reason == "save-and-stop: saved step 4"
    assert world.job.outcome.exit_code == 0


def test_save_and_stop_of_a_hung_job_ends_and_says_so() -> None:
    world = running("a")
    command(world, "save-and-stop")
    world.wait(POLICY.save_seconds + 1)
    assert world.job.outcome is not None
    assert world.job.outcome.exit_code == 3
    assert len(world.take(a.StopWorkers)) == 1


def test_pause_holds_and_resume_goes_on_from_the_checkpoint() -> None:
    world = running("a", "b")
    command(world, "pause")
    world.step(4)
    world.commit(4)
    for rank in range(4):
        world.exit(rank, exit_code=0, last_step=4)
    assert world.job.paused
    world.wait(500)
    assert world.generation.stage == "ended"
    command(world, "run")
    assert world.generation.number == 2
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == 4
    assert not world.job.ledger.charges


@pytest.mark.parametrize(("step_seconds", "deadline_seconds"), [(1.0, POLICY.save_seconds), (40.0, 200.0)])
def test_a_save_that_growth_waits_for_has_time_for_some_steps(step_seconds: float, deadline_seconds: float) -> None:
    """A job shrunk to a fifth with steps of 40 s: the ranks agree on a save at one step, and take it at a later one."""
    world = running("a", "b", max_nodes=3, steps=3)
    learned = msgspec.structs.replace(world.job.learned, step_seconds=step_seconds)
    world.view = msgspec.structs.replace(
        world.view, jobs={"j": msgspec.structs.replace(world.job, learned=learned, step_seconds=(step_seconds,) * 3)}
    )
    assert rates.save_seconds(world.job, POLICY) == deadline_seconds
    world.join("c")
    world.wait(POLICY.growth_cooldown_seconds + 1)
    (save,) = world.take(a.AskSave)
    assert (save.purpose, save.deadline_seconds) == ("growth", deadline_seconds)


def test_growth_only_at_a_commit_after_the_cooldown() -> None:
    world = running("a", "b", max_nodes=3, steps=3)
    world.join("c")
    assert not world.take(a.AskSave)
    assert "cool-down" in world.reason
    world.steps(4, 3 + int(POLICY.growth_cooldown_seconds) + 1)
    assert [item.purpose for item in world.take(a.AskSave)] == ["growth"]
    world.commit(2)
    assert world.generation.number == 1
    world.commit(world.job.frontier)
    assert world.generation.spec.nodes == ("a", "b", "c")
    assert [item.kind for item in world.job.incidents] == ["growth"]
    assert not world.job.ledger.charges


def test_growth_that_does_not_pay_is_left_alone() -> None:
    world = running("a", "b", max_nodes=3, steps=3, policy=Policy(restart_seconds_prior=10_000.0))
    world.join("c")
    world.steps(4, 60)
    assert not world.take(a.AskSave)
    assert "no growth from 4 to 6 workers: gain" in world.reason


def test_growth_is_called_off_when_the_newcomer_goes() -> None:
    world = running("a", "b", max_nodes=3, steps=3)
    world.join("c")
    world.steps(4, 40)
    assert world.job.boundary is not None
    world.lose("c")
    world.commit(world.job.frontier)
    assert world.generation.number == 1
    assert world.job.boundary is None


def test_flapping_node_does_not_make_the_job_flap() -> None:
    world = running("a", "b", max_nodes=3, steps=3)
    for number in range(4, 34):
        if number % 2:
            world.join("c")
        else:
            world.lose("c")
        world.step(number)
    assert world.generation.number == 1


def test_operator_drain_moves_the_job_off_without_a_charge() -> None:
    world = running("a", "b")
    world.tell(e.NodeCommandGiven(at=world.now, node="b", command="drain"))
    world.step(4)
    world.commit(4)
    assert world.generation.spec.nodes == ("a",)
    assert not world.job.ledger.charges
    world.tell(e.NodeCommandGiven(at=world.now, node="b", command="uncordon"))
    world.steps(5, 60)
    assert [item.purpose for item in world.take(a.AskSave)] == ["drain", "growth"]


def test_cordon_leaves_what_runs_alone() -> None:
    world = running("a", "b")
    world.tell(e.NodeCommandGiven(at=world.now, node="b", command="cordon"))
    world.steps(4, 20)
    assert world.generation.number == 1
    world.exit(0, signal=9)
    world.wait(1)
    assert world.generation.spec.nodes == ("a",)


def test_automation_off_drains_nothing_by_itself() -> None:
    from regrow import wire

    world = running("a", "b", max_nodes=3)
    world.tell(e.AutomationSwitched(at=world.now, on=False))
    world.tell(e.NodeHealth(at=world.now, node="b", verdict=wire.HealthVerdict(state="unhealthy", action="replace", reason="ECC")))
    world.join("c")
    world.steps(4, 90)
    assert world.generation.number == 1
    assert not world.view.quarantine
    assert [page.node for page in world.take(a.Page)] == ["b"]
    world.tell(e.NodeCommandGiven(at=world.now, node="a", command="drain"))
    assert [item.purpose for item in world.take(a.AskSave)] == ["drain"]
