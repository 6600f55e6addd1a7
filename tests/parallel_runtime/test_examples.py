"""The examples run as their users start them: torchrun for the plain script, the bare interpreter for the GPT."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.demo.compare import compare

ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str], folder: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("REGROW_", "TORCHELASTIC_"))}
    clean |= {"OMP_NUM_THREADS": "1", **environment}
    finished = subprocess.run(
        ["nice", "-n", "10", sys.executable, *command], cwd=folder, env=clean, capture_output=True, text=True, timeout=280, check=False
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def test_gpt_without_a_supervisor_stops_and_goes_on_like_its_twin(tmp_path: Path) -> None:
    """The script saves by itself; started again it continues; the whole equals the reference, which shares no restore code."""
    script = str(ROOT / "examples" / "train_gpt.py")
    arguments = ["--layers", "1", "--hidden", "48", "--seq", "48", "--samples", "48", "--seed", "2"]
    places = {"REGROW_CHECKPOINT": str(tmp_path / "checkpoints"), "REGROW_STEP_LOG": str(tmp_path / "run"), "REGROW_GLOBAL_BATCH": "16"}
    places["REGROW_MICRO_BATCH"] = "2"
    schedule = ["--warmup", "100"]  # a rate that does not depend on the number of steps
    run([script, *arguments, *schedule, "--steps", "3"], tmp_path, **places)
    text = run([script, *arguments, *schedule, "--steps", "6"], tmp_path, TORCHELASTIC_RESTART_COUNT="1", **places)
    assert "finished step=6" in text
    run(["-m", "regrow.demo.reference", "--folder", str(tmp_path / "twin"), *arguments, *schedule, "--steps", "6"], tmp_path)
    comparison = compare(tmp_path / "run", tmp_path / "twin", last_step=6, tolerances={})
    assert comparison.passed, comparison.checks
    assert next(check for check in comparison.checks if check.name == "loss").worst == 0.0
    assert next(check for check in comparison.checks if check.name == "final_state").worst == 0.0


@pytest.mark.slow
def test_plain_ddp_script_under_torchrun_and_in_another_world(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "ddp_plain.py")
    assert "step=2 " in run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, "--steps", "2"], tmp_path)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    text = run([script, "--steps", "3"], tmp_path, **alone)
    assert "step=3 " in text
    assert "step=2 " not in text, "it did not continue from its own checkpoint"


def commands_of_the_readme() -> list[str]:
    """The command lines of the blocks, in order."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "examples" / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.soak
@pytest.mark.parametrize("line", commands_of_the_readme())
def test_commands_of_the_readme_run_as_they_stand(line: str, tmp_path: Path) -> None:
    for script in (ROOT / "examples").glob("*.py"):
        (tmp_path / script.name).symlink_to(script)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("REGROW_", "TORCHELASTIC_"))}
    finished = subprocess.run(
        shlex.split(line),
        cwd=tmp_path,
        env=clean | {"PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-1500:] + finished.stderr[-3000:]
    ends = {"python": "finished step=", "regrow": ": done at step ", "torchrun": "step=5 "}
    assert ends[line.split(maxsplit=1)[0]] in finished.stdout + finished.stderr
