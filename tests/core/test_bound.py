"""What the loss of a rank costs where its parts of the state are nowhere else, said before anything is lost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.core.world import World, running

from regrow import wire
from regrow.supervisor import documents
from regrow.supervisor.core import events as e


def told(world: World, **detail: object) -> None:
    """A node says what its workers found out."""
    event = world.phase_event("a", "replicas", job="j", generation=world.generation.number)
    world.tell(msgspec.structs.replace(event, detail=detail))


def bound(world: World, **changes: Any) -> Any:
    """As `job show` has it."""
    return documents.job_document(world.view, msgspec.structs.replace(world.job, **changes), world.now)["checkpoint"]["bound"]


def tier(kind: Any, seconds: float, safe: float) -> wire.TierInterval:
    """How often it is saved to."""
    return wire.TierInterval(tier=kind, interval_seconds=seconds, safe_seconds=safe, rule="given", reason="")


def test_nothing_is_said_before_the_workers_know() -> None:
    world = running("a", "b")
    assert bound(world) is None
    told(world, ranks="many", nodes=1)
    assert bound(world) is None


def test_without_a_snapshot_it_is_all_then_the_age_of_the_checkpoint() -> None:
    world = running("a", "b")
    told(world, ranks=4, nodes=2)
    assert bound(world, checkpoints={}) == {"sole_ranks": 4, "sole_nodes": 2, "seconds": None, "source": "start"}
    world.steps(world.job.frontier + 1, world.job.frontier + 3)
    world.commit(world.job.frontier)
    world.wait(7)
    assert bound(world) == {"sole_ranks": 4, "sole_nodes": 2, "seconds": pytest.approx(7), "source": "checkpoint"}


def test_a_younger_snapshot_in_memory_bounds_it_and_an_older_one_does_not() -> None:
    world = running("a", "b")
    told(world, ranks=4, nodes=2)
    world.wait(10)
    number, step = world.generation.number, world.job.frontier + 1
    tiers = (tier("storage", 60, 1), tier("memory", 2, 0.5))
    world.tell(e.CheckpointMoved(at=world.now, job="j", generation=number, step=step, state="snapshot", tiers=tiers))
    assert bound(world)["seconds"] == pytest.approx(2.5)
    assert bound(world)["source"] == "memory"
    world.steps(step, step + 2)
    world.commit(step)
    world.wait(1)
    assert (bound(world)["source"], bound(world)["seconds"]) == ("checkpoint", pytest.approx(1))
    world.wait(9)
    assert bound(world)["source"] == "memory"


def test_it_is_of_a_generation() -> None:
    world = running("a", "b")
    told(world, ranks=4, nodes=2)
    world.exit(0, signal=9)
    world.wait(1)
    assert bound(world) is None
