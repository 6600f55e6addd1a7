"""Names of metrics and log events, each once. Base units; label values from closed sets or from live nodes.

A metric is declared here and nowhere else; `build` makes prometheus-client objects of a group on a registry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Metric(msgspec.Struct, frozen=True):
    """One metric: its exposition name without the counter suffix, kind, help, labels and who exports it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    group: Literal["supervisor", "agent", "worker"] = "supervisor"
    buckets: tuple[float, ...] = ()


_RECOVERY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 900)

PHASES = ("detect", "decide", "fence", "stop", "start", "rendezvous", "restore", "first_step")
"""Phases of a recovery, in order. They add up to the whole."""

CAUSES = ("infrastructure", "preemption", "program", "unknown")
"""Causes that the restart ledger charges."""

METRICS: tuple[Metric, ...] = (
    Metric("regrow_scaling_efficiency_ratio", "gauge", "E = S/k at the same global batch, S = t1/tk", ("job", "mesh")),
    Metric("regrow_goodput_ratio", "gauge", "Tokens in the final lineage over what the reserved GPU-seconds could have given", ("job",)),
    Metric("regrow_ettr_ratio", "gauge", "Productive time over wall time", ("job",)),
    Metric("regrow_failures", "counter", "Incidents by cause", ("job", "cause")),
    Metric("regrow_failure_rate_per_gpu_hour", "gauge", "Estimated failure rate (Gamma posterior mean)", ("job",)),
    Metric("regrow_mtbf_hours", "gauge", "Estimated mean time between failures of the job", ("job",)),
    Metric("regrow_restarts", "counter", "Generations formed after the first", ("job",)),
    Metric("regrow_generation", "gauge", "Number of the current generation", ("job",)),
    Metric("regrow_epoch", "gauge", "Term of the leader"),
    Metric("regrow_is_leader", "gauge", "1 on the leading supervisor"),
    Metric("regrow_store_up", "gauge", "1 while the store answers"),
    Metric("regrow_step", "gauge", "Highest completed step", ("job",)),
    Metric("regrow_loss", "gauge", "Loss of the highest completed step", ("job",)),
    Metric("regrow_step_seconds", "histogram", "Duration of completed steps", ("job",), buckets=_RECOVERY_BUCKETS),
    Metric("regrow_recomputed_steps", "counter", "Completed steps that were lost and computed again", ("job",)),
    Metric("regrow_recovery_phase_seconds", "histogram", "Duration of one recovery phase", ("job", "phase"), buckets=_RECOVERY_BUCKETS),
    Metric(
        "regrow_recovery_seconds",
        "histogram",
        "First symptom to first completed step beyond the frontier",
        ("job",),
        buckets=_RECOVERY_BUCKETS,
    ),
    Metric("regrow_checkpoint_stall_seconds", "histogram", "Time a save held training up", ("job",), buckets=_RECOVERY_BUCKETS),
    Metric("regrow_checkpoint_write_seconds", "histogram", "Snapshot to durable", ("job",), buckets=_RECOVERY_BUCKETS),
    Metric("regrow_checkpoint_age_seconds", "gauge", "Age of the newest committed checkpoint", ("job",)),
    Metric("regrow_checkpoint_interval_seconds", "gauge", "Interval that the controller uses now", ("job",)),
    Metric("regrow_checkpoints", "counter", "Checkpoints by the state they reached", ("job", "state")),
    Metric("regrow_digest_checks", "counter", "Cross-replica digest checks by verdict", ("job", "verdict")),
    Metric("regrow_nodes", "gauge", "Nodes by state", ("state",)),
    Metric("regrow_node_healthy", "gauge", "1 healthy, 0 not", ("node",)),
    Metric(
        "regrow_turn_seconds",
        "histogram",
        "Duration of one turn of the decision core",
        (),
        buckets=(0.0001, 0.0005, 0.001, 0.005, 0.02, 0.1, 1),
    ),
    Metric("regrow_agent_up", "gauge", "1 while the agent runs", ("node",), group="agent"),
    Metric("regrow_agent_beat_age_seconds", "gauge", "Age of the last beat sent", ("node",), group="agent"),
    Metric("regrow_agent_host_memory_available_bytes", "gauge", "Memory available on the host", ("node",), group="agent"),
    Metric("regrow_agent_host_cpu_ratio", "gauge", "Busy share of the host's CPUs", ("node",), group="agent"),
    Metric("regrow_agent_host_disk_free_bytes", "gauge", "Free bytes under the state folder", ("node",), group="agent"),
    Metric("regrow_agent_gpu_temperature_celsius", "gauge", "GPU temperature", ("node", "device"), group="agent"),
    Metric("regrow_agent_gpu_xids", "counter", "XIDs seen", ("node", "device", "xid"), group="agent"),
    Metric("regrow_agent_probe_seconds", "gauge", "Duration of the last NVML probe", ("node",), group="agent"),
    Metric("regrow_agent_workers", "gauge", "Running workers", ("node",), group="agent"),
)


def build(group: str, registry: CollectorRegistry) -> dict[str, Any]:
    """Make the prometheus-client metrics of a group on `registry`: {name: Counter | Gauge | Histogram}."""
    import prometheus_client as prometheus

    kinds = {"counter": prometheus.Counter, "gauge": prometheus.Gauge}
    made: dict[str, Any] = {}
    for metric in METRICS:
        if metric.group != group:
            continue
        if metric.kind == "histogram":
            made[metric.name] = prometheus.Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)
        else:
            made[metric.name] = kinds[metric.kind](metric.name, metric.help, metric.labels, registry=registry)
    return made
