"""Other people's trainers under `regrow run`. Level 0, unmodified: a worker is killed and the job ends all the same. Level 2, on our
checkpoints: a worker is killed, and losses and final state are to the bit those of a run without a fault.

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
from typing import Any, Self

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


class Launched:
    """`regrow run` of an example on two local agents, its output in a log; what rank 0 wrote in each generation."""

    def __init__(self, python: str, folder: Path, script: str, *arguments: str, slots: int = 1, options: tuple[str, ...] = ()) -> None:
        self._run = folder
        self._log = folder.with_suffix(".log")
        self._command = (
            *(python, "-m", "regrow", "run", "--plain", "--local", "2", "--nproc-per-node", str(slots), "--job", "fit"),
            *("--run-dir", str(folder), *options, str(ROOT / f"examples/{script}.py"), *arguments),
        )
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        log = os.open(self._log, os.O_CREAT | os.O_WRONLY)
        self._process = await asyncio.create_subprocess_exec(
            *self._command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, cwd=self._run.parent
        )
        os.close(log)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()

    @property
    def process(self) -> asyncio.subprocess.Process:
        """The launcher."""
        assert self._process is not None
        return self._process

    @property
    def log(self) -> str:
        """All that it printed."""
        return self._log.read_text(encoding="utf-8")

    def text(self, generation: int) -> str:
        """Output of rank 0."""
        path = self._run / f"nodes/n0/jobs/fit/g{generation}/rank0.out"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def kill(self, rank: int) -> None:
        """SIGKILL a worker."""
        victim = worker(psutil.Process(self.process.pid), f"rank{rank}.out")
        assert victim is not None, self.log
        victim.kill()

    async def ends(self) -> None:
        """To its end, at which the job is done."""
        assert await asyncio.wait_for(self.process.wait(), 400) in (0, 3), self.log


@pytest.mark.parametrize("script", ["hf_trainer", "lightning_fit", "accelerate_loop"])
async def test_a_trainer_goes_on_from_its_own_checkpoint(script: str, python: str, processes: Any, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    async with Launched(python, tmp_path / "run", script, "--output", out, "--steps", "600", "--save-every", "20") as job:
        await processes.until(lambda: job.process.returncode is not None or "step=50 " in job.text(1), "it trains")
        assert job.process.returncode is None, job.log
        job.kill(1)
        await job.ends()
        text = job.text(2)
    steps = [int(step) for step in re.findall(r"^step=(\d+) world=2", text, re.MULTILINE)]
    assert steps[0] % 20 == 1  # the step after a checkpoint of the trainer's own
    assert steps[0] > 20
    assert steps == list(range(steps[0], 601))
    assert "finished step=600" in text


async def test_megatron_core_under_tensor_parallelism_goes_on_from_its_own_checkpoint(python: str, processes: Any, tmp_path: Path) -> None:
    """Two replicas of two tensor-parallel ranks: one rank is killed, and every later loss is to the bit that of a run without a fault."""

    async def run(name: str, *, kill: bool) -> list[dict[int, str]]:
        """{step: loss} of each generation."""
        arguments = ("--output", str(tmp_path / f"{name}-out"), "--steps", "120", "--save-every", "20")
        async with Launched(python, tmp_path / name, "megatron_gpt", *arguments, slots=2) as job:
            if kill:
                await processes.until(lambda: job.process.returncode is not None or "step=50 " in job.text(1), "it trains")
                job.kill(3)
            await job.ends()
        pattern = re.compile(r"^step=(\d+) world=4 loss=(\S+)$", re.MULTILINE)
        return [{int(step): loss for step, loss in pattern.findall(job.text(generation))} for generation in (1, 2)]

    (twin, _), (_, seen) = await run("twin", kill=False), await run("seen", kill=True)
    assert sorted(twin) == list(range(1, 121))
    first = min(seen)
    assert first > 20
    assert first % 20 == 1, "the step after a checkpoint of Megatron's"
    assert seen == {step: twin[step] for step in range(first, 121)}


LEVEL2 = {"hf_trainer_level2": ("16", "4"), "lightning_level2": ("32", "8")}
"""Global batch and micro-batch: two micro-batches for each of two replicas."""


@pytest.mark.parametrize("script", list(LEVEL2))
async def test_a_trainer_on_our_checkpoints_does_not_notice_a_kill(script: str, python: str, processes: Any, tmp_path: Path) -> None:
    batch, micro = LEVEL2[script]

    async def run(name: str, *, kill: bool) -> dict[int, dict[int, str]]:
        options = ("--global-batch", batch, "--micro-batch", micro)
        async with Launched(python, tmp_path / name, script, "--steps", "300", options=options) as job:
            if kill:
                committed = tmp_path / name / "checkpoints"
                await processes.until(
                    lambda: job.process.returncode is not None or any(committed.glob("step-*/record.json")), "a checkpoint"
                )
                job.kill(1)
            await job.ends()
        text = job.text
        steps = {
            generation: {int(step): loss for step, loss in re.findall(r"^step=(\d+) world=2 loss=(\S+)$", text(generation), re.MULTILINE)}
            for generation in (1, 2, 3)
        }
        (steps[0],) = [{0: found} for found in re.findall(r"^finished step=300 state=(\w+)$", text(1) + text(2) + text(3), re.MULTILINE)]
        return {generation: found for generation, found in steps.items() if found}

    twin, seen = await run("twin", kill=False), await run("seen", kill=True)
    assert set(twin) == {0, 1}
    last = max(seen)
    assert last > 1, "it was killed in the middle"
    resumed = min(seen[last])
    assert resumed > 1, "it goes on from a checkpoint"
    assert sorted(seen[last]) == list(range(resumed, 301))
    assert {step: twin[1][step] for step in seen[last]} == seen[last], "the same losses, to the bit"
    assert seen[0] == twin[0], "the same parameters in the end"


STATEFUL = """
import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from regrow.agent.worker.data import BatchPlan, Recipe
from regrow.integrations.sampler import StepSampler
from regrow.parallel.batch import split

recipe, data = Recipe(num_samples=96, seed=3, global_batch=16, micro_batch=2), TensorDataset(torch.arange(96))

def trained(dp, first, last, workers):
    shares = []
    for replica in range(dp):
        plan = BatchPlan(recipe, split(16, 2, dp), replica, base_step=first - 1, base_samples=(first - 1) * 16)
        sampler = StepSampler(plan, last + 2)
        loader = StatefulDataLoader(data, batch_sampler=sampler, num_workers=workers)
        walk = sampler.steps(loader)
        shares.append([[int(sample) for (batch,) in next(walk) for sample in batch] for _ in range(first, last + 1)])
        loader.state_dict()
    return [sample for step in zip(*shares, strict=True) for share in step for sample in share]

if __name__ == "__main__":
    whole = trained(1, 1, 6, 0)
    print(sorted(whole) == list(range(96)), trained(4, 1, 2, 1) + trained(3, 3, 5, 0) + trained(2, 6, 6, 1) == whole)
"""


def test_torchdatas_loader_gives_every_sample_once_over_a_change_of_replicas(python: str, tmp_path: Path) -> None:
    (tmp_path / "walk.py").write_text(STATEFUL)
    done = subprocess.run([python, str(tmp_path / "walk.py")], capture_output=True, text=True, check=False, timeout=400)
    assert done.stdout.split() == ["True", "True"], done.stderr
