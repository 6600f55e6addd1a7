"""The mesh of a running job after its number of workers changed: fast, from the job's specification alone.

The full planner (`planner.plan`) prices meshes by memory, links and time on a described inventory. A job that only
says "this mesh, this batch" is served here by what is always known: work per worker, pipeline bubble, exact batch.
"""

from __future__ import annotations

import msgspec

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.parallel import batch
from regrow.parallel.mesh import layers_per_stage
from regrow.wire import JobSpec, ModelShape

_OTHER_TP = 1.15
"""Price of another tensor-parallel size than the user's, as a factor of the step time. Ours: the user chose it for
reasons that the specification does not carry (memory, kernels)."""
_OTHER_PP = 1.02
"""Price of another pipeline split: ours, it only breaks ties."""


class MeshChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A mesh with everything that a generation needs of it."""

    mesh: MeshShape
    micro_batches: tuple[int, ...]
    """Micro-batches a step per data-parallel replica; empty when the job states no global batch."""
    layers_per_stage: tuple[int, ...]
    """Empty when the job states no number of layers."""
    zero_stage: int
    workers_used: int
    reason: str


def choose_mesh(spec: JobSpec, num_workers: int) -> MeshChoice | None:
    """The best mesh of at most `num_workers` workers that keeps the job's global batch exact; None when there is none.

    In this order: the job's `mesh_table`, the job's own mesh when all its workers are there, the cheapest legal mesh.
    Without a model or a mesh only the data-parallel axis varies. Tensor parallelism stays inside a node.
    """
    if num_workers < 1:
        return None
    listed = [count for count in spec.mesh_table if count <= num_workers]
    if listed:
        count = max(listed)
        made, why = _complete(spec, spec.mesh_table[count])
        if made is not None:
            return msgspec.structs.replace(made, reason=f"listed for {count} workers in the job's mesh table")
        if count == num_workers:
            raise ConfigurationError(f"mesh table entry for {count} workers: {why}", where="mesh_table", hint="correct or remove the entry")
    if spec.mesh is not None and spec.mesh.world_size <= num_workers:
        made, _ = _complete(spec, spec.mesh)
        if made is not None:
            return msgspec.structs.replace(made, reason=_with_idle("the mesh the job asked for", num_workers - made.workers_used))
    return _cheapest(spec, num_workers)


def why_not(spec: JobSpec, mesh: MeshShape) -> str:
    """Why a mesh cannot run this job; empty when it can."""
    return _complete(spec, mesh)[1]


def _cheapest(spec: JobSpec, num_workers: int) -> MeshChoice | None:
    best: tuple[float, int, MeshChoice] | None = None
    tried = 0
    for mesh in _candidates(spec, num_workers):
        made, _ = _complete(spec, mesh)
        tried += 1
        if made is None:
            continue
        key = (_price(spec, made), -made.workers_used)
        if best is None or key < best[:2]:
            best = (*key, made)
    if best is None:
        return None
    price, _, made = best
    reason = f"cheapest of {tried} meshes for {num_workers} workers: relative step time {price:.3g}"
    return msgspec.structs.replace(made, reason=_with_idle(reason, num_workers - made.workers_used))


def _with_idle(text: str, idle: int) -> str:
    return f"{text}; {idle} of the workers idle" if idle else text


def _candidates(spec: JobSpec, num_workers: int) -> list[MeshShape]:
    home = spec.mesh or MeshShape()
    if spec.mesh is None or spec.model is None or spec.model.layers < 1:
        dp = _most_replicas(spec, num_workers // home.replica_size, home)
        return [msgspec.structs.replace(home, dp=dp)] if dp else []
    found: list[MeshShape] = []
    for tp in range(1, min(num_workers, max(1, spec.nproc_per_node, home.tp)) + 1):
        if spec.nproc_per_node % tp and tp != home.tp:
            continue  # ranks are numbered through the nodes: such a TP group would lie across two of them
        for pp in range(1, min(spec.model.layers, num_workers // (tp * home.cp)) + 1):
            shape = MeshShape(tp=tp, pp=pp, cp=home.cp, ep=home.ep)
            dp = _most_replicas(spec, num_workers // shape.replica_size, shape)
            if dp:
                found.append(msgspec.structs.replace(shape, dp=dp))
    return found


def _most_replicas(spec: JobSpec, most: int, shape: MeshShape) -> int:
    """Replicas that workers, batch and expert axis allow; 0: none. Fewer are never faster, so only this many are tried."""
    if spec.global_batch and spec.micro_batch > 0:
        most = min(most, spec.global_batch // spec.micro_batch)
    while most > 1 and ((most * shape.cp * shape.tp) % shape.ep or not _equal_enough(spec, most)):
        most -= 1
    return most


def _equal_enough(spec: JobSpec, dp: int) -> bool:
    return not (spec.equal_replicas and spec.global_batch) or spec.global_batch // max(spec.micro_batch, 1) % dp == 0


def _price(spec: JobSpec, made: MeshChoice) -> float:
    """Time of a step in units of one micro-batch over all layers on one worker.

    The replica with the most micro-batches M sets the pace: (M + P - 1) slots, each the work of the fullest stage
    divided by TP x CP (bubble: https://arxiv.org/abs/1811.06965).
    """
    mesh, home = made.mesh, spec.mesh or MeshShape()
    slots = (max(made.micro_batches) if made.micro_batches else 1.0 / mesh.dp) + mesh.pp - 1
    stage = max(made.layers_per_stage) / sum(made.layers_per_stage) if made.layers_per_stage else 1.0 / mesh.pp
    price = slots * stage / (mesh.tp * mesh.cp)
    if mesh.tp != home.tp:
        price *= _OTHER_TP
    if mesh.pp != home.pp:
        price *= _OTHER_PP
    return price


def _complete(spec: JobSpec, mesh: MeshShape) -> tuple[MeshChoice | None, str]:
    why = _shape_forbids(spec.model, mesh)
    if why:
        return None, why
    try:
        counts = batch.split(spec.global_batch, spec.micro_batch, mesh.dp) if spec.global_batch else ()
        layers = spec.model.layers if spec.model else 0
        stages = layers_per_stage(layers, mesh.pp) if layers else ()
        if not _equal_enough(spec, mesh.dp):
            return None, f"replicas of DP {mesh.dp} would run {counts} micro-batches, and equal replicas are asked for"
    except ConfigurationError as error:
        return None, error.what
    made = MeshChoice(
        mesh=mesh, micro_batches=counts, layers_per_stage=stages, zero_stage=spec.zero_stage, workers_used=mesh.world_size, reason=""
    )
    return made, ""


def _shape_forbids(model: ModelShape | None, mesh: MeshShape) -> str:
    if model is None:
        return ""
    for name, size in (("heads", model.heads), ("KV heads", model.kv_heads), ("FFN width", model.ffn), ("hidden size", model.hidden)):
        if size and size % mesh.tp:
            return f"{name} {size} is not a multiple of TP {mesh.tp}"
    if model.layers and mesh.pp > model.layers:
        return f"PP {mesh.pp} is more than {model.layers} layers"
    if model.experts and mesh.ep > 1 and model.experts % mesh.ep:
        return f"{model.experts} experts are not a multiple of EP {mesh.ep}"
    return ""
