"""What `regrow plan` answers besides the plans: survivors, spares, placement, advice, reliability, pictures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from regrow.cli import plan_document, plan_inputs, plan_run
from regrow.errors import ConfigurationError, OperationalError
from regrow.parallel import advise, calibrate, picture, placement, planner, survive
from regrow.parallel.planner import Plan, Request, Result
from regrow.parallel.traffic import traffic

PICTURES = ("mesh", "schedule", "regime")


def calibrated(request: Request, path: Path, run: plan_run.Run | None = None) -> tuple[Request, dict[str, Any]]:
    """The request with constants fitted to a run's meshes or a file of measured ones, and the fit. A run's meshes are each judged
    on an inventory of their own size: it lost nodes and got them back."""
    samples = list(run.samples) if run is not None else calibrate.read(plan_inputs.read_text(path, "--calibrate"), str(path))
    if run is None:
        found = calibrate.calibrate(request, samples)
    else:
        found = calibrate.calibrate_all([(_of_size(request, sample.mesh.world_size), sample) for sample in samples])
    meshes = [
        {"mesh": str(sample.mesh), "measured_seconds": sample.step_seconds, "predicted_seconds": seconds}
        | ({"steps": run.steps[index]} if run is not None else {})
        for index, (sample, seconds) in enumerate(zip(samples, found.predicted, strict=True))
    ]
    return msgspec.structs.replace(request, constants=found.constants), msgspec.to_builtins(found) | {"meshes": meshes}


def _of_size(request: Request, workers: int) -> Request:
    """One node of that many GPUs: a mesh that has run needs no leave to."""
    there = request.inventory
    node = msgspec.structs.replace(there.nodes[0], gpus=workers)
    one = msgspec.structs.replace(there, nodes=(node,), nvlink_gpus=max(there.nvlink_gpus, workers))
    return msgspec.structs.replace(request, inventory=one, recompute=request.recompute or "none", fragmentation=0.0, context_bytes=0.0)


def add(document: dict[str, Any], request: Request, result: Result, flags: dict[str, Any]) -> None:
    """Fill in the answers that were asked for."""
    best = result.best
    if flags["rate_per_gpu_hour"] is not None:
        document["reliability"] = _reliability(request, flags["rate_per_gpu_hour"])
    if best is None:
        return
    if flags["table"]:
        document["table"] = table(request, flags["rate_per_gpu_hour"], recovery_of(flags))
    if flags["placement"]:
        document["placement"] = _placement(request, best)
    if flags["advise"]:
        document["advice"] = msgspec.to_builtins(advise.advise(request, best, flags["critical_batch"]))


def explain_refusal(document: dict[str, Any], request: Request) -> None:
    """Nearest valid plans when axes were forced, and how many nodes would do when the model does not fit."""
    forced = {axis: getattr(request, axis) for axis in ("dp", "tp", "pp", "cp", "ep") if getattr(request, axis) is not None}
    free = msgspec.structs.replace(request, dp=None, tp=None, pp=None, cp=None, ep=None)
    choices = [free] if forced else []
    if request.zero is not None or request.recompute is not None or request.schedule != "1f1b":
        choices.append(msgspec.structs.replace(free, zero=None, recompute=None, schedule="1f1b", virtual=1))
    for relaxed in choices:
        plans = planner.plan(relaxed, most=1000).plans
        if plans:
            near = sorted(plans, key=lambda one: sum(abs(math.log2(getattr(one.mesh, axis) / size)) for axis, size in forced.items()))
            document["nearest"] = [plan_document.plan(relaxed, one) for one in near[:3]]
            return
    needed = _nodes_needed(free)
    if needed:
        document["nodes_needed"] = needed
        document["notes"].append(f"{needed} nodes of this kind would hold it")


def _nodes_needed(request: Request) -> int:
    """Fewest equal nodes on which some plan fits, found by doubling and halving; 0: not within 4,096 times as many."""
    there = request.inventory
    node = max(there.nodes, key=lambda each: each.gpus)

    def fits(count: int) -> bool:
        nodes = tuple(msgspec.structs.replace(node, name=f"n{index}") for index in range(count))
        return (
            planner.plan(msgspec.structs.replace(request, inventory=msgspec.structs.replace(there, nodes=nodes)), most=1).best is not None
        )

    low, high = len(there.nodes), 2 * len(there.nodes)
    while not fits(high):
        low, high = high, 2 * high
        if high > 4096:
            return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def before_and_after(request: Request, lost: int, flags: dict[str, Any]) -> dict[str, Any]:
    """The plan before a loss, and the options after it."""
    plan_inputs.lose(request, lost)
    before = planner.plan(request, most=1).best
    if before is None:
        return {"before": None, "after_loss": None}
    found = survive.after_loss(request, before, lost, recovery_of(flags))
    options = [
        {
            "name": option.name,
            "mesh": plan_document.mesh(option.mesh) if option.mesh else None,
            "step_seconds": option.step_seconds if math.isfinite(option.step_seconds) else None,
            "moved_bytes_per_rank": option.moved_bytes,
            "transition_seconds": option.transition_seconds,
            "lost_seconds": option.lost_seconds,
            "gpus_used": option.plan.gpus_used if option.plan else None,
            "gpus_idle": option.plan.gpus_idle if option.plan else None,
            "reason": option.reason,
        }
        for option in found.options
    ]
    answer = {"lost_nodes": lost, "repair_hours": flags["repair_hours"], "options": options, "verdict": found.verdict}
    return {"before": plan_document.plan(request, before), "after_loss": answer}


def recovery_of(flags: dict[str, Any]) -> survive.Recovery:
    """What a change of mesh costs, as the flags say."""
    return survive.Recovery(
        reform_seconds=flags["reform_seconds"],
        restore_bytes_per_second=flags["restore_gb_per_second"] * 1e9,
        repair_seconds=flags["repair_hours"] * 3600.0,
    )


def table(request: Request, rate_per_gpu_hour: float | None, recovery: survive.Recovery) -> dict[str, Any]:
    """The best mesh for every number of surviving nodes with the change that leads there, and the number of spares where a failure
    rate is given."""
    rows = planner.plan_table(request)
    found = survive.changes(request, rows, recovery)
    made: dict[str, Any] = {
        "rows": [_row(row) | _change(change) for row, change in zip(rows, found, strict=True)],
        "verdict": _verdict(request, found, recovery),
    }
    if rate_per_gpu_hour is not None:
        per_node = rate_per_gpu_hour * request.inventory.gpus / len(request.inventory.nodes)
        made["spares"] = msgspec.to_builtins(survive.spare_nodes(rows, per_node, recovery.repair_seconds / 3600.0))
    return made


def _change(change: survive.Change | None) -> dict[str, Any]:
    if change is None:
        return {"change": None}
    return {
        "change": {
            "kind": change.kind,
            "mesh": plan_document.mesh(change.plan.mesh),
            "step_seconds": change.plan.step_seconds,
            "gpus_idle": change.plan.gpus_idle,
            "moved_bytes_per_rank": change.moved_bytes,
            "transition_seconds": change.transition_seconds,
            "lost_seconds": change.lost_seconds,
        }
    }


def _verdict(request: Request, found: tuple[survive.Change | None, ...], recovery: survive.Recovery) -> str:
    """Up to how many lost nodes the mesh stays, and where nothing fits any more."""
    if len(found) < 2 or found[0] is None:
        return "there is nothing to shrink"
    hours = f"a repair in {recovery.repair_seconds / 3600.0:g} h"
    first = next((lost for lost, change in enumerate(found) if change is None or change.kind == "new mesh"), None)
    if first is None:
        return f"for {hours} dropping replicas is best down to the last node"
    end = next((lost for lost, change in enumerate(found) if change is None), len(found))
    least = f"; with {end} nodes lost nothing fits" if end < len(found) else ""
    if first == end:
        return f"for {hours} dropping replicas is best while anything fits{least}"
    kept = f"up to {_nodes(first - 1)} lost drop replicas, " if first > 1 else ""
    share = f"one node is {request.inventory.gpus_per_node / request.inventory.gpus:.2%} of the GPUs"
    return f"for {hours} ({share}): {kept}from {_nodes(first)} lost on a new TP, PP, CP or EP can pay{least}"


def _nodes(number: int) -> str:
    """1 node, 2 nodes."""
    return f"{number} node" + ("" if number == 1 else "s")


def _row(row: planner.Row) -> dict[str, Any]:
    one = row.plan
    if one is None:
        return {"nodes": row.nodes, "gpus": row.gpus, "mesh": None}
    return {
        "nodes": row.nodes,
        "gpus": row.gpus,
        "mesh": plan_document.mesh(one.mesh),
        "zero_stage": one.zero_stage,
        "micro_batch": one.micro_batch,
        "micro_batches_most": one.micro_batches[0],
        "micro_batches_least": one.micro_batches[-1],
        "recompute": one.setup.recompute,
        "step_seconds": one.step_seconds,
        "gpus_used": one.gpus_used,
        "gpus_idle": one.gpus_idle,
    }


def _reliability(request: Request, rate: float) -> dict[str, float]:
    if not math.isfinite(rate) or rate <= 0:
        raise ConfigurationError(f"{rate}", where="--rate-per-gpu-hour", hint="give a finite number above 0")
    mtbf = 1.0 / (request.inventory.gpus * rate)
    return {"rate_per_gpu_hour": rate, "mtbf_hours": mtbf, "failures_per_day": 24.0 / mtbf, "p_no_failure_24h": math.exp(-24.0 / mtbf)}


def _placement(request: Request, best: Plan) -> dict[str, Any]:
    made = _place(request, best)
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(made.nodes):
        ranks.setdefault(node, []).append(rank)
    return {"order": made.order, "ranks": ranks, "idle": made.idle, "buddies": made.buddies, "warnings": list(made.warnings)}


def _place(request: Request, best: Plan) -> placement.Placement:
    moved = traffic(request.model, best.layers_per_stage, best.setup)
    return placement.place(best.mesh, request.inventory, dp_bytes=moved.dp, pp_bytes=moved.pp)


def _drawn_count(best: Plan) -> int:
    """At most 64 micro-batches are drawn; interleaving takes multiples of PP."""
    most = min(best.micro_batches[0], 64)
    return most - most % best.mesh.pp if best.setup.schedule == "interleaved" and most > best.mesh.pp else most


def write_picture(request: Request, best: Plan | None, kind: str, path: Path) -> None:
    """Draw the best plan.

    Raises:
        ConfigurationError: unknown picture, or no plan to draw.
        OperationalError: the file cannot be written.
    """
    if kind not in PICTURES:
        raise ConfigurationError(f"unknown picture {kind!r}", where="--picture", hint=f"one of {', '.join(PICTURES)}")
    if best is None:
        return
    if kind == "mesh":
        text = picture.mesh_svg(_place(request, best))
    elif kind == "schedule":
        text = picture.schedule_svg(best.setup.schedule, best.mesh.pp, _drawn_count(best), best.setup.virtual)
    else:
        seq = max(1, request.model.seq)
        points = advise.regimes(request, max(4096, best.gpus_used), max(2.0**26, float(request.global_batch * seq)))
        text = picture.regime_svg(points, best.gpus_used, float(request.global_batch * seq))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OperationalError(f"cannot write: {error.strerror}", where=str(path), hint="choose another --svg path") from error
