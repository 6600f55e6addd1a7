"""What users and programs read: jobs, nodes and status as plain data (design.md, section 4)."""

from __future__ import annotations

from typing import Any

import msgspec

from regrow.supervisor.core import goodput, ledger, membership, phases, quarantine, rates, symptoms
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import GenerationView, Incident, JobView, Member, NodeView, View

PLANNED = "planned"
"""Cause of changes that we wanted (growth, drains by an operator): shown as changes, not as incidents."""


def status(view: View, now: float, *, name: str, leading: bool) -> dict[str, Any]:
    """The cluster at a glance."""
    return {
        "supervisor": name,
        "leading": leading,
        "epoch": view.epoch,
        "store_up": view.store_up,
        "automation": view.automation,
        "observed": [msgspec.to_builtins(item) for item in view.observed.values()],
        "nodes": [node(view, item, now) for _, item in sorted(view.nodes.items())],
        "jobs": [job_line(item, now) for _, item in sorted(view.jobs.items())],
        "quarantine": [msgspec.to_builtins(record) for _, record in sorted(view.quarantine.items()) if record.state != "healthy"],
    }


def job_state(job: JobView) -> str:
    """waiting, starting, running, recovering, stopping, pausing, parked, paused, done, failed, stopped."""
    if job.outcome is not None:
        return job.outcome.state
    if job.paused:
        return "paused"
    if job.command in ("stop", "save-and-stop", "abort"):
        return "stopping"
    if job.command == "pause":
        return "pausing"
    if job.parked:
        return "parked"
    generation = job.generation
    if generation is None:
        return "waiting"
    if generation.first_step_at is None and not _runs_without_steps(generation):
        return "starting" if not job.incidents else "recovering"
    return "running"


def _runs_without_steps(generation: GenerationView) -> bool:
    started = all("started" in member.phases or member.adopted for member in generation.members.values())
    return generation.stage in ("starting", "running") and started and symptoms.level(generation) == 0


def job_line(job: JobView, now: float) -> dict[str, Any]:
    """A job in a list."""
    whole = job_summary(job, now)
    kept = ("job", "state", "reason", "generation", "step", "mesh", "loss", "goodput", "ettr", "checkpoint", "restarts")
    return {name: whole[name] for name in kept} | {"newest_incident": whole["incidents"][-1] if whole["incidents"] else None}


_ADVICE_SECONDS = Policy().budget_window_seconds
"""Advice goes by failures of this time, as the decision not to grow does by default."""


def job_document(view: View, job: JobView, now: float) -> dict[str, Any]:
    """`job show`."""
    nodes = [_job_node(view, job, item, now) for _, item in sorted(view.nodes.items())]
    return job_summary(job, now) | {"nodes": nodes, "spec": msgspec.to_builtins(job.spec, str_keys=True)}


def job_summary(job: JobView, now: float) -> dict[str, Any]:
    """A job without its nodes and its specification."""
    generation = job.generation
    active = generation is not None and generation.stage != "ended"
    incidents = [item for item in job.incidents if item.cause != PLANNED]
    return {
        "job": job.spec.job,
        "state": job_state(job),
        "reason": _reason(job),
        "command": job.command,
        "generation": generation.number if generation is not None else 0,
        "epoch": generation.spec.epoch if generation is not None else 0,
        "step": _step(job),
        "frontier": job.frontier,
        "loss": job.loss,
        "samples": job.samples,
        "mesh": str(generation.spec.mesh) if generation is not None and active else "",
        "world_size": generation.spec.world_size if generation is not None and active else 0,
        "micro_batches": list(generation.spec.micro_batches) if generation is not None else [],
        "global_batch": job.spec.global_batch,
        "incidents": [incident_document(item) for item in incidents],
        "changes": [incident_document(item) for item in job.incidents if item.cause == PLANNED],
        "checkpoint": _checkpoint(job, now),
        "checkpoints": [
            {
                "step": item.step,
                "generation": item.generation,
                "directory": item.directory,
                "evidence": list(item.evidence),
                "damaged": item.damaged,
                "age_seconds": max(0.0, now - item.committed_at),
            }
            for _, item in sorted(job.checkpoints.items())
        ],
        "restarts": ledger.num_charges(job.ledger),
        "failures_per_hour": rates.failure_rate(job, now) * 3600,
        "advice": "failures come in batches: fix machines first" if rates.in_batches(job, now, _ADVICE_SECONDS) is not None else "",
        "goodput": goodput.ratio(job, now),
        "ettr": goodput.ettr(job, now),
        "lost_steps": job.effort.lost_steps,
        "step_seconds": rates.median_step(job),
        "digest_checks": dict(job.digest_checks),
        "outcome": msgspec.to_builtins(job.outcome) if job.outcome is not None else None,
    }


def _step(job: JobView) -> int:
    generation = job.generation
    if generation is not None and generation.completed_step is not None:
        return generation.completed_step
    return job.frontier


def _reason(job: JobView) -> str:
    if job.outcome is not None:
        return job.outcome.reason
    if job.parked:
        return job.parked
    return job.generation.spec.reason if job.generation is not None else ""


def _checkpoint(job: JobView, now: float) -> dict[str, Any]:
    usable = [item for item in job.checkpoints.values() if not item.damaged]
    tiers = [msgspec.to_builtins(one) for one in job.tiers]
    if not usable:
        void = msgspec.to_builtins(job.void_saves)
        return {"step": None, "age_seconds": None, "verified_step": None, "void": void, "tiers": tiers, "bound": _bound(job, None)}
    newest = max(usable, key=lambda item: item.step)
    verified = [item.step for item in usable if item.evidence]
    return {
        "step": newest.step,
        "age_seconds": max(0.0, now - newest.committed_at),
        "directory": newest.directory,
        "verified_step": max(verified) if verified else None,
        "void": msgspec.to_builtins(job.void_saves),
        "tiers": tiers,
        "bound": _bound(job, max(0.0, now - newest.committed_at)),
    }


def _bound(job: JobView, age_seconds: float | None) -> dict[str, Any] | None:
    """What the loss of a rank, or of a node, costs at most, where parts of the state are nowhere else; None: not known yet.

    `seconds`: of work, now: the age of the newest checkpoint, or of snapshots in memory at their interval; None: all since the start.
    """
    generation = job.generation
    if generation is None or generation.num_sole_ranks is None:
        return None
    memory = next((tier for tier in job.tiers if tier.tier == "memory" and tier.interval_seconds > 0), None)
    seconds, source = age_seconds, "checkpoint" if age_seconds is not None else "start"
    if memory is not None and (seconds is None or memory.interval_seconds + memory.safe_seconds < seconds):
        seconds, source = memory.interval_seconds + memory.safe_seconds, "memory"
    return {"sole_ranks": generation.num_sole_ranks, "sole_nodes": generation.num_sole_nodes, "seconds": seconds, "source": source}


def incident_document(item: Incident) -> dict[str, Any]:
    """One incident with its phases; they add up to `seconds`."""
    return {
        "id": item.id,
        "kind": item.kind,
        "cause": item.cause,
        "node": item.node,
        "rank": item.rank,
        "text": item.text,
        "rung": item.rung,
        "at": item.symptom_at,
        "generation_before": item.generation_before,
        "generation_after": item.generation_after,
        "frontier": item.frontier,
        "restored_step": item.restored_step,
        "lost_steps": max(0, item.frontier - item.restored_step) if item.restored_step is not None else None,
        "phases": phases.spans(item),
        "phase": phases.current(item),
        "seconds": phases.whole(item),
        "restart_seconds": phases.restart_seconds(item),
        "recovered": item.recovered_at is not None,
        "closed": item.closed,
    }


def _job_node(view: View, job: JobView, item: NodeView, now: float) -> dict[str, Any]:
    generation = job.generation
    member = generation.members.get(item.name) if generation is not None and generation.stage != "ended" else None
    ranks = [worker.rank for worker in member.workers] if member is not None else []
    return {
        "node": item.name,
        "state": node_state(view, item, member),
        "ranks": ranks,
        "why": membership.why_not(view, item, job),
        "silent_seconds": max(0.0, now - item.silent_since) if item.silent_since is not None else None,
        "health": item.health.state,
    }


def node_state(view: View, item: NodeView, member: Member | None) -> str:
    """gone, suspect, quarantined, draining, unhealthy, cordoned, member, spare."""
    record = quarantine.blocked(view, item)
    checks = (
        (not item.connected, "gone"),
        (item.silent_since is not None, "suspect"),
        (record is not None, "quarantined"),
        (bool(item.leaving) or item.name in view.drains, "draining"),
        (bool(item.unusable) or quarantine.is_bad(item), "unhealthy"),
        (item.name in view.cordoned, "cordoned"),
        (member is not None, "member"),
    )
    return next((name for holds, name in checks if holds), "spare")


def node(view: View, item: NodeView, now: float) -> dict[str, Any]:
    """`node show`."""
    jobs: list[dict[str, Any]] = []
    member: Member | None = None
    for name, job in view.jobs.items():
        if job.generation is not None and job.generation.stage != "ended" and item.name in job.generation.members:
            member = job.generation.members[item.name]
            jobs.append({"job": name, "generation": job.generation.number, "ranks": [worker.rank for worker in member.workers]})
    record = quarantine.blocked(view, item)
    return {
        "node": item.name,
        "state": node_state(view, item, member),
        "address": item.address,
        "incarnation": item.incarnation,
        "slots": item.slots,
        "connected": item.connected,
        "silent_seconds": max(0.0, now - item.silent_since) if item.silent_since is not None else None,
        "gone_seconds": max(0.0, now - item.disconnected_at) if item.disconnected_at is not None and not item.connected else None,
        "cordoned": item.name in view.cordoned,
        "draining": item.name in view.drains or bool(item.leaving),
        "unusable": item.unusable,
        "health": msgspec.to_builtins(item.health),
        "quarantine": msgspec.to_builtins(record) if record is not None else None,
        "devices": [device.uuid for device in item.devices],
        "hardware_id": item.hardware_id,
        "jobs": jobs,
    }


def where(job: JobView, rank: int | None) -> list[dict[str, Any]]:
    """`job where`: rank -> node, GPU and mesh coordinates of the current generation."""
    generation = job.generation
    if generation is None:
        return []
    found = [
        {
            "rank": worker.rank,
            "node": member.node,
            "local_rank": worker.local_rank,
            "device": worker.device_uuid,
            "coordinates": generation.spec.mesh.coordinates(worker.rank),
            "generation": generation.number,
        }
        for member in generation.members.values()
        for worker in member.workers
        if rank is None or worker.rank == rank
    ]
    return sorted(found, key=lambda item: item["rank"])
