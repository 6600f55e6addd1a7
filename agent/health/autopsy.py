"""What holds a running job up: looks at every rank of this host twice, from outside, and names the rank and the cause.

Nothing has to be installed in the job or asked of it: /proc, py-spy's view of its stacks, progress words of Regrow's own
workers, and flight recorder dumps where torch left some. The processes are stopped for milliseconds by py-spy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from regrow.agent import stacks
from regrow.agent.health import flight, jobs, ras, stackview
from regrow.agent.health.autopsy_verdict import RankView, Verdict, judge
from regrow.agent.progress import Progress, read_progress
from regrow.errors import OperationalError

SAMPLE_GAP_SECONDS = 1.5
"""Between the two looks: a rank that is at another place then, or computed meanwhile, is moving."""
BUDGET_SECONDS = 30.0
RAS_SECONDS = 6.0
_AT_ONCE = 4
_BUSY_SHARE = 0.2
_TICKS = 100
_DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """The findings on one job."""

    job: str
    world_size: int
    verdict: Verdict
    ranks: tuple[RankView, ...]
    groups: tuple[stackview.Group, ...]
    flight: tuple[flight.FlightFinding, ...] = ()
    problems: tuple[str, ...] = ()
    """What could not be looked at."""


class Autopsy(msgspec.Struct, frozen=True, kw_only=True):
    """All jobs of this host."""

    jobs: tuple[JobReport, ...]
    seconds: float


class _Sample(msgspec.Struct, frozen=True):
    state: jobs.State | None
    stack: stackview.Stack
    problem: str
    at: float


async def examine(
    *,
    pids: tuple[int, ...] = (),
    dumps: Sequence[Path] = (),
    gap_seconds: float = SAMPLE_GAP_SECONDS,
    budget_seconds: float = BUDGET_SECONDS,
    ras_address: str = "",
) -> Autopsy:
    """Look at all jobs, or those of `pids`, within the budget.

    Args:
        pids: any processes of the jobs that are meant; empty: all.
        dumps: flight recorder dumps, in addition to those that the jobs' environment points at.
        gap_seconds: between the two looks.
        budget_seconds: for everything; what was not seen by then is told as a problem.
        ras_address: of NCCL's RAS service; empty: NCCL_RAS_ADDR of the job, else NCCL's own default.

    Raises:
        OperationalError: a dump that was named cannot be read.
    """
    began = time.monotonic()
    found = jobs.find(pids)
    recordings = [flight.read(path) for path in dumps]
    limit = asyncio.Semaphore(_AT_ONCE)
    first = await _look(found, limit, budget_seconds / 2)
    told = await _services(found, ras_address)
    await asyncio.sleep(max(0.0, gap_seconds))
    second = await _look(found, limit, max(1.0, budget_seconds - (time.monotonic() - began)))
    told_again = await _services(found, ras_address)
    reports = [
        _report(
            [(one, *pair) for one, pair in zip(found, zip(first, second, strict=True), strict=True) if one.job == name],
            recordings,
            (told.get(name), told_again.get(name)),
        )
        for name in dict.fromkeys(one.job for one in found)
    ]
    return Autopsy(jobs=tuple(reports), seconds=time.monotonic() - began)


def merge(parts: Sequence[Autopsy]) -> Autopsy:
    """One answer from the documents of several hosts: ranks of the same job are judged together."""
    reports: list[JobReport] = []
    every = [one for part in parts for one in part.jobs]
    for name in dict.fromkeys(one.job for one in every):
        same = [one for one in every if one.job == name]
        ranks = tuple({rank.rank: rank for one in same for rank in sorted(one.ranks, key=lambda rank: rank.rank)}.values())
        ranks = tuple(sorted(ranks, key=lambda rank: rank.rank))
        found = tuple(item for one in same for item in one.flight)
        world = max(one.world_size for one in same)
        reports.append(
            JobReport(
                job=name,
                world_size=world,
                verdict=judge(ranks, world_size=world, findings=found),
                ranks=ranks,
                groups=tuple(stackview.group({one.rank: one.stack for one in ranks})),
                flight=found,
                problems=tuple(problem for one in same for problem in one.problems),
            )
        )
    return Autopsy(jobs=tuple(reports), seconds=max((one.seconds for one in parts), default=0.0))


async def _look(found: Sequence[jobs.TrainingProcess], limit: asyncio.Semaphore, seconds: float) -> list[_Sample]:
    async def one(process: jobs.TrainingProcess) -> _Sample:
        async with limit:
            state = jobs.state_of(process.pid)
            if state is None or state.started != process.started:
                return _Sample(None, stackview.Stack(), "", time.monotonic())
            try:
                async with asyncio.timeout_at(deadline):
                    document, problem = await stacks.py_spy_threads(process.pid, stopped=state.letter in "Tt")
            except TimeoutError:
                document, problem = [], "no stack within the budget"
            return _Sample(state, stackview.main_thread(document), problem, time.monotonic())

    deadline = asyncio.get_running_loop().time() + seconds
    return list(await asyncio.gather(*(one(process) for process in found)))


async def _services(found: Sequence[jobs.TrainingProcess], address: str) -> dict[str, ras.Ras | str]:
    """{job: what NCCL says, or why not}. Where nobody listens there is no entry: most jobs have no such service."""
    answers: dict[str, ras.Ras | str] = {}
    for name in dict.fromkeys(one.job for one in found):
        told = next((one.environment[jobs.RAS_VARIABLE] for one in found if one.job == name and jobs.RAS_VARIABLE in one.environment), "")
        try:
            answers[name] = await ras.ask(address or told or f"localhost:{ras.PORT}", RAS_SECONDS)
        except TimeoutError:
            answers[name] = f"NCCL's service did not answer in {RAS_SECONDS:g} s"
        except ValueError as error:
            answers[name] = str(error)
        except OSError as error:
            if address or told:
                answers[name] = f"NCCL's service at {address or told}: {error}"
    return answers


def _of_nccl(
    told: tuple[ras.Ras | str | None, ras.Ras | str | None], ranks: Sequence[RankView], world: int, problems: list[str]
) -> list[flight.FlightFinding]:
    first, second = told
    if isinstance(first, ras.Ras) and isinstance(second, ras.Ras):
        return ras.findings(first, second, {one.pid: one.rank for one in ranks}, world)
    problems += [one for one in dict.fromkeys(told) if isinstance(one, str)]
    return []


def _report(
    samples: Sequence[tuple[jobs.TrainingProcess, _Sample, _Sample]],
    named: Sequence[flight.Recording],
    told: tuple[ras.Ras | str | None, ras.Ras | str | None] = (None, None),
) -> JobReport:
    ranks = tuple(_view(*one) for one in samples)
    world = max((process.world_size for process, _, _ in samples), default=0)
    local = max((process.local_world_size for process, _, _ in samples), default=0)
    problems = [f"rank {process.rank}: {second.problem}" for process, _, second in samples if second.problem]
    recordings = {one.rank: one for one in (*_dumps([process for process, _, _ in samples], problems), *named)}
    findings = (*_of_nccl(told, ranks, world, problems), *flight.compare(recordings.values()))
    return JobReport(
        job=samples[0][0].job,
        world_size=world,
        verdict=judge(ranks, world_size=world, local_world_size=local, findings=findings),
        ranks=ranks,
        groups=tuple(stackview.group({one.rank: one.stack for one in ranks})),
        flight=findings,
        problems=tuple(problems),
    )


def _view(process: jobs.TrainingProcess, first: _Sample, second: _Sample) -> RankView:
    word = _word(process)
    moving = False
    busy = 0.0
    if first.state is not None and second.state is not None:
        busy = (second.state.cpu_ticks - first.state.cpu_ticks) / _TICKS / max(0.1, second.at - first.at)
        moving = first.stack.signature != second.stack.signature
    if word is not None and word.changed_at_ns > time.monotonic_ns() - int((second.at - first.at) * 1e9):
        moving = True
    return RankView(
        rank=process.rank,
        pid=process.pid,
        state=second.state.letter if second.state is not None else "gone",
        wait_channel=second.state.wait_channel if second.state is not None else "",
        stack=second.stack,
        moving=moving,
        busy=busy > _BUSY_SHARE,
        step=word.applied_step if word is not None and word.sequence else None,
        phase=word.phase if word is not None and word.sequence else "",
    )


def _word(process: jobs.TrainingProcess) -> Progress | None:
    if not process.generation_folder:
        return None
    return next((one for one in read_progress(Path(process.generation_folder, "progress")) if one.pid == process.pid), None)


def _dumps(processes: Sequence[jobs.TrainingProcess], problems: list[str]) -> list[flight.Recording]:
    """Dumps that torch wrote for these ranks while they ran; older files are another run's."""
    found: list[flight.Recording] = []
    for one in processes:
        prefix = next((one.environment[name] for name in _DUMP_VARIABLES if one.environment.get(name)), "")
        path = Path(f"{prefix}{one.rank}")
        try:
            if not prefix or path.stat().st_mtime < Path(f"/proc/{one.pid}").stat().st_mtime:
                continue
            found.append(flight.read(path, one.rank))
        except OSError:
            continue
        except OperationalError as error:
            problems.append(str(error))
    return found
