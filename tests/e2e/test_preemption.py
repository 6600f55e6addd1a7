"""A job of higher priority takes nodes from one that runs, where the policy allows it: real workers, one cluster, two jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.launcher import LIMIT_SECONDS, TEST_MARK, Run

TOY = Path(__file__).with_name("toy.py")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]


def test_the_lower_job_saves_gives_up_a_node_and_takes_it_back(
    launch: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGROW_POLICY_PREEMPTION", "true")
    monkeypatch.setenv("REGROW_POLICY_PREEMPT_AFTER_SECONDS", "0.5")
    monkeypatch.setenv("REGROW_POLICY_GROWTH_COOLDOWN_SECONDS", "0.5")
    shape = ("--nproc-per-node", "1", "--global-batch", "8")
    low = launch("--local", "2", "--nnodes", "1:2", *shape, "--job", "low", str(TOY), "--steps", "100000", "--log", str(tmp_path / "low"))
    low.until(lambda: (low.job("low").get("step") or 0) > 5, "training")
    before = low.job("low")["step"]
    address = json.loads((low.root / "supervisor" / "supervisor.json").read_text())["http"]
    high = ("--nnodes", "1", *shape, "--priority", "5", "--job", "high", "--checkpoint-dir", str(tmp_path / "high-ckpt"))
    argv = [sys.executable, "-m", "regrow", "run", "--supervisor", f"http://{address}", "--json", *high]
    argv += [str(TOY), "--steps", "30", "--log", str(tmp_path / "high")]
    environment = {**os.environ, TEST_MARK: low.mark, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + low.story()
    assert json.loads(done.stdout)["step"] == 30
    low.until(lambda: low.job("low").get("world_size") == 2 and low.job("low")["generation"] >= 3, "both nodes again")
    job = low.job("low")
    assert job["incidents"] == []
    assert job["restarts"] == 0, "nobody is charged for the cluster's policy"
    assert job["changes"][0]["kind"] == "preempted"
    assert job["changes"][0]["restored_step"] >= before, "it saved before it went"
    assert "preempted by high (priority 5 over 0)" in job["changes"][0]["text"]
    low.process.terminate()
    low.wait()
    assert low.gone(10.0) == []
