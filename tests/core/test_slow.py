"""A rank that became slower than it was: when a spare takes its node's ranks, and when it is left alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.core.world import POLICY, World, running

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import observe
from regrow.supervisor.core.policy import Policy

MOVES = msgspec.structs.replace(POLICY, slow_ratio=0.1)


def with_spare(*, nodes: tuple[str, ...] = ("a", "b", "c"), policy: Policy = MOVES, **changes: Any) -> World:
    """A job on two nodes, ranks 2 and 3 on b; the others are spares."""
    settings: dict[str, Any] = {"max_nodes": 2, "min_nodes": 2, "mesh": None} | changes
    world = running(*nodes, policy=policy, **settings)
    assert world.generation.node_of(2) == "b"
    return world


def train(world: World, seconds: float, **slow: float) -> None:
    """A step a second; `slow`: {"r2": excess}."""
    ranks = {int(name[1:]): ratio for name, ratio in slow.items()}
    for _ in range(int(seconds)):
        world.step(world.job.frontier + 1, slow=ranks)


def test_a_spare_takes_the_ranks_at_a_saved_step_and_nobody_is_charged() -> None:
    world = with_spare()
    train(world, POLICY.slow_seconds - 1, r2=0.3)
    assert not world.take(a.AskSave), "not at once: it may pass"
    assert "rank 2 computes 30 % longer than it did: moved in 2 s" in world.reason
    train(world, 2, r2=0.3)
    (save,) = world.take(a.AskSave)
    assert save.purpose == "drain"
    saved = world.job.frontier
    world.commit(saved)
    assert tuple(world.generation.members) == ("a", "c")
    assert world.generation.spec.world_size == 4
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == saved
    change = world.job.incidents[-1]
    assert (change.kind, change.node, change.cause) == ("slow", "b", "planned")
    assert not world.job.ledger.charges
    assert world.generation.slow == {}, "what was measured dies with its generation"


@pytest.mark.parametrize(
    ("why", "nodes", "slow", "policy"),
    [
        ("passes over", ("a", "b", "c"), {}, {}),
        ("all are slow: no node is to blame", ("a", "b", "c"), {"r-1": 0.5}, {}),
        ("too little", ("a", "b", "c"), {"r2": 0.09}, {}),
        ("no spare", ("a", "b"), {"r2": 0.3}, {}),
        ("switched off", ("a", "b", "c"), {"r2": 0.3}, {"slow_ratio": 0.0}),
        ("does not pay", ("a", "b", "c"), {"r2": 0.11}, {"growth_horizon_seconds": 30.0, "restart_seconds_prior": 60.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_left_alone(why: str, nodes: tuple[str, ...], slow: dict[str, float], policy: dict[str, Any]) -> None:
    world = with_spare(nodes=nodes, policy=msgspec.structs.replace(MOVES, **policy))
    train(world, POLICY.slow_seconds - 1, r2=0.3)
    train(world, 3 * POLICY.slow_seconds, **slow)
    assert not world.take(a.AskSave), why
    assert world.generation.number == 1


def test_what_passes_while_it_is_being_saved_is_called_off() -> None:
    world = with_spare()
    train(world, POLICY.slow_seconds + 1, r2=0.3)
    assert world.take(a.AskSave)
    train(world, 1)
    world.commit(world.job.frontier)
    assert world.take(a.EndBoundary)
    assert world.generation.number == 1


def test_observed_only_and_within_the_budget_of_evictions() -> None:
    held = with_spare(policy=msgspec.structs.replace(MOVES, observe_only=frozenset({"drain"})))
    train(held, POLICY.slow_seconds + 5, r2=0.3)
    assert not held.take(a.AskSave)
    (note,) = [item for item in held.view.observed.values() if item.kind == "drain"]
    assert "drain b out of generation 1 of j: rank 2 computes 30 % longer" in note.would

    world = with_spare(policy=msgspec.structs.replace(MOVES, evictions_per_hour=1, breaker_share=0.0))
    train(world, POLICY.slow_seconds + 1, r2=0.3)
    world.commit(world.job.frontier)
    assert tuple(world.generation.members) == ("a", "c")
    assert observe.evicted(world.view, world.job, world.now) == {"b"}
    train(world, POLICY.slow_seconds + 5, r1=0.3)
    assert tuple(world.generation.members) == ("a", "c"), "a second one within the hour is left alone, and a person is called"
    assert [page for page in world.take(a.Page) if page.key == "evictions-j"]
