"""Before a node (re)joins: does it still compute, remember and store? Bounded in time, reported as a whole.

The GPU baseline comes from the same probe and policy as everyday health; memory, matrix product and disk run in a child
that may hang or die without harm. A child that works is not taken for one that hangs: while it uses CPU time or moves bytes, or waits for a
core, it gets as much time again. Whether it exchanges bytes with its peers is the business of agent/pairs.py, at the same time.
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
from regrow.agent.health.preflight_report import SLOW, UNFINISHED, Preflight
from regrow.agent.health.prober import Prober
from regrow.processes import stat_fields

_BURNIN = "regrow.agent.health.burnin"
_LOOK_SECONDS = 0.5
_STILL_SECONDS = 1.5
"""At least so long without any sign of work before a child counts as one that stands still."""


async def run(
    state_dir: Path,
    *,
    fake_state: Path | None = None,
    expected_gpus: int | None = None,
    budget_seconds: float = 60.0,
    memory_bytes: int = 64 << 20,
    matrix: int = 384,
) -> Preflight:
    """Run all checks, the slow ones side by side, within `budget_seconds` (and two more to stop what hangs); on a host that is too busy,
    within twice as much.

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
    reading = asyncio.create_task(_read(child, done), name="regrow-burn-in")
    pulse = Pulse(child.pid)
    problem, name = "", UNFINISHED
    try:
        while not reading.done():
            spent = time.monotonic() - began
            limit = 2 * budget if pulse.seen_within(max(_STILL_SECONDS, budget / 4)) else budget
            if spent >= limit:
                name = SLOW if limit > budget else UNFINISHED
                how = "at work all the time: this host is busy" if name == SLOW else "and it stands still"
                problem = f"no end within {limit:.0f} s, after {', '.join(one.name for one in done) or 'nothing'}; {how}"
                break
            await asyncio.wait((reading,), timeout=min(_LOOK_SECONDS, limit - spent))
        else:
            code = reading.result()
            if code not in (0, 1) or not done:
                problem = f"the check process ended with {code}"
    finally:
        reading.cancel()
        await _stop(child)
    if problem:
        done.append(CheckResult(name=name, ok=False, seconds=time.monotonic() - began, detail=problem))
    return done


async def _read(child: asyncio.subprocess.Process, done: list[CheckResult]) -> int:
    """Results as they come; the exit code."""
    assert child.stdout is not None
    while line := await child.stdout.readline():
        done.append(msgspec.json.decode(line, type=CheckResult))
    return await child.wait()


class Pulse:
    """Whether a process works: CPU time and bytes that move, or it waits for a core. One that sleeps, or that the kernel holds, does not."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._last = ""
        self._moved_at = time.monotonic()

    def seen_within(self, seconds: float) -> bool:
        """Look; has anything moved in the last `seconds`? True of a process that has just ended: what it said is yet to be read."""
        now = time.monotonic()
        try:
            fields = stat_fields(self._pid)
            moved = f"{fields[11:13]} {Path(f'/proc/{self._pid}/io').read_text(encoding='ascii')}"
        except OSError:
            return True
        if moved != self._last or fields[0] == "R":
            self._last, self._moved_at = moved, now
        return now - self._moved_at <= seconds


async def _stop(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.kill()
        try:
            async with asyncio.timeout(2.0):
                await child.wait()
        except TimeoutError:
            return
