"""Save on one mesh, load on others: real gloo ranks, DTensors, pipeline stages, two writers, bit for bit."""

from __future__ import annotations

import pytest

from regrow.ckpt import catalog

CHAIN = [
    ("dp=2,tp=2,pp=2", 0),
    ("dp=3,tp=1,pp=1", 3),
    ("dp=1,tp=2,pp=3", 0),
    ("dp=2,tp=2,pp=1", 3),
    ("dp=1,tp=1,pp=1", 0),
]


@pytest.mark.slow
async def test_any_mesh_to_any_other(ranks, writers, make_committer):
    point = None
    for number, (mesh, zero) in enumerate(CHAIN):
        spec = ranks.next_spec(mesh, point)
        committer = await make_committer(spec, writers)
        result = await ranks.phase(mesh, zero=zero, restore=point, steps=2)
        assert result["ok"], result["errors"]
        assert all(report[1] == "snapshot" for rank in result["ranks"] for report in rank["reports"])
        while (await committer.until("complete")).step != 2 * (number + 1):
            pass
        entry = ranks.newest()
        assert (entry.step, entry.generation, entry.samples) == (2 * (number + 1), number + 1, 16 * (number + 1))
        assert str(entry.mesh) == mesh
        if point is not None:
            assert entry.parent is not None
            assert entry.parent.record_digest == point.record_digest
        point = entry.restore_point()
    assert len(catalog.scan(ranks.checkpoints)) == 2 * len(CHAIN)


@pytest.mark.slow
async def test_random_streams_of_a_rank(ranks, writers, make_committer):
    mesh = "dp=2,tp=1,pp=1"
    committer = await make_committer(ranks.next_spec(mesh), writers)
    await ranks.phase(mesh, steps=1)
    await committer.until("complete")
    point = ranks.newest().restore_point()
    draws = []
    for again in ("dp=2,tp=1,pp=1", "dp=2,tp=1,pp=1", "dp=1,tp=2,pp=1", "dp=1,tp=2,pp=1"):
        ranks.next_spec(again)
        result = await ranks.phase(again, restore=point)
        assert result["ok"], result["errors"]
        draws.append([rank["draws"][0] for rank in result["ranks"]])
    assert draws[0] == draws[1]
    assert draws[2] == draws[3]
    assert draws[2][0] != draws[2][1]
    assert set(draws[0]).isdisjoint(draws[2])
