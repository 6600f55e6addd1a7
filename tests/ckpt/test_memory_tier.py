"""Snapshots that stay in memory: nothing is written, the next process on the node goes on from them, and what must not be taken is not."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch
from ckpt_small import Small

from regrow.ckpt import catalog, remembered
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


class Job:
    """A small job whose step 1 is a checkpoint on storage, in its first generation."""

    def __init__(self, folder, writer) -> None:
        self.folder, self.writer = folder, writer
        self.first = Small(folder, writer=writer.socket)

    async def begin(self, make_committer) -> Small:
        self.committer = await make_committer(self.first.state._place.spec, [self.writer])
        self.first.train(1)
        self.point = await self.to_storage(1)
        return self.first

    async def to_storage(self, step: int) -> RestorePoint:
        assert self.first.state.save(step, 4 * step).outcome == "snapshot"
        await self.committer.until("complete")
        settled(self.first)
        entry = catalog.newest_restorable(self.folder)
        assert entry is not None
        return entry.restore_point()

    def to_memory(self, step: int) -> None:
        assert self.first.state.save(step, 4 * step, memory=True).outcome == "snapshot"
        settled(self.first)

    def second(self, *, memory: bool = True) -> Small:
        """The process of the next generation, with other weights until it restores."""
        small = Small(self.folder, 2, self.point, seed=9, writer=self.writer.socket, check_first_step=False)
        place = small.state._place
        small.state._place = msgspec.structs.replace(place, spec=msgspec.structs.replace(place.spec, memory=memory))
        return small


@pytest.fixture
async def job(make_writer, make_committer, tmp_path):
    made = Job(tmp_path, await make_writer())
    await made.begin(make_committer)
    return made


async def test_the_next_process_goes_on_from_memory_and_nothing_is_written(job, tmp_path):
    first = job.first
    for step in (2, 3):
        first.train(1)
        job.to_memory(step)
    assert (first.state.counts.remembered, first.state.counts.durable) == (2, 1)
    assert len(list(tmp_path.glob("step-*"))) == 1, "of the checkpoint alone"
    wanted = {name: value.clone() for name, value in first.tensors().items()}
    first.state.close()
    first.train(3)
    second = job.second()
    assert second.state.restore() == 3
    assert second.state.recalled
    assert second.state.samples == 12
    assert second.state.loaded.bytes_read == 0, "nothing came from storage"
    for name, value in second.tensors().items():
        assert torch.equal(value, wanted[name]), name
    second.train(3)
    assert second.trace == first.trace[-3:], "random state, rates and moments go on too"


async def test_without_the_leaders_word_memory_is_left_alone(job):
    """The leader wants an older state: after a corruption, or because an operator says so."""
    job.first.train(1)
    job.to_memory(2)
    job.first.state.close()
    second = job.second(memory=False)
    assert second.state.restore() == 1
    assert not second.state.recalled


async def test_a_checkpoint_that_is_newer_than_memory_is_taken(job):
    for step, save in ((2, job.to_memory), (3, None)):
        job.first.train(1)
        if save is not None:
            save(step)
    job.point = await job.to_storage(3)
    job.first.state.close()
    second = job.second()
    assert second.state.restore() == 3
    assert not second.state.recalled


async def test_memory_that_turns_out_to_be_damaged_leads_to_storage(job, monkeypatch):
    """The arena was filled anew while it was being read: all ranks go to the checkpoint together."""
    job.first.train(1)
    job.to_memory(2)
    job.first.state.close()
    second = job.second()
    monkeypatch.setattr(second.state._sink, "borrow", lambda _: {})
    assert second.state.restore() == 1
    assert not second.state.recalled
    assert second.state.samples == 4


async def test_what_is_not_finite_is_not_remembered(job):
    first = job.first
    first.train(1)
    with torch.no_grad():
        first.model[0].weight[0, 0] = float("nan")
    job.to_memory(2)
    assert first.state.counts.not_durable == 1
    assert "model.0.weight" in first.state.counts.last_reason
    first.state.close()
    assert job.second().state.restore() == 1


async def test_a_writer_that_died_took_its_snapshots_with_it(job):
    job.first.train(1)
    job.to_memory(2)
    job.first.state.close()
    job.writer.kill()
    job.writer.start()
    assert job.second().state.restore() == 1


async def test_one_process_without_an_agent_says_that_it_keeps_nothing(tmp_path):
    alone = Small(tmp_path)
    alone.train(1)
    alone.state.save(1, 4, memory=True)
    alone.state.ready()
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
        (4, 7, "p", (3, 5, "q"), False),  # our own generation has nothing yet
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
    restore = RestorePoint(step=point[1], directory="x", record_digest=point[2], generation=point[0])
    assert remembered.continues(one, restore, 4) is wanted


def test_a_rank_that_could_not_take_it_up_is_heard_by_all():
    assert remembered.agree(lambda mine: [mine, b"rank 1: gone"], "") == "rank 1: gone"
    assert remembered.agree(lambda mine: [mine, b""], "") == ""
