"""Real ranks on gloo: one process imports torch and forks the ranks of every job."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.ids import MeshShape

HERE = Path(__file__).parent
JOB_SECONDS = 240.0
"""Deadline of one job: generous, a loaded machine is no failure."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A call that `world` ranks make together."""

    name: str
    world: int
    call: str
    keywords: dict[str, object]


@dataclasses.dataclass(frozen=True)
class Done:
    """A finished job: its folder, or why it failed."""

    folder: Path
    codes: tuple[int | None, ...]
    error: str

    def ok(self) -> Path:
        """The folder of a job that went well."""
        assert all(code == 0 for code in self.codes), f"{self.folder.name}: exit codes {self.codes}\n{self.error}"
        return self.folder


class Ranks:
    """Starts jobs of several ranks."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    def job(self, name: str, world: int, call: str, keywords: dict[str, object]) -> Job:
        """Any call; in `keywords`, {folder} is the job's folder and {root} the folder of all jobs' folders."""
        return Job(name, world, call, keywords)

    def training(self, name: str, mesh: str, *arguments: str, call: str = "regrow.demo.reference:main") -> Job:
        """A run of the reference on a mesh."""
        argv = ["--folder", "{folder}", "--mesh", mesh, "--rendezvous", "file://{folder}/store", *arguments]
        return Job(name, MeshShape.parse(mesh).world_size, call, {"argv": argv})

    def run(self, jobs: list[Job]) -> dict[str, Done]:
        """Run jobs one after the other in one process tree; nothing is left running."""
        root = self._factory.mktemp("ranks")
        (root / "jobs.json").write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(HERE),
        }
        command = ["nice", "-n", "10", sys.executable, str(HERE / "zygote.py"), str(root / "jobs.json"), str(root), str(JOB_SECONDS)]
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=JOB_SECONDS * len(jobs), check=False)
        assert finished.returncode == 0, finished.stderr[-3000:]
        results = json.loads((root / "results.json").read_text())
        return {name: Done(root / name, tuple(result["codes"]), result["error"]) for name, result in results.items()}


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Real ranks on gloo."""
    return Ranks(tmp_path_factory)
