"""`regrow autopsy` on several hosts: the same command runs on each, and the answers are judged together."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Sequence

import msgspec

from regrow.agent.health.autopsy import Autopsy, merge
from regrow.errors import ConfigurationError, OperationalError

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5 {host}"
_SRUN = "srun --jobid {job} --overlap --nodes 1 --ntasks 1 --quiet --nodelist {{host}}"
_AT_ONCE = 64
_SPARE_SECONDS = 10.0
"""For the way there and back, beyond the budget of the look itself."""
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")


class HostProblem(msgspec.Struct, frozen=True):
    """A host that gave no answer."""

    host: str
    problem: str


async def slurm_hosts(job: str) -> tuple[list[str], str]:
    """The hosts of a Slurm job and the command that runs something there.

    Raises:
        ConfigurationError: not the number of a job.
        OperationalError: Slurm does not know it, or is not there.
    """
    if not re.fullmatch(r"\d+([_+.]\d+)?", job):
        raise ConfigurationError(f"{job!r} is no job number", where="--slurm", hint="as squeue shows it")
    nodes = (await _run(["squeue", "--noheader", "--job", job, "--format", "%N"], 20.0)).strip()
    if not nodes:
        raise OperationalError(f"job {job} runs on no node", where="squeue", hint="`squeue --me` shows your jobs")
    return (await _run(["scontrol", "show", "hostnames", nodes], 20.0)).split(), _SRUN.format(job=job)


async def examine(
    hosts: Sequence[str], via: str, arguments: Sequence[str], budget_seconds: float
) -> tuple[Autopsy, tuple[HostProblem, ...]]:
    """Run `regrow autopsy --json` with `arguments` on each host, by this interpreter's path, and merge what they say.

    Args:
        via: command that runs another one on {host}.

    Raises:
        ConfigurationError: a host name or command that cannot be.
        OperationalError: no host gave an answer.
    """
    if "{host}" not in via:
        raise ConfigurationError("has no {host}", where="--via", hint=f"like {SSH!r}")
    wrong = [host for host in hosts if not _NAME.match(host)]
    if wrong:
        raise ConfigurationError(f"{wrong[0]!r} is no host name", where="--hosts", hint="names, separated by commas")
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(host: str) -> Autopsy | HostProblem:
        words = [word.format(host=host) for word in shlex.split(via)]
        words += [sys.executable, "-m", "regrow", "autopsy", "--json", *arguments]
        async with limit:
            try:
                return msgspec.json.decode(await _run(words, budget_seconds + _SPARE_SECONDS), type=Autopsy)
            except msgspec.DecodeError:
                return HostProblem(host, "its answer cannot be read")
            except OperationalError as error:
                return HostProblem(host, str(error))

    answers = await asyncio.gather(*(one(host) for host in hosts))
    found = [answer for answer in answers if isinstance(answer, Autopsy)]
    problems = tuple(answer for answer in answers if isinstance(answer, HostProblem))
    if not found:
        raise OperationalError(
            f"no host gave an answer: {problems[0].host}: {problems[0].problem}" if problems else "no hosts",
            where="regrow autopsy",
            hint="the same Python and regrow must be there; --via says how to get there",
        )
    return merge(found), problems


async def _run(words: Sequence[str], seconds: float) -> str:
    """What a command writes. An autopsy ends with 1 or 3 when it has found something."""
    try:
        process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    except OSError as error:
        raise OperationalError(f"{words[0]}: {error.strerror}", where="regrow autopsy", hint="is it installed here?") from error
    try:
        async with asyncio.timeout(seconds):
            out, complaint = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
        raise OperationalError(f"no answer in {seconds:g} s", where=words[0]) from None
    if not out.strip() and process.returncode:
        said = complaint.decode(errors="replace").strip().splitlines()
        raise OperationalError(said[0][:200] if said else f"ended with {process.returncode}", where=words[0])
    return out.decode(errors="replace")
