from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from regrow.agent import preflight
from regrow.agent.health import burnin
from regrow.agent.health.fake_nvml.control import FakeNvml
from regrow.agent.health.preflight_report import findings_of

SMALL = {"memory_bytes": 1 << 20, "matrix": 64}


def _leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if "preflight" in path.name]


async def test_a_sound_node_passes(fake: FakeNvml, tmp_path: Path) -> None:
    report = await preflight.run(tmp_path, fake_state=fake.path, expected_gpus=4, **SMALL)
    assert report.problems == ()
    assert report.ok
    assert {one.name for one in report.checks} == {"gpus", "memory", "matmul", "disk"}
    assert _leftovers(tmp_path) == []


@pytest.mark.parametrize("fault", ["memory", "matmul", "disk"])
async def test_one_wrong_bit_fails_its_check_and_no_other(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(burnin.FAULT_VARIABLE, fault)
    report = await preflight.run(tmp_path, **SMALL)
    assert not report.ok
    assert [one.name for one in report.checks if not one.ok] == [fault]


async def test_a_check_that_hangs_ends_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(burnin.FAULT_VARIABLE, "hang")
    began = time.monotonic()
    report = await preflight.run(tmp_path, budget_seconds=3.0, **SMALL)
    assert time.monotonic() - began < 30
    assert any("no end within" in problem for problem in report.problems)
    assert psutil.Process().children(recursive=True) == []


async def test_a_check_that_is_merely_slow_is_no_sign_against_the_node(tmp_path: Path) -> None:
    """It was at work all the time, gets as much time again, and is told as what it is."""
    report = await preflight.run(tmp_path, budget_seconds=0.3, memory_bytes=1 << 30)
    assert not report.ok
    assert [one.name for one in report.checks if one.name.startswith("burn_in")] == ["burn_in_slow"]
    assert "busy" in str(report.problems)
    assert findings_of(report) == ()
    assert psutil.Process().children(recursive=True) == []


@pytest.mark.parametrize(("program", "works"), [("while True: pass", True), ("import time; time.sleep(600)", False)])
def test_work_is_told_from_standing_still(program: str, works: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", f"print(flush=True)\n{program}"], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            pulse = preflight.Pulse(child.pid)
            pulse.seen_within(60)
            end = time.monotonic() + 30
            while (seen := pulse.seen_within(0.5)) != works or (works and time.monotonic() < end - 29):
                assert time.monotonic() < end
                time.sleep(0.1)
            assert seen == works
        finally:
            child.kill()


async def test_gpu_baseline(fake: FakeNvml, tmp_path: Path) -> None:
    fake.set_device(1, remap_pending=True)
    assert "reset" in str((await preflight.run(tmp_path, fake_state=fake.path, **SMALL)).problems), "J03: a reset is pending"
    fake.set_device(1, remap_pending=False)
    assert (await preflight.run(tmp_path, fake_state=fake.path, expected_gpus=8, **SMALL)).problems == ("gpus: 4 GPUs of 8",)


@pytest.mark.parametrize("n", [1, 5, 7, 64, 100])
def test_the_known_product_is_right(n: int) -> None:
    a, b, expected = burnin.known_product(n)
    assert np.array_equal(a @ b, expected)
