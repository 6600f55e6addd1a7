"""Scans look at what changed only: whatever happens, they find what a look at everything finds."""

from __future__ import annotations

import random

import pytest
from world import World, hello, running

from regrow import wire
from regrow.supervisor.core import events as e
from regrow.supervisor.core import membership, quarantine, standing
from regrow.supervisor.core.membership import Seat
from regrow.supervisor.core.memo import Changes, Scan
from regrow.supervisor.core.records import QuarantineRecord
from regrow.supervisor.core.view import JobView, View

NODES = ("a", "b", "c", "d", "s", "t")


def something(world: World, rng: random.Random) -> None:
    """A fact about a random node."""
    node, now = rng.choice(NODES), world.now
    keys = (f"hw-{node}", f"node:{node}", f"GPU-{node}-0")
    match rng.randrange(9):
        case 0:
            world.lose(node)
        case 1:
            world.tell(e.NodeJoined(at=now, hello=hello(node, slots=rng.choice((1, 2, 4)), incarnation=f"{node}-{rng.random()}")))
        case 2:
            world.tell(e.NodeSilent(at=now, node=node, last_heard_at=now - 2))
        case 3:
            world.tell(e.NodeHeard(at=now, node=node))
        case 4:
            world.tell(e.NodeCommandGiven(at=now, node=node, command=rng.choice(("cordon", "uncordon", "drain", "clear"))))
        case 5:
            state = rng.choice(("healthy", "unhealthy"))
            world.tell(e.NodeHealth(at=now, node=node, verdict=wire.HealthVerdict(state=state, action="replace", reason="XID 79")))
        case 6:
            record = QuarantineRecord(
                key=rng.choice(keys), state=rng.choice(("quarantined", "burn_in", "healthy")), since=now, until=now + 50, node=node
            )
            world.tell(e.QuarantineLoaded(at=now, records=(record,)))
        case 7:
            world.tell(e.SpareStoreChanged(at=now, node=node, address=rng.choice(("", f"{node}:{rng.randrange(1000)}"))))
        case _:
            world.tell(e.NodeJoined(at=now, hello=hello(node, hardware_id=rng.choice(("hw-a", f"hw-{node}", "")))))


def all_asked(view: View, job: JobView) -> dict[str, str]:
    """The answer by a look at every node."""
    return {name: why for name, node in view.nodes.items() if (why := membership.why_not(view, node, job))}


def seats_of(view: View, job: JobView, without: frozenset[str]) -> tuple[Seat, ...]:
    """Members of a next generation, by a look at every node: the last ones keep their ranks, a newcomer takes the place of one that is gone."""
    out = all_asked(view, job).keys() | without
    last = job.generation.spec.nodes if job.generation is not None else ()

    def seat(name: str) -> Seat:
        return Seat(node=name, slots=min(view.nodes[name].slots, job.spec.nproc_per_node))

    there = [name for name in last if name in view.nodes and name not in out]
    new = [name for name in sorted(view.nodes) if name not in last and name not in out and (not last or view.nodes[name].spare_store)]
    fresh = [seat(name) for name in new[: max(0, job.spec.max_nodes - len(there))]]
    found: list[Seat] = []
    for name in last:
        if name in there:
            found.append(seat(name))
            continue
        assert job.generation is not None
        took = next((other for other in fresh if other.slots == len(job.generation.members[name].workers)), None)
        if took is not None:
            fresh.remove(took)
            found.append(took)
    return (*found, *fresh)


@pytest.mark.parametrize("seed", range(12))
def test_who_is_blocked_and_who_may_be_a_member(seed: int) -> None:
    rng = random.Random(seed)
    world = running("a", "b", "c", "d", max_nodes=5)
    world.join("s")
    for _ in range(60):
        something(world, rng)
        world.now += rng.choice((0.0, 0.5, 40.0))
        world.tell(e.Tick(at=world.now))
        view, job = world.view, world.job
        assert membership.blocked(view, job) == all_asked(view, job), f"seed {seed}"
        without = frozenset(rng.sample(NODES, rng.randrange(2)))
        assert membership.eligible(view, job, frozenset(), without=without) == seats_of(view, job, without), f"seed {seed}"
        away = [node for node in view.nodes.values() if not node.reachable]
        expected = [n for n in view.nodes.values() if n in away or n.leaving or n.clear_asked or quarantine.is_bad(n)]
        assert list(standing.notable(view)) == expected, f"seed {seed}"


def test_scan_asks_what_changed_only_and_keeps_the_order() -> None:
    asked: list[float] = []

    def odd(value: float) -> bool:
        asked.append(value)
        return value % 2 == 1

    scan: Scan[float] = Scan(odd)
    items = {"a": 1001.0, "b": 1002.0, "c": 1003.0}
    assert scan.get(items) == (1001.0, 1003.0)
    asked.clear()
    items = items | {"b": 1005.0}
    assert scan.get(items) == (1001.0, 1005.0, 1003.0)
    assert asked == [1005.0]
    assert scan.get(items) == (1001.0, 1005.0, 1003.0)
    assert asked == [1005.0]
    items = items | {"a": 1004.0}
    assert scan.get(items) == (1005.0, 1003.0)
    assert scan.get({"c": 1003.0}) == (1003.0,)
    assert scan.get({}) == ()


def test_other_names_or_another_order_are_no_small_change() -> None:
    changes: Changes[object] = Changes()
    one, two, three = object(), object(), object()
    assert changes.look({"a": one, "b": two}) is None
    assert changes.look({"a": one, "b": three}) == [1]
    assert changes.look({"a": one, "b": three}) == []
    assert changes.look({"b": three, "a": one}) is None
    assert changes.look({"b": three, "a": one, "c": two}) is None
