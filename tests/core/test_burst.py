"""Hosts that lose power together are one decision, although they fall silent one after the other."""

from __future__ import annotations

import pytest
from world import LOST_PEER, POLICY, World, running

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e


def silent(world: World, node: str, *, late: tuple[str, ...] = (), within: float = 0.5) -> None:
    """A node has not been heard for the limit of 2 s; others are late and would be silent within this time."""
    until = world.now + within if late else 0.0
    world.tell(e.NodeSilent(at=world.now, node=node, last_heard_at=world.now - 2.0, late=late, late_until=until))


def peer_fails(world: World) -> None:
    world.exit(0, exit_code=1, error=LOST_PEER)


def test_a_rack_is_one_decision_with_its_numbers() -> None:
    world = running("a", "b", "c", "d")
    silent(world, "b", late=("c", "d"))
    peer_fails(world)
    assert not world.take(a.RecordGeneration)
    assert "1 nodes of generation 1 are lost, 2 more have not beaten for over half of the silence limit: 0.50 s more" in world.reason
    world.now += 0.3
    silent(world, "c")
    silent(world, "d")
    world.wait(5)
    assert [record.spec.nodes for record in world.take(a.RecordGeneration)] == [("a",)]
    assert len(world.job.ledger.charges) == 1
    assert len(world.job.incidents) == 1


@pytest.mark.parametrize(
    ("late", "within", "decided_after"),
    [
        ((), 0.0, 0.0),  # nobody else is late: at once
        (("d",), 0.4, 0.4),  # it beats again: one beat was lost
        (("elsewhere",), 0.4, 0.0),  # late, and not a member
        (("c", "d"), 60.0, POLICY.burst_seconds - 2.0),  # never longer than the limit, counted from the first sign
    ],
)
def test_how_long_the_rest_of_a_burst_is_waited_for(late: tuple[str, ...], within: float, decided_after: float) -> None:
    world = running("a", "b", "c", "d")
    begin = world.now
    silent(world, "b", late=late, within=within)
    peer_fails(world)
    world.wait(10)
    (record,) = world.take(a.RecordGeneration)
    assert record.spec.nodes == ("a", "c", "d")
    decided = next(
        at for at, decision in world.log if any(isinstance(action, a.RecordGeneration) for action in decision.actions) and at >= begin
    )
    assert decided - begin == pytest.approx(decided_after, abs=0.01)


def test_a_late_node_that_was_heard_is_nobodys_business() -> None:
    world = running("a", "b", "c", "d")
    silent(world, "b", late=("c",), within=0.5)
    silent(world, "c")
    world.tell(e.NodeHeard(at=world.now, node="c"))
    world.wait(1)
    assert world.generation.number == 1
