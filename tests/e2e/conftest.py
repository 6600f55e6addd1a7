"""Runs of `regrow run`, and the toy without Regrow around it to compare with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.launcher import Run

TOY = Path(__file__).with_name("toy.py")
_TWIN_STEPS = 400
"""As many as the longest test compares."""


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """{step: loss} of the toy without Regrow around it: one process, no faults."""
    folder = tmp_path_factory.mktemp("twin")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REGROW_")} | {"OMP_NUM_THREADS": "1"}
    argv = [sys.executable, str(TOY), "--steps", str(_TWIN_STEPS), "--pause", "0", "--log", str(folder / "log")]
    subprocess.run(argv, env=environment, check=True, cwd=folder, timeout=300)
    (log,) = (folder / "log").glob("*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "step" in line}


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start `regrow run` with these arguments; killed with all that it started when the test ends."""
    runs: list[Run] = []

    def start(*arguments: str) -> Run:
        runs.append(Run(tmp_path, *arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
