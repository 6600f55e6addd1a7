"""Two replicas differ: who was wrong is shown by the step done again, on a third device where there is one; the question outlives the leader."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from world import World, hello, running

from regrow import wire
from regrow.ids import MeshShape
from regrow.supervisor.core import events as e
from regrow.supervisor.core import third
from regrow.supervisor.core.records import LedgerRecord, Place, Try, Undecided

TRUE = "t"


def digests(world: World, step: int, wrong: dict[str, str], *, position: bool = False) -> None:
    """Each rank tells what its device makes of a step.

    Args:
        wrong: {device: what it has instead of the truth}.
        position: every position has a truth of its own.
    """
    size = world.generation.spec.mesh.replica_size
    told = {
        worker.rank: wrong.get(worker.device_uuid, TRUE) + (str(worker.rank % size) if position else "")
        for member in world.generation.members.values()
        for worker in member.workers
    }
    world.step(step)
    world.tell(e.DigestsReported(at=world.now, job="j", generation=world.generation.number, step=step, digests=told))


def until_the_tie(*nodes: str, wrong: dict[str, str], position: bool = False, **changes: Any) -> World:
    """Three steps at which all agree, the third one committed; after the fourth two replicas differ."""
    world = running(*nodes, steps=0, commit=None, **changes)
    for step in (1, 2, 3):
        digests(world, step, {}, position=position)
    world.commit(3)
    digests(world, 4, wrong, position=position)
    world.wait(1)
    assert (world.job.incidents[-1].kind, world.job.incidents[-1].rank) == ("sdc", -1)
    assert not world.view.quarantine
    assert world.generation.number == 2
    assert world.generation.spec.restore is not None
    assert world.generation.spec.restore.step == 3
    return world


def pair(*nodes: str, wrong: dict[str, str]) -> World:
    return until_the_tie(*nodes, wrong=wrong, nproc_per_node=1, mesh=MeshShape(dp=2), max_nodes=2)


@pytest.mark.parametrize(
    ("first", "again", "accused", "restarts"),
    [
        ({"GPU-a-0": "x"}, {}, "GPU-a-0", 0),  # one-shot, of the one that the spare stands in for: nothing to roll back
        ({"GPU-b-0": "x"}, {}, "GPU-b-0", 1),  # one-shot, of the one that goes on
        ({"GPU-a-0": "x"}, {"GPU-a-0": "x"}, "GPU-a-0", 0),  # sticky
        ({"GPU-b-0": "x"}, {"GPU-b-0": "x"}, "GPU-b-0", 1),
        ({"GPU-b-0": "x"}, {"GPU-b-0": "y"}, "GPU-b-0", 1),  # something else each time
        ({"GPU-a-0": "x", "GPU-b-0": "y"}, {"GPU-b-0": "z", "GPU-c-0": "u"}, "", 1),  # nothing comes again: nobody
    ],
)
def test_a_spare_does_the_step_in_place_of_one_of_two(first: dict[str, str], again: dict[str, str], accused: str, restarts: int) -> None:
    world = pair("a", "b", "c", wrong=first)
    assert set(world.generation.members) == {"b", "c"}, "a third device has a look"
    digests(world, 4, again)
    world.wait(1)
    assert set(world.view.quarantine) == ({accused} if accused else set())
    assert world.generation.number == 2 + restarts
    if accused:
        assert world.job.ledger.undecided is None
        node = accused.split("-")[1]
        assert world.view.quarantine[accused].state == "quarantined"
        assert node not in world.generation.members
        assert f"on {node}" in world.view.quarantine[accused].reason


@pytest.mark.parametrize("sick", ["GPU-a-0", "GPU-a-1", "GPU-b-0", "GPU-b-1"])
def test_without_a_spare_the_devices_of_a_node_change_their_ranks(sick: str) -> None:
    """A device that is always wrong in the same way: the step done again in place would say the same thing again."""
    world = until_the_tie("a", "b", wrong={sick: "x"}, position=True, mesh=MeshShape(dp=2, tp=2), in_place=True)
    order = {worker.rank: worker.device_uuid for member in world.generation.members.values() for worker in member.workers}
    assert order == {0: "GPU-a-1", 1: "GPU-a-0", 2: "GPU-b-1", 3: "GPU-b-0"}
    digests(world, 4, {sick: "x"}, position=True)
    world.wait(1)
    assert set(world.view.quarantine) == {sick}
    assert world.generation.number == 3
    assert not world.generation.spec.in_place, "a process would go on with the other's device"


def test_processes_do_not_go_on_with_the_device_of_another_rank() -> None:
    """After a generation whose ranks were moved within their nodes the next one is forked anew; the one after that goes on in place."""
    world = until_the_tie("a", "b", wrong={"GPU-a-0": "x"}, position=True, mesh=MeshShape(dp=2, tp=2), in_place=True)
    digests(world, 4, dict.fromkeys(("GPU-a-0", "GPU-a-1", "GPU-b-0", "GPU-b-1"), "z"), position=True)  # does not repeat itself: nobody
    found = []
    for step in (5, 6):
        world.step(step)
        world.exit(0, signal=9)
        world.wait(30)
        found.append(world.generation.spec.in_place)
    assert not world.view.quarantine
    assert found == [False, True]


@pytest.mark.parametrize("sick", ["a", "b", "c", "d"])
def test_without_a_spare_nodes_of_one_device_change_places(sick: str) -> None:
    wrong = {f"GPU-{sick}-0": "x"}
    world = until_the_tie(*"abcd", wrong=wrong, position=True, nproc_per_node=1, mesh=MeshShape(dp=2, tp=1, pp=2))
    assert set(world.generation.members) == set("abcd")
    assert list(world.generation.members) != list("abcd")
    digests(world, 4, wrong, position=True)
    world.wait(1)
    assert set(world.view.quarantine) == {f"GPU-{sick}-0"}


def test_two_devices_alone_that_each_repeat_themselves_accuse_nobody_and_the_question_ends() -> None:
    world = pair("a", "b", wrong={"GPU-a-0": "x"})
    for _ in range(third.MOST_TRIES + 1):
        digests(world, 4, {"GPU-a-0": "x"})
        world.wait(60)
    assert not world.view.quarantine


def test_of_two_devices_the_one_that_does_not_repeat_itself_is_accused() -> None:
    world = pair("a", "b", wrong={"GPU-a-0": "x"})
    digests(world, 4, {"GPU-a-0": "y"})
    world.wait(1)
    assert set(world.view.quarantine) == {"GPU-a-0"}


@pytest.mark.parametrize("sticky", [True, False])
def test_the_question_outlives_the_leader_that_had_it(sticky: bool) -> None:
    """Killed between the mismatch and the verdict: all that the next one has is what was written with the generation's record."""
    old = pair("a", "b", "c", wrong={"GPU-b-0": "x"})
    written = msgspec.json.encode(old.job.ledger)
    members = {name: member.workers for name, member in old.generation.members.items()}
    checkpoint = wire.CheckpointRecord(step=3, generation=1, epoch=1, directory="/ckpt/step-3-g1", record_digest="d")
    world = World()
    world.now = old.now + 5
    world.tell(
        e.JobLoaded(
            at=world.now,
            spec=old.job.spec,
            generation=old.generation.spec,
            members=members,
            ledger=msgspec.json.decode(written, type=LedgerRecord),
            checkpoints=(checkpoint,),
            incidents=old.job.incidents,
        )
    )
    for name in "abc":
        now = wire.RunningGeneration(job="j", epoch=1, generation=2, workers=members.get(name, ()), spec=old.generation.spec)
        world.tell(e.NodeJoined(at=world.now, hello=hello(name, highest_generation=2, running=now if name in members else None)))
    world.wait(5)
    assert world.generation.number == 2
    digests(world, 4, {"GPU-b-0": "x"} if sticky else {})
    world.wait(1)
    assert set(world.view.quarantine) == {"GPU-b-0"}


@pytest.mark.parametrize("mesh", [MeshShape(dp=2, tp=8, pp=1024), MeshShape(dp=512, tp=8), MeshShape(dp=256, tp=8, pp=8)])
def test_what_is_written_of_a_large_world_is_small(mesh: MeshShape) -> None:
    """16,384 ranks, of two replicas or many: the store takes 1.5 MB, and four answers may be kept."""
    world = running("a", "b")
    current = msgspec.structs.replace(world.generation, spec=msgspec.structs.replace(world.generation.spec, mesh=mesh))
    member = world.generation.members["a"]
    workers = tuple(wire.WorkerAssignment(rank=rank, local_rank=0, device_uuid=f"GPU-{rank:032x}") for rank in range(mesh.world_size))
    current = msgspec.structs.replace(current, members={"a": msgspec.structs.replace(member, workers=workers)})
    own = mesh.world_size // mesh.dp
    told = {rank: f"{rank % own:016x}" for rank in range(mesh.world_size)} | {own + 3: "f" * 16}
    asked = third.ask(None, current, 7, told)
    asked = third.ask(asked, current, 7, told)
    assert (own + 3 in asked.tries[0].digests) == (3 in asked.tries[0].digests) == (mesh.dp <= 256)
    assert len(msgspec.json.encode(asked)) < 100_000


def test_devices_of_several_nodes_are_nobody() -> None:
    mesh = MeshShape(dp=2, tp=2)
    here = {rank: Place(node="ab"[rank // 2], device=f"g{rank}", slot=rank % 2) for rank in range(4)}
    then = Try(digests={0: "x", 1: "t", 2: "t", 3: "y"}, places=here)
    now = Try(digests=dict.fromkeys(range(4), "t"), places=here)
    assert third.judge(Undecided(step=1, mesh=mesh, tries=(then, now))) == ()


def test_a_step_that_all_had_alike_and_otherwise_the_next_time_is_no_witness() -> None:
    here = {rank: Place(node="a", device=f"g{rank}", slot=rank) for rank in range(2)}
    tries = tuple(Try(digests=dict(enumerate(told)), places=here) for told in ("xy", "zz", "xx"))
    assert third.judge(Undecided(step=1, mesh=MeshShape(dp=2), tries=tries)) == ()
    assert third.judge(Undecided(step=1, mesh=MeshShape(dp=2), tries=(tries[0], tries[2]))) == (here[1],)
