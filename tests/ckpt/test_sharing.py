"""Replicas on several nodes read one copy together: who reads what, real ranks over gloo, damage that one finds, and when it pays."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_synthetic import shard
from hypothesis import given
from hypothesis import strategies as st

from regrow.ckpt.assemble import Checkpoint
from regrow.ckpt.sharing import PROBE_BYTES, Told, first_units, is_sharing_faster, plan_units

SHAPES = {"a": (4096, 1024), "b": (4096, 512), "c": (7,), "d": (64, 64), "empty": (0, 3)}


@given(replicas=st.integers(1, 6), shards=st.integers(1, 3), per_node=st.integers(1, 4))
def test_every_box_is_read_once_and_reaches_all_that_need_it(replicas, shards, per_node):
    world = replicas * shards
    nodes = [f"n{rank // per_node}" for rank in range(world)]
    held = [[shard(name, shape, (replicas, shards), (None, 0), rank) for name, shape in SHAPES.items()] for rank in range(world)]
    units = plan_units(held, nodes)
    for part in range(shards):
        group = [rank for rank in range(world) if rank % shards == part]
        mine = [unit for unit in units if unit.giver in group]
        if len({nodes[rank] for rank in group}) == 1:
            assert mine == [], "one node's ranks have a page cache between them"
            continue
        assert all({unit.giver, *unit.takers} == set(group) for unit in mine)
        assert sum(unit.box.nbytes for unit in mine) == sum(box.nbytes for box in held[part])
        given = [sum(unit.box.nbytes for unit in mine if unit.giver == rank) for rank in group]
        assert max(given) <= sum(given) / len(group) + (4 << 20), "the reading is not spread"
    first, rest = first_units(units)
    assert sorted([*first, *rest]) == units
    for giver in {unit.giver for unit in rest}:
        assert sum(unit.box.nbytes for unit in first if unit.giver == giver) >= PROBE_BYTES


def test_whether_it_pays_is_what_was_measured():
    def told(read_seconds: float, carry_seconds: float) -> list[Told]:
        return [Told(read_seconds, 1000, carry_seconds, 3000), Told(read_seconds, 1000, carry_seconds, 3000), Told(0.0, 0, 0.0, 0)]

    assert is_sharing_faster(told(read_seconds=1.0, carry_seconds=2.9))
    assert not is_sharing_faster(told(read_seconds=1.0, carry_seconds=3.1))
    assert not is_sharing_faster([Told()])


def flip(directory: Path, name: str) -> None:
    with Checkpoint(directory) as checkpoint:
        file, chunk = checkpoint.source.tensors[name][0]
    with (directory / file).open("r+b") as damaged:
        damaged.seek(chunk.at)
        byte = damaged.read(1)
        damaged.seek(chunk.at)
        damaged.write(bytes([byte[0] ^ 1]))


@pytest.mark.slow
async def test_four_replicas_on_two_nodes_read_one_copy(ranks, writers, make_committer):
    mesh = "dp=4,tp=1,pp=1"
    committer = await make_committer(ranks.next_spec(mesh), writers)
    assert (await ranks.phase(mesh, steps=1))["ok"]
    await committer.until("complete")
    await committer.close()
    entry = ranks.newest()
    with Checkpoint(Path(entry.directory)) as checkpoint:
        whole = sum(box.nbytes for box in checkpoint.boxes())
    for writer in writers:  # what they have in memory would be read there
        writer.kill()
        writer.start()
    for how, copies in (("always", 1), ("never", 4)):
        ranks.next_spec(mesh)
        result = await ranks.phase(mesh, restore=entry.restore_point(), read_once=how)
        assert result["ok"], result["errors"]
        read = [rank["loaded"]["bytes_from_storage"] for rank in result["ranks"]]
        assert sum(read) == copies * whole
        assert sum(rank["loaded"]["bytes_from_ranks"] for rank in result["ranks"]) == (4 - copies) * whole
        assert max(read) < whole or copies == 4
    flip(Path(entry.directory), "model.layers.1.up.weight")
    ranks.next_spec(mesh)
    result = await ranks.phase(mesh, restore=entry.restore_point(), read_once="always")
    assert result["errors"] == ["exit codes [1, 1, 1, 1]"], "all are told, nobody waits"
    assert len(result["failures"]) == 4
    for failure in result["failures"]:
        assert failure.startswith("DamagedCheckpointError: rank ")
        assert "tensor model.layers.1.up.weight: block 0" in failure
