"""Incidents of earlier terms, as a new leader loads them."""

from __future__ import annotations

import msgspec
from world import World, running, spec

from regrow import wire
from regrow.supervisor.core import events as e
from regrow.supervisor.core.view import Incident


def before() -> tuple[wire.GenerationSpec, dict[str, tuple[wire.WorkerAssignment, ...]], tuple[Incident, ...]]:
    """What the store holds after an incident that is not over."""
    world = running("a", "b")
    world.exit(0, signal=9)
    world.wait(1)
    current = world.generation
    assert (current.number, world.job.incidents[-1].closed) == (2, False)
    return current.spec, {name: member.workers for name, member in current.members.items()}, world.job.incidents


def successor(generation: wire.GenerationSpec | None, members: dict[str, tuple[wire.WorkerAssignment, ...]], *incidents: Incident) -> World:
    world = World()
    loaded = e.JobLoaded(at=world.now, spec=spec(max_nodes=2), generation=generation, members=members, incidents=incidents)
    world.tell(e.LeaderStarted(at=world.now, epoch=2), loaded)
    return world


def test_an_open_incident_goes_on_with_the_generation_that_was_to_end_it() -> None:
    generation, members, incidents = before()
    world = successor(generation, members, *incidents)
    assert world.job.incidents == incidents


def test_without_that_generation_it_is_closed_and_not_called_recovered() -> None:
    generation, members, incidents = before()
    other = msgspec.structs.replace(generation, generation=3)
    for world in (successor(other, members, *incidents), successor(None, {}, *incidents)):
        assert [(item.closed, item.recovered_at) for item in world.job.incidents] == [(True, None)]
