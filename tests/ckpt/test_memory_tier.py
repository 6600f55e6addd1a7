"""Snapshots that stay in memory: nothing is written, the next process on the node goes on from them, and what must not be taken is not."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch
from ckpt_small import Small

from regrow.ckpt import remembered
from regrow.ckpt.manifest import Note, Parent, RankManifest
from regrow.ckpt.protocol import Remembered
from regrow.ckpt.remembered import Choice, Head, Offer
from regrow.ids import MeshShape
from regrow.wire import RestorePoint

LIMIT = 60.0


def settled(small: Small) -> None:
    """Wait until the writer has said what became of every snapshot."""
    counts, deadline = small.state.counts, time.monotonic() + LIMIT
    while counts.durable + counts.remembered + counts.not_durable < counts.snapshots:
        assert time.monotonic() < deadline
        small.state.ready()


def next_one(folder, writer, generation: int, restore: RestorePoint | None = None, *, memory: bool = True) -> Small:
    """The process of the next generation, with other weights until it restores."""
    small = Small(folder, generation, restore, seed=9, writer=writer.socket, check_first_step=False)
    place = small.state._place
    small.state._place = msgspec.structs.replace(place, spec=msgspec.structs.replace(place.spec, memory=memory))
    return small


@pytest.fixture
async def writer(make_writer):
    return await make_writer()


async def test_the_next_process_goes_on_from_memory_and_nothing_is_written(writer, tmp_path):
    first = Small(tmp_path, writer=writer.socket)
    first.train(3)
    assert first.state.save(3, 12, memory=True).outcome == "snapshot"
    settled(first)
    first.train(1)
    assert first.state.save(4, 16, memory=True).outcome == "snapshot"
    settled(first)
    assert (first.state.counts.remembered, first.state.counts.durable) == (2, 0)
    assert not list(tmp_path.glob("step-*")), "no directory, no file"
    wanted = {name: value.clone() for name, value in first.tensors().items()}
    first.state.close()
    first.train(3)
    second = next_one(tmp_path, writer, 2)
    assert second.state.restore() == 4
    assert second.state.recalled
    assert second.state.samples == 16
    assert second.state.loaded.bytes_read == 0, "nothing came from storage"
    for name, value in second.tensors().items():
        assert torch.equal(value, wanted[name]), name
    second.train(3)
    assert second.trace == first.trace[-3:], "random state, rates and moments go on too"


async def test_without_the_leaders_word_memory_is_left_alone(writer, tmp_path):
    """The leader wants an older state: after a corruption, or because an operator says so."""
    first = Small(tmp_path, writer=writer.socket)
    first.train(1)
    first.state.save(1, 4, memory=True)
    settled(first)
    first.state.close()
    second = next_one(tmp_path, writer, 2, memory=False)
    assert second.state.restore() == 0
    assert not second.state.recalled


async def test_a_snapshot_in_memory_that_was_overwritten_is_not_taken(writer, tmp_path, make_committer):
    """Its arena is filled anew for a checkpoint; the other arena holds the one before, which is not newer than the checkpoint."""
    first = Small(tmp_path, writer=writer.socket)
    committer = await make_committer(first.state._place.spec, [writer])
    first.train(1)
    first.state.save(1, 4, memory=True)
    settled(first)
    first.train(1)
    first.state.save(2, 8)
    point = (await committer.until("complete")).pending
    settled(first)
    first.state.close()
    restore = RestorePoint(step=2, directory=point.directory, generation=1, samples=8)
    second = next_one(tmp_path, writer, 2, restore)
    assert second.state.restore() == 2
    assert not second.state.recalled, "step 1 is older than the checkpoint"


async def test_what_is_not_finite_is_not_remembered(writer, tmp_path):
    first = Small(tmp_path, writer=writer.socket)
    first.train(1)
    with torch.no_grad():
        first.model[0].weight[0, 0] = float("nan")
    first.state.save(1, 4, memory=True)
    settled(first)
    assert first.state.counts.not_durable == 1
    assert "model.0.weight" in first.state.counts.last_reason
    first.state.close()
    assert next_one(tmp_path, writer, 2).state.restore() == 0


async def test_a_writer_that_died_took_its_snapshots_with_it(writer, tmp_path):
    first = Small(tmp_path, writer=writer.socket)
    first.train(1)
    first.state.save(1, 4, memory=True)
    settled(first)
    first.state.close()
    writer.kill()
    writer.start()
    second = next_one(tmp_path, writer, 2)
    assert second.state.restore() == 0


async def test_one_process_without_an_agent_says_that_it_keeps_nothing(tmp_path):
    alone = Small(tmp_path)
    alone.train(1)
    alone.state.save(1, 4, memory=True)
    assert "outlives" in alone.state.counts.last_reason


# --- the choice ----------------------------------------------------------------------------------------------------


def head(step: int, rank: int, *, generation: int = 1, world: int = 2, digest: str = "same") -> Head:
    return Head(generation, step, f"/c/step-{step}-g{generation}", world, rank, f"{digest}{rank}")


WHOLE = Offer("a", (head(5, 0), head(6, 0)))


@pytest.mark.parametrize(
    ("offers", "wanted"),
    [
        ([], None),
        ([WHOLE], None),
        ([WHOLE, Offer("b", (head(5, 1),))], (5, ("a",), ("b",))),
        ([WHOLE, Offer("b", (head(5, 1), head(6, 1)))], (6, ("a",), ("b",))),
        ([WHOLE, Offer("b", (head(5, 1), head(6, 1), head(6, 0)))], (6, ("a", "b"), ("b",))),
        ([WHOLE, Offer("b", (head(5, 1), head(6, 1), head(6, 0, digest="other")))], (5, ("a",), ("b",))),
        ([WHOLE, Offer("b", (head(5, 1), head(6, 1), head(2, 0, generation=2, world=1)))], (2, ("b",))),
        ([WHOLE, Offer("b", (head(5, 1), head(6, 1, world=3)))], (5, ("a",), ("b",))),
    ],
)
def test_the_newest_that_is_whole(offers, wanted):
    choice = remembered.choose(offers)
    if wanted is None:
        assert choice is None
        return
    assert isinstance(choice, Choice)
    assert choice.directory.startswith(f"/c/step-{wanted[0]}-")
    assert choice.holders == wanted[1:]


@pytest.mark.parametrize(
    ("generation", "step", "parent", "point", "wanted"),
    [
        (3, 7, None, None, True),
        (4, 7, None, None, False),  # our own generation has nothing yet
        (3, 7, "p", None, False),  # it came from a checkpoint, the leader starts at step 0
        (3, 7, "p", (3, 5, "q"), True),  # the leader's checkpoint is of the same generation, and older
        (3, 5, "p", (3, 5, "q"), False),
        (3, 7, "p", (2, 5, "p"), True),  # both go back to the same checkpoint
        (3, 7, "other", (2, 5, "p"), False),  # another line of descent
        (3, 7, None, (2, 5, "p"), False),
        (2, 4, "p", (1, 5, "p"), False),
    ],
)
def test_only_what_continues_the_leaders_choice(generation, step, parent, point, wanted):
    note = Note(
        samples=1,
        mesh=MeshShape(),
        world_size=1,
        parent=Parent(directory="d", record_digest=parent, generation=1, step=1) if parent else None,
    )
    manifest = RankManifest(rank=0, file="f", size_bytes=1, digest="", gap_digest="", chunks=())
    one = Remembered(job="j", epoch=1, generation=generation, step=step, node="n", directory="/d", manifest=manifest, note=note)
    restore = RestorePoint(step=point[1], directory="x", record_digest=point[2], generation=point[0]) if point else None
    assert remembered.continues(one, restore, 4) is wanted


def test_a_rank_that_could_not_take_it_up_is_heard_by_all():
    assert remembered.agree(lambda mine: [mine, b"rank 1: gone"], "") == "rank 1: gone"
    assert remembered.agree(lambda mine: [mine, b""], "") == ""
