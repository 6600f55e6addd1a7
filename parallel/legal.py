"""Why a mesh cannot run a model: each sentence names the factors and their values. Empty: it can."""

from __future__ import annotations

from regrow.ids import MeshShape
from regrow.parallel.inventory import Inventory
from regrow.parallel.shape import Model


def shape_problem(model: Model, mesh: MeshShape, *, sequence_parallel: bool = True, replicate_kv: bool = False) -> str:
    """What of the model's shape a mesh does not divide."""
    if not model.known:
        return ""
    tp = mesh.tp
    for name, size in (("heads", model.heads), ("FFN width", model.ffn), ("hidden size", model.hidden)):
        if size % tp:
            return f"{name} {size} is not a multiple of TP {tp}"
    if model.kv_heads % tp and not (replicate_kv and tp % model.kv_heads == 0):
        return f"KV heads {model.kv_heads} are not a multiple of TP {tp} (--replicate-kv copies them where TP is a multiple)"
    if model.seq % mesh.cp:
        return f"sequence {model.seq} is not a multiple of CP {mesh.cp}"
    if sequence_parallel and tp > 1 and (model.seq // mesh.cp) % tp:
        return f"sequence {model.seq} over CP {mesh.cp} is not a multiple of TP {tp}, which sequence parallelism needs"
    if mesh.pp > model.layers:
        return f"PP {mesh.pp} is more than {model.layers} layers: each stage holds at least one"
    return expert_problem(model, mesh)


def expert_problem(model: Model, mesh: MeshShape) -> str:
    """What is wrong with the expert axis. EP lies inside DP x CP x TP; it is no factor of the world."""
    if mesh.ep == 1:
        return ""
    if not model.experts:
        return f"EP {mesh.ep} for a model without experts"
    if model.experts % mesh.ep:
        return f"{model.experts} experts are not a multiple of EP {mesh.ep}"
    inner = mesh.dp * mesh.cp * mesh.tp
    if inner % mesh.ep:
        return f"EP {mesh.ep} does not divide DP {mesh.dp} x CP {mesh.cp} x TP {mesh.tp} = {inner}, in which it is folded"
    return ""


def world_problem(inventory: Inventory, mesh: MeshShape, *, tp_asked: bool) -> str:
    """Why the mesh does not find its GPUs."""
    if mesh.world_size > inventory.gpus:
        return (
            f"DP {mesh.dp} x TP {mesh.tp} x PP {mesh.pp}"
            + (f" x CP {mesh.cp}" if mesh.cp > 1 else "")
            + f" = {mesh.world_size} GPUs, {inventory.gpus} are there"
        )
    if mesh.tp > inventory.nvlink_gpus and not tp_asked:
        return f"TP {mesh.tp} would leave the NVLink domain of {inventory.nvlink_gpus} GPUs"
    groups = inventory.tp_groups(mesh.tp)
    needed = mesh.world_size // mesh.tp
    if needed > groups:
        inside = "a node" if inventory.nvlink_gpus <= inventory.gpus_per_node else f"an NVLink domain of {inventory.nvlink_gpus} GPUs"
        return f"DP {mesh.dp} x PP {mesh.pp} x CP {mesh.cp} takes {needed} x TP {mesh.tp} inside {inside}, there is room for {groups}"
    return ""


def axis_sizes(model: Model, limit: int) -> list[int]:
    """Sizes that heads, KV heads, FFN and hidden allow for TP, up to `limit`."""
    if not model.known:
        return [1 << power for power in range(max(1, limit).bit_length()) if 1 << power <= limit]
    return [tp for tp in range(1, limit + 1) if not any(size % tp for size in (model.heads, model.kv_heads, model.ffn, model.hidden))]


def stage_sizes(layers: int, limit: int) -> list[int]:
    """Pipeline sizes worth trying: for each height of the fullest stage the smallest number of stages that reaches it.

    More stages of the same height would only add bubble. Without a known number of layers: powers of two.
    """
    if not layers:
        return [1 << power for power in range(max(1, limit).bit_length()) if 1 << power <= limit]
    return sorted({-(-layers // height) for height in range(1, layers + 1)} & set(range(1, min(limit, layers) + 1)))
