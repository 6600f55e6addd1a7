"""Recording and alert rules as data. `dashboards/rules/*.yaml` is written from here by `python -m regrow.dashboards.write`.

Each alert is a heading of docs/operations.md. `page` wakes somebody up: training stands still, or state may be lost or wrong.
`ticket` is work for the day: Regrow has dealt with it, or it costs efficiency. `none` is no alert but a fact that silences others.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from regrow.agent.health.xid import table

Severity = Literal["page", "ticket", "none"]

RUNBOOK = "docs/operations.md"
JOB = "cluster, job_name"
NODE = "cluster, node"
GPU = "cluster, node, device"
_HARDWARE = ("reset", "reboot", "replace")


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One alert. `hold` is how long the expression must hold, a PromQL duration."""

    name: str
    expr: str
    hold: str
    severity: Severity
    summary: str
    scope: Literal["cluster", "job", "node", "gpu"]

    @property
    def runbook(self) -> str:
        """Link into the runbook."""
        return f"{RUNBOOK}#{self.name.lower()}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded series."""

    name: str
    expr: str


class Pace(msgspec.Struct, frozen=True):
    """Writes durations. A factor below 1 shortens all of them alike: rules for a run of minutes instead of months."""

    factor: float = 1.0

    def d(self, seconds: float) -> str:
        """A PromQL duration, at least a second."""
        left = max(1, round(seconds * self.factor))
        for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
            if left % size == 0:
                return f"{left // size}{unit}"
        return f"{left}s"

    def n(self, seconds: float) -> str:
        """The same as a number of seconds."""
        return f"{seconds * self.factor:g}"


def hardware_xids() -> str:
    """Regular expression of the XIDs after which a GPU or its host needs something done."""
    return "|".join(str(code) for code, one in sorted(table().items()) if one.action in _HARDWARE)


def records(pace: Pace) -> list[Record]:
    """Recorded series: what several panels and alerts share."""
    d5, d1h, d1d = pace.d(300), pace.d(3600), pace.d(86_400)
    over = [
        ("regrow:stopping", "min by (cluster) (regrow_stopping)"),
        ("regrow:jobs_over", "min by (cluster) (regrow_teardown)"),
        ("regrow:nodes_lost:ratio", "sum by (cluster) (regrow_node_lost) / count by (cluster) (regrow_node_lost)"),
        ("regrow:step_rate", f"sum by ({JOB}) (rate(regrow_step_seconds_count[{d5}]))"),
        (
            "regrow:step_seconds:mean",
            f"sum by ({JOB}) (rate(regrow_step_seconds_sum[{d5}])) / (sum by ({JOB}) (rate(regrow_step_seconds_count[{d5}])) > 0)",
        ),
        ("regrow:lost_time:ratio", f"sum by ({JOB}, phase) (rate(regrow_lost_seconds_total[{d1h}]))"),
        (
            "regrow:recovery_seconds:p95",
            f"histogram_quantile(0.95, sum by ({JOB}, le) (increase(regrow_recovery_seconds_bucket[{d1d}])))",
        ),
        ("regrow:goodput:ratio", f"max by ({JOB}) (regrow_goodput_ratio)"),
    ]
    return [Record(name=name, expr=expr) for name, expr in over]


def alerts(pace: Pace) -> list[Alert]:
    """All alerts."""
    rows = [*_cluster(pace), *_teardown(pace), *_job(pace), *_state(pace), *_node(pace), *_agent(pace), *_gpu(pace)]
    return [
        Alert(name=f"Regrow{name}", expr=expr, hold=hold, severity=severity, summary=summary, scope=scope)
        for scope, severity, name, hold, expr, summary in rows
    ]


_Row = tuple[Literal["cluster", "job", "node", "gpu"], Severity, str, str, str, str]


def _cluster(p: Pace) -> list[_Row]:
    slow = f'sum by (cluster) (rate(regrow_turn_seconds_bucket{{le="0.1"}}[{p.d(300)}]))'
    return [
        ("cluster", "page", "SupervisorDown", p.d(60), 'sum by (cluster) (up{role="supervisor"}) == 0',
         "No supervisor of cluster {{ $labels.cluster }} answers: training goes on, nobody would react to the next failure"),
        ("cluster", "page", "StoreDown", p.d(60), "max by (cluster) (regrow_store_up) == 0",
         "etcd of cluster {{ $labels.cluster }} does not answer: training goes on, checkpoints stay pending, nothing can be re-formed"),
        ("cluster", "page", "NoLeader", p.d(60), "max by (cluster) (regrow_is_leader) == 0",
         "No supervisor of cluster {{ $labels.cluster }} leads"),
        ("cluster", "ticket", "TwoLeaders", p.d(60), "sum by (cluster) (regrow_is_leader) > 1",
         "{{ $value }} supervisors of cluster {{ $labels.cluster }} say that they lead; only one of them can act"),
        ("cluster", "ticket", "AutomationOff", p.d(900), "min by (cluster) (regrow_automation_enabled) == 0",
         "Automatic actions of cluster {{ $labels.cluster }} are switched off"),
        ("cluster", "ticket", "ActuatorFailing", p.d(900), 'max by (cluster) (regrow_actuator_orders{state=~"failed|held"}) > 0',
         "A quarantined node of cluster {{ $labels.cluster }} is not known to Slurm, Kubernetes or the site's program"),
        ("cluster", "ticket", "SlowDecisions", p.d(600),
         f"1 - {slow} / (sum by (cluster) (rate(regrow_turn_seconds_count[{p.d(300)}])) > 0) > 0.05",
         "{{ $value | humanizePercentage }} of the supervisor's turns take more than 0.1 s"),
    ]  # fmt: skip


def _teardown(p: Pace) -> list[_Row]:
    """Facts that silence. After an orderly end the supervisor is gone: what was recorded last still holds."""
    last = f"(last_over_time(regrow:jobs_over[{p.d(86_400)}]) == 1 or last_over_time(regrow:stopping[{p.d(86_400)}]) == 1)"
    ended = (
        f"(regrow:jobs_over == 1 unless regrow:jobs_over offset {p.d(900)} == 1) or regrow:stopping == 1"
        f' or ({last} and on (cluster) sum by (cluster) (up{{role="supervisor"}}) == 0)'
    )
    leaving = f"max by ({NODE}) (regrow_node_teardown) == 1"
    return [
        ("cluster", "none", "ClusterTeardown", "0s", ended, "Cluster {{ $labels.cluster }} comes to its end on our own order"),
        ("job", "none", "JobTeardown", "0s", f"max by ({JOB}) (regrow_teardown) == 1",
         "Job {{ $labels.job_name }} is stopped, paused or over on our own order"),
        ("node", "none", "NodeTeardown", "0s", leaving, "Node {{ $labels.node }} is emptied or leaves on our own order"),
        ("node", "none", "KillWindow", "0s", f"max by ({NODE}) (regrow_agent_teardown) == 1",
         "Workers on node {{ $labels.node }} were killed by us a moment ago"),
    ]  # fmt: skip


def _job(p: Pace) -> list[_Row]:
    active = f'max by ({JOB}) (regrow_job_state{{state=~"waiting|starting|running|recovering"}}) == 1'
    stuck = f"max by ({JOB}) (changes(regrow_step[{p.d(600)}])) == 0 and max by ({JOB}) (regrow_step) > 0 and {active}"
    spread = f'max by ({JOB}) (regrow_rank_compute_seconds{{stat="max"}}) - max by ({JOB}) (regrow_rank_compute_seconds{{stat="median"}})'
    kind = f'sum by ({JOB}) (increase(regrow_incidents_total{{kind="KIND"}}[{p.d(3600)}])) > 0'
    return [
        ("job", "page", "JobFailed", "0s", f'max by ({JOB}) (regrow_job_state{{state="failed"}}) == 1',
         "Job {{ $labels.job_name }} has failed and is not started again"),
        ("job", "page", "JobParked", p.d(60), f'max by ({JOB}) (regrow_job_state{{state="parked"}}) == 1',
         "Job {{ $labels.job_name }} waits for an operator or for machines"),
        ("job", "page", "JobStuck", p.d(300), stuck, "Job {{ $labels.job_name }} has completed no new step"),
        ("job", "page", "RecoverySlow", p.d(60), f"max by ({JOB}) (regrow_recovery_open_seconds) > {p.n(300)}",
         "The recovery of job {{ $labels.job_name }} has been open for {{ $value | humanizeDuration }}"),
        ("job", "ticket", "RestartBudgetLow", "0s",
         f"min by ({JOB}) (regrow_restart_budget_remaining) <= 0.2 * max by ({JOB}) (regrow_restart_budget)",
         "Job {{ $labels.job_name }} has {{ $value }} restarts left before it is given up"),
        ("job", "ticket", "FailuresFrequent", "0s", f"sum by ({JOB}) (increase(regrow_failures_total[{p.d(3600)}])) > 5",
         "Job {{ $labels.job_name }} had {{ $value | printf \"%.0f\" }} failures within an hour"),
        ("job", "ticket", "GoodputLow", p.d(3600), f"regrow:goodput:ratio < 0.5 and {active}",
         "Goodput of job {{ $labels.job_name }} is {{ $value | humanizePercentage }}"),
        ("job", "ticket", "JobShrunk", p.d(1800),
         f'max by ({JOB}) (regrow_gpus{{use="mesh"}}) < max by ({JOB}) (regrow_gpus{{use="reserved"}}) and {active}',
         "Job {{ $labels.job_name }} runs on {{ $value }} GPUs, more are reserved for it"),
        ("job", "ticket", "Straggler", p.d(900),
         f"{spread} > 0.1 * regrow:step_seconds:mean or max by ({JOB}) (regrow_straggler_excess_ratio) > 0.05",
         "A rank of job {{ $labels.job_name }} computes longer than the others, or than it did"),
        ("job", "ticket", "NonFinite", "0s", kind.replace("KIND", "non_finite"),
         "Job {{ $labels.job_name }} was rolled back because of NaN or infinity"),
    ]  # fmt: skip


def _state(p: Pace) -> list[_Row]:
    bad = f'sum by ({JOB}) (increase(regrow_checkpoints_total{{state=~"failed|skipped"}}[{p.d(1800)}])) > 0'
    good = f'sum by ({JOB}) (increase(regrow_checkpoints_total{{state="committed"}}[{p.d(1800)}])) > 0'
    stale = f"max by ({JOB}) (regrow_checkpoint_age_seconds) > 3 * max by ({JOB}) (regrow_checkpoint_interval_seconds)"
    return [
        ("job", "page", "SilentCorruption", "0s", f'sum by ({JOB}) (increase(regrow_incidents_total{{kind="sdc"}}[{p.d(3600)}])) > 0',
         "Replicas of job {{ $labels.job_name }} differed: state was corrupted on some GPU"),
        ("job", "page", "CheckpointStale", p.d(120), stale,
         "The newest checkpoint of job {{ $labels.job_name }} is {{ $value | humanizeDuration }} old"),
        ("job", "ticket", "SavesFailing", p.d(300), f"{bad} unless {good}",
         "Saves of job {{ $labels.job_name }} are skipped or fail, and none was committed"),
        ("job", "ticket", "CheckpointDamaged", "0s", f"max by ({JOB}) (regrow_checkpoints_damaged) > 0",
         "{{ $value }} checkpoints of job {{ $labels.job_name }} cannot be used"),
    ]  # fmt: skip


def _node(p: Pace) -> list[_Row]:
    def state(name: str) -> str:
        return f'max by ({NODE}) (regrow_node_state{{state="{name}"}}) == 1'

    return [
        ("cluster", "page", "ManyNodesLost", p.d(60), "regrow:nodes_lost:ratio > 0.1 and sum by (cluster) (regrow_node_lost) >= 3",
         "{{ $value | humanizePercentage }} of the nodes of cluster {{ $labels.cluster }} are lost: look for a common cause"),
        ("node", "ticket", "NodeLost", p.d(120), f"max by ({NODE}) (regrow_node_lost) == 1", "Node {{ $labels.node }} went without a word"),
        ("node", "ticket", "NodeSilent", p.d(60), state("suspect"), "Node {{ $labels.node }} is connected and does not beat"),
        ("node", "ticket", "NodeQuarantined", "0s", state("quarantined"), "Node {{ $labels.node }} is in quarantine"),
        ("node", "ticket", "NodeUnhealthy", p.d(60), state("unhealthy"), "Node {{ $labels.node }} says that it must not train"),
    ]  # fmt: skip


def _agent(p: Pace) -> list[_Row]:
    named = 'max by (cluster, node) (label_replace(up{role="agent"} == bool 0, "node", "$1", "instance", "(.*)")) == 1'
    leads = "and on (cluster) max by (cluster) (regrow_is_leader) == 1"

    def share(part: str, whole: str) -> str:
        return f"min by ({NODE}) ({part} / {whole}) < 0.05"

    return [
        ("node", "ticket", "AgentUnreachable", p.d(300), f"{named} unless on ({NODE}) max by ({NODE}) (regrow_node_lost) == 1",
         "Metrics of the agent on {{ $labels.node }} cannot be scraped"),
        ("node", "ticket", "AgentDisconnected", p.d(120), f"max by ({NODE}) (regrow_agent_connected) == 0 {leads}",
         "The agent on {{ $labels.node }} finds no leader although there is one"),
        ("node", "ticket", "AgentLate", p.d(600), f"max by ({NODE}) (regrow_agent_loop_lag_seconds) > 1",
         "The agent on {{ $labels.node }} is {{ $value | humanizeDuration }} late: the host is overloaded"),
        ("node", "ticket", "DiskLow", p.d(300), share("regrow_agent_host_disk_free_bytes", "regrow_agent_host_disk_bytes"),
         "{{ $value | humanizePercentage }} of the disk under the state folder of {{ $labels.node }} is free"),
        ("node", "ticket", "MemoryLow", p.d(300), share("regrow_agent_host_memory_available_bytes", "regrow_agent_host_memory_bytes"),
         "{{ $value | humanizePercentage }} of the memory of {{ $labels.node }} is available"),
        ("node", "ticket", "ProbeFails", p.d(120), f"min by ({NODE}) (regrow_agent_probe_ok) == 0",
         "The NVIDIA driver on {{ $labels.node }} does not answer"),
    ]  # fmt: skip


def _gpu(p: Pace) -> list[_Row]:
    xid = f'min by ({GPU}, xid) (regrow_agent_gpu_xid_age_seconds{{xid=~"{hardware_xids()}"}}) < {p.n(600)}'
    hot = f"max by ({GPU}) (regrow_agent_gpu_temperature_celsius) >= max by ({GPU}) (regrow_agent_gpu_slowdown_celsius) - 3"
    ecc = f'sum by ({GPU}) (increase(regrow_agent_gpu_ecc_errors_total{{kind="uncorrected"}}[{p.d(600)}])) > 0'
    where = "GPU {{ $labels.device }} of node {{ $labels.node }}"
    return [
        ("gpu", "ticket", "GpuXid", "0s", xid, f"XID {{{{ $labels.xid }}}} on {where}"),
        ("gpu", "ticket", "GpuLost", "0s", f"max by ({GPU}) (regrow_agent_gpu_lost) == 1", f"{where} is lost to the driver"),
        ("gpu", "ticket", "GpuEcc", "0s", ecc, f"Uncorrectable memory errors on {where}"),
        ("gpu", "ticket", "GpuHot", p.d(600), hot, f"{where} is at {{{{ $value }}}} degrees, where it slows down"),
    ]  # fmt: skip


class Inhibition(msgspec.Struct, frozen=True, kw_only=True):
    """While an alert of `source` fires, those that match `target` and agree in `equal` are not sent."""

    source: str
    target: str
    equal: tuple[str, ...]


_ALL = 'severity=~"page|ticket"'
INHIBITIONS: tuple[Inhibition, ...] = (
    Inhibition(source='alertname="RegrowClusterTeardown"', target=_ALL, equal=("cluster",)),
    Inhibition(source='alertname="RegrowJobTeardown"', target=_ALL, equal=("cluster", "job_name")),
    Inhibition(source='alertname="RegrowNodeTeardown"', target=_ALL, equal=("cluster", "node")),
    Inhibition(source='alertname="RegrowKillWindow"', target='scope="gpu"', equal=("cluster", "node")),
    Inhibition(source='alertname=~"RegrowNodeLost|RegrowAgentUnreachable"', target='scope="gpu"', equal=("cluster", "node")),
    Inhibition(source='alertname="RegrowManyNodesLost"', target='alertname=~"RegrowNode.*|RegrowAgent.*"', equal=("cluster",)),
    Inhibition(source='alertname="RegrowSupervisorDown"', target='alertname=~"RegrowNoLeader|RegrowStoreDown"', equal=("cluster",)),
    Inhibition(
        source='alertname="RegrowStoreDown"',
        target='alertname=~"RegrowNoLeader|RegrowSavesFailing|RegrowCheckpointStale"',
        equal=("cluster",),
    ),
)
