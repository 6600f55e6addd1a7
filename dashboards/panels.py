"""What the dashboards show, as data: titles, PromQL, legends, units. `grafana.py` makes Grafana's JSON of it."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["lines", "stack", "stat", "name", "table", "states"]
"""stat: a number; name: the legend of the one series that there is; states: a row for each series, coloured where it is 1."""
Words = dict[str, tuple[str, str]]
"""{value: (word, colour)}"""
UP: Words = {"0": ("down", "red"), "1": ("up", "green")}
ON: Words = {"0": ("OFF", "red"), "1": ("on", "green")}
HOLDS: Words = {"0": (" ", "transparent"), "1": ("yes", "green")}


class Query(msgspec.Struct, frozen=True):
    """One line of PromQL and how its series are called."""

    expr: str
    legend: str


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One panel. `width` of 24 columns."""

    title: str
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    unit: str = "short"
    width: int = 12
    about: str = ""
    words: Words = {}


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """One dashboard. `variables`: {name: label_values(...) query}."""

    uid: str
    title: str
    variables: dict[str, str]
    panels: tuple[Panel, ...]


def _panel(
    title: str,
    *queries: tuple[str, str],
    kind: Kind = "lines",
    unit: str = "short",
    width: int = 12,
    about: str = "",
    words: Words | None = None,
) -> Panel:
    meaning = words if words is not None else HOLDS if kind == "states" else {}
    return Panel(title=title, queries=tuple(Query(*one) for one in queries), kind=kind, unit=unit, width=width, about=about, words=meaning)


_CLUSTER = {"cluster": "label_values(regrow_nodes, cluster)"}
_JOB = _CLUSTER | {"job": 'label_values(regrow_step{cluster="$cluster"}, job_name)'}
_NODE = _CLUSTER | {"node": 'label_values(regrow_agent_up{cluster="$cluster"}, node)'}
_C = 'cluster="$cluster"'
_J = 'cluster="$cluster",job_name="$job"'
_N = 'cluster="$cluster",node="$node"'

FLEET = Board(
    uid="regrow-fleet",
    title="Regrow: Fleet",
    variables=_CLUSTER,
    panels=(
        _panel("Leaders", (f"sum(regrow_is_leader{{{_C}}})", "leaders"), kind="stat", width=4),
        _panel("Store", (f"max(regrow_store_up{{{_C}}})", "up"), kind="stat", width=4, words=UP),
        _panel("Automation", (f"min(regrow_automation_enabled{{{_C}}})", "on"), kind="stat", width=4, words=ON),
        _panel("Nodes", (f"sum(regrow_nodes{{{_C}}})", "known"), kind="stat", width=4),
        _panel("Lost nodes", (f"sum(regrow_node_lost{{{_C}}})", "lost"), kind="stat", width=4),
        _panel("Alerts", (f'count(ALERTS{{{_C},alertstate="firing",severity=~"page|ticket"}}) or vector(0)', "firing"), kind="stat", width=4),
        _panel("Nodes by state", (f"sum by (state) (regrow_nodes{{{_C}}})", "{{state}}"), kind="stack"),
        _panel("Quarantine", (f"sum by (state) (regrow_quarantine{{{_C}}})", "{{state}}"), kind="stack"),
        _panel("Jobs", (f"max by (job_name, state) (regrow_job_state{{{_C}}}) == 1", "{{job_name}} {{state}}"), kind="table"),
        _panel("GPUs: in the mesh and reserved", (f"max by (job_name, use) (regrow_gpus{{{_C}}})", "{{job_name}} {{use}}")),
        _panel("Goodput", (f"max by (job_name) (regrow_goodput_ratio{{{_C}}})", "{{job_name}}"), unit="percentunit"),
        _panel("Failures by cause, over the jobs' life", (f"sum by (cause) (regrow_failures_total{{{_C}}})", "{{cause}}"), kind="stack"),
        _panel(
            "Mean time between failures of a node, with its 95 % interval",
            (f'max by (job_name, bound) (regrow_mtbf_seconds{{{_C},scope="node"}})', "{{job_name}} {{bound}}"),
            unit="s",
        ),
        _panel(
            "Decisions: mean time of a turn",
            (f"sum(rate(regrow_turn_seconds_sum{{{_C}}}[$__rate_interval])) / sum(rate(regrow_turn_seconds_count{{{_C}}}[$__rate_interval]))", "turn"),
            unit="s",
        ),
    ),
)  # fmt: skip

JOB = Board(
    uid="regrow-job",
    title="Regrow: Job",
    variables=_JOB,
    panels=(
        _panel("State", (f"max by (state) (regrow_job_state{{{_J}}}) == 1", "{{state}}"), kind="name", width=4),
        _panel("Step", (f"max(regrow_step{{{_J}}})", "step"), kind="stat", width=4),
        _panel("Generation", (f"max(regrow_generation{{{_J}}})", "generation"), kind="stat", width=4),
        _panel("Goodput", (f"max(regrow_goodput_ratio{{{_J}}})", "goodput"), kind="stat", unit="percentunit", width=4),
        _panel("ETTR", (f"max(regrow_ettr_ratio{{{_J}}})", "ETTR"), kind="stat", unit="percentunit", width=4),
        _panel("Checkpoint age", (f"max(regrow_checkpoint_age_seconds{{{_J}}})", "age"), kind="stat", unit="s", width=4),
        _panel("Steps a second", (f"sum(rate(regrow_step_seconds_count{{{_J}}}[$__rate_interval]))", "steps/s")),
        _panel("Loss", (f"max(regrow_loss{{{_J}}})", "loss")),
        _panel(
            "Where reserved GPU time went",
            (f"max(regrow_lineage_gpu_seconds{{{_J}}})", "lineage"),
            (f"max(regrow_reserved_gpu_seconds_total{{{_J}}}) - max(regrow_lineage_gpu_seconds{{{_J}}})", "everything else"),
            kind="stack", unit="s", about="The two add up to the GPU-seconds that were reserved; lineage over the sum is goodput.",
        ),
        _panel("Lost time by phase", (f"sum by (phase) (regrow_lost_seconds_total{{{_J}}})", "{{phase}}"), kind="stack", unit="s"),
        _panel("Restarts by cause", (f"sum by (cause) (regrow_failures_total{{{_J}}})", "{{cause}}"), kind="stack"),
        _panel("Incidents by kind", (f"sum by (kind) (regrow_incidents_total{{{_J}}})", "{{kind}}"), kind="stack"),
        _panel(
            "Recoveries: mean time of each phase",
            (f"sum by (phase) (regrow_recovery_phase_seconds_sum{{{_J}}}) / sum by (phase) (regrow_recovery_phase_seconds_count{{{_J}}})", "{{phase}}"),
            kind="stack", unit="s",
        ),
        _panel("Recovery open since", (f"max(regrow_recovery_open_seconds{{{_J}}})", "open"), unit="s"),
        _panel(
            "Checkpoint age and longest interval",
            (f"max(regrow_checkpoint_age_seconds{{{_J}}})", "age"),
            (f"max(regrow_checkpoint_interval_seconds{{{_J}}})", "interval"), unit="s",
        ),
        _panel(
            "Saves by tier: interval, stall, until safe",
            (f"max by (tier, value) (regrow_checkpoint_tier_seconds{{{_J}}})", "{{tier}} {{value}}"), unit="s",
        ),
        _panel("Checkpoints by state", (f"sum by (state) (regrow_checkpoints_total{{{_J}}})", "{{state}}")),
        _panel("Own compute over the ranks", (f"max by (stat) (regrow_rank_compute_seconds{{{_J}}})", "{{stat}}"), unit="s"),
        _panel("Straggler: by how much it became slower", (f"max(regrow_straggler_excess_ratio{{{_J}}})", "excess"), unit="percentunit"),
        _panel("Wall that bounds the step", (f"max by (wall) (regrow_wall{{{_J}}})", "{{wall}}"), kind="states"),
        _panel(
            "Scaling efficiency S/k, t1 named", (f"max by (mesh, t1) (regrow_scaling_efficiency_ratio{{{_J}}})", "{{mesh}}, t1 {{t1}}"),
            unit="percentunit",
        ),
        _panel("Share of the step that is exposed", (f"max(regrow_step_exposed_ratio{{{_J}}})", "exposed"), unit="percentunit"),
        _panel("Failures per GPU-hour, with its 95 % interval", (f"3600 * max by (bound) (regrow_failure_rate_per_gpu_second{{{_J}}})", "{{bound}}")),
        _panel("Mean time between failures", (f'max by (scope) (regrow_mtbf_seconds{{{_J},bound="point"}})', "{{scope}}"), unit="s"),
    ),
)  # fmt: skip

NODE = Board(
    uid="regrow-node",
    title="Regrow: Node timeline",
    variables=_NODE,
    panels=(
        _panel("State", (f"max by (state) (regrow_node_state{{{_N}}})", "{{state}}"), kind="states", width=24),
        _panel("Health verdict", (f"max by (state) (regrow_agent_health{{{_N}}})", "{{state}}"), kind="states", width=24),
        _panel("Phase of each rank", (f"max by (job_name, rank, phase) (regrow_worker_phase{{{_N}}}) == 1", "{{job_name}} rank {{rank}} {{phase}}"), kind="states", width=24),
        _panel("Workers", (f"max(regrow_agent_workers{{{_N}}})", "workers")),
        _panel("Step of each rank", (f"max by (rank) (regrow_worker_step{{{_N}}})", "rank {{rank}}")),
        _panel("Own compute of each rank", (f"max by (rank) (regrow_worker_compute_seconds{{{_N}}})", "rank {{rank}}"), unit="s"),
        _panel("Start phases of each rank", (f"max by (rank, phase) (regrow_worker_start_seconds{{{_N}}})", "rank {{rank}} {{phase}}"), unit="s"),
        _panel("GPU temperature", (f"max by (device) (regrow_agent_gpu_temperature_celsius{{{_N}}})", "{{device}}"), unit="celsius"),
        _panel(
            "GPU memory in use",
            (f"max by (device) (regrow_agent_gpu_memory_used_bytes{{{_N}}}) / max by (device) (regrow_agent_gpu_memory_bytes{{{_N}}})", "{{device}}"),
            unit="percentunit",
        ),
        _panel("GPU power", (f"max by (device) (regrow_agent_gpu_power_watts{{{_N}}})", "{{device}}"), unit="watt"),
        _panel("GPU busy", (f"max by (device) (regrow_agent_gpu_busy_ratio{{{_N}}})", "{{device}}"), unit="percentunit"),
        _panel("XIDs", (f"max by (device, xid) (regrow_agent_gpu_xids_total{{{_N}}})", "{{xid}} on {{device}}")),
        _panel("ECC errors", (f"max by (device, kind) (regrow_agent_gpu_ecc_errors_total{{{_N}}})", "{{kind}} on {{device}}")),
        _panel("Host memory available", (f"max(regrow_agent_host_memory_available_bytes{{{_N}}})", "available"), unit="bytes"),
        _panel("Host CPU", (f"max(regrow_agent_host_cpu_ratio{{{_N}}})", "busy"), unit="percentunit"),
    ),
)  # fmt: skip

SDC = Board(
    uid="regrow-sdc",
    title="Regrow: SDC",
    variables=_JOB,
    panels=(
        _panel("Incidents of silent corruption", (f'sum(regrow_incidents_total{{{_J},kind="sdc"}})', "sdc"), kind="stat", width=6),
        _panel("Rolled back for NaN", (f'sum(regrow_incidents_total{{{_J},kind="non_finite"}})', "non-finite"), kind="stat", width=6),
        _panel("Newest agreed step", (f"max(regrow_digest_agreed_step{{{_J}}})", "step"), kind="stat", width=6),
        _panel("Damaged checkpoints", (f"max(regrow_checkpoints_damaged{{{_J}}})", "damaged"), kind="stat", width=6),
        _panel("Digest checks by verdict", (f"sum by (verdict) (regrow_digest_checks_total{{{_J}}})", "{{verdict}}")),
        _panel(
            "Steps since replicas agreed last", (f"max(regrow_step{{{_J}}}) - max(regrow_digest_agreed_step{{{_J}}})", "steps"),
            about="What a corruption found now could reach back at most.",
        ),
        _panel("Newest checkpoint: committed and verified", (f"max by (state) (regrow_checkpoint_step{{{_J}}})", "{{state}}")),
        _panel("Non-finite steps by rank", (f"sum by (node, rank) (regrow_worker_nonfinite_total{{{_J}}})", "{{node}} rank {{rank}}")),
        _panel(
            "Hardware in quarantine", (f"max by (state) (regrow_quarantine{{{_C}}})", "{{state}}"), kind="stack", width=24,
        ),
    ),
)  # fmt: skip

AGENT = Board(
    uid="regrow-agent",
    title="Regrow: Agent self",
    variables=_NODE,
    panels=(
        _panel("Connected", (f"max(regrow_agent_connected{{{_N}}})", "leader"), (f"max(regrow_agent_store_up{{{_N}}})", "store"), kind="stat", width=8, words=UP),
        _panel("Shim", (f"max(regrow_agent_shim_up{{{_N}}})", "up"), kind="stat", width=8, words=UP),
        _panel("Checkpoint writer", (f"max(regrow_agent_writer_up{{{_N}}})", "up"), kind="stat", width=8, words=UP),
        _panel("Age of the last beat", (f"max(regrow_agent_beat_age_seconds{{{_N}}})", "age"), unit="s"),
        _panel("Delay of the event loop", (f"max(regrow_agent_loop_lag_seconds{{{_N}}})", "delay"), unit="s"),
        _panel(
            "Messages that wait, and that were dropped",
            (f"max(regrow_agent_kept_messages{{{_N}}})", "waiting"), (f"max(regrow_agent_dropped_messages_total{{{_N}}})", "dropped"),
        ),
        _panel("Duration of a probe", (f"max(regrow_agent_probe_seconds{{{_N}}})", "probe"), unit="s"),
        _panel(
            "CPU of the agent process",
            ('sum(rate(process_cpu_seconds_total{cluster="$cluster",role="agent",instance="$node"}[$__rate_interval]))', "cores"),
        ),
        _panel(
            "Memory of the agent process", ('max(process_resident_memory_bytes{cluster="$cluster",role="agent",instance="$node"})', "resident"),
            unit="bytes",
        ),
        _panel("Open files", ('max(process_open_fds{cluster="$cluster",role="agent",instance="$node"})', "files")),
        _panel(
            "Disk under the state folder",
            (f"max(regrow_agent_host_disk_free_bytes{{{_N}}}) / max(regrow_agent_host_disk_bytes{{{_N}}})", "free"), unit="percentunit",
        ),
    ),
)  # fmt: skip

BOARDS = (FLEET, JOB, NODE, SDC, AGENT)
