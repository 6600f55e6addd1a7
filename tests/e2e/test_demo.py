"""The main job, whole: what `make demo` runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.processes import marked

MARK = "REGROW_TEST_RUN"


@pytest.mark.timeout(900)
def test_demo_with_all_faults(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "regrow", "demo", "--fault", "all", "--seed", "1", "--run-dir", str(tmp_path / "d"), "--json"]
    environment = {**os.environ, MARK: str(tmp_path)}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=850)
    assert done.stdout, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert done.returncode == 0, (
        json.dumps([check for check in result.get("checks", [result]) if not check.get("ok")], indent=1) + done.stderr[-3000:]
    )
    assert [fault["kind"] for fault in result["faults"]] == ["node", "sdc", "gpu", "hang"]
    ranks = [generation["ranks"] for generation in result["generations"]]
    assert ranks[:5] == [8, 6, 8, 6, 4]
    for incident in result["incidents"]:
        assert sum(incident["phases"].values()) == pytest.approx(incident["seconds"], rel=0.02)
    page = Path(result["report"]).read_text()
    assert page.count("<svg") >= 2
    assert marked(MARK, str(tmp_path)) == []


@pytest.mark.parametrize(
    "flags", [["--fault", "earthquake"], ["--zero", "4"], ["--seed", "-1"], ["--steps", "3"], ["--fault", "node,fire"]]
)
def test_wrong_flags_are_refused_before_anything_starts(tmp_path: Path, flags: list[str]) -> None:
    argv = [sys.executable, "-m", "regrow", "demo", *flags, "--run-dir", str(tmp_path / "d")]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "try:" in done.stderr
    assert not (tmp_path / "d").exists()


def test_folder_that_is_not_a_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    argv = [sys.executable, "-m", "regrow", "demo", "--run-dir", str(tmp_path)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert (tmp_path / "precious.txt").read_text() == "mine"
