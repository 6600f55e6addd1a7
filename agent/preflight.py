"""Before a node (re)joins: does it still compute, remember, store and reach its peers? Bounded in time, reported as a whole.

The GPU baseline comes from the same probe and policy as everyday health; memory, matrix product and disk run in a child
that may hang or die without harm. Pairs for an all-gather test that isolates a bad node in two rounds are chosen here;
running them is the cluster's business.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from regrow.agent.health import base, policy
from regrow.agent.health.burnin_result import CheckResult
from regrow.agent.health.history import History
from regrow.agent.health.preflight_report import UNFINISHED, Preflight
from regrow.agent.health.prober import Prober

_BURNIN = "regrow.agent.health.burnin"
_CONNECT_SECONDS = 3.0

Pair = tuple[str, str]


async def run(
    state_dir: Path,
    *,
    fake_state: Path | None = None,
    expected_gpus: int | None = None,
    peers: Sequence[str] = (),
    budget_seconds: float = 60.0,
    memory_bytes: int = 64 << 20,
    matrix: int = 384,
) -> Preflight:
    """Run all checks, the slow ones side by side, within `budget_seconds` (and two more to stop what hangs).

    Args:
        state_dir: where the disk check writes.
        expected_gpus: fewer than this fail the GPU baseline; None: any number.
        peers: host:port that must accept a connection.
    """
    began = time.monotonic()
    groups = await asyncio.gather(
        _gpu_baseline(fake_state, expected_gpus, budget_seconds),
        _burn_in(state_dir, budget_seconds, memory_bytes, matrix),
        *(_peer(address, min(_CONNECT_SECONDS, budget_seconds)) for address in peers),
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


async def _peer(address: str, seconds: float) -> list[CheckResult]:
    began = time.monotonic()
    host, _, port = address.rpartition(":")
    problem = ""
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
    except TimeoutError:
        problem = f"no answer within {seconds:.0f} s"
    except (OSError, ValueError) as error:
        problem = str(error)
    return [CheckResult(name=f"peer {address}", ok=not problem, seconds=time.monotonic() - began, detail=problem)]


# --- pairs: a bad node is found in two rounds ---------------------------------------------------------------------------


def first_round(nodes: Iterable[str]) -> list[Pair]:
    """Disjoint pairs over all nodes; with an odd number the last one is paired with the first as well."""
    names = sorted(set(nodes))
    pairs = list(zip(names[::2], names[1::2], strict=False))
    if len(names) % 2 and len(names) > 1:
        pairs.append((names[-1], names[0]))
    return pairs


def second_round(pairs: Sequence[Pair], failed: Callable[[Pair], bool]) -> list[Pair]:
    """Each node of a failed pair with a node that passed; the good ones are used in turn. Empty: nothing failed, or all did."""
    suspects = dict.fromkeys(name for pair in pairs if failed(pair) for name in pair)
    good = list(dict.fromkeys(name for pair in pairs if not failed(pair) for name in pair if name not in suspects))
    return [(name, good[i % len(good)]) for i, name in enumerate(suspects)] if good else []


def isolate(nodes: Iterable[str], works: Callable[[Pair], bool]) -> tuple[str, ...]:
    """Bad nodes: those that fail with two different partners, the second of them known to be good.

    When every pair of the first round fails there is no good partner: then nobody is named.
    """
    pairs = first_round(nodes)
    results = {pair: works(pair) for pair in pairs}
    second = second_round(pairs, lambda pair: not results[pair])
    return tuple(name for name, partner in second if not works((name, partner)))
