"""Goodput and ETTR from the accumulators of a job."""

from __future__ import annotations

import statistics

import msgspec

from regrow import wire
from regrow.supervisor.core.records import EffortRecord
from regrow.supervisor.core.view import Effort, JobView, NodeView, View

_change = msgspec.structs.replace


def reserve(effort: Effort, now: float, num_workers: int) -> Effort:
    """Count reserved GPU-seconds up to now, and from here on `num_workers` of them (spares and idle ones included)."""
    passed = max(0.0, now - effort.reserved_at)
    return _change(
        effort,
        reserved_gpu_seconds=effort.reserved_gpu_seconds + passed * effort.num_reserved,
        reserved_at=max(now, effort.reserved_at),
        num_reserved=num_workers,
    )


def completed(effort: Effort, *, seconds: float, world_size: int, num_new: int, median: float | None) -> Effort:
    """Steps beyond the frontier were completed in `seconds`."""
    best = effort.best_gpu_seconds_per_step
    if median is not None:
        best = median * world_size if best is None else min(best, median * world_size)
    return _change(effort, productive_seconds=effort.productive_seconds + (seconds if num_new else 0.0), best_gpu_seconds_per_step=best)


def untold(job: JobView, first: int, at: float) -> int:
    """Steps that were completed after the last leader's account and before step `first`, the first that this term heard of."""
    if job.past is None or job.step_seconds or at <= job.past.until:
        return 0
    return max(0, first - 1 - job.past.frontier)


def rolled_back(effort: Effort, *, num_steps: int, step_seconds: float) -> Effort:
    """Completed steps turned into lost work."""
    return _change(
        effort,
        lost_steps=effort.lost_steps + num_steps,
        productive_seconds=max(0.0, effort.productive_seconds - num_steps * step_seconds),
    )


def ratio(job: JobView, now: float) -> float | None:
    """Steps of the final lineage x the best GPU-seconds a step / all reserved GPU-seconds. None before the first step."""
    if job.past is not None and not job.step_seconds:
        return None  # how far it is was not told in this term
    whole = account(job, now)
    if whole.best_gpu_seconds_per_step is None or whole.reserved_gpu_seconds <= 0:
        return None
    return min(1.0, max(0, job.frontier - whole.base_step) * whole.best_gpu_seconds_per_step / whole.reserved_gpu_seconds)


def ettr(job: JobView, now: float) -> float | None:
    """Productive time / wall time. None before any time passed."""
    whole = account(job, now)
    wall = now - whole.since
    return min(1.0, whole.productive_seconds / wall) if wall > 0 else None


def account(job: JobView, now: float) -> EffortRecord:
    """What was counted in this term and in those before it. Between two terms what was reserved stayed reserved."""
    effort = reserve(job.effort, now, job.effort.num_reserved)
    past = job.past or EffortRecord(since=effort.since, until=effort.since, base_step=job.effort_base)
    best = [value for value in (effort.best_gpu_seconds_per_step, past.best_gpu_seconds_per_step) if value is not None]
    between = max(0.0, effort.since - past.until) * past.num_reserved
    return EffortRecord(
        since=past.since,
        until=effort.reserved_at,
        reserved_gpu_seconds=past.reserved_gpu_seconds + between + effort.reserved_gpu_seconds,
        num_reserved=effort.num_reserved,
        productive_seconds=past.productive_seconds + effort.productive_seconds,
        best_gpu_seconds_per_step=min(best, default=None),
        base_step=past.base_step,
        frontier=job.frontier,
    )


def scaling_efficiency(job: JobView) -> dict[str, float]:
    """E = S/k per mesh at the same global batch, relative to the smallest world that was measured."""
    if not job.mesh_seconds:
        return {}
    world, seconds = min(job.mesh_seconds.values())
    return {mesh: (seconds * world) / (taken * size) for mesh, (size, taken) in job.mesh_seconds.items() if taken > 0}


def median(values: tuple[float, ...]) -> float | None:
    """Median, or None of nothing."""
    return statistics.median(values) if values else None


def reserved_with(effort: Effort, view: View, spec: wire.JobSpec, newcomer: NodeView) -> int:
    """The same with a node that was not known before, from what was reserved without it: thousands join one after the other."""
    if len(view.nodes) <= max(spec.max_nodes, spec.min_nodes):
        return effort.num_reserved + min(newcomer.slots, spec.nproc_per_node)
    return reserved(view, spec)


def reserved(view: View, spec: wire.JobSpec) -> int:
    """Workers' places that are kept for a job: those of all known nodes, up to its greatest number of nodes."""
    most = max(spec.max_nodes, spec.min_nodes)
    slots = [min(node.slots, spec.nproc_per_node) for node in view.nodes.values()]
    return sum(slots) if len(slots) <= most else sum(sorted(slots, reverse=True)[:most])
