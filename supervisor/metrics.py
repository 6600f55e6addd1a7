"""Prometheus metrics of the supervisor: derived from the view after each turn, with labels of live things only."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from regrow import telemetry
from regrow.supervisor.core import goodput, phases, rates
from regrow.supervisor.core.view import JobView, View
from regrow.supervisor.documents import PLANNED, node_state

_NODE_STATES: tuple[str, ...] = ("member", "spare", "suspect", "gone", "quarantined", "draining", "unhealthy", "cordoned")


class Metrics:
    """Counters count what is new in the view since the last look; series of what is gone are removed."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._made: dict[str, Any] = telemetry.build("supervisor", self.registry)
        self._nodes: set[str] = set()
        self._seen: dict[str, _Seen] = {}
        self._meshes: dict[str, set[str]] = {}

    def exposition(self) -> bytes:
        """Text format."""
        return generate_latest(self.registry)

    def leading(self, *, epoch: int, leads: bool, store_up: bool) -> None:
        """Role of this supervisor."""
        self._made["regrow_epoch"].set(epoch)
        self._made["regrow_is_leader"].set(1 if leads else 0)
        self._made["regrow_store_up"].set(1 if store_up else 0)

    def turn(self, seconds: float) -> None:
        """Duration of a turn."""
        self._made["regrow_turn_seconds"].observe(seconds)

    def view(self, view: View, now: float) -> None:
        """Look at everything. Called at most a few times a second."""
        self._made["regrow_epoch"].set(view.epoch)
        self._made["regrow_store_up"].set(1 if view.store_up else 0)
        self._look_at_nodes(view)
        for name, job in view.jobs.items():
            self._look_at_job(name, job, now)
        for name in [name for name in self._seen if name not in view.jobs]:
            self._forget_job(name)

    def _look_at_nodes(self, view: View) -> None:
        members = {
            name: member
            for job in view.jobs.values()
            if job.generation is not None and job.generation.stage != "ended"
            for name, member in job.generation.members.items()
        }
        counts: dict[str, int] = dict.fromkeys(_NODE_STATES, 0)
        for name, node in view.nodes.items():
            state = node_state(view, node, members.get(name))
            counts[state] += 1
            self._made["regrow_node_healthy"].labels(name).set(1 if state in ("member", "spare", "cordoned") else 0)
        for name in self._nodes - set(view.nodes):
            self._made["regrow_node_healthy"].remove(name)
        self._nodes = set(view.nodes)
        for state, count in counts.items():
            self._made["regrow_nodes"].labels(state).set(count)

    def _look_at_job(self, name: str, job: JobView, now: float) -> None:
        made, seen = self._made, self._seen.setdefault(name, _Seen())
        generation = job.generation
        gauges = {
            "regrow_goodput_ratio": goodput.ratio(job, now),
            "regrow_ettr_ratio": goodput.ettr(job, now),
            "regrow_mtbf_hours": 1.0 / (rates.failure_rate(job, now) * 3600),
            "regrow_generation": generation.number if generation is not None else None,
            "regrow_step": job.frontier,
            "regrow_loss": job.loss,
        }
        if generation is not None and generation.spec.world_size:
            gauges["regrow_failure_rate_per_gpu_hour"] = rates.failure_rate(job, now) * 3600 / generation.spec.world_size
            if generation.spec.save_interval_seconds:
                gauges["regrow_checkpoint_interval_seconds"] = generation.spec.save_interval_seconds
        usable = [item for item in job.checkpoints.values() if not item.damaged]
        if usable:
            gauges["regrow_checkpoint_age_seconds"] = now - max(usable, key=lambda item: item.step).committed_at
        for metric, value in gauges.items():
            if value is not None:
                made[metric].labels(name).set(value)
        self._meshes_of(name, job)
        self._count(name, job, seen)

    def _meshes_of(self, name: str, job: JobView) -> None:
        current = goodput.scaling_efficiency(job)
        for mesh, ratio in current.items():
            self._made["regrow_scaling_efficiency_ratio"].labels(name, mesh).set(ratio)
        for mesh in self._meshes.get(name, set()) - set(current):
            self._made["regrow_scaling_efficiency_ratio"].remove(name, mesh)
        self._meshes[name] = set(current)

    def _count(self, name: str, job: JobView, seen: _Seen) -> None:
        made = self._made
        for cause in telemetry.CAUSES:
            made["regrow_failures"].labels(name, cause)
        for incident in job.incidents:
            key = (incident.id, incident.symptom_at)
            if incident.cause in telemetry.CAUSES and key not in seen.incidents:
                seen.incidents.add(key)
                made["regrow_failures"].labels(name, incident.cause).inc()
            if incident.recovered_at is not None and key not in seen.recovered and incident.cause != PLANNED:
                seen.recovered.add(key)
                made["regrow_recovery_seconds"].labels(name).observe(phases.whole(incident) or 0.0)
                for phase, seconds in phases.spans(incident).items():
                    made["regrow_recovery_phase_seconds"].labels(name, phase).observe(seconds)
        kept = {(incident.id, incident.symptom_at) for incident in job.incidents}
        seen.incidents &= kept
        seen.recovered &= kept
        number = job.generation.number if job.generation is not None else 0
        if number > seen.generation:
            if seen.generation:
                made["regrow_restarts"].labels(name).inc()
            seen.generation = number
        if job.effort.lost_steps > seen.lost_steps:
            made["regrow_recomputed_steps"].labels(name).inc(job.effort.lost_steps - seen.lost_steps)
            seen.lost_steps = job.effort.lost_steps
        for verdict, count in job.digest_checks.items():
            if count > seen.digests.get(verdict, 0):
                made["regrow_digest_checks"].labels(name, verdict).inc(count - seen.digests.get(verdict, 0))
                seen.digests[verdict] = count

    def step(self, job: str, seconds: float) -> None:
        """A completed step."""
        if seconds > 0:
            self._made["regrow_step_seconds"].labels(job).observe(seconds)

    def checkpoint(self, job: str, state: str, *, stall_seconds: float, write_seconds: float) -> None:
        """A checkpoint reached a state."""
        self._made["regrow_checkpoints"].labels(job, state).inc()
        if state == "snapshot" and stall_seconds > 0:
            self._made["regrow_checkpoint_stall_seconds"].labels(job).observe(stall_seconds)
        if state == "durable" and write_seconds > 0:
            self._made["regrow_checkpoint_write_seconds"].labels(job).observe(write_seconds)

    def _forget_job(self, name: str) -> None:
        del self._seen[name]
        for metric in telemetry.METRICS:
            if metric.group == "supervisor" and metric.labels and metric.labels[0] == "job":
                made = self._made[metric.name]
                for labels in list(made._metrics):  # noqa: SLF001  # the client has no public way to list label values
                    if labels[0] == name:
                        made.remove(*labels)


class _Seen:
    """What was counted of a job."""

    def __init__(self) -> None:
        self.incidents: set[tuple[str, float]] = set()
        self.recovered: set[tuple[str, float]] = set()
        self.generation = 0
        self.lost_steps = 0
        self.digests: dict[str, int] = {}
