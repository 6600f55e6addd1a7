"""Names of metrics, each once, and the text that Prometheus scrapes.

Rules: base units (seconds, bytes, ratios); labels from closed sets or from live nodes, ranks and GPUs; a state is one series
per possible value, 1 for the one that holds and 0 for the others; a job is `job_name`, because Prometheus keeps `job` for itself.

Two ways to export. `Page` is written anew at each scrape from what is known then: nothing of what is gone can stay in it.
Metrics with `kept` count things that pass (histograms, events) and live in a prometheus-client registry made by `build`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric: its exposition name without the counter suffix, kind, help, labels and who exports it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    group: Literal["supervisor", "agent", "worker"] = "supervisor"
    kept: bool = False
    buckets: tuple[float, ...] = ()

    @property
    def series(self) -> str:
        """Name of its samples: counters end in _total."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


PHASES = ("detect", "decide", "fence", "stop", "start", "rendezvous", "restore", "first_step")
"""Phases of a recovery, in order. They add up to the whole."""

LOSSES = ("detect", "decide", "fence", "stop", "start", "rendezvous", "restore", "first_step", "recompute", "checkpoint")
"""Where a job's time went that gave no new step: the phases (first_step up to the first step of the new generation), steps
computed again, and the stalls of saves."""

CAUSES = ("infrastructure", "preemption", "program", "unknown")
"""Causes that the restart ledger charges."""

KINDS = (
    "node_lost", "unreachable", "worker_exit", "hang", "sdc", "non_finite", "unhealthy", "leaving", "restore_refused", "start_failed",
    "returned_empty", "wrong_step", "other",
)  # fmt: skip
"""Kinds of incident; one that is not in the list counts as `other`."""

JOB_STATES = (
    "waiting", "starting", "running", "recovering", "stopping", "pausing", "parked", "paused", "done", "failed", "stopped",
)  # fmt: skip
NODE_STATES = ("member", "spare", "suspect", "gone", "quarantined", "draining", "unhealthy", "cordoned")
HEALTH_STATES = ("healthy", "degraded", "unhealthy", "unknown")
QUARANTINE_STATES = ("suspect", "quarantined", "burn_in", "probation")
CHECKPOINT_STATES = ("snapshot", "durable", "committed", "pending", "failed", "skipped")
DIGEST_VERDICTS = (
    "agree",
    "diverged",
    "skipped",
    "at_rest_mismatch",
    "received_wrong",
    "replay_agree",
    "replay_diverged",
    "replay_skipped",
)
ORDER_STATES = ("open", "failed", "done", "held")
"""Orders to actuators. failed: the last attempt failed, another follows; held: the rate limit is reached."""
WALLS = ("memory", "compute", "communication")
"""The three walls: what bounds the step."""
ONE_WORKER = ("measured", "compute", "linear")
"""Where t1, the step on one worker, is from. measured: a mesh of one worker ran; compute: the sum of all ranks' own measured
compute; linear: the smallest mesh that ran, times its number of workers (assumes that it scales perfectly up to there)."""
BOUNDS = ("point", "lower95", "upper95")
"""An estimate and the ends of its 95 % credible interval."""
SCOPES = ("job", "node", "gpu")
WORKER_PHASES = ("start", "import", "rendezvous", "model", "restore", "first_step", "step", "eval", "save", "finished", "stopped")

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0)
_TURN_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.02, 0.1, 1.0)
_JOB = ("job_name",)
_NODE = ("node",)
_GPU = ("node", "device")
_RANK = ("job_name", "node", "rank")


def _gauge(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name=name, kind="gauge", help=help_text, labels=labels, group=_group(name))


def _counter(name: str, help_text: str, *labels: str, kept: bool = False) -> Metric:
    return Metric(name=name, kind="counter", help=help_text, labels=labels, group=_group(name), kept=kept)


def _histogram(name: str, help_text: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Metric:
    return Metric(name=name, kind="histogram", help=help_text, labels=labels, group=_group(name), kept=True, buckets=buckets)


def _group(name: str) -> Literal["supervisor", "agent", "worker"]:
    if name.startswith("regrow_agent_"):
        return "agent"
    return "worker" if name.startswith("regrow_worker_") else "supervisor"


_OF_THE_SUPERVISOR = (
    _gauge("regrow_build_info", "Always 1; the version is its label", "version"),
    _gauge("regrow_is_leader", "1 on the leading supervisor"),
    _gauge("regrow_epoch", "Term of the leader; 0 on one that stands by"),
    _gauge("regrow_store_up", "1 while the store answers"),
    _gauge("regrow_stopping", "1 once this supervisor was told to stop"),
    _gauge("regrow_automation_enabled", "1 unless an operator has stopped all automatic actions"),
    _histogram("regrow_turn_seconds", "Duration of one turn of the decision core", buckets=_TURN_SECONDS),
    _gauge("regrow_nodes", "Nodes by state", "state"),
    _gauge("regrow_node_state", "1 for the state that a node is in", "node", "state"),
    _gauge("regrow_node_healthy", "1 when a node is in use or could be", *_NODE),
    _gauge("regrow_node_lost", "1 for a node that went without a word; a node that left in an orderly manner has no series", *_NODE),
    _gauge("regrow_node_teardown", "1 while a node is being emptied or let go on our own order", *_NODE),
    _gauge("regrow_quarantine", "Pieces of hardware that are not trusted, by state", "state"),
    _gauge("regrow_actuator_orders", "Nodes that Slurm, Kubernetes or a program was told of, by what became of the last order", "state"),
)

_OF_A_JOB = (
    _gauge("regrow_job_state", "1 for the state that a job is in", "job_name", "state"),
    _gauge("regrow_teardown", "1 while a job is stopped, paused or over on an order or at its own end", *_JOB),
    _gauge("regrow_generation", "Number of the current generation", *_JOB),
    _gauge("regrow_step", "Highest completed step of the lineage", *_JOB),
    _gauge("regrow_samples", "Samples that the lineage has consumed", *_JOB),
    _gauge("regrow_loss", "Loss of the highest completed step", *_JOB),
    _gauge("regrow_gpus", "GPUs (workers' places) of a job: in the mesh, and reserved for it", "job_name", "use"),
    _gauge("regrow_mesh_axis_size", "Size of each axis of the current mesh", "job_name", "axis"),
    _histogram("regrow_step_seconds", "Duration of completed steps", *_JOB),
    _gauge("regrow_rank_compute_seconds", "Own compute time of a step over the ranks: min, median, max", "job_name", "stat"),
    _gauge("regrow_rank_slowest", "Rank with the longest own compute time", *_JOB),
    _gauge("regrow_straggler_rank", "Rank that became slower than it was; -1: all did; absent: nobody", *_JOB),
    _gauge("regrow_straggler_excess_ratio", "By how much it became slower, as a share of the compute time; 0: nobody", *_JOB),
)

_OF_EFFICIENCY = (
    _gauge(
        "regrow_scaling_efficiency_ratio", "E = S/k at the same global batch, S = t1/tk; t1 says where t1 is from", "job_name", "mesh", "t1"
    ),
    _gauge("regrow_scaling_speedup_ratio", "S = t1/tk at the same global batch", "job_name", "mesh", "t1"),
    _gauge("regrow_one_worker_step_seconds", "t1: the step on one worker, measured or modelled", "job_name", "t1"),
    _gauge("regrow_wall", "1 for the wall that bounds the step: memory, compute or communication", "job_name", "wall"),
    _gauge("regrow_step_exposed_ratio", "Share of the step in which the busiest rank does not compute", *_JOB),
    _gauge("regrow_memory_used_ratio", "GPU memory in use on the fullest GPU; no series without GPUs", *_JOB),
    _gauge("regrow_goodput_ratio", "Steps of the lineage at the best measured GPU-seconds a step, over all reserved GPU-seconds", *_JOB),
    _counter("regrow_reserved_gpu_seconds", "GPU-seconds kept for the job, spares, idle and quarantined ones included", *_JOB),
    _gauge("regrow_lineage_gpu_seconds", "Steps of the lineage times the best GPU-seconds a step: the numerator of goodput", *_JOB),
    _gauge("regrow_ettr_ratio", "Productive time over wall time", *_JOB),
    _gauge("regrow_productive_seconds", "Time of completed steps that the lineage still has", *_JOB),
    _counter("regrow_lost_seconds", "Time without new steps, by where it went", "job_name", "phase", kept=True),
    _counter("regrow_recomputed_steps", "Completed steps that were lost and computed again", *_JOB),
)

_OF_FAILURES = (
    _counter("regrow_failures", "Incidents that the restart ledger charged, by cause, over the job's life", "job_name", "cause"),
    _counter("regrow_incidents", "Incidents by kind", "job_name", "kind", kept=True),
    _gauge("regrow_failure_rate_per_gpu_second", "Estimated failure rate (Gamma posterior) with its interval", "job_name", "bound"),
    _gauge("regrow_mtbf_seconds", "Estimated mean time between failures of the job, of a node, of a GPU", "job_name", "scope", "bound"),
    _counter("regrow_restarts", "Generations formed after the first, over the job's life", *_JOB),
    _gauge("regrow_restart_budget", "Restarts by program and unknown causes that a job may take within the window", *_JOB),
    _gauge("regrow_restart_budget_remaining", "Those that are left", *_JOB),
    _gauge("regrow_recovery_open_seconds", "Age of the incident that is not over; 0: there is none", *_JOB),
    _gauge("regrow_recovery_phase", "1 for the phase that the open recovery is in", "job_name", "phase"),
    _histogram("regrow_recovery_phase_seconds", "Duration of one recovery phase", "job_name", "phase"),
    _histogram("regrow_recovery_seconds", "First symptom to first completed step beyond the frontier", *_JOB),
)

_OF_STATE = (
    _counter(
        "regrow_checkpoints",
        "Checkpoints by the state they reached (snapshot, failed, skipped: once a node)",
        "job_name",
        "state",
        kept=True,
    ),
    _counter("regrow_checkpoint_written_bytes", "Bytes of committed checkpoints", *_JOB, kept=True),
    _histogram("regrow_checkpoint_stall_seconds", "Time a save held training up", *_JOB),
    _histogram("regrow_checkpoint_write_seconds", "Snapshot to durable", *_JOB),
    _gauge("regrow_checkpoint_age_seconds", "Age of the newest committed checkpoint", *_JOB),
    _gauge("regrow_checkpoint_step", "Step of the newest checkpoint: committed, verified", "job_name", "state"),
    _gauge("regrow_checkpoint_interval_seconds", "Longest time between saves that the controller allows", *_JOB),
    _gauge(
        "regrow_checkpoint_tier_seconds",
        "By tier (storage, memory): the interval in force (0: not saved to), its stall, and until it is safe",
        "job_name",
        "tier",
        "value",
    ),
    _gauge("regrow_checkpoints_damaged", "Checkpoints that exist and cannot be used", *_JOB),
    _counter(
        "regrow_digest_checks",
        "Checks of results by verdict, in this leader's term (across replicas, at rest, repeated micro-steps)",
        "job_name",
        "verdict",
    ),
    _gauge("regrow_digest_agreed_step", "Newest step at which all replicas agreed", *_JOB),
)

_OF_AN_AGENT = (
    _gauge("regrow_agent_up", "1 while the agent runs", *_NODE),
    _gauge("regrow_agent_connected", "1 while a leader has welcomed this agent", *_NODE),
    _gauge("regrow_agent_store_up", "1 while the store answers this agent", *_NODE),
    _gauge("regrow_agent_beat_age_seconds", "Age of the last beat sent", *_NODE),
    _gauge("regrow_agent_kept_messages", "Messages that wait for a leader", *_NODE),
    _counter("regrow_agent_dropped_messages", "Messages given up while there was no leader", *_NODE),
    _gauge("regrow_agent_loop_lag_seconds", "Longest delay of the agent's event loop since the last scrape", *_NODE),
    _gauge("regrow_agent_shim_up", "1 while the process that forks workers is there", *_NODE),
    _gauge("regrow_agent_writer_up", "1 while the checkpoint writer is there", *_NODE),
    _gauge("regrow_agent_copies_held_bytes", "Memory that copies of other nodes' checkpoints take here", *_NODE),
    _counter("regrow_agent_mirrors", "Passes that copied checkpoints to a job's second storage, by outcome", "node", "outcome"),
    _counter("regrow_agent_copies", "Copies of own checkpoint files by outcome at the buddy, and those refused here", "node", "outcome"),
    _counter("regrow_agent_memory_short", "Left out for want of memory: saves, second arenas, copies of other nodes", "node", "left_out"),
    _gauge("regrow_agent_copy_seconds", "Duration of the last copy to the buddy", *_NODE),
    _gauge("regrow_agent_workers", "Running workers", *_NODE),
    _gauge("regrow_agent_teardown", "1 from our own kill of workers until its symptoms can be over", *_NODE),
    _gauge("regrow_agent_health", "1 for the verdict on this node", "node", "state"),
    _gauge("regrow_agent_conditions", "Open health conditions", *_NODE),
    _gauge("regrow_agent_host_memory_available_bytes", "Memory available on the host", *_NODE),
    _gauge("regrow_agent_host_memory_bytes", "Memory of the host", *_NODE),
    _gauge("regrow_agent_host_cpu_ratio", "Busy share of the host's CPUs", *_NODE),
    _gauge("regrow_agent_host_disk_free_bytes", "Free bytes under the state folder", *_NODE),
    _gauge("regrow_agent_host_disk_bytes", "Size of the file system of the state folder", *_NODE),
    _gauge("regrow_agent_probe_seconds", "Duration of the last NVML probe", *_NODE),
    _gauge("regrow_agent_probe_ok", "1 when the last NVML probe was answered; no series without a driver", *_NODE),
    _gauge("regrow_agent_gpus", "GPUs that answered the last probe", *_NODE),
)

_OF_A_GPU = (
    _gauge("regrow_agent_gpu_lost", "1 when the driver says that this GPU is lost", *_GPU),
    _gauge("regrow_agent_gpu_temperature_celsius", "GPU temperature", *_GPU),
    _gauge("regrow_agent_gpu_slowdown_celsius", "Temperature at which this GPU slows down", *_GPU),
    _gauge("regrow_agent_gpu_memory_used_bytes", "GPU memory in use", *_GPU),
    _gauge("regrow_agent_gpu_memory_bytes", "GPU memory", *_GPU),
    _gauge("regrow_agent_gpu_power_watts", "Power draw", *_GPU),
    _gauge("regrow_agent_gpu_busy_ratio", "Share of time in which a kernel ran", *_GPU),
    _counter("regrow_agent_gpu_ecc_errors", "ECC errors since the driver was loaded", "node", "device", "kind"),
    _counter("regrow_agent_gpu_xids", "XIDs seen by this node's agents; codes that are not in the table count as `other`", "node", "device", "xid"),
    _gauge("regrow_agent_gpu_xid_age_seconds", "Time since this XID came last on this GPU", "node", "device", "xid"),
)  # fmt: skip

_OF_A_WORKER = (
    _gauge("regrow_worker_step", "Last step that a rank applied", *_RANK),
    _gauge("regrow_worker_step_seconds", "Duration of its last step", *_RANK),
    _gauge("regrow_worker_compute_seconds", "Its own compute in the last step, before synchronisation", *_RANK),
    _gauge("regrow_worker_loss", "Loss of the last step, from ranks that know it", *_RANK),
    _gauge("regrow_worker_grad_norm", "Gradient norm of the last step, from ranks that know it", *_RANK),
    _gauge("regrow_worker_phase", "1 for the phase that a rank is in", *_RANK, "phase"),
    _gauge("regrow_worker_start_seconds", "Duration of the phases of its start", *_RANK, "phase"),
    _gauge("regrow_worker_restored_bytes", "Bytes of its last restore by source: memory, peers, storage, ranks", *_RANK, "source"),
    _counter("regrow_worker_steps", "Steps that a rank applied in this generation", *_RANK),
    _counter("regrow_worker_tokens", "Tokens that a rank told of in this generation", *_RANK),
    _counter("regrow_worker_saves", "Saves by outcome in this generation", *_RANK, "outcome"),
    _counter("regrow_worker_stall_seconds", "Time that saves held this rank up in this generation", *_RANK),
    _counter("regrow_worker_nonfinite", "Steps at which something was infinite or NaN on this rank", *_RANK),
)

METRICS: tuple[Metric, ...] = (
    *_OF_THE_SUPERVISOR,
    *_OF_A_JOB,
    *_OF_EFFICIENCY,
    *_OF_FAILURES,
    *_OF_STATE,
    *_OF_AN_AGENT,
    *_OF_A_GPU,
    *_OF_A_WORKER,
)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}


def build(group: str, registry: CollectorRegistry) -> dict[str, Any]:
    """Make the kept metrics of a group on `registry`: {name: Counter | Gauge | Histogram}."""
    import prometheus_client as prometheus

    made: dict[str, Any] = {}
    for metric in METRICS:
        if metric.group != group or not metric.kept:
            continue
        if metric.kind == "histogram":
            made[metric.name] = prometheus.Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)
        else:
            made[metric.name] = prometheus.Counter(metric.name, metric.help, metric.labels, registry=registry)
    return made


class Page:
    """One scrape: samples are put in any order, the text has each family once with its help."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def put(self, name: str, value: float | None, *labels: str | int) -> None:
        """One sample; None: there is no such sample now.

        Raises:
            KeyError: a metric that is not declared.
            ValueError: another number of label values than declared.
        """
        if value is None:
            return
        metric = BY_NAME[name]
        if len(labels) != len(metric.labels):
            raise ValueError(f"{name} has the labels {metric.labels}, got {labels}")
        pairs = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in zip(metric.labels, labels, strict=True))
        text = f"{metric.series}{{{pairs}}} {float(value)!r}" if pairs else f"{metric.series} {float(value)!r}"
        self._lines.setdefault(name, []).append(text)

    def enum(self, name: str, known: tuple[str, ...], holds: str, *labels: str | int) -> None:
        """A state: 1 for `holds`, 0 for the others of `known`."""
        for state in known:
            self.put(name, 1.0 if state == holds else 0.0, *labels, state)

    def text(self) -> bytes:
        """Prometheus text format 0.0.4."""
        parts: list[str] = []
        for metric in METRICS:
            lines = self._lines.get(metric.name)
            if lines:
                parts.append(f"# HELP {metric.series} {metric.help}\n# TYPE {metric.series} {metric.kind}")
                parts += lines
        return ("\n".join(parts) + "\n").encode() if parts else b""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
