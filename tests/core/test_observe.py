"""Trust is earned: observe-only for every kind of automatic action, budgets, one switch; spares go by priority."""

from __future__ import annotations

import msgspec
import pytest
from world import POLICY, World, hello, running, spec

from regrow import wire
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core import observe
from regrow.supervisor.core.policy import Policy


def only(*kinds: str, **more: object) -> Policy:
    return msgspec.structs.replace(POLICY, observe_only=frozenset(kinds), **more)


def sick(world: World, node: str) -> None:
    verdict = wire.HealthVerdict(state="unhealthy", action="reset", reason="XID 48", device_uuids=(f"GPU-{node}-0",), incident=f"i-{node}")
    world.tell(e.NodeHealth(at=world.now, node=node, verdict=verdict))


def would(world: World, kind: str) -> list[str]:
    return [item.would for item in world.view.observed.values() if item.kind == kind]


def test_observed_quarantine_and_drain_say_what_they_would_do_and_do_nothing() -> None:
    world = running("a", "b", "c", policy=only("quarantine", "drain"))
    sick(world, "b")
    world.wait(POLICY.save_seconds * 2)
    assert world.generation.number == 1
    assert not world.view.quarantine
    assert would(world, "quarantine") == ["quarantine GPU-b-0 of b: XID 48"]
    assert would(world, "drain") == ["drain b out of generation 1 of j: unhealthy: XID 48"]
    assert len(world.take(a.Observe)) == 2, "once for each occasion"


def test_observed_recovery_names_the_mesh_and_leaves_the_generation_alone() -> None:
    world = running("a", "b", policy=only("recovery"))
    world.exit(3, signal=9)
    world.wait(300)
    assert world.generation.number == 1
    assert not world.job.ledger.charges
    (text,) = would(world, "recovery")
    assert text.startswith("RecordGeneration: generation 2 of j")
    assert "restore step 2" in text


def test_observed_growth_says_the_gain_and_asks_for_no_save() -> None:
    world = running("a", "b", policy=only("growth"), max_nodes=4)
    world.join("c", "d")
    for number in range(4, 60):
        world.step(number)
    (text,) = would(world, "growth")
    assert "grow from 4 to 8 workers" in text
    assert not world.take(a.AskSave)
    assert world.generation.number == 1


def test_switch_off_observes_all_but_recovery_and_on_does_what_is_due() -> None:
    world = running("a", "b", "c")
    world.tell(e.AutomationSwitched(at=world.now, on=False, by="operator"))
    sick(world, "b")
    world.wait(POLICY.save_seconds * 2)
    assert world.generation.number == 1
    assert would(world, "quarantine")
    assert would(world, "drain")
    world.exit(0, signal=9)
    world.wait(5)
    assert world.generation.number == 2
    world.tell(e.AutomationSwitched(at=world.now, on=True, by="operator"))
    world.wait(POLICY.save_seconds * 2)
    assert world.view.quarantine["GPU-b-0"].state == "quarantined"
    assert "b" not in world.generation.members


def test_off_does_not_let_a_drain_that_was_asked_for_take_the_sick_along() -> None:
    world = running("a", "b", "c")
    world.tell(e.AutomationSwitched(at=world.now, on=False, by="operator"))
    sick(world, "b")
    world.tell(e.NodeCommandGiven(at=world.now, node="c", command="drain"))
    world.wait(0.1)
    (save,) = world.take(a.AskSave)
    assert save.reason == "c drained by an operator"


def test_evictions_of_an_hour_are_bounded_and_a_person_is_called() -> None:
    names = tuple("abcdefgh")
    policy = msgspec.structs.replace(POLICY, evictions_per_hour=2, breaker_share=0.0, breaker_nodes=99)
    world = running(*names, policy=policy, mesh=None, global_batch=0)
    for node in "bcd":
        sick(world, node)
        world.wait(POLICY.save_seconds * 2)
        world.step(world.job.frontier + 1)
    assert {"b", "c"} & set(world.generation.members) == set()
    assert "d" in world.generation.members
    assert len([page for page in world.take(a.Page) if page.key == "evictions-j"]) == 1
    assert would(world, "drain") == [f"drain d out of generation {world.generation.number} of j: unhealthy: XID 48"]
    world.now += observe.EVICTION_WINDOW_SECONDS
    world.wait(POLICY.save_seconds * 2)
    world.step(world.job.frontier + 1)
    world.wait(POLICY.save_seconds * 2)
    assert "d" not in world.generation.members, "an hour later the budget is there again"


@pytest.mark.parametrize("kind", observe.KINDS)
def test_every_kind_is_off_by_name_only(kind: str) -> None:
    world = World()
    assert observe.held(world.view, only(kind), kind)
    assert not observe.held(world.view, POLICY, kind)


# --- several jobs


def two(priorities: tuple[int, int], *names: str) -> World:
    """Jobs `j` and `k` submitted at once, each for two nodes."""
    world = World()
    world.join(*names)
    jobs = zip(("j", "k"), priorities, strict=True)
    world.tell(
        *(
            e.JobLoaded(at=world.now, spec=spec(job=name, priority=number, max_nodes=2, min_nodes=2, mesh=None), submitted=True)
            for name, number in jobs
        )
    )
    world.wait(POLICY.join_seconds + 0.1)
    return world


def test_nodes_go_to_the_job_of_higher_priority_and_the_other_waits_visibly() -> None:
    world = two((0, 5), "a", "b", "c")
    assert world.view.jobs["j"].generation is None
    assert world.view.jobs["j"].parked
    generation = world.view.jobs["k"].generation
    assert generation is not None
    assert generation.spec.nodes == ("a", "b")


def test_a_job_keeps_its_nodes_whatever_the_priority_of_a_newcomer() -> None:
    world = running("a", "b", max_nodes=2)
    world.tell(e.JobLoaded(at=world.now, spec=spec(job="k", priority=9, min_nodes=2, max_nodes=2, mesh=None), submitted=True))
    world.wait(60)
    assert world.generation.spec.nodes == ("a", "b")
    assert world.generation.number == 1
    assert world.view.jobs["k"].parked
    world.join("c", "d")
    world.wait(POLICY.join_seconds + 1)
    other = world.view.jobs["k"].generation
    assert other is not None
    assert other.spec.nodes == ("c", "d")


def test_one_spare_that_two_jobs_need_at_once_goes_to_the_higher_priority() -> None:
    world = two((0, 5), "a", "b", "c", "d")
    world.tell(e.NodeJoined(at=world.now, hello=hello("e")))
    jobs = world.view.jobs
    victims = {name: job.generation.spec.nodes[1] for name, job in jobs.items() if job.generation is not None}
    assert set(victims) == {"j", "k"}
    for number in (1, 2):
        world.now += 1
        for name in victims:
            world.tell(e.StepsCompleted(at=world.now, job=name, generation=jobs[name].generation.number, step=number, step_seconds=1.0))  # type: ignore[union-attr]
    world.tell(*(e.NodeDisconnected(at=world.now, node=node, reason="closed") for node in victims.values()))
    world.wait(60)
    generation = world.view.jobs["k"].generation
    assert generation is not None
    assert "e" in generation.spec.nodes
    assert world.view.jobs["j"].parked
    assert "e" not in (world.view.jobs["j"].generation.spec.nodes if world.view.jobs["j"].generation else ())  # type: ignore[union-attr]
