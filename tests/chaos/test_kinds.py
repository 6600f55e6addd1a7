"""Fault kinds on a real cluster, several in one run; the long plans are the soak form. And what the faults do by themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.chaos.test_parts import fake_dcgmi

from regrow.agent.health.classify import classify
from regrow.agent.health.xid import parse
from regrow.chaos.surroundings import Surroundings
from regrow.errors import OperationalError

REGROW = str(Path(sys.executable).with_name("regrow"))

PLAN = """
version = 1
name = "ci"
seed = 3
[cluster]
nodes = 3
[[fault]]
kind = "worker_nan"
[[fault]]
kind = "worker_raise"
[[fault]]
kind = "kernel_noise"
quiet_seconds = 2
[[fault]]
kind = "nvml_noise"
xid = 45
quiet_seconds = 1
[[fault]]
kind = "agent_pause"
quiet_seconds = 3
[[fault]]
kind = "storage_gone"
quiet_seconds = 3
[[fault]]
kind = "checkpoint_flip"
[[fault]]
kind = "kernel_xid"
"""


def run(plan: str | Path, folder: Path, seconds: float) -> dict[str, object]:
    done = subprocess.run(
        [REGROW, "chaos", "run", str(plan), "--run-dir", str(folder / "run"), "--json"],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    card = json.loads(done.stdout)
    wrong = [one for one in card["marks"] if one["error"]]
    assert done.returncode == 0, (wrong, card, done.stderr[-3000:])
    return card


@pytest.mark.timeout(400)
def test_kinds_that_need_no_accelerator_in_one_run(tmp_path: Path) -> None:
    """With --stay: what was broken can be looked at when the plan is over, until Ctrl-C; the card comes then."""
    (tmp_path / "plan.toml").write_text(PLAN)
    with subprocess.Popen(
        [REGROW, "chaos", "run", str(tmp_path / "plan.toml"), "--run-dir", str(tmp_path / "run"), "--stay", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        said: list[str] = []
        for line in started.stderr:
            said.append(line)
            if "the plan is over" in line:
                break
        assert started.poll() is None, "".join(said)[-3000:]
        address = json.loads((tmp_path / "run/supervisor/supervisor.json").read_text())["http"]
        job = httpx.get(f"http://{address}/v1/jobs/chaos", trust_env=False).json()
        assert len(job["incidents"]) == 4
        started.send_signal(signal.SIGINT)
        said.append(started.stderr.read())
        card = json.loads(started.stdout.read())
    assert started.returncode == 0, ([one for one in card["marks"] if one["error"]], "".join(said)[-3000:])
    assert (card["num_named_right"], card["num_false_alarms"]) == (4, 0)
    told = json.loads((tmp_path / "run/faults.json").read_text())
    assert sorted(one["kind"] for one in told if one["incident"]) == sorted(mark["kind"] for mark in card["marks"] if mark["incident"])
    began = {one["id"]: one["at"] for one in job["incidents"]}
    assert all(one["at"] <= began[one["incident"]] for one in told if one["incident"]), "a fault is before what is seen of it"


@pytest.mark.soak
@pytest.mark.timeout(700)
@pytest.mark.parametrize("plan", ["storage", "silence", "corruption"])
def test_plans(plan: str, tmp_path: Path) -> None:
    run(plan, tmp_path, 680)


@pytest.mark.soak
def test_a_value_in_dcgm_alone_is_no_incident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with a stand-in for DCGM's tool on the path: put there again and again while the job goes on."""
    log = fake_dcgmi(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    plan = tmp_path / "plan.toml"
    plan.write_text("[job]\nkind = 'small'\n[[fault]]\nkind = 'dcgm_inject'\nvalue = 79\nquiet_seconds = 6\n")
    run(str(plan), tmp_path, 300)
    assert log.read_text().count("--value 79") > 3


# --- the faults by themselves --------------------------------------------------------------------------------------


@pytest.fixture
def around(tmp_path: Path) -> Surroundings:
    found = Surroundings(tmp_path)
    found.prepare()
    return found


def test_one_bit_of_the_newest_checkpoint(around: Surroundings, tmp_path: Path) -> None:
    with pytest.raises(OperationalError, match="no checkpoint"):
        around.flip_newest_checkpoint()
    for step in (3, 12):
        folder = tmp_path / "checkpoints" / f"step-{step:012d}-g1-ab"
        folder.mkdir(parents=True)
        (folder / "rank-0").write_bytes(bytes(100))
        (folder / "record.json").write_bytes(b"x")
    begun = tmp_path / "checkpoints" / "step-000000000013-g1-ab"
    begun.mkdir()
    (begun / "rank-0").touch()
    assert around.num_checkpoints() == 2, "one that is being written is none yet"
    victim = around.flip_newest_checkpoint()
    assert victim.parent.name.startswith("step-000000000012")
    assert sum(byte.bit_count() for byte in victim.read_bytes()) == 1


def test_storage_that_is_away_comes_back(around: Surroundings, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-1"
    folder.mkdir(parents=True)
    around.hide_storage()
    with pytest.raises(NotADirectoryError):
        folder.mkdir()
    around.heal()
    around.heal()
    assert folder.is_dir()


def test_a_paused_process_goes_on(around: Surroundings) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    around.pause(child.pid)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    around.heal()
    child.communicate("\n", timeout=30)
    assert child.returncode == 0


@pytest.mark.parametrize("bus", ["00000001:0A:00.0", "0001:0a:00.0", "0000:C1:00.0"])
def test_the_kernels_address_is_nvmls(around: Surroundings, bus: str) -> None:
    """The kernel prints a domain of four digits, NVML one of eight; both mean one GPU."""
    around.say_in_kernel_log("kernel_xid", 79, bus)
    (line,) = around.kernel_log.read_text().splitlines()
    seen = parse(line, 0.0)
    assert seen is not None
    assert seen.pci_bus_id == ("0000:c1:00.0" if "C1" in bus else "0001:0a:00.0")


def test_noise_names_no_broken_part_of_this_node(around: Surroundings) -> None:
    around.say_in_kernel_log("kernel_noise", 0, "0001:01:00.0")
    lines = around.kernel_log.read_text().splitlines()
    assert [parse(line, 0.0) is not None for line in lines].count(True) == 1
    assert [classify(line).action for line in lines].count("reboot_node") == 1
