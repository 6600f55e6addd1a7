"""Batch arithmetic, layers on stages, rank groups, and the mesh of a job after its size changed."""

from __future__ import annotations

import itertools
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.parallel import batch, elastic, mesh, planner
from regrow.wire import JobSpec, ModelShape

DEMO = JobSpec(
    job="demo",
    argv=("train.py",),
    nproc_per_node=2,
    mesh=MeshShape(dp=2, tp=2, pp=2),
    model=ModelShape(layers=6, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=256, seq=64),
    global_batch=16,
    micro_batch=2,
)


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 64))
def test_split_is_exact_and_even(count: int, micro: int, dp: int) -> None:
    if count < dp:
        with pytest.raises(ConfigurationError, match="fewer than"):
            batch.split(count * micro, micro, dp)
        return
    counts = batch.split(count * micro, micro, dp)
    assert len(counts) == dp
    assert sum(counts) * micro == count * micro
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("total", "micro", "dp"), [(0, 1, 1), (8, 0, 1), (8, 1, 0), (-8, 1, 1), (9, 2, 1)])
def test_split_refuses(total: int, micro: int, dp: int) -> None:
    with pytest.raises(ConfigurationError) as caught:
        batch.split(total, micro, dp)
    assert caught.value.hint


@given(st.integers(1, 300), st.integers(1, 80))
def test_no_layer_vanishes(layers: int, pp: int) -> None:
    if layers < pp:
        with pytest.raises(ConfigurationError, match="cannot fill"):
            mesh.layers_per_stage(layers, pp)
        return
    counts = mesh.layers_per_stage(layers, pp)
    assert sum(counts) == layers
    assert len(counts) == pp
    assert max(counts) - min(counts) <= 1


def test_llama3_stages_are_short_at_both_ends() -> None:
    assert mesh.layers_per_stage(126, 16) == (7, *[8] * 14, 7)
    assert mesh.layers_per_stage(30, 4) == (7, 8, 8, 7)


def test_groups_follow_the_rank_order() -> None:
    shape = MeshShape(dp=2, tp=2, pp=2)
    assert mesh.groups(shape, "tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.groups(shape, "pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.groups(shape, "dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    for axis in mesh.AXES:
        for group in mesh.groups(shape, axis):
            others = [{k: v for k, v in shape.coordinates(rank).items() if k != axis} for rank in group]
            assert all(other == others[0] for other in others)


def test_llama3_figure_5_rank_coordinates() -> None:
    shape = MeshShape(tp=2, cp=2, pp=2, dp=2)
    for rank, axis in ((1, "tp"), (2, "cp"), (4, "pp"), (8, "dp")):
        assert shape.coordinates(rank) == {name: int(name == axis) for name in mesh.AXES}


@pytest.mark.parametrize(
    ("workers", "meshes"), [(8, {"2x2x2"}), (6, {"3x2x1", "1x2x3"}), (4, {"2x2x1", "1x2x2"}), (2, {"1x2x1"}), (1, {"1x1x1"})]
)
def test_the_demo_job_on_fewer_workers(workers: int, meshes: set[str]) -> None:
    made = planner.choose_mesh(DEMO, workers)
    assert made is not None
    assert f"{made.mesh.dp}x{made.mesh.tp}x{made.mesh.pp}" in meshes


@pytest.mark.parametrize("workers", range(1, 20))
def test_every_world_keeps_the_batch_and_all_layers(workers: int) -> None:
    made = planner.choose_mesh(DEMO, workers)
    assert made is not None
    assert sum(made.micro_batches) * DEMO.micro_batch == DEMO.global_batch
    assert sum(made.layers_per_stage) == 6
    assert made.workers_used == made.mesh.world_size <= workers
    assert made.mesh.tp <= 2


@pytest.mark.parametrize("workers", range(1, 25))
def test_no_mesh_is_better_than_the_chosen_one(workers: int) -> None:
    """Against every mesh of at most that many workers, by the same price."""
    spec = msgspec.structs.replace(DEMO, mesh=MeshShape(dp=8, tp=2, pp=2))
    made = planner.choose_mesh(spec, workers)
    assert made is not None
    prices: list[float] = []
    for dp, tp, pp in itertools.product(range(1, workers + 1), range(1, 3), range(1, 7)):
        one, _ = elastic._complete(spec, MeshShape(dp=dp, tp=tp, pp=pp))
        if one is not None and one.workers_used <= workers:
            prices.append(elastic._price(spec, one))
    assert elastic._price(spec, made) == pytest.approx(min(prices))


def test_a_large_job_is_chosen_quickly() -> None:
    shape = ModelShape(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, seq=8192)
    spec = JobSpec(job="big", argv=("t.py",), nproc_per_node=8, mesh=MeshShape(dp=128, tp=8, pp=16), model=shape, global_batch=2048)
    start = time.process_time()
    made = planner.choose_mesh(spec, 16376)
    assert time.process_time() - start < 1.0
    assert made is not None
    assert (made.mesh.tp, made.workers_used <= 16376) == (8, True)
    assert sum(made.micro_batches) == 2048


def test_tp_groups_do_not_lie_across_nodes() -> None:
    shape = ModelShape(layers=12, hidden=768, heads=12, kv_heads=12, ffn=3072, vocab=256, seq=64)
    spec = JobSpec(job="j", argv=("t.py",), nproc_per_node=8, mesh=MeshShape(dp=4, tp=8), model=shape, global_batch=4)
    for workers in range(1, 33):
        made = planner.choose_mesh(spec, workers)
        assert made is not None
        assert 8 % made.mesh.tp == 0


def test_a_large_plain_job_is_chosen_quickly() -> None:
    start = time.process_time()
    made = planner.choose_mesh(JobSpec(job="j", argv=("t.py",), global_batch=20000), 16384)
    assert time.process_time() - start < 0.5
    assert made is not None
    assert made.mesh.dp == 16384


def test_experts_stay_folded_into_the_data_axis() -> None:
    shape = ModelShape(layers=4, hidden=128, heads=4, experts=8)
    spec = JobSpec(job="moe", argv=("t.py",), nproc_per_node=2, mesh=MeshShape(dp=4, tp=2, ep=4), model=shape, global_batch=24)
    for workers in (7, 6, 5, 4):
        made = planner.choose_mesh(spec, workers)
        assert made is not None
        assert (made.mesh.dp * made.mesh.tp) % made.mesh.ep == 0


def test_no_model_keeps_tp_and_pp() -> None:
    spec = JobSpec(job="j", argv=("t.py",), mesh=MeshShape(dp=4, tp=2, pp=2), global_batch=8)
    made = planner.choose_mesh(spec, 13)
    assert made is not None
    assert made.mesh == MeshShape(dp=3, tp=2, pp=2)
    assert made.micro_batches == (3, 3, 2)
    assert planner.choose_mesh(spec, 3) is None


def test_plain_data_parallel_job_uses_everybody() -> None:
    made = planner.choose_mesh(JobSpec(job="j", argv=("t.py",)), 7)
    assert made is not None
    assert made.mesh == MeshShape(dp=7)


@pytest.mark.parametrize("workers", [3, 5, 7])
def test_a_plain_job_takes_everybody_even_where_the_batch_rounds_up(workers: int) -> None:
    made = planner.choose_mesh(JobSpec(job="j", argv=("t.py",), global_batch=8), workers)
    assert made is not None
    assert made.mesh.dp == workers
    assert sum(made.micro_batches) == 8


def test_table_wins_over_cost() -> None:
    spec = JobSpec(job="j", argv=("t.py",), mesh=MeshShape(dp=8), mesh_table={6: MeshShape(dp=2, pp=3)}, global_batch=8)
    made = planner.choose_mesh(spec, 7)
    assert made is not None
    assert made.mesh == MeshShape(dp=2, pp=3)
    assert "table" in made.reason


def test_why_a_mesh_cannot_run_a_job() -> None:
    assert elastic.why_not(DEMO, MeshShape(dp=2, tp=2, pp=2)) == ""
    assert "heads 4 is not a multiple of TP 3" in elastic.why_not(DEMO, MeshShape(tp=3))
    assert "PP 7 is more than 6 layers" in elastic.why_not(DEMO, MeshShape(pp=7))
    assert "fewer than 9 replicas" in elastic.why_not(DEMO, MeshShape(dp=9))


def test_table_that_cannot_be_kept_is_an_error() -> None:
    spec = JobSpec(job="j", argv=("t.py",), mesh_table={6: MeshShape(dp=6)}, global_batch=4)
    with pytest.raises(ConfigurationError, match="fewer than 6 replicas"):
        planner.choose_mesh(spec, 6)
