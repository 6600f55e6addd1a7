"""Each alert on time series of its own, evaluated by promtool: quiet, on, off again, and a near miss that must stay quiet."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import yaml
from tests.observe.conftest import ROOT

from regrow.dashboards import rules

RULES = ROOT / "dashboards" / "rules"
ALERTS = {alert.name: alert for alert in rules.alerts(rules.Pace())}
Series = dict[str, str]
SPIKE = "0x5 1x10 0x10"
"""A fact from minute 6 to minute 16."""
DIP = "1x5 0x10 1x10"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Samples a minute apart (what is recorded may lag a minute behind), and the minutes at which the alert is asked for. `near`: series with which it never fires."""

    alert: str
    series: Series
    quiet: int
    on: int
    off: int
    summary: str
    labels: str = ""
    """Besides the cluster: name=value, comma-separated."""
    near: tuple[Series, ...]


def _metric(name: str, **labels: str) -> str:
    pairs = ",".join(f'{label}="{text}"' for label, text in {"cluster": "c", **labels}.items())
    return f"{name}{{{pairs}}}"


def job(name: str, **labels: str) -> str:
    """A series of the job gpt."""
    return _metric(name, job_name="gpt", **labels)


def node(name: str, where: str = "n0", **labels: str) -> str:
    """A series of a node."""
    return _metric(name, node=where, **labels)


def gpu(name: str, **labels: str) -> str:
    """A series of a GPU of n0."""
    return _metric(name, node="n0", device="GPU-a", **labels)


def supervisor(name: str, number: int = 1, **labels: str) -> str:
    """A series of one supervisor."""
    return _metric(name, instance=f"s:{number}", **labels)


UP = supervisor("up", role="supervisor")
UP_TOO = supervisor("up", 2, role="supervisor")
RUNNING = {job("regrow_job_state", state="running"): "1x200"}
IDLE = {job("regrow_job_state", state="paused"): "1x200", job("regrow_job_state", state="running"): "0x200"}


def fact(alert: str, series: str, summary: str, *, near: Series, labels: str = "") -> Case:
    """An alert that follows its series at once."""
    return Case(alert=alert, series={series: SPIKE}, quiet=5, on=6, off=17, summary=summary, labels=labels, near=(near,))


def held(alert: str, series: str, values: str, minutes: int, summary: str, *, near: Series, labels: str = "") -> Case:
    """An alert whose series changes at minute 6, must hold for `minutes`, and changes back at minute 6 + 3 x minutes."""
    return Case(
        alert=alert, series={series: values}, quiet=5 + minutes, on=7 + minutes, off=7 + 3 * minutes, summary=summary, labels=labels, near=(near,)
    )  # fmt: skip


def _for(before: str, then: str, minutes: int) -> str:
    return f"{before}x5 {then}x{3 * minutes} {before}x20"


CLUSTER = [
    held("SupervisorDown", UP, DIP.replace("0x10", "0x3"), 1,
         "No supervisor of cluster c answers: training goes on, nobody would react to the next failure", near={UP: DIP, UP_TOO: "1x30"}),
    held("StoreDown", supervisor("regrow_store_up"), _for("1", "0", 1), 1,
         "etcd of cluster c does not answer: training goes on, checkpoints stay pending, nothing can be re-formed",
         near={supervisor("regrow_store_up"): DIP, supervisor("regrow_store_up", 2): "1x30"}),
    held("NoLeader", supervisor("regrow_is_leader"), _for("1", "0", 1), 1, "No supervisor of cluster c leads",
         near={supervisor("regrow_is_leader"): DIP, supervisor("regrow_is_leader", 2): "0x5 1x30"}),
    Case(alert="TwoLeaders", series={supervisor("regrow_is_leader"): "1x30", supervisor("regrow_is_leader", 2): SPIKE}, quiet=6, on=8, off=17,
         summary="2 supervisors of cluster c say that they lead; only one of them can act",
         near=({supervisor("regrow_is_leader"): "1x30", _metric("regrow_is_leader", instance="s:2").replace('"c"', '"d"'): "1x30"},)),
    held("AutomationOff", supervisor("regrow_automation_enabled"), _for("1", "0", 15), 15, "Automatic actions of cluster c are switched off",
         near={supervisor("regrow_automation_enabled"): "1x5 0x10 1x60"}),
    held("ActuatorFailing", supervisor("regrow_actuator_orders", state="failed"), _for("0", "2", 15), 15,
         "A quarantined node of cluster c is not known to Slurm, Kubernetes or the site's program",
         near={supervisor("regrow_actuator_orders", state="failed"): "0x5 1x10 0x60", supervisor("regrow_actuator_orders", state="done"): "3x80"}),
    Case(alert="SlowDecisions",
         series={supervisor("regrow_turn_seconds_bucket", le="0.1"): "0+10x10 105+5x30 265+10x30", supervisor("regrow_turn_seconds_count"): "0+10x80"},
         quiet=20, on=30, off=48, summary="50% of the supervisor's turns take more than 0.1 s",
         near=({supervisor("regrow_turn_seconds_bucket", le="0.1"): "0+97x80", supervisor("regrow_turn_seconds_count"): "0+100x80"},
               {supervisor("regrow_turn_seconds_bucket", le="0.1"): "5x80", supervisor("regrow_turn_seconds_count"): "10x80"})),
    Case(alert="ClusterTeardown", series={job("regrow_teardown"): "0x5 1x40"}, quiet=5, on=8, off=24,
         summary="Cluster c comes to its end on our own order",
         near=({job("regrow_teardown"): "0x5 1x40", _metric("regrow_teardown", job_name="other"): "0x46"},)),
    Case(alert="ManyNodesLost", series={node("regrow_node_lost", f"n{number}"): SPIKE if number < 3 else "0x30" for number in range(10)},
         quiet=6, on=10, off=19, summary="30% of the nodes of cluster c are lost: look for a common cause",
         near=({node("regrow_node_lost", f"n{number}"): SPIKE if number < 2 else "0x30" for number in range(10)},
               {node("regrow_node_lost", f"n{number}"): SPIKE if number < 3 else "0x30" for number in range(40)})),
]  # fmt: skip

JOB = [
    fact("JobTeardown", job("regrow_teardown"), "Job gpt is stopped, paused or over on our own order", near={job("regrow_teardown"): "0x30"}),
    fact("JobFailed", job("regrow_job_state", state="failed"), "Job gpt has failed and is not started again",
         near={job("regrow_job_state", state="done"): SPIKE}),
    held("JobParked", job("regrow_job_state", state="parked"), _for("0", "1", 1), 1, "Job gpt waits for an operator or for machines",
         near={job("regrow_job_state", state="paused"): SPIKE}),
    Case(alert="JobStuck", series={job("regrow_step"): "1+1x10 11x30 12+1x20", **RUNNING}, quiet=24, on=30, off=43,
         summary="Job gpt has completed no new step",
         near=({job("regrow_step"): "1+1x10 11x50", **IDLE}, {job("regrow_step"): "0x60", **RUNNING})),
    Case(alert="RecoverySlow", series={job("regrow_recovery_open_seconds"): "0x5 60+60x14 0x10"}, quiet=11, on=13, off=21,
         summary="The recovery of job gpt has been open for 8m 0s", near=({job("regrow_recovery_open_seconds"): "0x5 60+60x4 0x10"},)),
    Case(alert="RestartBudgetLow", series={job("regrow_restart_budget_remaining"): "10x5 2x5 10x10", job("regrow_restart_budget"): "10x30"},
         quiet=5, on=6, off=12, summary="Job gpt has 2 restarts left before it is given up",
         near=({job("regrow_restart_budget_remaining"): "3x30", job("regrow_restart_budget"): "10x30"},)),
    Case(alert="FailuresFrequent", series={job("regrow_failures_total", cause="hardware"): "10x20 13x80", job("regrow_failures_total", cause="program"): "0x20 4x80"},
         quiet=20, on=50, off=90, summary="Job gpt had 7 failures within an hour",
         near=({job("regrow_failures_total", cause="hardware"): "0x20 4x80"},)),
    Case(alert="GoodputLow", series={job("regrow_goodput_ratio"): "0.8x5 0.4x100 0.8x20", **RUNNING}, quiet=65, on=70, off=110,
         summary="Goodput of job gpt is 40%", near=({job("regrow_goodput_ratio"): "0.51x120", **RUNNING}, {job("regrow_goodput_ratio"): "0.2x120", **IDLE})),
    Case(alert="JobShrunk", series={job("regrow_gpus", use="mesh"): "8x5 6x50 8x20", job("regrow_gpus", use="reserved"): "8x80", **RUNNING},
         quiet=35, on=40, off=57, summary="Job gpt runs on 6 GPUs, more are reserved for it",
         near=({job("regrow_gpus", use="mesh"): "8x80", job("regrow_gpus", use="reserved"): "8x80", **RUNNING},
               {job("regrow_gpus", use="mesh"): "0x80", job("regrow_gpus", use="reserved"): "8x80", **IDLE})),
    Case(alert="Straggler",
         series={job("regrow_rank_compute_seconds", stat="max"): "1x5 1.3x30 1x20", job("regrow_rank_compute_seconds", stat="median"): "1x60",
                 job("regrow_step_seconds_sum"): "0+120x60", job("regrow_step_seconds_count"): "0+60x60"},
         quiet=20, on=25, off=37, summary="A rank of job gpt computes longer than the others, or than it did",
         near=({job("regrow_rank_compute_seconds", stat="max"): "1.1x60", job("regrow_rank_compute_seconds", stat="median"): "1x60",
                job("regrow_step_seconds_sum"): "0+120x60", job("regrow_step_seconds_count"): "0+60x60"},)),
    held("Straggler", job("regrow_straggler_excess_ratio"), _for("0", "0.2", 15), 15,
         "A rank of job gpt computes longer than the others, or than it did", near={job("regrow_straggler_excess_ratio"): "0.04x60"}),
    *(Case(alert=name, series={job("regrow_incidents_total", kind=kind): "0x20 1x100"}, quiet=20, on=30, off=82, summary=summary,
           near=({job("regrow_incidents_total", kind="hang"): "0x20 5x100", job("regrow_incidents_total", kind=kind): "3x120"},))
      for name, kind, summary in (
          ("NonFinite", "non_finite", "Job gpt was rolled back because of NaN or infinity"),
          ("SilentCorruption", "sdc", "Replicas of job gpt differed: state was corrupted on some GPU"))),
    Case(alert="CheckpointStale",
         series={job("regrow_checkpoint_age_seconds"): "0+60x20 0+60x10", job("regrow_checkpoint_interval_seconds"): "300x40"},
         quiet=17, on=19, off=22, summary="The newest checkpoint of job gpt is 19m 0s old",
         near=({job("regrow_checkpoint_age_seconds"): "900x40", job("regrow_checkpoint_interval_seconds"): "300x40"},)),
    Case(alert="SavesFailing",
         series={job("regrow_checkpoints_total", state="failed"): "0x5 1+1x40", job("regrow_checkpoints_total", state="committed"): "5x45 6x40"},
         quiet=8, on=15, off=46, summary="Saves of job gpt are skipped or fail, and none was committed",
         near=({job("regrow_checkpoints_total", state="skipped"): "0+1x80", job("regrow_checkpoints_total", state="committed"): "0+1x80"},
               {job("regrow_checkpoints_total", state="pending"): "0+1x80", job("regrow_checkpoints_total", state="committed"): "0x80"})),
    Case(alert="CheckpointDamaged", series={job("regrow_checkpoints_damaged"): "0x5 2x5 0x5"}, quiet=5, on=6, off=12,
         summary="2 checkpoints of job gpt cannot be used", near=({job("regrow_checkpoints_damaged"): "0x30"},)),
]  # fmt: skip

LEADS = {supervisor("regrow_is_leader"): "1x60"}
NODE = [
    fact("NodeTeardown", node("regrow_node_teardown"), "Node n0 is emptied or leaves on our own order", labels="node=n0", near={node("regrow_node_teardown"): "0x30"}),
    fact("KillWindow", node("regrow_agent_teardown"), "Workers on node n0 were killed by us a moment ago", labels="node=n0", near={node("regrow_agent_teardown"): "0x30"}),
    held("NodeLost", node("regrow_node_lost"), _for("0", "1", 2), 2, "Node n0 went without a word", labels="node=n0", near={node("regrow_node_lost"): "0x5 1x1 0x30"}),
    held("NodeSilent", node("regrow_node_state", state="suspect"), _for("0", "1", 1), 1, "Node n0 is connected and does not beat", labels="node=n0",
         near={node("regrow_node_state", state="spare"): "1x30"}),
    fact("NodeQuarantined", node("regrow_node_state", state="quarantined"), "Node n0 is in quarantine", labels="node=n0",
         near={node("regrow_node_state", state="cordoned"): "1x30"}),
    held("NodeUnhealthy", node("regrow_node_state", state="unhealthy"), _for("0", "1", 1), 1, "Node n0 says that it must not train", labels="node=n0",
         near={node("regrow_node_state", state="draining"): "1x30"}),
    held("AgentUnreachable", _metric("up", role="agent", instance="n0"), _for("1", "0", 5), 5, "Metrics of the agent on n0 cannot be scraped", labels="node=n0",
         near={_metric("up", role="agent", instance="n0"): "1x5 0x30", node("regrow_node_lost"): "0x5 1x30"}),
    Case(alert="AgentDisconnected", series={node("regrow_agent_connected"): "1x5 0x6 1x20", **LEADS}, quiet=7, on=9, off=13,
         summary="The agent on n0 finds no leader although there is one", labels="node=n0",
         near=({node("regrow_agent_connected"): "0x30", supervisor("regrow_is_leader"): "0x30"},)),
    held("AgentLate", node("regrow_agent_loop_lag_seconds"), _for("0.01", "2", 10), 10, "The agent on n0 is 2s late: the host is overloaded", labels="node=n0",
         near={node("regrow_agent_loop_lag_seconds"): "0.01x5 2x8 0.01x30"}),
    *(Case(alert=name, series={node(f"regrow_agent_host_{part}"): "50x5 4x15 50x20", node(f"regrow_agent_host_{whole}"): "100x50"},
           quiet=10, on=12, off=22, summary=f"4% of the {words} of n0 is available" if name == "MemoryLow" else f"4% of the {words} of n0 is free",
           labels="node=n0", near=({node(f"regrow_agent_host_{part}"): "6x50", node(f"regrow_agent_host_{whole}"): "100x50"},))
      for name, part, whole, words in (
          ("DiskLow", "disk_free_bytes", "disk_bytes", "disk under the state folder"),
          ("MemoryLow", "memory_available_bytes", "memory_bytes", "memory"))),
    held("ProbeFails", node("regrow_agent_probe_ok"), _for("1", "0", 2), 2, "The NVIDIA driver on n0 does not answer", labels="node=n0",
         near={node("regrow_agent_probe_ok"): "1x5 0x1 1x30"}),
]  # fmt: skip

WHERE = "node=n0,device=GPU-a"
GPU = [
    Case(alert="GpuXid", series={gpu("regrow_agent_gpu_xid_age_seconds", xid="79"): "_x3 10+60x40"}, quiet=2, on=5, off=16,
         summary="XID 79 on GPU GPU-a of node n0", labels=f"{WHERE},xid=79",
         near=({gpu("regrow_agent_gpu_xid_age_seconds", xid="31"): "10+60x40", gpu("regrow_agent_gpu_xid_age_seconds", xid="43"): "10+60x40"},)),
    fact("GpuLost", gpu("regrow_agent_gpu_lost"), "GPU GPU-a of node n0 is lost to the driver", labels=WHERE, near={gpu("regrow_agent_gpu_lost"): "0x30"}),
    Case(alert="GpuEcc", series={gpu("regrow_agent_gpu_ecc_errors_total", kind="uncorrected"): "7x20 8x60"}, quiet=20, on=22, off=32,
         summary="Uncorrectable memory errors on GPU GPU-a of node n0", labels=WHERE,
         near=({gpu("regrow_agent_gpu_ecc_errors_total", kind="uncorrected"): "7x80", gpu("regrow_agent_gpu_ecc_errors_total", kind="corrected"): "0+1x80"},)),
    Case(alert="GpuHot", series={gpu("regrow_agent_gpu_temperature_celsius"): "60x5 85x20 60x20", gpu("regrow_agent_gpu_slowdown_celsius"): "87x60"},
         quiet=15, on=17, off=27, summary="GPU GPU-a of node n0 is at 85 degrees, where it slows down", labels=WHERE,
         near=({gpu("regrow_agent_gpu_temperature_celsius"): "83x60", gpu("regrow_agent_gpu_slowdown_celsius"): "87x60"},)),
]  # fmt: skip
CASES = [*CLUSTER, *JOB, *NODE, *GPU]


def expected(case: Case) -> dict[str, object]:
    """The alert as it must be sent."""
    rule = ALERTS[f"Regrow{case.alert}"]
    labels = {"cluster": "c", "severity": rule.severity, "scope": rule.scope}
    labels |= {"job_name": "gpt"} if rule.scope == "job" else {}
    labels |= dict(pair.split("=") for pair in case.labels.split(",") if pair)
    return {"exp_labels": labels, "exp_annotations": {"summary": case.summary, "runbook_url": rule.runbook}}


def rule_file(folder: Path, case: Case) -> str:
    """The checked-in rule alone: promtool would evaluate all the others at each of its minutes, too."""
    groups: Any = yaml.safe_load((RULES / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    alone = [rule for group in groups for rule in group["rules"] if rule["alert"] == f"Regrow{case.alert}"]
    path = folder / f"{case.alert}.rule"
    path.write_text(json.dumps({"groups": [{"name": case.alert, "rules": alone}]}))
    return str(path)


def document(case: Case, rule: str) -> dict[str, object]:
    """A promtool test file; JSON is YAML."""

    def asked(minute: int, *wanted: dict[str, object]) -> dict[str, object]:
        return {"eval_time": f"{minute}m", "alertname": f"Regrow{case.alert}", "exp_alerts": list(wanted)}

    def series(given: Series) -> list[dict[str, str]]:
        return [{"series": name, "values": values} for name, values in given.items()]

    right = [asked(case.quiet), asked(case.on, expected(case)), asked(case.off)]
    tests = [{"name": f"{case.alert} on and off", "interval": "1m", "input_series": series(case.series), "alert_rule_test": right}]
    for number, given in enumerate(case.near):
        never = [asked(minute) for minute in sorted({case.quiet, case.on, case.off, 30, 75})]
        tests.append(
            {"name": f"{case.alert} near miss {number}", "interval": "1m", "input_series": series(given), "alert_rule_test": never}
        )
    return {"rule_files": [str(RULES / "recording.yaml"), rule], "evaluation_interval": "1m", "tests": tests}


def test_every_alert_is_on_when_it_must_be_and_off_again(tmp_path: Path) -> None:
    paths: list[Path] = []
    for number, case in enumerate(CASES):
        paths.append(tmp_path / f"{number:02}-{case.alert}.yaml")
        paths[-1].write_text(json.dumps(document(case, rule_file(tmp_path, case))))
    done = subprocess.run(["promtool", "test", "rules", *map(str, paths)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == len(CASES)


def test_the_table_has_every_alert() -> None:
    assert {f"Regrow{case.alert}" for case in CASES} == set(ALERTS)
