"""Training processes of this host, whoever started them: torchrun, srun, mpirun or Regrow. From /proc alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from regrow.processes import stat_fields

_REGROW_LOG = re.compile(r"^(?P<folder>.*/jobs/(?P<job>[^/]+)/g(?P<generation>\d+))/rank(?P<rank>\d+)\.out$")
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_WORLDS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
RAS_VARIABLE = "NCCL_RAS_ADDR"
_NAMES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


class TrainingProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One rank on this host."""

    pid: int
    rank: int
    world_size: int
    """0: not known."""
    job: str
    """Run or job id and master address: the same on all hosts of a job."""
    local_world_size: int = 0
    generation_folder: str = ""
    """Of a worker of Regrow: where its progress words are."""
    started: int = 0
    """Start time in clock ticks: with the pid it names the process for good."""
    environment: dict[str, str] = {}
    """What tells where dumps are (TORCH_*) and where NCCL answers."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A process as the kernel sees it."""

    letter: str
    cpu_ticks: int
    parent: int
    started: int
    wait_channel: str = ""


def state_of(pid: int) -> State | None:
    """None: it is gone."""
    try:
        fields = stat_fields(pid)
        channel = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    ticks = int(fields[11]) + int(fields[12])
    return State(
        letter=fields[0], cpu_ticks=ticks, parent=int(fields[1]), started=int(fields[19]), wait_channel="" if channel == "0" else channel
    )


def find(pids: tuple[int, ...] = ()) -> list[TrainingProcess]:
    """All ranks on this host that this user may look at, or those of the jobs of `pids`, by job and rank: a rank's own process, a helper of
    it, or a launcher (torchrun, srun's step, an agent of Regrow), whose descendants the ranks are.

    Helpers of a rank (data loader workers inherit its environment) are left out: of processes that say the same rank of the
    same job, the ancestor is the rank.
    """
    found = [one for entry in os.listdir("/proc") if entry.isdigit() and (one := _look(int(entry))) is not None]  # noqa: PTH208
    parents = {one.pid: state.parent for one in found if (state := state_of(one.pid)) is not None}
    ranks = {(one.job, one.rank, one.pid) for one in found}
    own = [one for one in found if (one.job, one.rank, parents.get(one.pid, 0)) not in ranks and one.pid in parents]
    if pids:
        jobs = {one.job for one in found if not _line_of(one.pid).isdisjoint(pids)}
        own = [one for one in own if one.job in jobs]
    return sorted(own, key=lambda one: (one.job, one.rank))


def _line_of(pid: int) -> set[int]:
    """A process and its ancestors; init and the kernel's own are nobody's launcher."""
    line: set[int] = set()
    while pid > 1 and pid not in line:
        line.add(pid)
        state = state_of(pid)
        pid = state.parent if state is not None else 0
    return line


def _look(pid: int) -> TrainingProcess | None:
    if pid == os.getpid():
        return None
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
        log = os.readlink(f"/proc/{pid}/fd/1")  # noqa: PTH115
        python = "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return None
    state = state_of(pid)
    if state is None or not python:
        return None
    entries = (item.partition("=") for item in raw.decode(errors="replace").split("\0"))
    environment = {name: value for name, _, value in entries}
    worker = _REGROW_LOG.match(log)
    if worker is not None:
        return _regrow_worker(pid, worker, state)
    return _other(pid, environment, state)


def _regrow_worker(pid: int, log: re.Match[str], state: State) -> TrainingProcess:
    """Forked workers show their parent's environment in /proc: the path of their log says who they are."""
    folder = log["folder"]
    world = local = 0
    try:
        world = int(msgspec.json.decode(Path(folder, "spec.json").read_bytes())["world_size"])
        local = len(msgspec.json.decode(Path(folder, "order.json").read_bytes())["workers"])
    except (OSError, ValueError, KeyError, msgspec.DecodeError):
        world = world or 0
    return TrainingProcess(
        pid=pid,
        rank=int(log["rank"]),
        world_size=world,
        job=f"{log['job']} generation {log['generation']}",
        local_world_size=local,
        generation_folder=folder,
        started=state.started,
    )


def _other(pid: int, environment: Mapping[str, str], state: State) -> TrainingProcess | None:
    rank, world = _number(environment, _RANKS), _number(environment, _WORLDS)
    if rank is None or world is None or rank >= world:
        return None
    names = [environment[name] for name in _NAMES if environment.get(name, "none") != "none"][:1]
    master = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}".strip(":")
    return TrainingProcess(
        pid=pid,
        rank=rank,
        world_size=world,
        job=" at ".join([*names, *([master] if master else [])]) or f"world of {world}",
        local_world_size=_number(environment, ("LOCAL_WORLD_SIZE",)) or 0,
        started=state.started,
        environment={name: value for name, value in environment.items() if name.startswith("TORCH_") or name == RAS_VARIABLE},
    )


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), None)
