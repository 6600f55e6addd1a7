"""`regrow demo`: the main job on this machine, with faults, compared with a run that had none."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regrow import wire
from regrow.agent.health.fake_nvml.control import FakeNvml
from regrow.demo import page
from regrow.demo.compare import compare, judge_controls, state_tolerances
from regrow.demo.lineage import Lineage, read_lineage
from regrow.demo.scenario import Injected, Scenario
from regrow.demo.twin import run_twins
from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.local.cluster import ClusterPlan, LocalCluster
from regrow.local.launch import Follower, submit
from regrow.local.live import LiveView

JOB = "demo"
NODES, SLOTS = 4, 2
GLOBAL_BATCH, MICRO_BATCH = 16, 2

POLICY = (("REGROW_POLICY_HANG_FLOOR_SECONDS", "6"), ("REGROW_POLICY_GROWTH_COOLDOWN_SECONDS", "3"))
"""Time constants for a run of two minutes; the hang limit is still learned from the step times, above this floor."""


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """What the user can choose."""

    faults: tuple[str, ...]
    seed: int = 0
    steps: int = 45
    zero: int = 0
    run_dir: Path = Path("runs/demo")
    plain: bool = False


def job_specification(options: DemoOptions) -> wire.JobSpec:
    """The job of the demo."""
    root = options.run_dir.absolute()
    return wire.JobSpec(
        job=JOB,
        argv=(str(Path(__file__).with_name("train_gpt.py")), "--steps", str(options.steps), "--seed", str(options.seed)),
        cwd=str(root),
        env={"REGROW_STEP_LOG": str(root / "steps"), "REGROW_CHAOS": "1", "OMP_NUM_THREADS": "1"},
        nproc_per_node=SLOTS,
        min_nodes=1,
        max_nodes=NODES,
        mesh=MeshShape(dp=2, tp=2, pp=2),
        model=wire.ModelShape(layers=4, hidden=96, heads=6, kv_heads=6, ffn=384, vocab=256, seq=96),
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        zero_stage=options.zero,
        seed=options.seed,
        checkpoint=wire.CheckpointPolicy(
            path=str(root / "checkpoints"), keep_last=3, max_interval_seconds=8.0, prior_failures_per_hour=60.0
        ),
        nice=10,
    )


async def run(options: DemoOptions) -> dict[str, Any]:
    """Run, break, compare, report. The result document; `ok` says whether all checks hold."""
    root = options.run_dir.absolute()
    _fresh(root)
    begin = time.monotonic()
    with LiveView(title="regrow demo", total_steps=options.steps, plain=options.plain) as view:
        view.note(f"starting etcd, a supervisor and {NODES} agents with {SLOTS} workers each; run folder {root}")
        document, injected = await _train(options, root, view)
        view.note("comparing with runs that had no fault")
        twin, second = await run_twins(
            root,
            options.steps,
            options.seed,
            controls_after=max(1, options.steps // 3),
            script_flags=("--zero", str(options.zero)),
        )
    result = _judge(options, root, document, injected, twin, second)
    result["seconds"] = time.monotonic() - begin
    result["summary"] += f"; {result['seconds']:.0f} s in all"
    (root / "report.html").write_text(page.render(result), encoding="utf-8")
    result["report"] = str(root / "report.html")
    return result


def _fresh(root: Path) -> None:
    """An empty run folder; only one that an earlier demo made is cleared."""
    if root.exists() and any(root.iterdir()):
        if not (root / "demo.txt").exists():
            raise ConfigurationError("the folder is not empty and not from an earlier demo", where=str(root), hint="give another --run-dir")
        shutil.rmtree(root)
    root.mkdir(parents=True, exist_ok=True)
    (root / "demo.txt").write_text("made by `regrow demo`; the next one clears this folder\n", encoding="utf-8")


async def _train(options: DemoOptions, root: Path, view: LiveView) -> tuple[dict[str, Any], list[Injected]]:
    plan = ClusterPlan(root=root, nodes=NODES, slots=SLOTS, fake_nvml=True, env=POLICY)
    cluster = LocalCluster(plan)
    for number, node in enumerate(plan.node_names()):
        cluster.nvml_state(node).parent.mkdir(parents=True, exist_ok=True)
        FakeNvml(cluster.nvml_state(node)).write(devices=SLOTS, node=number)
    async with cluster:
        view.at(cluster.supervisor_address())
        await submit(cluster.api, job_specification(options))
        follower = Follower(cluster.api, JOB, view, period_seconds=0.1, seldom_seconds=0.5)
        scenario = Scenario(cluster, follower, view, job=JOB, seed=options.seed)
        following = asyncio.create_task(follower.follow())
        try:
            await _unless_it_ends(scenario.run(options.faults), following)
            document = await following
        finally:
            following.cancel()
    return document, scenario.injected


async def _unless_it_ends(work: Any, following: asyncio.Task[dict[str, Any]]) -> None:
    """Run `work`; an error of the follower ends it too."""
    task = asyncio.ensure_future(work)
    await asyncio.wait((task, following), return_when=asyncio.FIRST_COMPLETED)
    if not task.done() and following.done() and following.exception() is not None:
        task.cancel()
        following.result()
    await task


def _judge(
    options: DemoOptions, root: Path, document: dict[str, Any], injected: list[Injected], twin: Path, second: Path
) -> dict[str, Any]:
    checks = [_check("job finished", document.get("state") == "done", str((document.get("outcome") or {}).get("reason", "")))]
    checks += _fault_checks(options, document, injected)
    lineage, reference = read_lineage(root / "steps"), read_lineage(twin)
    comparison = compare(root / "steps", twin, last_step=options.steps, tolerances=state_tolerances(twin, second))
    checks += [
        _check(f"twin: {check.name}", check.passed, f"{check.detail}; worst {check.worst:.3g}, limit {check.limit:.3g}")
        for check in comparison.checks
    ]
    for control in judge_controls(twin / "controls", twin):
        name = f"control: {control.omitted} not restored is caught" if control.omitted else "control: a complete restore passes"
        caught = ", ".join(control.caught_by) or "nothing"
        checks.append(_check(name, control.passed, f"caught by {caught}; loss off by {control.loss_deviation:.1e}"))
    incidents = document.get("incidents", [])
    return {
        "ok": all(check["ok"] for check in checks),
        "seed": options.seed,
        "summary": (
            f"{comparison.steps} steps, {comparison.lost_steps} computed again, {len(incidents)} incidents, "
            f"meshes {' - '.join(mesh for mesh, _ in itertools.groupby(comparison.meshes))}"
        ),
        "checks": checks,
        "faults": [_fault(fault, incidents) for fault in injected],
        "incidents": incidents,
        "generations": _generations(lineage),
        "goodput": document.get("goodput"),
        "loss": [(step.step, step.losses[0]) for step in lineage.steps.values()],
        "twin_loss": [(step.step, step.losses[0]) for step in reference.steps.values()],
        "run_dir": str(root),
    }


def _check(name: str, ok: bool, detail: str) -> dict[str, Any]:
    return {"name": name, "ok": ok, "detail": detail}


def _fault_checks(options: DemoOptions, document: dict[str, Any], injected: list[Injected]) -> list[dict[str, Any]]:
    """Each fault that was asked for was injected, detected, and named right; nothing else was seen."""
    checks: list[dict[str, Any]] = []
    incidents = {incident["id"]: incident for incident in document.get("incidents", [])}
    for kind in options.faults:
        fault = next((fault for fault in injected if fault.kind == kind), None)
        if fault is None:
            checks.append(_check(f"fault {kind} was injected", ok=False, detail="the run ended before"))
            continue
        incident = incidents.pop(fault.incident, {})
        named = incident.get("node") == fault.node and (fault.rank < 0 or incident.get("rank") == fault.rank)
        truth = f"{fault.node}" + (f" rank {fault.rank}" if fault.rank >= 0 else "")
        checks.append(_check(f"fault {kind} on {truth} is named right", named, str(incident.get("text", "no incident"))))
    checks.append(_check("no other incident", not incidents, "; ".join(str(incident.get("text")) for incident in incidents.values())))
    return checks


def _fault(fault: Injected, incidents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    incident = next((incident for incident in incidents if incident["id"] == fault.incident), {})
    return {
        "kind": fault.kind,
        "node": fault.node,
        "rank": fault.rank,
        "step": fault.step,
        "mesh_before": fault.mesh_before,
        "mesh_after": fault.mesh_after,
        "recovered_seconds": fault.recovered_seconds,
        "named": str(incident.get("text", "")),
        "grown_mesh": fault.grown_mesh,
        "grow_pause_seconds": fault.grow_pause_seconds,
    }


def _generations(lineage: Lineage) -> list[dict[str, Any]]:
    return [
        {
            "generation": segment.generation,
            "mesh": segment.mesh,
            "ranks": MeshShape.parse(segment.mesh).world_size,
            "restored": segment.restored,
            "first_step": min(segment.steps, default=None),
            "last_step": max(segment.steps, default=None),
        }
        for segment in lineage.segments
    ]


def clear_bulk(root: Path) -> None:
    """Remove what is large after a good end: checkpoints, store and node folders. Logs and the report stay."""
    for name in ("checkpoints", "etcd", "nodes"):
        shutil.rmtree(root / name, ignore_errors=True)
