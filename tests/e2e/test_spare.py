"""A node that is lost with everything on it: a spare stands warm beside the job and takes its place."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.launcher import TEST_MARK, Run

from regrow.processes import MARK, marked

TOY = Path(__file__).with_name("toy.py")

pytestmark = pytest.mark.timeout(400)


def lose_power(run: Run, node: str) -> int:
    """SIGKILL agent, shim, workers, writer and stores of a node. Returns how many."""
    found: list[int] = []
    for pid in marked(TEST_MARK, run.mark):
        try:
            items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(item.startswith(MARK.encode()) and item.endswith(f"nodes/{node}".encode()) for item in items):
            found.append(pid)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):  # it was ending by itself
            os.kill(pid, signal.SIGKILL)
    return len(found)


def test_a_spare_takes_the_ranks_of_a_lost_node(launch: Callable[..., Run], tmp_path: Path) -> None:
    flags = ("--local", "3", "--nproc-per-node", "1", "--nnodes", "2:2", "--global-batch", "8", "--job", "toy")
    run = launch(*flags, str(TOY), "--steps", "150", "--log", str(tmp_path / "log"))
    run.until(lambda: (run.job("toy").get("step") or 0) > 5 and (run.job("toy").get("checkpoint") or {}).get("step"), "a checkpoint")
    before = {node["node"]: node["ranks"] for node in run.job("toy")["nodes"]}
    (spare,) = (node for node, ranks in before.items() if not ranks)
    (lost,) = (node for node, ranks in before.items() if ranks == [0])
    (other,) = (node for node, ranks in before.items() if ranks == [1])
    assert lose_power(run, lost) >= 3
    run.until(lambda: any(item["recovered"] for item in run.job("toy").get("incidents", [])), "a recovery")
    after = {node["node"]: node["ranks"] for node in run.job("toy")["nodes"]}
    assert after[spare] == [0], "the same rank"
    assert after[other] == [1], "the survivor keeps its own"
    incident = run.job("toy")["incidents"][0]
    assert incident["rung"] == "spare"
    assert sum(incident["phases"].values()) == pytest.approx(incident["seconds"], rel=0.02)
    assert run.wait() == 0, run.story()
    assert run.result()["mesh"] == "" or "dp=2" in run.result()["mesh"]
    assert run.gone(5.0) == []
