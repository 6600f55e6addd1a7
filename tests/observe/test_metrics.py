"""What the metrics say, against views and messages whose answer is known."""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
import pytest
from scipy import stats

from regrow import telemetry, wire
from regrow.agent import metrics_page as agent_page
from regrow.agent.health.history import Condition, DeviceHistory, History, XidCount
from regrow.agent.health.sample import DeviceSample, NodeSample
from regrow.agent.watch import NoHealth
from regrow.agent.worker_metrics import WorkerMetrics
from regrow.ids import MeshShape
from regrow.supervisor import metrics_page
from regrow.supervisor.core import phases, rates
from regrow.supervisor.core.records import Charge, LedgerRecord, QuarantineRecord
from regrow.supervisor.core.view import (
    CheckpointView,
    Effort,
    GenerationView,
    Incident,
    JobView,
    Member,
    NodeView,
    View,
)
from regrow.supervisor.metrics import Metrics, lost_seconds
from regrow.supervisor.pace import Pace

NOW = 10_000.0


def node(name: str, **more: Any) -> NodeView:
    return NodeView(name=name, incarnation="i", address="h", peer_address="h:1", slots=2, joined_at=0.0, **more)


def generation(number: int = 3, nodes: int = 2) -> GenerationView:
    names = tuple(f"n{index}" for index in range(nodes))
    spec = wire.GenerationSpec(job="gpt", epoch=1, generation=number, mesh=MeshShape(dp=2 * nodes), world_size=2 * nodes, nodes=names)
    members = {
        name: Member(
            node=name, group_rank=index, workers=tuple(wire.WorkerAssignment(rank=2 * index + local, local_rank=local) for local in (0, 1))
        )
        for index, name in enumerate(names)
    }
    return GenerationView(spec=spec, members=members, stage="running", created_at=0.0, first_step_at=1.0)


def job(**more: Any) -> JobView:
    effort = Effort(since=0.0, reserved_at=NOW, reserved_gpu_seconds=1000.0, best_gpu_seconds_per_step=4.0, productive_seconds=5000.0)
    start = {"spec": wire.JobSpec(job="gpt", argv=("x.py",)), "submitted_at": 0.0, "effort": effort, "generation": generation()}
    return JobView(**(start | more))


def samples(view: View, metrics: Metrics | None = None) -> dict[str, float]:
    """{series with its labels: value} of a leader with this view."""
    metrics = metrics or Metrics()
    metrics.leading(epoch=2, leads=True, store_up=True)
    metrics.view(view, NOW)
    return parsed(metrics.exposition())


def parsed(text: bytes) -> dict[str, float]:
    rows = [line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#")]
    assert len(rows) == len({row[0] for row in rows}), "a series twice"
    return {name: float(value) for name, value in rows}


def test_page_refuses_what_is_not_declared() -> None:
    page = telemetry.Page()
    with pytest.raises(KeyError):
        page.put("regrow_nonsense", 1.0)
    with pytest.raises(ValueError, match="has the labels"):
        page.put("regrow_step", 1.0)
    page.put("regrow_step", 7, 'a"b\\c\nd')
    page.put("regrow_loss", None, "gpt")
    assert page.text().decode().splitlines()[-1] == 'regrow_step{job_name="a\\"b\\\\c\\nd"} 7.0'


def test_goodput_is_lineage_over_everything_reserved() -> None:
    found = samples(View(jobs={"gpt": job(frontier=150, effort_base=50)}))
    assert found['regrow_lineage_gpu_seconds{job_name="gpt"}'] == 400.0
    assert found['regrow_reserved_gpu_seconds_total{job_name="gpt"}'] == 1000.0
    assert found['regrow_goodput_ratio{job_name="gpt"}'] == 0.4
    assert found['regrow_ettr_ratio{job_name="gpt"}'] == 0.5


def test_a_state_is_one_series_of_many() -> None:
    found = samples(View(jobs={"gpt": job(parked="no nodes")}, nodes={"n0": node("n0"), "n1": node("n1", silent_since=1.0)}))
    states = {name: value for name, value in found.items() if name.startswith("regrow_job_state")}
    assert len(states) == len(telemetry.JOB_STATES)
    assert [name for name, value in states.items() if value] == ['regrow_job_state{job_name="gpt",state="parked"}']
    assert found['regrow_node_state{node="n0",state="member"}'] == 1
    assert found['regrow_node_state{node="n1",state="suspect"}'] == 1
    assert found['regrow_node_state{node="n1",state="member"}'] == 0


def test_a_node_that_left_has_no_series_one_that_was_lost_has_for_an_hour() -> None:
    gone = {"connected": False, "disconnected_at": NOW - 60}
    nodes = {
        "here": node("here"),
        "lost": node("lost", **gone),
        "left": node("left", leaving="SIGTERM", **gone),
        "old": node("old", connected=False, disconnected_at=NOW - 3601),
    }
    found = samples(View(nodes=nodes))
    named = {match for name in found for match in re.findall(r'node="(\w+)"', name)}
    assert named == {"here", "lost"}
    assert found['regrow_node_lost{node="lost"}'] == 1
    assert found['regrow_node_lost{node="here"}'] == 0
    assert found['regrow_nodes{state="gone"}'] == 1


def test_quarantine_is_told_by_gpu_serial_or_chassis() -> None:
    device = wire.Device(uuid="GPU-a", serial="s1")
    nodes = {"n0": node("n0", devices=(device,)), "n1": node("n1", hardware_id="chassis"), "n2": node("n2")}
    for key, bad in (("GPU-a", "n0"), ("s1", "n0"), ("chassis", "n1"), ("node:n2", "n2")):
        record = QuarantineRecord(key=key, state="quarantined", since=0.0, node=bad)
        found = samples(View(nodes=nodes, quarantine={key: record}))
        assert [name for name in nodes if found[f'regrow_node_state{{node="{name}",state="quarantined"}}']] == [bad], key
        assert found['regrow_quarantine{state="quarantined"}'] == 1


def charges(number: int, cause: str) -> tuple[Charge, ...]:
    return tuple(Charge(at=float(index), cause=cause, generation=index, incident=f"{cause}{index}") for index in range(number))


def test_totals_are_right_at_the_first_scrape_of_a_new_leader_and_the_old_one_shows_none() -> None:
    ledger = LedgerRecord(charges=charges(3, "infrastructure") + charges(2, "program"))
    view = View(jobs={"gpt": job(ledger=ledger, highest_generation=6)})
    old = Metrics()
    for metrics in (old, Metrics()):
        found = samples(view, metrics)
        assert found['regrow_failures_total{job_name="gpt",cause="infrastructure"}'] == 3
        assert found['regrow_failures_total{job_name="gpt",cause="program"}'] == 2
        assert found['regrow_failures_total{job_name="gpt",cause="preemption"}'] == 0
        assert found['regrow_restarts_total{job_name="gpt"}'] == 5
    old.step("gpt", 1.0)
    old.leading(epoch=0, leads=False, store_up=True)
    assert not [name for name in parsed(old.exposition()) if "job_name" in name or "node=" in name]


def test_series_of_a_job_that_is_gone_are_removed() -> None:
    metrics = Metrics()
    samples(View(jobs={"gpt": job()}), metrics)
    metrics.step("gpt", 1.0)
    assert [name for name in samples(View(), metrics) if "gpt" in name] == []


def test_failure_rate_has_the_interval_of_its_posterior() -> None:
    policy = wire.CheckpointPolicy(prior_failures_per_hour=2.0)
    some = job(spec=wire.JobSpec(job="gpt", argv=("x",), checkpoint=policy), ledger=LedgerRecord(charges=charges(4, "unknown")))
    found = metrics_page.failure_rates(some, NOW)
    prior = 2.0 / 3600
    posterior = stats.gamma(1 + 4, scale=1 / (1 / prior + NOW))
    assert found["point"] == pytest.approx(rates.failure_rate(some, NOW)) == pytest.approx(posterior.mean())
    assert found["lower95"] == pytest.approx(posterior.ppf(0.025))
    assert found["upper95"] == pytest.approx(posterior.ppf(0.975))
    shown = samples(View(jobs={"gpt": some}))
    hours = {scope: shown[f'regrow_mtbf_seconds{{job_name="gpt",scope="{scope}",bound="point"}}'] for scope in telemetry.SCOPES}
    assert hours["gpu"] == pytest.approx(4 * hours["job"])
    assert hours["node"] == pytest.approx(2 * hours["job"])
    lower, upper = (shown[f'regrow_mtbf_seconds{{job_name="gpt",scope="job",bound="{bound}"}}'] for bound in ("lower95", "upper95"))
    assert lower < hours["job"] < upper


def test_lost_time_adds_up_and_steps_computed_again_stand_apart() -> None:
    incident = Incident(
        id="i", kind="hang", cause="unknown", symptom_at=0.0, detected_at=1.0, decided_at=1.5,
        marks={"fence": 2.0, "stop": 2.5, "start": 3.0, "rendezvous": 4.0, "restore": 6.0}, first_step_at=7.0, recovered_at=12.0, closed=True,
    )  # fmt: skip
    found = lost_seconds(incident)
    assert sum(found.values()) == pytest.approx(phases.whole(incident)) == 12.0
    assert found["first_step"] == 1.0
    assert found["recompute"] == 5.0
    shown = samples(View(jobs={"gpt": job(incidents=(incident,))}))
    assert sum(value for name, value in shown.items() if name.startswith("regrow_lost_seconds_total")) == 12.0
    assert shown['regrow_incidents_total{job_name="gpt",kind="hang"}'] == 1


def steps(number: int, rank: int, compute: float, step: float = 1.0) -> wire.NodeSteps:
    report = wire.StepReport(generation=number, rank=rank, step=9, step_seconds=step, compute_seconds=compute)
    return wire.NodeSteps(job="gpt", generation=number, step=9, reports=(report,))


@pytest.mark.parametrize(
    ("compute", "memory", "wall"), [(0.5, 0.0, "communication"), (0.5, 0.99, "communication"), (0.9, 0.95, "memory"), (0.9, 0.5, "compute")]
)
def test_the_wall_is_told_from_measured_phases(compute: float, memory: float, wall: str) -> None:
    metrics = Metrics()
    for rank in range(4):
        metrics.said("n0", steps(3, rank, compute if rank == 0 else compute / 2))
    metrics.said("n0", wire.Beat(seq=1, generation=3, memory_ratio=memory))
    found = samples(View(jobs={"gpt": job(mesh_seconds={"dp=4,tp=1,pp=1": (4, 1.0)})}), metrics)
    assert [name for name in telemetry.WALLS if found[f'regrow_wall{{job_name="gpt",wall="{name}"}}']] == [wall]
    assert found['regrow_step_exposed_ratio{job_name="gpt"}'] == pytest.approx(1 - compute)
    assert found.get('regrow_memory_used_ratio{job_name="gpt"}', 0.0) == memory
    assert found['regrow_rank_slowest{job_name="gpt"}'] == 0


def test_scaling_efficiency_names_its_t1() -> None:
    metrics = Metrics()
    for rank in range(4):
        metrics.said("n0", steps(3, rank, 0.75))
    measured = {str(MeshShape(dp=2)): (2, 1.6), str(MeshShape(dp=4)): (4, 1.0)}
    found = samples(View(jobs={"gpt": job(mesh_seconds=measured)}), metrics)
    ratio = 'regrow_scaling_efficiency_ratio{{job_name="gpt",mesh="dp={},tp=1,pp=1",t1="{}"}}'
    assert found[ratio.format(2, "linear")] == 1.0
    assert found[ratio.format(4, "linear")] == pytest.approx(0.8)
    assert found[ratio.format(4, "compute")] == pytest.approx(0.75)
    assert found['regrow_one_worker_step_seconds{job_name="gpt",t1="compute"}'] == pytest.approx(3.0)
    alone = samples(View(jobs={"gpt": job(mesh_seconds=measured | {str(MeshShape()): (1, 3.0)})}))
    assert alone[ratio.format(4, "measured")] == pytest.approx(0.75)
    assert not [name for name in alone if 't1="linear"' in name]


def test_reports_of_an_older_generation_do_not_count() -> None:
    pace = Pace(3)
    pace.stepped(steps(2, 0, 0.9))
    assert pace.compute() is None
    assert pace.one_worker_seconds(1) is None


def test_checkpoints_and_digests() -> None:
    listed = {
        step: CheckpointView(step=step, generation=1, directory="d", committed_at=NOW - age, evidence=evidence, damaged=damaged)
        for step, age, evidence, damaged in ((10, 90.0, ("read_back",), ""), (20, 30.0, (), ""), (30, 5.0, (), "torn"))
    }
    found = samples(
        View(
            jobs={
                "gpt": job(checkpoints=listed, digest_checks={"agree": 4, "diverged": 1, "replay_agree": 2}, agreed_steps=frozenset({18}))
            }
        )
    )
    assert found['regrow_checkpoint_age_seconds{job_name="gpt"}'] == 30
    assert found['regrow_checkpoint_step{job_name="gpt",state="committed"}'] == 20
    assert found['regrow_checkpoint_step{job_name="gpt",state="verified"}'] == 10
    assert found['regrow_checkpoints_damaged{job_name="gpt"}'] == 1
    assert found['regrow_digest_checks_total{job_name="gpt",verdict="diverged"}'] == 1
    assert found['regrow_digest_checks_total{job_name="gpt",verdict="at_rest_mismatch"}'] == 0
    assert found['regrow_digest_checks_total{job_name="gpt",verdict="replay_agree"}'] == 2
    assert found['regrow_digest_agreed_step{job_name="gpt"}'] == 18


def test_the_stall_of_a_save_counts_once_although_every_node_tells_of_it() -> None:
    metrics = Metrics()
    view = View(jobs={"gpt": job()})
    samples(view, metrics)
    for step, stall in ((5, 0.1), (5, 0.3), (5, 0.2), (9, 0.2)):
        metrics.said("n", wire.CheckpointChanged(job="gpt", generation=3, step=step, state="snapshot", stall_seconds=stall))
    assert samples(view, metrics)['regrow_lost_seconds_total{job_name="gpt",phase="checkpoint"}'] == pytest.approx(0.5)


# --- the agent


class Health(NoHealth):
    """What was seen."""

    def __init__(self, history: History, sample: NodeSample | None) -> None:
        self._history = history
        self._sample = sample

    def history(self) -> History:
        return self._history

    def sample(self) -> NodeSample | None:
        return self._sample


def test_xids_count_and_what_our_own_kill_caused_has_no_age() -> None:
    device = wire.Device(uuid="GPU-a", memory_bytes=100)
    now = time.time()
    xids = {
        62: XidCount(count=1, last_at=now - 60),
        31: XidCount(count=2, last_at=now - 5),
        45: XidCount(count=3, teardown=3, last_at=now),
        9001: XidCount(count=1, last_at=now),
        9002: XidCount(count=1, last_at=now - 9),
    }
    condition = Condition(incident="i", kind="k", action="reset", state="unhealthy", reason="r", since_at=0.0, last_at=0.0)
    history = History(devices={"GPU-a": DeviceHistory(device=device, xids=xids)}, conditions=(condition,))
    seen = NodeSample(status="ok", devices=(DeviceSample(device=device, memory_used_bytes=95, temperature=50),))
    page = telemetry.Page()
    agent_page.put_gpus(page, "n0", Health(history, seen))
    found = parsed(page.text())
    count = {code: found[f'regrow_agent_gpu_xids_total{{node="n0",device="GPU-a",xid="{code}"}}'] for code in ("62", "31", "45", "other")}
    assert count == {"62": 1, "31": 2, "45": 3, "other": 2}
    assert found['regrow_agent_gpu_xid_age_seconds{node="n0",device="GPU-a",xid="62"}'] == pytest.approx(60, abs=5)
    assert 'regrow_agent_gpu_xid_age_seconds{node="n0",device="GPU-a",xid="45"}' not in found
    assert found['regrow_agent_conditions{node="n0"}'] == 1
    assert seen.memory_ratio() == 0.95


def test_a_gpu_that_was_taken_out_has_no_series_and_one_of_a_hung_driver_keeps_its_counts() -> None:
    history = History(devices={"GPU-a": DeviceHistory(device=wire.Device(uuid="GPU-a"), xids={79: XidCount(count=1)})})
    for status, shown in (("ok", False), ("hung", True)):
        page = telemetry.Page()
        agent_page.put_gpus(page, "n0", Health(history, NodeSample(status=status)))  # type: ignore[arg-type]
        assert ("GPU-a" in page.text().decode()) is shown, status


def test_series_of_workers_are_those_of_the_running_generation() -> None:
    workers = WorkerMetrics()
    word = wire.RankProgress(rank=4, started_step=8, applied_step=7, phase="step", age_seconds=0.0)

    def shown(number: int) -> dict[str, float]:
        page = telemetry.Page()
        workers.put(page, "n0", "gpt", number, (word,))
        return parsed(page.text())

    for step in (6, 7):
        workers.said(wire.StepReport(generation=2, rank=4, step=step, step_seconds=0.5, tokens=100, loss=1.5, nonfinite="loss"))
    workers.said(wire.SaveReport(generation=2, rank=4, step=7, outcome="snapshot", stall_seconds=0.25))
    workers.said(wire.WorkerPhase(generation=2, rank=4, phase="restored", seconds=3.0, detail={"bytes_from_peers": 70, "directory": "d"}))
    workers.said(wire.StepReport(generation=1, rank=0, step=3))
    found = shown(2)
    who = 'job_name="gpt",node="n0",rank="4"'
    assert found[f"regrow_worker_steps_total{{{who}}}"] == 2
    assert found[f"regrow_worker_tokens_total{{{who}}}"] == 200
    assert found[f"regrow_worker_stall_seconds_total{{{who}}}"] == 0.25
    assert found[f"regrow_worker_nonfinite_total{{{who}}}"] == 2
    assert found[f'regrow_worker_start_seconds{{{who},phase="restore"}}'] == 3.0
    assert found[f'regrow_worker_phase{{{who},phase="step"}}'] == 1
    assert found[f'regrow_worker_restored_bytes{{{who},source="peers"}}'] == 70
    assert not [name for name in found if 'rank="0"' in name]
    workers.said(wire.StepReport(generation=3, rank=0, step=8))
    assert [name for name in shown(3) if "steps_total" in name] == ['regrow_worker_steps_total{job_name="gpt",node="n0",rank="0"}']


def test_a_scrape_of_2048_nodes_is_cheap() -> None:
    """The bound is generous: a hundred times what one core needs would still be caught."""
    nodes = {f"n{index}": node(f"n{index}", hardware_id=f"h{index}") for index in range(2048)}
    record = QuarantineRecord(key="h7", state="quarantined", since=0.0, node="n7")
    view = View(nodes=nodes, jobs={"gpt": job(generation=generation(nodes=2048))}, quarantine={"h7": record})
    metrics = Metrics()
    metrics.leading(epoch=1, leads=True, store_up=True)
    metrics.view(view, NOW)
    metrics.exposition()
    began = time.process_time()
    text = metrics.exposition()
    took = time.process_time() - began
    assert text.count(b"\n") > 2048 * len(telemetry.NODE_STATES)
    print(f"2,048 nodes: {took * 1000:.0f} ms, {len(text) / 1e6:.1f} MB")
    assert took < 5.0
    began = time.process_time()
    for _ in range(10):
        metrics.view(msgspec.structs.replace(view), NOW)
    assert (time.process_time() - began) / 10 < 0.1
