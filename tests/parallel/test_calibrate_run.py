"""`regrow plan --calibrate RUN`: model, batch and step times of a run's own journal."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from regrow.ids import MeshShape
from regrow.parallel import cost, inventory, search, shape
from regrow.parallel.planner import Plan, Request

Regrow = Callable[..., tuple[int, Any, str]]
SHAPE = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 2048, "vocab": 512, "seq": 256, "params": 0, "experts": 0}
SPEC = {"job": "small", "model": SHAPE, "global_batch": 16, "micro_batch": 2, "nproc_per_node": 2, "zero_stage": 0}
MESHES = {"dp=4,tp=2,pp=1": 4, "dp=3,tp=2,pp=1": 3, "dp=2,tp=1,pp=2": 2, "dp=2,tp=2,pp=1": 2, "dp=1,tp=1,pp=2": 1, "dp=8,tp=1,pp=1": 4}
TRUTH = cost.Constants(efficiency=0.3, half_width=200.0, step_overhead=0.05)


def seconds(mesh: MeshShape) -> float:
    """What a machine of constants that the tool does not know would take."""
    there = inventory.uniform(1, mesh.world_size, device="cpu")
    sizes = {name: size for name, size in SHAPE.items() if size}
    asked = Request(model=shape.make(**sizes), inventory=there, global_batch=16, zero=0, recompute="none", tp=mesh.tp, constants=TRUTH)
    made = search.judge(asked, mesh, 2)
    assert isinstance(made, Plan)
    return made.step_seconds


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a journal: six generations of ten steps, the first two of each slow, on a fake driver's devices."""
    entries: list[dict[str, Any]] = [
        {"kind": "node_joined", "job": "", "generation": 0, "data": {"slots": 2, "devices": ["GPU-fa4e0000"]}},
        {"kind": "job_loaded", "job": "small", "generation": 0, "data": {"spec": SPEC}},
    ]
    for number, (mesh, nodes) in enumerate(MESHES.items(), 1):
        entries.append({"kind": "record_generation", "job": "small", "generation": number, "data": {"mesh": mesh, "num_nodes": nodes}})
        taken = seconds(MeshShape.parse(mesh))
        entries += [
            {
                "kind": "steps_completed",
                "job": "small",
                "generation": number,
                "data": {"step": step, "step_seconds": taken * (9 if step < 2 else 1)},
            }
            for step in range(10)
        ]
    folder = tmp_path / "run" / "supervisor"
    folder.mkdir(parents=True)
    database = sqlite3.connect(folder / "journal.sqlite")
    with database:
        database.execute("create table events (id integer primary key, kind text not null, body text not null)")
        rows = [(entry["kind"], json.dumps(entry)) for entry in entries]
        database.executemany("insert into events (kind, body) values (?, ?)", rows)
    database.close()
    return tmp_path / "run"


def test_everything_comes_from_the_run(regrow: Regrow, run: Path) -> None:
    code, document, _ = regrow("plan", "--calibrate", run)
    assert code == 0
    assert (document["inventory"]["gpus"], document["inventory"]["gpu_type"]) == (8, "cpu")
    assert document["best"]["global_batch"] == 16
    assert "layers 8" in document["notes"][0]
    found = document["calibration"]
    assert found["rank_correlation"] == 1.0
    assert found["worst_error"] < 0.1
    assert {each["mesh"]: each["steps"] for each in found["meshes"]} == dict.fromkeys(MESHES, 8)
    for each in found["meshes"]:
        assert each["measured_seconds"] == pytest.approx(seconds(MeshShape.parse(each["mesh"])))


def test_flags_win_and_other_machines_are_planned_for(regrow: Regrow, run: Path) -> None:
    code, document, _ = regrow("plan", "--calibrate", run / "supervisor" / "journal.sqlite", "--nodes", 16, "--global-batch", 64)
    assert code == 0
    assert document["inventory"]["nodes"] == 16
    assert document["best"]["global_batch"] == 64


def test_what_is_no_run_is_refused(regrow: Regrow, tmp_path: Path) -> None:
    assert regrow("plan", "--calibrate", tmp_path)[0] == 2
    broken = tmp_path / "journal.sqlite"
    broken.write_text("no database at all, but a text that is long enough to be read")
    code, document, _ = regrow("plan", "--calibrate", broken)
    assert (code, "journal" in document["error"]["what"]) == (2, True)


def test_too_few_steps_are_told(regrow: Regrow, run: Path) -> None:
    database = sqlite3.connect(run / "supervisor" / "journal.sqlite")
    with database:
        database.execute("delete from events where id > 6")
    database.close()
    code, document, _ = regrow("plan", "--calibrate", run)
    assert code == 2
    assert "enough steps" in document["error"]["what"]


def test_a_measured_mesh_needs_no_leave(regrow: Regrow, run: Path) -> None:
    """The run's nodes may be too small for the planner's taste; the mesh ran, so its time counts."""
    code, document, _ = regrow("plan", "--calibrate", run, "--nodes", 1, "--gpus-per-node", 1)
    assert code == 0
    assert len(document["calibration"]["meshes"]) == len(MESHES)
    assert msgspec.json.encode(document["calibration"]["constants"])
