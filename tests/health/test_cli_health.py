from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regrow.agent.health.fake_nvml.control import FakeNvml, uuid_of

LOG = """\
[ 10.0] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build
[rank3]:[E ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)
[ 99.5] NVRM: Xid (PCI:0000:4c:00): 45, pid=90311, name=pt_main_thread, Ch 0000000c
[ 99.4] NVRM: Xid (PCI:0000:4c:00): 48, pid=90311, name=pt_main_thread, DBE (double bit error) ECC Error
"""


def regrow(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("regrow")), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        input=stdin,
        check=False,
    )


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout)


def test_classify_answers_the_contract(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG, encoding="utf-8")
    done = regrow("health", "--classify", log, "--json")
    assert done.returncode == 0
    got = document(done)
    assert [(one["line"], one["class"], one["action"], one["role"], one["xid"]) for one in got["lines"]] == [
        (1, "benign", "none", "none", None),
        (2, "collective_timeout", "symptom_find_straggler", "secondary", None),
        (3, "gpu_cleanup_secondary", "follow_other_xid", "secondary", 45),
        (4, "gpu_mem_uncorrectable", "drain_reset_gpu", "primary", 48),
    ]
    assert {key: got["verdict"][key] for key in ("class", "action", "first_line")} == {
        "class": "gpu_mem_uncorrectable",
        "action": "drain_reset_gpu",
        "first_line": 4,
    }


def test_classify_for_people_and_from_stdin() -> None:
    done = regrow("health", "--classify", "-", stdin=LOG)
    assert done.returncode == 0
    assert "verdict: gpu_mem_uncorrectable, action drain_reset_gpu" in done.stdout
    assert "benign" not in done.stdout


@pytest.mark.parametrize(("data", "lines"), [(b"", 0), (b"\n", 1), (b"a\r\nb", 2), (b"\xff\xfe\x00\n\x85\x0b\n", 2)])
def test_classify_counts_lines_as_editors_do(tmp_path: Path, data: bytes, lines: int) -> None:
    log = tmp_path / "log"
    log.write_bytes(data)
    done = regrow("health", "--classify", log, "--json")
    assert len(document(done)["lines"]) == lines


def test_wrong_files_are_configuration_errors(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    for arguments in (
        ("--classify", tmp_path / "absent"),
        ("--classify", tmp_path),
        ("--state", tmp_path / "absent"),
        ("--state", tmp_path / "bad.json"),
        ("--policy", tmp_path / "absent"),
    ):
        done = regrow("health", *arguments, "--json")
        assert done.returncode == 2, arguments
        assert document(done)["error"]["what"]
        assert "Traceback" not in done.stderr


def test_verdict_and_exit_codes(fake: FakeNvml) -> None:
    healthy = regrow("health", "--state", fake.path, "--json")
    assert (healthy.returncode, document(healthy)["state"], document(healthy)["probe"]["gpus"]) == (0, "healthy", 4)
    fake.set_device(1, pcie_width=8)
    assert regrow("health", "--state", fake.path, "--json").returncode == 3
    fake.set_xid(2, 31, 62, 45)
    sick = regrow("health", "--state", fake.path, "--explain", "--json")
    got = document(sick)
    assert (sick.returncode, got["state"], got["action"], got["device_uuids"]) == (1, "unhealthy", "reset", [uuid_of(2)])
    assert got["xids"][uuid_of(2)]["62"] == {"count": 1, "teardown": 0}
    assert any("Xid 45" in line for line in got["explain"]["set_aside"])
    assert got["explain"]["policy"]["probe"]["deadline_seconds"] == 10.0
    people = regrow("health", "--state", fake.path, "--explain")
    assert people.stdout.startswith("unhealthy: action reset: gpu_firmware")
    assert "set aside" in people.stdout


def test_hung_driver(fake: FakeNvml) -> None:
    fake.hang()
    done = regrow("health", "--state", fake.path, "--deadline", "1", "--json")
    assert (done.returncode, document(done)["probe"]["status"], document(done)["action"]) == (1, "hung", "reboot")


def test_this_machine() -> None:
    done = regrow("health", "--json")
    assert done.returncode in (0, 3), done.stderr
    assert document(done)["probe"]["status"] in ("ok", "no_driver")


def test_a_policy_of_ones_own(fake: FakeNvml, tmp_path: Path) -> None:
    from regrow.agent.health import policy

    lenient = tmp_path / "policy.toml"
    lenient.write_text(policy.DEFAULT.read_text(encoding="utf-8").replace("hung_probes = 1 ", "hung_probes = 2 "), encoding="utf-8")
    fake.hang()
    done = regrow("health", "--state", fake.path, "--policy", lenient, "--dry-run", "--deadline", "0.5", "--json")
    assert (done.returncode, document(done)["state"]) == (0, "healthy")
