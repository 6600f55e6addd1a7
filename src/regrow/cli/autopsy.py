"""`regrow autopsy`: what holds the jobs on this node up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regrow.cli.output import Json, emit
from regrow.errors import ConfigurationError, OperationalError

if TYPE_CHECKING:
    from regrow.agent.health.autopsy import Autopsy, JobReport

_EXIT = {"running": 0, "hung": 1, "unclear": 3}


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("autopsy", help="Attach to the jobs on this node and say what holds them up.")
    def _autopsy(
        pid: Annotated[list[int] | None, typer.Option("--pid", min=1, help="The jobs of these ranks or launchers; default: all.")] = None,
        flight: Annotated[
            list[Path] | None, typer.Option("--flight", metavar="FILE", help="A flight recorder dump of torch, PREFIX<rank>; repeatable.")
        ] = None,
        merge: Annotated[
            list[Path] | None, typer.Option("--merge", metavar="FILE", help="Judge --json documents of several nodes together.")
        ] = None,
        hosts: Annotated[
            str | None, typer.Option("--hosts", metavar="A,B", help="Look on these hosts, by ssh, and judge all together.")
        ] = None,
        slurm: Annotated[str, typer.Option("--slurm", metavar="JOB", help="Look on all hosts of this Slurm job, by srun.")] = "",
        via: Annotated[str, typer.Option("--via", metavar="COMMAND", help="How to run something on {host}; default: ssh.")] = "",
        gap: Annotated[float, typer.Option("--gap", min=0.1, max=60, help="Seconds between the two looks.")] = 1.5,
        budget: Annotated[float, typer.Option("--budget", min=2, help="Seconds for everything.")] = 30.0,
        ras: Annotated[str, typer.Option("--ras", metavar="HOST:PORT", help="NCCL's RAS service; default: the job's NCCL_RAS_ADDR.")] = "",
        frames: Annotated[bool, typer.Option("--frames", help="Print the stacks of each group.")] = False,
        as_json: Json = False,
    ) -> None:
        if hosts is not None or slurm:
            found = _elsewhere(
                hosts or "", slurm, via, ["--gap", str(gap), "--budget", str(budget), *(("--ras", ras) if ras else ())], budget
            )
        else:
            found = _merged(merge) if merge else _examined(tuple(pid or ()), tuple(flight or ()), gap, budget, _address(ras))
        emit(found, as_json=as_json, human=lambda: _tell(found, frames=frames))
        statuses = {one.verdict.status for one in found.jobs}
        raise typer.Exit(
            max((_EXIT[status] for status in statuses if status != "unclear"), default=0) or (3 if "unclear" in statuses else 0)
        )


def _elsewhere(hosts: str, slurm: str, via: str, arguments: list[str], budget: float) -> Autopsy:
    import asyncio

    from regrow.agent.health import autopsy_hosts

    async def look() -> Autopsy:
        names, command = await autopsy_hosts.slurm_hosts(slurm) if slurm else (named, autopsy_hosts.SSH)
        found, problems = await autopsy_hosts.examine(names, via or command, arguments, budget)
        for one in problems:
            sys.stderr.write(f"regrow: {one.host}: {one.problem}\n")
        return found

    if hosts and slurm:
        raise ConfigurationError("give either --hosts or --slurm", where="regrow autopsy")
    named = [one.strip() for one in hosts.split(",") if one.strip()]
    if not named and not slurm:
        raise ConfigurationError("names no host", where="--hosts", hint="--hosts a,b,c")
    return asyncio.run(look())


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if text and not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigurationError(f"{text!r} is no address", where="--ras", hint="HOST:PORT, like localhost:28028")
    return text


def _examined(pids: tuple[int, ...], dumps: tuple[Path, ...], gap: float, budget: float, ras: str) -> Autopsy:
    import asyncio

    from regrow.agent import stacks
    from regrow.agent.health import autopsy

    if stacks.py_spy() is None:
        raise ConfigurationError("py-spy is not there", where="regrow autopsy", hint="pip install py-spy")
    try:
        found = asyncio.run(autopsy.examine(pids=pids, dumps=dumps, gap_seconds=gap, budget_seconds=budget, ras_address=ras))
    except OperationalError as error:  # a dump that was named; not 1, which says of a job that it hangs
        raise ConfigurationError(error.what, where=error.where, hint=error.hint) from error
    if not found.jobs:
        raise ConfigurationError(
            "no training process that this user may look at",
            where="pids " + ", ".join(map(str, pids)) if pids else "this node",
            hint="ranks are told by RANK and WORLD_SIZE (torchrun, srun, mpirun) or by Regrow's log files; run it as the job's user or root",
        )
    return found


def _merged(paths: list[Path]) -> Autopsy:
    import msgspec

    from regrow.agent.health import autopsy

    parts: list[Autopsy] = []
    for path in paths:
        try:
            parts.append(msgspec.json.decode(path.read_bytes(), type=autopsy.Autopsy))
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigurationError(str(error), where=f"--merge {path}", hint="name files that `regrow autopsy --json` wrote") from error
    return autopsy.merge(parts)


def _tell(found: Autopsy, *, frames: bool) -> None:
    for one in found.jobs:
        _tell_job(one, frames=frames)
    sys.stdout.write(f"looked for {found.seconds:.1f} s\n")


def _tell_job(one: JobReport, *, frames: bool) -> None:
    write = sys.stdout.write
    world = f" of {one.world_size}" if one.world_size else ""
    write(f"job {one.job}: {len(one.ranks)}{world} ranks here\n")
    write(f"  {one.verdict.status}: {one.verdict.text}\n  cause: {one.verdict.cause}\n")
    for group in one.groups:
        pids = ", ".join(str(rank.pid) for rank in one.ranks if rank.rank in group.ranks)
        write(f"  rank {', '.join(map(str, group.ranks))} (pid {pids}): {group.where}\n")
        if frames:
            write("".join(f"      {frame}\n" for frame in group.frames))
    for finding in one.flight:
        write(f"  flight recorder, group {finding.group!r}: {finding.text}\n")
    for problem in one.problems:
        write(f"  note: {problem}\n")
