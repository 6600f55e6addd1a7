"""What holds now, as samples: role, nodes and jobs of a view. Nothing is kept between two scrapes."""

from __future__ import annotations

from importlib.metadata import version

import msgspec

from regrow import telemetry
from regrow.supervisor.core import goodput, ledger, phases, quarantine, rates
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import GenerationView, JobView, Member, NodeView, View
from regrow.supervisor.documents import PLANNED, job_state, node_state
from regrow.supervisor.pace import Pace
from regrow.telemetry import Page

DEPARTED_SECONDS = 3600.0
"""A node that was lost so long ago has no series any more."""
_ENDING = ("stopping", "pausing", "paused", "done", "stopped")
_USABLE = ("member", "spare", "cordoned")


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """What this supervisor is now."""

    epoch: int = 0
    leads: bool = False
    store_up: bool | None = None
    """None: not known before the first term."""
    stopping: bool = False


def put_role(page: Page, role: Role) -> None:
    """Of this process."""
    page.put("regrow_build_info", 1.0, version("regrow"))
    page.put("regrow_is_leader", float(role.leads))
    page.put("regrow_epoch", role.epoch)
    page.put("regrow_store_up", float(role.store_up) if role.store_up is not None else None)
    page.put("regrow_stopping", float(role.stopping))


# --- nodes


def put_nodes(page: Page, view: View, now: float) -> None:
    """Nodes, quarantine, automation. A node that left on our order, or that was lost long ago, has no series."""
    page.put("regrow_automation_enabled", float(view.automation))
    members = _members(view)
    barred = {key for key, record in view.quarantine.items() if record.state in quarantine.OUT}
    free = msgspec.structs.replace(view, quarantine={})
    counts: dict[str, int] = dict.fromkeys(telemetry.NODE_STATES, 0)
    for name, node in view.nodes.items():
        if _departed(node, now):
            continue
        doubtful = bool(barred) and not barred.isdisjoint(_own_keys(node))
        state = node_state(view if doubtful else free, node, members.get(name))
        counts[state] += 1
        page.enum("regrow_node_state", telemetry.NODE_STATES, state, name)
        page.put("regrow_node_healthy", float(state in _USABLE), name)
        page.put("regrow_node_lost", float(not node.connected), name)
        page.put("regrow_node_teardown", float(bool(node.leaving) or name in view.drains), name)
    for state, count in counts.items():
        page.put("regrow_nodes", count, state)
    held = [record.state for record in view.quarantine.values()]
    for state in telemetry.QUARANTINE_STATES:
        page.put("regrow_quarantine", held.count(state), state)


def _departed(node: NodeView, now: float) -> bool:
    if node.connected:
        return False
    return bool(node.leaving) or node.released or (node.disconnected_at is not None and now - node.disconnected_at > DEPARTED_SECONDS)


def _own_keys(node: NodeView) -> set[str]:
    """Every key under which the node may be in quarantine: only then the whole rule is asked, which looks at all nodes."""
    found = {device.uuid for device in node.devices} | {device.serial for device in node.devices}
    return found | {node.hardware_id, f"node:{node.name}"}


def _members(view: View) -> dict[str, Member]:
    return {
        name: member
        for job in view.jobs.values()
        if job.generation is not None and job.generation.stage != "ended"
        for name, member in job.generation.members.items()
    }


# --- a job


def put_job(page: Page, name: str, job: JobView, pace: Pace | None, policy: Policy, now: float) -> None:
    """Everything of one job."""
    generation = job.generation if job.generation is not None and job.generation.stage != "ended" else None
    if pace is not None and (generation is None or pace.generation != generation.number):
        pace = None
    state = job_state(job)
    page.enum("regrow_job_state", telemetry.JOB_STATES, state, name)
    page.put("regrow_teardown", float(state in _ENDING), name)
    page.put("regrow_generation", job.generation.number if job.generation is not None else None, name)
    page.put("regrow_step", job.frontier, name)
    page.put("regrow_samples", job.samples, name)
    page.put("regrow_loss", job.loss, name)
    page.put("regrow_gpus", generation.spec.world_size if generation is not None else 0, name, "mesh")
    page.put("regrow_gpus", job.effort.num_reserved, name, "reserved")
    if generation is not None:
        for axis in ("dp", "tp", "pp", "cp", "ep"):
            page.put("regrow_mesh_axis_size", getattr(generation.spec.mesh, axis), name, axis)
    _put_efficiency(page, name, job, now)
    _put_pace(page, name, job, generation, pace)
    _put_failures(page, name, job, generation, policy, now)
    _put_recovery(page, name, job, now)
    _put_checkpoints(page, name, job, generation, now)


def _put_efficiency(page: Page, name: str, job: JobView, now: float) -> None:
    effort = goodput.reserve(job.effort, now, 0) if job.outcome is None else job.effort
    page.put("regrow_goodput_ratio", goodput.ratio(job, now), name)
    page.put("regrow_ettr_ratio", goodput.ettr(job, job.outcome.at if job.outcome is not None else now), name)
    page.put("regrow_reserved_gpu_seconds", effort.reserved_gpu_seconds, name)
    if effort.best_gpu_seconds_per_step is not None:
        steps = max(0, job.frontier - job.effort_base)
        page.put("regrow_lineage_gpu_seconds", steps * effort.best_gpu_seconds_per_step, name)
    page.put("regrow_productive_seconds", effort.productive_seconds, name)
    page.put("regrow_recomputed_steps", effort.lost_steps, name)


def _put_pace(page: Page, name: str, job: JobView, generation: GenerationView | None, pace: Pace | None) -> None:
    """Scaling, walls and the spread of the ranks."""
    if job.mesh_seconds:
        world, seconds = min(job.mesh_seconds.values())
        base = "measured" if world == 1 else "linear"
        page.put("regrow_one_worker_step_seconds", world * seconds, name, base)
        for mesh, (size, taken) in job.mesh_seconds.items():
            _put_scaling(page, name, mesh, base, world * seconds, size, taken)
    if pace is None or generation is None:
        return
    size, mesh = generation.spec.world_size, str(generation.spec.mesh)
    one = pace.one_worker_seconds(size)
    if one is not None:
        page.put("regrow_one_worker_step_seconds", one, name, "compute")
        if mesh in job.mesh_seconds:
            _put_scaling(page, name, mesh, "compute", one, size, job.mesh_seconds[mesh][1])
    spread = pace.compute()
    for stat, value in zip(("min", "median", "max"), spread or (), strict=False):
        page.put("regrow_rank_compute_seconds", value, name, stat)
    page.put("regrow_rank_slowest", pace.slowest(), name)
    slow = generation.slow
    worst = max((rank for rank in slow if rank >= 0), key=lambda rank: slow[rank].excess_ratio, default=-1)
    page.put("regrow_straggler_excess_ratio", slow[worst].excess_ratio if worst in slow else 0.0, name)
    if worst in slow:
        page.put("regrow_straggler_rank", worst, name)
    page.put("regrow_step_exposed_ratio", pace.exposed(), name)
    page.put("regrow_memory_used_ratio", pace.memory_ratio(), name)
    wall = pace.wall()
    if wall is not None:
        page.enum("regrow_wall", telemetry.WALLS, wall, name)


def _put_scaling(page: Page, name: str, mesh: str, base: str, one: float, size: int, taken: float) -> None:
    if taken > 0:
        page.put("regrow_scaling_speedup_ratio", one / taken, name, mesh, base)
        page.put("regrow_scaling_efficiency_ratio", one / (taken * size), name, mesh, base)


def _put_failures(page: Page, name: str, job: JobView, generation: GenerationView | None, policy: Policy, now: float) -> None:
    for cause in telemetry.CAUSES:
        page.put("regrow_failures", ledger.num_charges(job.ledger, cause), name, cause)
    page.put("regrow_restarts", max(0, job.highest_generation - 1), name)
    budget = ledger.budget(job.spec, policy, "program")
    most = max(len(ledger.counted(job.ledger, policy, now, cause)) for cause in ("program", "unknown"))
    page.put("regrow_restart_budget", budget, name)
    page.put("regrow_restart_budget_remaining", max(0, budget - most), name)
    if job.outcome is not None:
        return
    units = {"job": 1}
    if generation is not None and generation.spec.world_size:
        units |= {"node": len(generation.members), "gpu": generation.spec.world_size}
    for bound, rate in failure_rates(job, now).items():
        for scope, number in units.items():
            turned = {"lower95": "upper95", "upper95": "lower95"}.get(bound, bound)
            page.put("regrow_mtbf_seconds", number / rate if rate > 0 else float("inf"), name, scope, turned)
        if "gpu" in units:
            page.put("regrow_failure_rate_per_gpu_second", rate / units["gpu"], name, bound)


def failure_rates(job: JobView, now: float) -> dict[str, float]:
    """Failures a second of the whole job: posterior mean and 95 % credible interval.

    The posterior is the Gamma of `rates.failure_rate`; its two parameters follow from its mean and what one more failure adds.
    """
    from scipy.special import gammaincinv

    mean = rates.failure_rate(job, now)
    exposure = 1.0 / (rates.failure_rate(job, now, more=1) - mean)
    shape = mean * exposure
    return {
        "point": mean,
        "lower95": float(gammaincinv(shape, 0.025)) / exposure,
        "upper95": float(gammaincinv(shape, 0.975)) / exposure,
    }


def _put_recovery(page: Page, name: str, job: JobView, now: float) -> None:
    last = job.incidents[-1] if job.incidents else None
    recovering = last is not None and not last.closed and last.cause != PLANNED
    page.put("regrow_recovery_open_seconds", max(0.0, now - last.symptom_at) if recovering and last is not None else 0.0, name)
    phase = phases.current(last) if recovering and last is not None else ""
    page.enum("regrow_recovery_phase", telemetry.PHASES, phase, name)


def _put_checkpoints(page: Page, name: str, job: JobView, generation: GenerationView | None, now: float) -> None:
    usable = [item for item in job.checkpoints.values() if not item.damaged]
    if usable:
        newest = max(usable, key=lambda item: item.step)
        page.put("regrow_checkpoint_step", newest.step, name, "committed")
        if job.outcome is None:
            page.put("regrow_checkpoint_age_seconds", max(0.0, now - newest.committed_at), name)
    verified = [item.step for item in usable if item.evidence]
    page.put("regrow_checkpoint_step", max(verified, default=None), name, "verified")
    if generation is not None:
        policy = job.spec.checkpoint
        page.put("regrow_checkpoint_interval_seconds", generation.spec.save_interval_seconds or policy.max_interval_seconds, name)
    for tier in job.tiers:
        page.put("regrow_checkpoint_tier_seconds", tier.interval_seconds, name, tier.tier, "interval")
        page.put("regrow_checkpoint_tier_seconds", tier.stall_seconds, name, tier.tier, "stall")
        page.put("regrow_checkpoint_tier_seconds", tier.safe_seconds, name, tier.tier, "safe")
    damaged = sum(1 for item in job.checkpoints.values() if item.damaged)
    page.put("regrow_checkpoints_damaged", damaged + job.num_damaged, name)
    for verdict in telemetry.DIGEST_VERDICTS:
        page.put("regrow_digest_checks", job.digest_checks.get(verdict, 0), name, verdict)
    page.put("regrow_digest_agreed_step", max(job.agreed_steps, default=None), name)
