"""The 3D example under `kill -9` of whatever process, at random moments: it ends like a run that nothing happened to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.launcher import TEST_MARK, Run

import regrow.demo
from regrow.demo import compare, lineage, steplog, twin
from regrow.processes import marked

EXAMPLE = Path(regrow.demo.__file__).with_name("train_gpt.py")
STEPS = 60
KILLS = 5
LIMIT_SECONDS = 900.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Step logs of the same training without Regrow, on one process and on two."""
    root = tmp_path_factory.mktemp("twins")
    return asyncio.run(twin.run_twins(root, STEPS, 0, controls_after=20, script_flags=()))


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("seed", range(1, 6))
def test_random_kills_of_the_example(
    launch: Callable[..., Run],
    tmp_path: Path,
    references: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    zero: int,
) -> None:
    """DP2 x TP2 x PP2 on four agents; agents, shims, workers, writers, supervisor, etcd and probes are all in the lot."""
    chance = random.Random(seed)
    monkeypatch.setenv(steplog.VARIABLE, str(tmp_path / "steps"))
    sizes = ("--local", "4", "--nproc-per-node", "2", "--mesh", "2x2x2", "--global-batch", "16", "--micro-batch", "2")
    run = launch(*sizes, "--zero", str(zero), "--job", "gpt", str(EXAMPLE), "--steps", str(STEPS), "--seed", "0")
    run.until(lambda: (run.job("gpt").get("checkpoint") or {}).get("step"), "a committed checkpoint")
    story: list[str] = []
    floors: list[tuple[int, int]] = []
    for _ in range(KILLS):
        least = (run.job("gpt").get("step") or 0) + chance.randint(1, 8)
        document = run.until(partial(beyond, run, least), f"step {least} after {story}")
        floors.append((document["generation"], document["checkpoint"]["step"]))
        pid = chance.choice(sorted(set(marked(TEST_MARK, run.mark)) - {run.process.pid}))
        story.append(f"step {document['step']}: {pid} {command_of(pid)}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert run.wait(LIMIT_SECONDS) == 0, f"{story}\n{run.story()}"
    one, two = references
    ours = lineage.read_lineage(tmp_path / "steps")
    for generation, committed in floors:
        later = [segment.restored for segment in ours.segments if segment.generation > generation]
        assert all(restored >= committed for restored in later), story
    result = compare.compare(tmp_path / "steps", one, last_step=STEPS, tolerances=compare.state_tolerances(one, two))
    assert result.passed, f"{result.failed} {result.checks} {story}"
    assert run.gone(5.0) == []


def beyond(run: Run, least: int) -> dict[str, Any] | None:
    """The job's document once it is at this step, or at its end."""
    document = run.job("gpt")
    return document if (document.get("step") or 0) >= min(least, STEPS - 1) else None


def command_of(pid: int) -> str:
    """The command line of a process, for messages."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
    except OSError:
        return "gone"
