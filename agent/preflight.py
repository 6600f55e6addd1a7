"""Before a node (re)joins: does it still compute, remember and store? Bounded in time, reported as a whole.

The GPU baseline comes from the same probe and policy as everyday health; memory, matrix product and disk run in a child
that may hang or die without harm. Whether it exchanges bytes with its peers is the business of agent/pairs.py, at the same time.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec

from regrow.agent.health import base, policy
from regrow.agent.health.burnin_result import CheckResult
from regrow.agent.health.history import History
from regrow.agent.health.preflight_report import UNFINISHED, Preflight
from regrow.agent.health.prober import Prober

_BURNIN = "regrow.agent.health.burnin"


async def run(
    state_dir: Path,
    *,
    fake_state: Path | None = None,
    expected_gpus: int | None = None,
    budget_seconds: float = 60.0,
    memory_bytes: int = 64 << 20,
    matrix: int = 384,
) -> Preflight:
    """Run all checks, the slow ones side by side, within `budget_seconds` (and two more to stop what hangs).

    Args:
        state_dir: where the disk check writes.
        expected_gpus: fewer than this fail the GPU baseline; None: any number.
    """
    began = time.monotonic()
    groups = await asyncio.gather(
        _gpu_baseline(fake_state, expected_gpus, budget_seconds),
        _burn_in(state_dir, budget_seconds, memory_bytes, matrix),
    )
    checks = tuple(check for group in groups for check in group)
    return Preflight(ok=all(one.ok for one in checks), seconds=time.monotonic() - began, checks=checks)


async def _gpu_baseline(fake_state: Path | None, expected: int | None, budget: float) -> list[CheckResult]:
    began = time.monotonic()
    prober = Prober(fake_state=fake_state)
    try:
        sample = await prober.probe(budget)
    finally:
        await prober.close()
    verdict = base.evaluate(base.Observation(at=time.time(), sample=sample, idle=True), History(), policy.default()).verdict
    problem = verdict.reason if verdict.state == "unhealthy" else ""
    if not problem and expected is not None and sample.count < expected:
        problem = f"{sample.count} GPUs of {expected}"
    return [CheckResult(name="gpus", ok=not problem, seconds=time.monotonic() - began, detail=problem)]


async def _burn_in(state_dir: Path, budget: float, memory_bytes: int, matrix: int) -> list[CheckResult]:
    began = time.monotonic()
    command = (sys.executable, "-m", _BURNIN, "--disk", str(state_dir), "--memory-bytes", str(memory_bytes), "--matrix", str(matrix))
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    done: list[CheckResult] = []
    problem = ""
    try:
        assert child.stdout is not None
        async with asyncio.timeout(budget):
            while line := await child.stdout.readline():
                done.append(msgspec.json.decode(line, type=CheckResult))
            code = await child.wait()
        if code not in (0, 1) or not done:
            problem = f"the check process ended with {code}"
    except TimeoutError:
        problem = f"no end within {budget:.0f} s, after {', '.join(one.name for one in done) or 'nothing'}"
    finally:
        await _stop(child)
    if problem:
        done.append(CheckResult(name=UNFINISHED, ok=False, seconds=time.monotonic() - began, detail=problem))
    return done


async def _stop(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.kill()
        try:
            async with asyncio.timeout(2.0):
                await child.wait()
        except TimeoutError:
            return
