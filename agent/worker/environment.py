"""What a training process is told by its environment, and what it is without one: a job of its own (torch-free)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.parallel import batch
from regrow.wire import GenerationSpec, JobSpec

STANDALONE_JOB = "standalone"
T = TypeVar("T")


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a script asks for in `attach(...)`. Holds where the job does not say; a contradiction is an error."""

    global_batch: int = 0
    micro_batch: int = 0
    seed: int | None = None
    mesh: MeshShape | None = None
    checkpoint: str = ""
    """Folder of checkpoints for a run whose job does not name one."""


class WorkerEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of one worker in one generation and the addresses of what serves it. Empty paths: not supervised."""

    job: str
    node: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    first_rank: int
    """The lowest rank of this node; ranks of a node follow each other, in whatever order its slots have them."""
    spec: GenerationSpec
    job_spec: JobSpec
    supervised: bool = False
    socket: str = ""
    """Unix stream socket of the agent."""
    writer: str = ""
    """Unix stream socket of the checkpoint writer."""
    progress: str = ""
    """``<path>:<slot>`` of this rank's progress word."""
    checkpoint: str = ""
    """Checkpoint folder of the job, absolute."""
    error_file: str = ""
    master_address: str = ""
    """host:port of the TCPStore; empty for a world of one."""
    agent_store: bool = False
    """True: the store is served by somebody else, every rank is a client."""
    chaos: bool = False

    @property
    def generation(self) -> int:
        """Number of this generation; 0 without a supervisor."""
        return self.spec.generation


def read(environ: Mapping[str, str] | None = None, defaults: Defaults | None = None) -> WorkerEnvironment:
    """Read the environment of a worker (see docs/concepts.md), a torchrun worker, or a plain process.

    Raises:
        ConfigurationError: a value that cannot be read, a mesh of another size than the world, or a script that asks for
            another batch, seed or mesh than its job.
    """
    source = os.environ if environ is None else environ
    asked = defaults or Defaults()
    rank, world = _number(source, "RANK", 0), _number(source, "WORLD_SIZE", 1)
    spec = _spec(source, asked, world)
    job_spec = _job_spec(source, spec, asked)
    _check_world(spec, rank, world)
    master = f"{source['MASTER_ADDR']}:{source['MASTER_PORT']}" if "MASTER_ADDR" in source and "MASTER_PORT" in source else ""
    return WorkerEnvironment(
        job=spec.job,
        node=source.get("REGROW_NODE", os.uname().nodename),
        rank=rank,
        local_rank=_number(source, "LOCAL_RANK", rank),
        world_size=world,
        local_world_size=_number(source, "LOCAL_WORLD_SIZE", world),
        first_rank=_number(source, "REGROW_FIRST_RANK", rank - _number(source, "LOCAL_RANK", rank)),
        spec=spec,
        job_spec=job_spec,
        supervised="REGROW_SOCKET" in source,
        socket=source.get("REGROW_SOCKET", ""),
        writer=source.get("REGROW_WRITER", ""),
        progress=source.get("REGROW_PROGRESS", ""),
        checkpoint=_absolute(source.get("REGROW_CHECKPOINT") or job_spec.checkpoint.path or asked.checkpoint),
        error_file=source.get("TORCHELASTIC_ERROR_FILE", ""),
        master_address=master,
        agent_store=source.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true",
        chaos=source.get("REGROW_CHAOS", "") == "1",
    )


def _absolute(folder: str) -> str:
    return str(Path(folder).absolute()) if folder else ""


def _number(source: Mapping[str, str], name: str, default: int) -> int:
    text = source.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise ConfigurationError(f"{text!r} is not a number", where=name, hint="start the script with `regrow run` or torchrun") from error


def _spec(source: Mapping[str, str], asked: Defaults, world: int) -> GenerationSpec:
    path = source.get("REGROW_SPEC", "")
    if path:
        spec = _read_json(path, GenerationSpec, "REGROW_SPEC")
    else:
        text = source.get("REGROW_MESH", "")
        mesh = MeshShape.parse(text) if text else asked.mesh or MeshShape(dp=world)
        spec = GenerationSpec(
            job=source.get("REGROW_JOB", STANDALONE_JOB),
            epoch=_number(source, "REGROW_EPOCH", 0),
            generation=_number(source, "REGROW_GENERATION", 0),
            mesh=mesh,
            world_size=world,
            nodes=(source.get("REGROW_NODE", os.uname().nodename),),
            global_batch=_number(source, "REGROW_GLOBAL_BATCH", asked.global_batch),
            micro_batch=_number(source, "REGROW_MICRO_BATCH", asked.micro_batch or 1),
            restart_count=_number(source, "TORCHELASTIC_RESTART_COUNT", 0),
        )
    return _with_batch(spec, asked)


def _with_batch(spec: GenerationSpec, asked: Defaults) -> GenerationSpec:
    """Fill in what the job left open, refuse what contradicts it."""
    for name, said, wanted in (
        ("global batch", spec.global_batch, asked.global_batch),
        # A supervised job that states no batch at all leaves both to the script.
        ("micro-batch", spec.micro_batch if spec.global_batch else 0, asked.micro_batch),
    ):
        if said and wanted and said != wanted:
            raise ConfigurationError(
                f"the script asks for a {name} of {wanted}, the job says {said}",
                where="regrow.attach()",
                hint=f"leave it out of attach(), or start the job with --{name.replace(' ', '-')} {wanted}",
            )
    if not spec.global_batch and asked.global_batch:
        spec = msgspec.structs.replace(spec, global_batch=asked.global_batch, micro_batch=asked.micro_batch or 1, micro_batches=())
    if spec.global_batch and not spec.micro_batches:
        counts = batch.split(spec.global_batch, spec.micro_batch, spec.mesh.dp)
        spec = msgspec.structs.replace(spec, micro_batches=counts)
    if spec.micro_batches and (len(spec.micro_batches) != spec.mesh.dp or sum(spec.micro_batches) * spec.micro_batch != spec.global_batch):
        raise ConfigurationError(
            f"micro-batches {spec.micro_batches} of {spec.micro_batch} do not make a global batch of {spec.global_batch} on {spec.mesh}",
            where=f"generation {spec.generation}",
            hint="this is a bug of the planner: please report it with `regrow job show --json`",
        )
    return spec


def _job_spec(source: Mapping[str, str], spec: GenerationSpec, asked: Defaults) -> JobSpec:
    path = source.get("REGROW_JOB_SPEC", "")
    if path:
        job = _read_json(path, JobSpec, "REGROW_JOB_SPEC")
        if job.seed and asked.seed and job.seed != asked.seed:
            raise ConfigurationError(
                f"the script asks for seed {asked.seed}, the job says {job.seed}", where="regrow.attach()", hint="leave it out of attach()"
            )
        return msgspec.structs.replace(job, seed=job.seed or asked.seed or 0)
    return JobSpec(
        job=spec.job, argv=(), mesh=spec.mesh, global_batch=spec.global_batch, micro_batch=spec.micro_batch, seed=asked.seed or 0
    )


def _check_world(spec: GenerationSpec, rank: int, world: int) -> None:
    if spec.mesh.world_size != world:
        raise ConfigurationError(
            f"mesh {spec.mesh} needs {spec.mesh.world_size} workers, the world has {world}",
            where="REGROW_MESH",
            hint=f"start {spec.mesh.world_size} workers, or leave the mesh out (then dp={world})",
        )
    if not 0 <= rank < world:
        raise ConfigurationError(f"rank {rank} is outside a world of {world}", where="RANK", hint="check RANK and WORLD_SIZE")


def _read_json(path: str, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"cannot be read: {error}", where=f"{where}={path}", hint="the agent writes this file") from error
