from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.cli import checks


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [str(Path(sys.executable).with_name("regrow")), "doctor", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def fake_etcd(folder: Path, version: str) -> None:
    script = folder / "etcd"
    script.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n", encoding="utf-8")
    script.chmod(0o755)


def test_this_machine_and_its_document() -> None:
    done = doctor("--json")
    found = json.loads(done.stdout)
    states = {one["name"]: one["status"] for one in found["checks"]}
    assert {"python", "torch", "etcd", "c compiler", "shared memory", "open files", "sockets", "cgroup", "gpus", "clock"} <= set(states)
    assert done.returncode == {True: 1, False: 3 if "warn" in states.values() else 0}["missing" in states.values()]
    assert states["python"] == states["sockets"] == "ok"
    assert states["gpus"] in ("ok", "note")


def test_for_people() -> None:
    done = doctor()
    assert "this machine" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("version", "members", "status"),
    [
        ("3.4.23", 3, "ok"),
        ("3.5.1", 1, "warn"),
        ("3.5.1", 3, "missing"),
        ("3.5.2", 5, "missing"),
        ("3.5.3", 3, "ok"),
        ("3.3.9", 1, "missing"),
    ],
)
def test_etcd_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, members: int, status: str) -> None:
    fake_etcd(tmp_path, version)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    got = checks.etcd(members)
    assert got.status == status, got
    assert version in got.detail
    assert bool(got.hint) == (status != "ok")


def test_what_is_missing_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    assert checks.torch().status == "missing"
    assert "pip install" in checks.torch().hint
    absent = checks.shared_memory(str(tmp_path / "absent"))
    assert (absent.status, bool(absent.hint)) == ("missing", True)


def test_exit_codes() -> None:
    def of(*states: checks.Status) -> int:
        return checks.exit_code([checks.Check("x", state, "") for state in states])

    assert (of("ok", "note"), of("ok", "warn"), of("warn", "missing")) == (0, 3, 1)


def test_a_hung_driver_is_named(tmp_path: Path) -> None:
    from regrow.agent.health.fake_nvml.control import FakeNvml

    fake = FakeNvml(tmp_path / "state.json")
    fake.write(devices=2)
    working = {one["name"]: one for one in json.loads(doctor("--json", REGROW_FAKE_NVML=str(fake.path)).stdout)["checks"]}
    assert working["gpus"]["detail"].startswith("2 GPUs")
    fake.hang()
    done = doctor("--json", "--deadline", "1", REGROW_FAKE_NVML=str(fake.path))
    hung = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert (done.returncode, hung["gpus"]["status"]) == (1, "missing")
    assert "hung" in hung["gpus"]["detail"]
