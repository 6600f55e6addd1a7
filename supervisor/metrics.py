"""Prometheus metrics of the supervisor: what passes is counted as it passes, what holds is read off the view at each scrape."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from regrow import telemetry, wire
from regrow.supervisor import metrics_page
from regrow.supervisor.core import phases
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import Incident, JobView, View
from regrow.supervisor.documents import PLANNED
from regrow.supervisor.pace import Pace


class Metrics:
    """One per process. Belongs to the event loop, but for `exposition`, which may run in a thread."""

    def __init__(self, policy: Policy | None = None) -> None:
        self._policy = policy or Policy()
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._role = metrics_page.Role()
        self._view: View | None = None
        self._now = 0.0
        self._orders: dict[str, int] = {}
        self._begin_term()

    def _begin_term(self) -> None:
        """Counts of an earlier term go: the next leader counts its own."""
        self._registry = CollectorRegistry()
        self._made: dict[str, Any] = telemetry.build("supervisor", self._registry)
        self._seen: dict[str, _Seen] = {}
        self._pace: dict[str, Pace] = {}

    def exposition(self) -> bytes:
        """Text format, of the view that was looked at last."""
        page = telemetry.Page()
        metrics_page.put_role(page, self._role)
        view = self._view
        if view is not None:
            metrics_page.put_nodes(page, view, self._now)
            for state in telemetry.ORDER_STATES:
                page.put("regrow_actuator_orders", self._orders.get(state, 0), state)
            for name, job in view.jobs.items():
                metrics_page.put_job(page, name, job, self._pace.get(name), self._policy, self._now)
        return page.text() + generate_latest(self._registry) + generate_latest(self._process)

    # --- what the process knows

    def leading(self, *, epoch: int, leads: bool, store_up: bool) -> None:
        """Role of this supervisor. One that does not lead shows no jobs and no nodes: the leader does."""
        if self._role.leads and not leads:
            self._view = None
            self._begin_term()
        self._role = metrics_page.Role(epoch=epoch, leads=leads, store_up=store_up, stopping=self._role.stopping)

    def stopping(self) -> None:
        """It was told to end."""
        self._role = metrics_page.Role(epoch=self._role.epoch, leads=self._role.leads, store_up=self._role.store_up, stopping=True)

    def view(self, view: View, now: float, orders: dict[str, int] | None = None) -> None:
        """Look at everything. Called at most a few times a second. `orders`: those to actuators, by state."""
        self._view, self._now, self._orders = view, now, orders or {}
        for name, job in view.jobs.items():
            self._count(name, job)
        for name in [name for name in self._seen if name not in view.jobs]:
            self._forget_job(name)

    # --- what passes

    def turn(self, seconds: float) -> None:
        """Duration of a turn."""
        self._made["regrow_turn_seconds"].observe(seconds)

    def step(self, job: str, seconds: float) -> None:
        """A completed step."""
        if seconds > 0:
            self._made["regrow_step_seconds"].labels(job).observe(seconds)

    def said(self, node: str, message: Any) -> None:
        """A line of an agent: step times of ranks, memory, what became of checkpoints."""
        match message:
            case wire.NodeSteps():
                self._pace_of(message.job, message.generation).stepped(message)
            case wire.Beat():
                for pace in self._pace.values():
                    pace.memory(node, message)
            case wire.CheckpointChanged():
                self._checkpoint(message)
            case _:
                return

    def _pace_of(self, job: str, generation: int) -> Pace:
        pace = self._pace.get(job)
        if pace is None or pace.generation < generation:
            pace = self._pace[job] = Pace(generation)
        return pace

    def _checkpoint(self, message: wire.CheckpointChanged) -> None:
        made, job = self._made, message.job
        made["regrow_checkpoints"].labels(job, message.state).inc()
        if message.state == "snapshot" and message.stall_seconds > 0:
            made["regrow_checkpoint_stall_seconds"].labels(job).observe(message.stall_seconds)
            seen = self._seen.setdefault(job, _Seen())
            step, longest = seen.stall
            longest = longest if step == message.step else 0.0
            if message.stall_seconds > longest:
                made["regrow_lost_seconds"].labels(job, "checkpoint").inc(message.stall_seconds - longest)
            seen.stall = (message.step, max(longest, message.stall_seconds))
        if message.state == "durable" and message.write_seconds > 0:
            made["regrow_checkpoint_write_seconds"].labels(job).observe(message.write_seconds)
        if message.state == "committed":
            made["regrow_checkpoint_written_bytes"].labels(job).inc(message.num_bytes)

    # --- what is new in the view

    def _count(self, name: str, job: JobView) -> None:
        seen = self._seen.get(name)
        if seen is None:
            seen = self._seen[name] = _Seen()
            for state in telemetry.CHECKPOINT_STATES:
                self._made["regrow_checkpoints"].labels(name, state)
            for kind in telemetry.KINDS:
                self._made["regrow_incidents"].labels(name, kind)
            for phase in telemetry.LOSSES:
                self._made["regrow_lost_seconds"].labels(name, phase)
        if seen.looked_at is job.incidents:
            return
        seen.looked_at = job.incidents
        for incident in job.incidents:
            if incident.cause != PLANNED:
                self._count_incident(name, incident, seen)
        kept = {(incident.id, incident.symptom_at) for incident in job.incidents}
        seen.incidents &= kept
        seen.recovered &= kept

    def _count_incident(self, name: str, incident: Incident, seen: _Seen) -> None:
        made, key = self._made, (incident.id, incident.symptom_at)
        if key not in seen.incidents:
            seen.incidents.add(key)
            made["regrow_incidents"].labels(name, incident.kind if incident.kind in telemetry.KINDS else "other").inc()
        if incident.recovered_at is None or key in seen.recovered:
            return
        seen.recovered.add(key)
        made["regrow_recovery_seconds"].labels(name).observe(phases.whole(incident) or 0.0)
        for phase, seconds in phases.spans(incident).items():
            made["regrow_recovery_phase_seconds"].labels(name, phase).observe(seconds)
        for phase, seconds in lost_seconds(incident).items():
            made["regrow_lost_seconds"].labels(name, phase).inc(seconds)

    def _forget_job(self, name: str) -> None:
        del self._seen[name]
        self._pace.pop(name, None)
        for made in self._made.values():
            for labels in list(made._metrics) if made._labelnames else []:  # noqa: SLF001  # no public way to list label values
                if labels[0] == name:
                    made.remove(*labels)


def lost_seconds(incident: Incident) -> dict[str, float]:
    """Seconds of a recovery by where they went: its phases, with the steps that were computed again apart from `first_step`.

    They add up to `phases.whole(incident)`.
    """
    spans = phases.spans(incident)
    again = 0.0
    if incident.first_step_at is not None and incident.recovered_at is not None:
        again = min(spans.get("first_step", 0.0), max(0.0, incident.recovered_at - incident.first_step_at))
    return spans | {"first_step": spans.get("first_step", 0.0) - again, "recompute": again}


class _Seen:
    """What was counted of a job."""

    def __init__(self) -> None:
        self.looked_at: tuple[Incident, ...] | None = None
        self.incidents: set[tuple[str, float]] = set()
        self.recovered: set[tuple[str, float]] = set()
        self.stall: tuple[int, float] = (-1, 0.0)
