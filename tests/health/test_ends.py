"""What an agent says of an ended worker: its own words, and whether the kernel or somebody else killed it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.agent import exits
from regrow.agent.config import AgentSettings
from regrow.agent.health import burnin
from regrow.agent.health.burnin_result import CheckResult
from regrow.agent.health.fake_nvml.control import FakeNvml
from regrow.agent.health.preflight_report import Preflight, findings_of
from regrow.agent.protocol import WorkerState
from regrow.agent.watch import HealthSource, open_health


def state(status: int, log: Path, pid: int = 7) -> WorkerState:
    return WorkerState(rank=0, local_rank=0, pid=pid, start_time=1, log=str(log), status=status)


@pytest.mark.parametrize(
    ("line", "said", "action"),
    [
        ("ValueError: boom", "user_code", "fix_code"),
        ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:9", "unknown", ""),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu_mem_uncorrectable", "drain_reset_gpu"),
        ("loss 3.2", "", ""),
    ],
)
def test_the_last_words_of_a_rank(line: str, said: str, action: str, tmp_path: Path) -> None:
    log = tmp_path / "rank0.out"
    log.write_text(f"step 1\n{line}\n")
    got = exits.describe(state(256, log))
    assert got.said == said
    assert action in ("", got.said_action)


def test_a_worker_that_we_stopped_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank0.out").write_text("ValueError: boom\n")
    torn = WorkerState(rank=0, local_rank=0, pid=7, start_time=1, log=str(tmp_path / "rank0.out"), status=9, torn_down=True)
    assert exits.describe(torn).said == ""


def test_a_kill_from_outside_is_told_from_the_kernels(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    before = exits.num_oom_kills()
    os.kill(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    child.returncode = -9
    after = exits.num_oom_kills()
    got = exits.describe(state(status, tmp_path / "none", child.pid), oom_counted=before is not None, oom_killed=before != after)
    assert (got.signal, got.oom_killed) == (9, False)
    assert got.oom_counted == (before is not None)


@pytest.mark.parametrize(
    ("before", "now", "killed", "told"),
    [
        ((1, 5), (1, 5), False, True),
        ((1, 5), (2, 6), True, True),
        ((1, 5), (1, 6), False, False),  # in another group, which may be the worker's
        ((None, 5), (None, 5), False, False),
        ((1, None), (1, None), False, True),
    ],
)
def test_a_kill_for_memory_in_another_control_group_is_left_open(
    before: tuple[int | None, int | None], now: tuple[int | None, int | None], killed: bool, told: bool
) -> None:
    assert exits.was_oom(exits.OomKills(*before), exits.OomKills(*now)) == (killed, told)


@pytest.mark.parametrize(
    "line",
    [
        "Out of memory: Killed process 4711 (python) total-vm:1kB, anon-rss:1kB",
        "Memory cgroup out of memory: Killed process 4711 (pt_main_thread)",
        "Memory cgroup out of memory: Kill process 17 (a) score 9; Killed process 4711 (python)",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,task=python,pid=4711,uid=0",
    ],
)
def test_pids_in_the_kernels_words(line: str) -> None:
    assert 4711 in exits.oom_kills_of([line])
    assert exits.oom_kills_of(["eth0: Link is up 4711"]) == frozenset()


async def until(health: HealthSource, state: str) -> None:
    """Watch until the verdict is so; the probe child ends with it."""
    done = asyncio.Event()
    task = asyncio.create_task(health.run(lambda verdict: done.set() if verdict.state == state else None))
    async with asyncio.timeout(30):
        await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_kernel_log_file_is_followed_with_a_fake_nvml_and_both_xids_are_one(fake: FakeNvml, tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("before\n")
    settings = AgentSettings(node="n", store="memory://", state=tmp_path, fake_nvml=str(fake.path), kernel_log=str(log))
    health = open_health(settings)
    await health.prepare()
    assert health.kernel_lines() == ()
    bus = health.devices()[0].pci_bus_id
    with log.open("a") as file:
        file.write(f"[ 10.5] NVRM: Xid (PCI:{bus}): 79, GPU has fallen off the bus.\n[ 11.0] Out of memory: Killed process 42 (python)\n")
    assert len(health.kernel_lines()) == 2
    assert exits.oom_kills_of(health.kernel_lines()) == {42}
    fake.set_xid(0, 79)
    await health.prepare()
    await until(health, "unhealthy")
    counts = [known.xids[79].count for known in health.history().devices.values() if 79 in known.xids]
    assert counts == [1]


async def test_the_hosts_own_log_says_nothing_on_a_fakes_gpus(fake: FakeNvml, tmp_path: Path) -> None:
    settings = AgentSettings(node="n", store="memory://", state=tmp_path, fake_nvml=str(fake.path), kernel_log="/dev/null")
    health = open_health(settings)
    await until(health, "healthy")
    assert health.kernel_lines() == ()


@pytest.mark.parametrize(("fault", "state", "reason"), [("", "healthy", ""), ("matmul", "unhealthy", "preflight_failed: matmul")])
async def test_a_node_is_checked_before_it_joins(
    fault: str, state: str, reason: str, fake: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(burnin.FAULT_VARIABLE, fault)
    health = open_health(AgentSettings(node="n", store="memory://", state=tmp_path, fake_nvml=str(fake.path)))
    await health.prepare()
    assert health.verdict().state == state
    assert health.verdict().reason.startswith(reason)
    report = json.loads((tmp_path / "preflight.json").read_text())
    assert report["ok"] == (not fault)
    assert {one["name"] for one in report["checks"]} >= {"gpus", "memory", "matmul", "disk"}
    await until(health, state)


def test_a_check_that_did_not_end_in_time_condemns_nobody() -> None:
    late = CheckResult(name="burn_in", ok=False, seconds=20, detail="no end within 20 s")
    (found,) = findings_of(Preflight(ok=False, seconds=20, checks=(late,)))
    assert (found.state, found.action) == ("degraded", "watch")
