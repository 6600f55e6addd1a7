"""Scripts of other people's trainers, unmodified, under `regrow run`: a worker is killed and the job ends as if nothing had been.

The trainers are not among the development tools: the first run makes an environment of its own with them, on top of this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with the trainers of the dependency group `integrations`, and all that this one has."""
    group = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]["integrations"]
    folder = tmp_path_factory.mktemp("trainers")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    own = next(folder.glob("lib/python3*/site-packages"))
    shared = Path(psutil.__file__).parents[1]
    (own / "shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n", encoding="utf-8")
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *group], check=True)
    return str(folder / "bin/python")


def worker(family: psutil.Process, name: str) -> psutil.Process | None:
    """The process that writes to this log."""
    for process in family.children(recursive=True):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process.pid}/fd/1").readlink().name == name:
                return process
    return None


@pytest.mark.parametrize("script", ["hf_trainer", "lightning_fit"])
async def test_a_trainer_goes_on_from_its_own_checkpoint(script: str, python: str, processes: Any, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    log = os.open(tmp_path / "run.log", os.O_CREAT | os.O_WRONLY)
    launched = await asyncio.create_subprocess_exec(
        *(python, "-m", "regrow", "run", "--plain", "--local", "2", "--nproc-per-node", "1", "--job", "fit", "--run-dir", str(run)),
        *(str(ROOT / f"examples/{script}.py"), "--output", str(out), "--steps", "600", "--save-every", "20"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=log,
        stderr=log,
        cwd=tmp_path,
    )
    os.close(log)

    def text(generation: int) -> str:
        path = run / f"nodes/n0/jobs/fit/g{generation}/rank0.out"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    try:
        await processes.until(lambda: launched.returncode is not None or "step=50 " in text(1), "it trains")
        assert launched.returncode is None, (tmp_path / "run.log").read_text(encoding="utf-8")
        victim = worker(psutil.Process(launched.pid), "rank1.out")
        assert victim is not None
        victim.kill()
        assert await asyncio.wait_for(launched.wait(), 400) in (0, 3), (tmp_path / "run.log").read_text(encoding="utf-8")
    finally:
        if launched.returncode is None:
            launched.terminate()
            await launched.wait()
    steps = [int(step) for step in re.findall(r"^step=(\d+) world=2", text(2), re.MULTILINE)]
    assert steps[0] % 20 == 1  # the step after a checkpoint of the trainer's own
    assert steps[0] > 20
    assert steps == list(range(steps[0], 601))
    assert "finished step=600" in text(2)
