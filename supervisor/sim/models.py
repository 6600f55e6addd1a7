"""Step time on every mesh, and the job as the core sees it."""

from __future__ import annotations

import msgspec

from regrow import wire
from regrow.ids import MeshShape
from regrow.parallel import planner
from regrow.parallel.inventory import uniform
from regrow.parallel.search import Request
from regrow.parallel.shape import Model
from regrow.supervisor.sim.setup import Setup

JOB = "train"
_LLAMA3 = Model(
    layers=126, hidden=16384, heads=128, kv_heads=8, head_dim=128, ffn=53248, vocab=128256, seq=8192, gated=True, tied=False, name="llama3"
)
_TABLE_NODES = 96
"""Survivor counts that are planned ahead; with fewer survivors only the data-parallel axis shrinks further."""
_TP = 8


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The job and its step times."""

    spec: wire.JobSpec
    step_seconds: dict[tuple[int, int], float]
    """{(dp, pp) in places: seconds} of planned meshes."""
    home: MeshShape
    full_seconds: float
    micro_batches: int
    source: str
    """Where the relative step times come from."""

    def seconds(self, mesh: MeshShape) -> float:
        """Seconds of a step. A mesh that was not planned is priced by its slots: (M + PP - 1) / PP against those of the full mesh."""
        known = self.step_seconds.get((mesh.dp, mesh.pp))
        if known is not None:
            return known
        return self.full_seconds * _slots(self.micro_batches, mesh) / _slots(self.micro_batches, self.home)


def _slots(micro_batches: int, mesh: MeshShape) -> float:
    """Time of a step in layers of one micro-batch: the fullest replica runs M micro-batches through P stages (arXiv:1811.06965)."""
    return (-(-micro_batches // mesh.dp) + mesh.pp - 1) / mesh.pp


def build(setup: Setup) -> Workload:
    """The job of a setup: fixed world, DP only, or with a table of the planner's meshes."""
    home, table, seconds, source = setup.home, {}, {}, "slots of the pipeline (M + PP - 1) / PP"
    if setup.strategy.replan and setup.mesh is None and setup.gpus_per_node == _TP and setup.places == 1 and setup.sequences == 0:
        planned = _planned(setup)
        if planned is not None:
            home, table, seconds = planned
            source = "parallel.cost for Llama 3 405B on H100, relative to the full mesh"
    least = setup.nodes if not setup.strategy.elastic else max(1, home.pp // setup.places)
    spec = wire.JobSpec(
        job=JOB,
        argv=("train.py",),
        nproc_per_node=setup.places,
        min_nodes=least,
        max_nodes=setup.nodes,
        mesh=home,
        mesh_table=table,
        global_batch=setup.global_batch,
        micro_batch=1,
        checkpoint=wire.CheckpointPolicy(
            path="/checkpoints",
            keep_last=setup.keep,
            max_interval_seconds=setup.max_interval_seconds,
            prior_failures_per_hour=setup.gpus * setup.rate_per_gpu_hour,
        ),
        max_restarts=1000,
    )
    return Workload(
        spec=spec,
        step_seconds=seconds,
        home=home,
        full_seconds=setup.step_seconds,
        micro_batches=setup.global_batch,
        source=source,
    )


def _planned(setup: Setup) -> tuple[MeshShape, dict[int, MeshShape], dict[tuple[int, int], float]] | None:
    """The planner's mesh for every number of survivors, tensor parallelism held at the node. None: the model does not fit."""
    request = Request(
        model=_LLAMA3, inventory=uniform(setup.nodes, setup.gpus_per_node), global_batch=setup.global_batch, micro_batch=(1,), tp=_TP
    )
    rows = planner.plan_table(request, least_nodes=max(1, setup.nodes - _TABLE_NODES))
    full = rows[0].plan
    if full is None or full.mesh.cp > 1 or full.mesh.world_size != setup.nodes * setup.gpus_per_node:
        return None
    table: dict[int, MeshShape] = {}
    seconds: dict[tuple[int, int], float] = {}
    for row in rows:
        if row.plan is None:
            break
        mesh = MeshShape(dp=row.plan.mesh.dp, pp=row.plan.mesh.pp)
        table[row.nodes] = mesh
        seconds[mesh.dp, mesh.pp] = setup.step_seconds * row.plan.step_seconds / full.step_seconds
    return table[setup.nodes], table, seconds
