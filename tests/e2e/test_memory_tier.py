"""Snapshots that stay in memory: after a failure the job goes on from a step that was never on storage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.launcher import Run
from tests.e2e.test_spare import TOY, lose_power

from regrow.ckpt import catalog

pytestmark = pytest.mark.timeout(400)
MEMORY = ("--memory-interval", "0.2", "--no-in-place", "--no-gasp", "--job", "toy", "--global-batch", "8", "--nproc-per-node", "1")


def checkpoint_step(run: Run) -> int:
    return (run.job("toy").get("checkpoint") or {}).get("step") or 0


def steps_later(run: Run, count: int) -> None:
    """Wait until the job is so many steps behind its newest checkpoint on storage."""
    run.until(
        lambda: checkpoint_step(run) and (run.job("toy").get("step") or 0) >= checkpoint_step(run) + count, "steps after a checkpoint"
    )


def went_on(run: Run, log: Path, twin: dict[int, float]) -> dict[str, Any]:
    """Check that the second generation began where memory ended, with the right state; returns its first line."""
    begin, *lines = [json.loads(line) for line in (log / "g2-r0.jsonl").read_text().splitlines()]
    stored = [entry.step for entry in catalog.scan(run.root / "checkpoints") if entry.state == "restorable" and entry.generation == 1]
    assert begin["restored"] > max(stored), "a step that no checkpoint has"
    assert lines[0]["step"] == begin["restored"] + 1
    for line in lines:
        assert line["loss"] == pytest.approx(twin[line["step"]], rel=1e-5)
    return begin


def test_a_killed_worker_goes_on_from_memory(launch: Callable[..., Run], tmp_path: Path, twin: dict[int, float]) -> None:
    run = launch("--local", "2", *MEMORY, str(TOY), "--steps", "130", "--log", str(tmp_path / "log"))
    steps_later(run, 60)
    assert run.inject("n1", "kill_worker")["done"]
    assert run.wait() == 0, run.story()
    assert run.result()["state"] == "done"
    begin = went_on(run, tmp_path / "log", twin)
    last = max(
        json.loads(line).get("step", 0) for line in (tmp_path / "log" / "g1-r0.jsonl").read_text().splitlines() if line.endswith("}")
    )
    assert last - begin["restored"] <= 45, "ranks agree on a save at most 20 steps (1 s) ahead, and hear of it as late"
    tiers = {one["tier"]: one for one in run.result()["checkpoint"]["tiers"]}
    assert (tiers["memory"]["rule"], tiers["memory"]["interval_seconds"]) == ("given", 0.2)
    assert tiers["storage"]["stall_seconds"] > 0
    assert tiers["memory"]["failures_per_second"] > 10 * tiers["storage"]["failures_per_second"], "memory served it; rank 0 was told"


@pytest.mark.soak
def test_a_lost_node_goes_on_from_its_buddys_memory(launch: Callable[..., Run], tmp_path: Path, twin: dict[int, float]) -> None:
    sizes = ("--local", "3", "--nnodes", "2:2", "--peer-memory")
    run = launch(*sizes, *MEMORY, str(TOY), "--steps", "200", "--log", str(tmp_path / "log"))
    steps_later(run, 60)
    (lost,) = (node["node"] for node in run.job("toy")["nodes"] if node["ranks"] == [0])
    assert lose_power(run, lost) >= 3
    assert run.wait() == 0, run.story()
    went_on(run, tmp_path / "log", twin)
