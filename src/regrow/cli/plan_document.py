"""The planner's answer as plain data: the JSON that design.md promises, and more."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from regrow.ids import MeshShape
from regrow.parallel import comm, cost, memory, pipeline, planner, shape, survive
from regrow.parallel.inventory import Inventory
from regrow.parallel.mesh import chunk_sizes
from regrow.parallel.planner import Plan, Request, Result
from regrow.parallel.traffic import traffic

_MOST_REJECTED = 100


def document(request: Request, result: Result, notes: list[str]) -> dict[str, Any]:
    """The whole answer of one planning."""
    best = result.best
    if best is not None and best.usage.total > 0.95 * request.inventory.gpu_memory_bytes:
        share = best.usage.total / request.inventory.gpu_memory_bytes
        notes = [
            *notes,
            f"the best plan fills {share:.0%} of the memory, within the model's error of 10 %: measure it, or raise --reserve-gb",
        ]
    if best is not None and best.mesh.tp > request.inventory.nvlink_gpus:
        notes = [
            *notes,
            f"TP {best.mesh.tp} leaves the NVLink domain of {request.inventory.nvlink_gpus} GPUs, as was asked: expect the slow link",
        ]
    return {
        "inventory": inventory(request.inventory),
        "model": model(request.model),
        "best": plan(request, best) if best else None,
        "plans": [plan(request, each) for each in result.plans],
        "rejected": [{"mesh": mesh(each.mesh), "reason": each.reason} for each in result.rejected[:_MOST_REJECTED]],
        "rejected_count": len(result.rejected),
        "checkpoint_bytes": survive.state_bytes(request),
        "largest_model": largest(request.inventory, request.recipe),
        "notes": notes,
    } | _equal(request, best)


def _equal(request: Request, best: Plan | None) -> dict[str, Any]:
    """What it would cost to give every replica the same count, where the best plan does not."""
    if best is None or best.micro_batches[0] == best.micro_batches[-1]:
        return {}
    made = planner.plan(msgspec.structs.replace(request, equal_replicas=True, dp=None), most=1).best
    if made is None:
        return {"equal_replicas": None}
    slower = made.step_seconds / best.step_seconds - 1.0
    return {
        "equal_replicas": {"mesh": mesh(made.mesh), "step_seconds": made.step_seconds, "gpus_idle": made.gpus_idle, "slower_ratio": slower}
    }


def inventory(there: Inventory) -> dict[str, Any]:
    """Node and GPU counts; uneven nodes are listed."""
    sizes = [node.gpus for node in there.nodes]
    return {
        "nodes": len(there.nodes),
        "gpus_per_node": there.gpus_per_node,
        "gpus": there.gpus,
        "gpu_type": there.device.name,
        "gpu_memory_bytes": there.gpu_memory_bytes,
        "nvlink_gpus": there.nvlink_gpus,
        "uneven": sizes if len(set(sizes)) > 1 else [],
    }


def model(described: shape.Model) -> dict[str, Any]:
    """The model as it was understood."""
    parts = shape.counts(described)
    known = {name: value for name, value in msgspec.to_builtins(described).items() if value}
    return known | {"params": parts.total, "params_from_shape": shape.counted(described) or None, "active_params": parts.active}


def mesh(one: MeshShape) -> dict[str, int]:
    """Axis sizes."""
    return {name: getattr(one, name) for name in ("dp", "tp", "pp", "cp", "ep")}


def plan(request: Request, made: Plan) -> dict[str, Any]:
    """One PLAN of the contract, with details."""
    used, setup = made.usage, made.setup
    moved = traffic(request.model, made.layers_per_stage, setup)
    most = made.micro_batches[0]
    return {
        "mesh": mesh(made.mesh),
        "zero_stage": made.zero_stage,
        "micro_batch": made.micro_batch,
        "accumulation": most,
        "micro_batches": list(made.micro_batches),
        "zero_weight_micro_batches": _fillers(made),
        "global_batch": request.global_batch,
        "layers_per_stage": list(made.layers_per_stage),
        "memory_bytes": {
            "weights": used.weights,
            "gradients": used.gradients,
            "optimizer": used.optimizer,
            "activations": used.activations,
            "buffers": used.buffers,
            "total": used.total,
        },
        "memory_detail": {"fullest_stage": used.stage, "buffers": used.parts, "host_bytes": used.host, "recipe": setup.recipe.name}
        | _shards(request, made)
        | _activation(request, made),
        "bubble_fraction": made.bubble_fraction,
        "bubble_ratio": pipeline.bubble_ratio(setup.schedule, setup.pp, most, setup.virtual),
        "schedule": setup.schedule,
        "virtual_stages": setup.virtual,
        "recompute": setup.recompute,
        "sequence_parallel": setup.sequence_parallel and setup.tp > 1,
        "comm_bytes": {"dp": moved.dp, "tp": moved.tp, "pp": moved.pp, "cp": moved.cp, "ep": moved.ep},
        "comm_detail": moved.detail | {"tp_reference_loss": comm.tp_reference_loss(setup.tp)},
        "step_seconds": made.step_seconds,
        "gpus_used": made.gpus_used,
        "gpus_idle": made.gpus_idle,
        "reason": made.reason,
    } | _times(request, made)


def _fillers(made: Plan) -> int:
    """Micro-batches of weight zero that short replicas run so that all ranks issue the same collectives (ZeRO-3, EP)."""
    if made.zero_stage < 3 and made.mesh.ep == 1:
        return 0
    return made.micro_batches[0] * made.mesh.dp - sum(made.micro_batches)


def _shards(request: Request, made: Plan) -> dict[str, Any]:
    """Whether ZeRO's shares are whole; torch pads or leaves the last ranks shorter, which changes memory by one share at most.

    `shard_rows`: for a dimension of that many rows, pairs of (rows of a rank, number of such ranks) in rank order.
    """
    ranks = memory.shard_groups(made.setup)[0]
    if made.zero_stage == 0 or not request.model.layers:
        return {}
    rows = {name: size for name, size in (("hidden", request.model.hidden), ("ffn", request.model.ffn)) if size}
    uneven = [f"{name} {size} over {ranks}" for name, size in rows.items() if size % ranks]
    shares = {name: [list(pair) for pair in Counter(chunk_sizes(size, ranks)).items()] for name, size in rows.items()}
    return {"zero_ranks": ranks, "uneven_shards": uneven, "shard_rows": shares}


def _activation(request: Request, made: Plan) -> dict[str, Any]:
    if not request.model.known:
        return {}
    setup = made.setup

    def one(recompute: str, *, tp: int = 1, sequence_parallel: bool = False) -> float:
        return memory.activation_per_layer(
            request.model, setup.micro_batch, recompute, tp=tp, cp=setup.cp, sequence_parallel=sequence_parallel
        )

    return {
        "padded_vocab": shape.padded_vocab(request.model.vocab, setup.tp),
        "activation_per_layer_bytes": {
            "whole": {level: one(level) for level in memory.RECOMPUTE},
            "tp_only": {level: one(level, tp=setup.tp) for level in memory.RECOMPUTE},
            "tp_and_sequence_parallel": {level: one(level, tp=setup.tp, sequence_parallel=True) for level in memory.RECOMPUTE},
        },
        "micro_batches_in_flight": pipeline.in_flight(setup.schedule, setup.pp, setup.micro_batches, setup.virtual, used_stage(made)),
    }


def used_stage(made: Plan) -> int:
    """The stage whose memory is reported."""
    return made.usage.stage


def _times(request: Request, made: Plan) -> dict[str, Any]:
    times = made.times
    if times is None:
        return {}
    seq = request.model.seq
    return {
        "seconds": {
            name: getattr(times, name) for name in ("compute", "bubble", "tp", "ep", "cp", "pp", "dp", "optimizer", "overhead", "dp_hidden")
        },
        "mfu": times.mfu,
        "efficiency": times.efficiency,
        "tokens_per_second": request.global_batch * seq / times.step,
        "wall": msgspec.to_builtins(cost.wall(times, made.usage.total, request.inventory.gpu_memory_bytes, made.setup)),
    }


def largest(there: Inventory, recipe: memory.Recipe) -> dict[str, Any]:
    """The largest model whose state alone fits, per ZeRO stage over all GPUs, by formula; and a lecture's printed table."""
    made = {
        ("ddp", "zero1", "zero2", "zero3")[zero]: {
            "bytes_per_parameter": memory.bytes_per_parameter(there.gpus, zero, recipe),
            "billion": memory.largest_model(there.gpu_memory_bytes, there.gpus, zero, recipe) / 1e9,
        }
        for zero in range(4)
    }
    return {
        "recipe": recipe.name,
        "gpus": there.gpus,
        "by_formula": made,
        "lecture": memory.lecture_table(there.gpus, there.gpu_memory_bytes),
    }
