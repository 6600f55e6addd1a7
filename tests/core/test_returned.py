"""Who was called lost answers again and is the same process: the verdict is corrected, and the charge is taken back."""

from __future__ import annotations

import pytest
from world import LOST_PEER, World, hello, running

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core import ledger


def lost() -> World:
    """The agent of b stands still, its worker dies meanwhile: its peers lose it, and nothing is heard of b."""
    world = running("a", "b", "c")
    world.tell(e.NodeSilent(at=world.now, node="b", last_heard_at=world.now - 2))
    world.exit(0, exit_code=1, error=LOST_PEER)
    world.wait(20)
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.node, incident.cause) == ("node_lost", "b", "infrastructure")
    assert "b" not in world.generation.members
    assert len(world.job.ledger.charges) == 1
    world.take()
    return world


@pytest.mark.parametrize("connected", [True, False])
def test_the_same_process_answers_again(connected: bool) -> None:
    world = lost()
    if connected:
        world.tell(e.NodeHeard(at=world.now, node="b"))
    else:
        world.lose("b")
        world.tell(e.NodeJoined(at=world.now, hello=hello("b", highest_generation=1)))
    for number in (3, 4, 5):
        world.step(number)
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.cause) == ("node_lost", "unknown")
    assert "the same process" in incident.text
    (order,) = [action for action in world.take(a.SaveLedger) if action.incident]
    assert order.incident == incident.id
    assert not world.job.ledger.charges
    assert ledger.num_charges(world.job.ledger) == 1, "a restart it was, held against nobody"
    world.tell(e.NodeHeard(at=world.now, node="b"))
    world.step(6)
    assert not world.take(a.SaveLedger), "corrected once"


def test_another_process_proves_nothing() -> None:
    """The host may have been booted anew."""
    world = lost()
    world.lose("b")
    world.tell(e.NodeJoined(at=world.now, hello=hello("b", incarnation="b-2", highest_generation=1)))
    for number in (3, 4):
        world.step(number)
    world.tell(e.NodeSilent(at=world.now, node="b", last_heard_at=world.now - 2))
    world.tell(e.NodeHeard(at=world.now, node="b"))
    for number in (5, 6):
        world.step(number)
    assert world.job.incidents[-1].cause == "infrastructure"
    assert len(world.job.ledger.charges) == 1


@pytest.mark.parametrize(("away", "cause"), [("silent", "infrastructure"), ("disconnected", "infrastructure"), ("spare", "unknown")])
def test_one_of_several_that_were_lost_together_clears_nobody(away: str, cause: str) -> None:
    world = running("a", "b", "c", "d", max_nodes=3)
    assert "d" not in world.generation.members
    if away == "spare":
        world.lose("d")
        world.wait(120)
    world.tell(e.NodeSilent(at=world.now, node="b", last_heard_at=world.now - 2))
    if away == "silent":
        world.tell(e.NodeSilent(at=world.now, node="c", last_heard_at=world.now - 2))
    if away == "disconnected":
        world.lose("c")
    world.wait(20)
    incident = world.job.incidents[-1]
    assert (incident.kind, incident.cause) == ("node_lost", "infrastructure")
    world.tell(e.NodeHeard(at=world.now, node=incident.node))
    for number in (3, 4):
        world.step(number)
    assert world.job.incidents[-1].cause == cause


def test_a_verdict_is_corrected_within_the_hour() -> None:
    world = lost()
    world.step(3)
    world.now += 4000
    world.tell(e.NodeHeard(at=world.now, node="b"))
    world.step(4)
    assert world.job.incidents[-1].cause == "infrastructure"
