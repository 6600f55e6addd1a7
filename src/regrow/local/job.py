"""From the words of the command line to a job, and its run to the end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

from regrow import wire
from regrow.ckpt import differences, mirroring, remote, retention
from regrow.ckpt.catalog import check_own, check_place, check_writable
from regrow.ckpt.differences import ACCEPT_VARIABLE
from regrow.errors import ConfigurationError, OperationalError
from regrow.ids import MeshShape, check_name
from regrow.local.api import SupervisorClient
from regrow.local.cluster import ClusterPlan, LocalCluster
from regrow.local.launch import DEGRADED, INTERRUPTED, Follower, follow_with_signals, lost_its_last_save, settled, submit
from regrow.local.live import LiveView
from regrow.supervisor.core.hang_limits import PHASES

AUTO = "auto"
SETTLE_SECONDS = 10.0
"""How long `regrow run` waits at the end of a job for word of its last save."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user typed; texts are not parsed yet."""

    script: tuple[str, ...]
    module: bool = False
    name: str = ""
    nodes: int = 1
    nnodes: str = ""
    nproc_per_node: str = "1"
    mesh: str = ""
    meshes: str = ""
    global_batch: int = 0
    micro_batch: int = 1
    equal_replicas: bool = False
    zero: int = 0
    model: str = ""
    max_restarts: int = 100
    priority: int = 0
    run_dir: str = ""
    checkpoint_dir: str = ""
    keep_last: int = 3
    keep_every_hours: float = 0.0
    keep_best: str = ""
    fresh: bool = False
    hang_seconds: float = 0.0
    hang_phases: tuple[str, ...] = ()
    hang_idle_seconds: float = 0.0
    preload: tuple[str, ...] = ()
    cold: bool = False
    in_place: bool | None = None
    gasp: bool = True
    node_files: bool = False
    peer_memory: bool = False
    memory_interval: str = "0"
    mirror: str = ""
    mirror_keep: int = 3
    accept: tuple[str, ...] = ()
    cwd: str = "."


def specification(request: Request) -> wire.JobSpec:
    """Check everything that can be checked before any side effect, and build the job.

    Raises:
        ConfigurationError: what is wrong, with the flag and what to try.
    """
    _check_script(request)
    for folder in (request.checkpoint_dir, request.run_dir):
        check_place(folder)
    name = check_name("job", request.name or _name_of(request.script[0]))
    slots = workers_per_node(request.nproc_per_node)
    low, high = node_range(request.nnodes, request.nodes)
    for value, flag in (
        (request.global_batch, "--global-batch"),
        (request.max_restarts, "--max-restarts"),
        (request.hang_seconds, "--hang-seconds"),
        (request.hang_idle_seconds, "--hang-idle-seconds"),
        (request.keep_every_hours, "--keep-every-hours"),
    ):
        if value < 0:
            raise ConfigurationError(f"{value} is negative", where=flag)
    if request.micro_batch < 1 or request.keep_last < 1:
        raise ConfigurationError("must be at least 1", where="--micro-batch, --keep-last")
    if request.zero not in range(4):
        raise ConfigurationError(f"{request.zero} is no ZeRO stage", where="--zero", hint="use 0, 1, 2 or 3")
    mesh = MeshShape.parse(request.mesh) if request.mesh else None
    spec = wire.JobSpec(
        job=name,
        argv=_argv(request),
        module=request.module,
        cwd=request.cwd,
        nproc_per_node=slots,
        min_nodes=low,
        max_nodes=high,
        mesh=mesh,
        mesh_table=mesh_table(request.meshes),
        model=model_shape(request.model) if request.model else None,
        global_batch=request.global_batch,
        micro_batch=request.micro_batch,
        equal_replicas=request.equal_replicas,
        zero_stage=request.zero,
        checkpoint=_policy(request, name),
        env={ACCEPT_VARIABLE: ",".join(differences.check_fields(request.accept))} if request.accept else {},
        max_restarts=request.max_restarts,
        priority=request.priority,
        nice=10 if request.nodes else 0,
        start_method="cold" if request.cold else "warm",
        in_place=request.in_place is not False,
        in_place_gpus=request.in_place is True,
        gasp=request.gasp,
        preload=request.preload,
        hang_seconds=request.hang_seconds,
        hang_phase_seconds=hang_phases(request.hang_phases),
        hang_idle_seconds=request.hang_idle_seconds,
    )
    if request.mirror:
        remote.Tier(request.mirror)  # says what is wrong with it
    _check_mesh(spec, high * slots)
    if request.fresh:
        check_own(spec.checkpoint.path, name)
    return spec


def _policy(request: Request, name: str) -> wire.CheckpointPolicy:
    metric, num_best, highest = retention.parse_best(request.keep_best) if request.keep_best else ("", 0, False)
    return wire.CheckpointPolicy(
        path=str(checkpoint_path(request, name)),
        keep_last=request.keep_last,
        keep_every_hours=request.keep_every_hours,
        keep_best=num_best,
        best_metric=metric,
        best_is_highest=highest,
        fresh_start=request.fresh,
        node_files=request.node_files,
        peer_memory=request.peer_memory,
        memory_interval_seconds=memory_seconds(request.memory_interval),
        memory_auto=request.memory_interval == AUTO,
        mirror_url=request.mirror,
        mirror_keep=request.mirror_keep,
    )


def memory_seconds(text: str) -> float:
    """Read --memory-interval; 0 for `auto`, which the interval controller answers.

    Raises:
        ConfigurationError: neither a time nor `auto`.
    """
    if text == AUTO:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ConfigurationError(f"cannot read {text!r}", where="--memory-interval", hint="seconds, 0 for none, or auto")
    return seconds


def hang_phases(words: tuple[str, ...]) -> dict[str, float]:
    """Read "eval=600" and the like.

    Raises:
        ConfigurationError: not of that form, or no phase with a limit of its own.
    """
    found: dict[str, float] = {}
    for word in words:
        phase, _, text = word.partition("=")
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if phase not in PHASES or not 0.0 < seconds < float("inf"):
            raise ConfigurationError(f"cannot read {word!r}", where="--hang-phase", hint=f"PHASE=SECONDS, phase one of {', '.join(PHASES)}")
        found[phase] = seconds
    return found


def _check_script(request: Request) -> None:
    if request.module:
        return
    path = Path(request.cwd) / request.script[0]
    if not path.is_file():
        raise ConfigurationError("no such script", where=str(path), hint="give the path of a Python file, or -m MODULE")
    if not os.access(path, os.R_OK):
        raise ConfigurationError("cannot be read", where=str(path))


def _argv(request: Request) -> tuple[str, ...]:
    if request.module:
        return request.script
    return (str((Path(request.cwd) / request.script[0]).absolute()), *request.script[1:])


def _name_of(script: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", Path(script).stem.lower()).strip("-._") or "job"


def run_folder(request: Request, name: str) -> Path:
    """RUN_DIR, by default runs/<job> in the current folder."""
    return Path(request.run_dir).absolute() if request.run_dir else Path(request.cwd) / "runs" / name


def checkpoint_path(request: Request, name: str) -> Path:
    """Absolute path of the job's checkpoint folder."""
    return Path(request.checkpoint_dir).absolute() if request.checkpoint_dir else run_folder(request, name) / "checkpoints"


def workers_per_node(text: str) -> int:
    """torchrun's --nproc-per-node: a number, `cpu` (cores), `gpu` or `auto` (GPUs when there are any, else cores)."""
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text in ("cpu", "gpu", "auto"):
        gpus = len([device for device in Path("/dev").glob("nvidia[0-9]*") if device.name[6:].isdigit()])
        if text == "gpu" and not gpus:
            raise ConfigurationError("this machine has no GPU", where="--nproc-per-node gpu", hint="use a number, cpu or auto")
        return gpus if gpus and text != "cpu" else os.cpu_count() or 1
    raise ConfigurationError(f"{text!r} is not a number of workers", where="--nproc-per-node", hint="use a number, cpu, gpu or auto")


def node_range(text: str, local: int) -> tuple[int, int]:
    """(least, most) nodes of MIN:MAX or N; by default one up to all local nodes."""
    if not text:
        return (1, local or 1)
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if low < 1 or high < low:
        raise ConfigurationError(f"{text!r} is not a range of nodes", where="--nnodes", hint="write MIN:MAX or N, for example 2:4")
    if local and high > local:
        raise ConfigurationError(f"{text} asks for more nodes than --local {local} starts", where="--nnodes", hint=f"use --local {high}")
    return low, high


def mesh_table(text: str) -> dict[int, MeshShape]:
    """Read '6:3x2x1 4:2x2x1'.

    Raises:
        ConfigurationError: an entry that cannot be read, or that needs more workers than it is for.
    """
    table: dict[int, MeshShape] = {}
    for entry in text.replace(";", " ").split():
        workers, separator, mesh = entry.partition(":")
        if not separator or not workers.isdigit():
            raise ConfigurationError(f"{entry!r} is not WORKERS:MESH", where="--meshes", hint="for example '8:2x2x2 6:3x2x1'")
        shape = MeshShape.parse(mesh)
        if shape.world_size > int(workers):
            raise ConfigurationError(f"mesh {shape} needs {shape.world_size} workers, not {workers}", where="--meshes")
        table[int(workers)] = shape
    return table


def model_shape(path: str) -> wire.ModelShape:
    """The planner's view of a Hugging Face config.json."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        heads = int(document["num_attention_heads"])
        return wire.ModelShape(
            layers=int(document["num_hidden_layers"]),
            hidden=int(document["hidden_size"]),
            heads=heads,
            kv_heads=int(document.get("num_key_value_heads") or heads),
            ffn=int(document.get("intermediate_size") or 4 * int(document["hidden_size"])),
            vocab=int(document.get("vocab_size") or 0),
            seq=int(document.get("max_position_embeddings") or 0),
        )
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", where=path) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"is not a Hugging Face config.json: {error}", where=path) from error


def _check_mesh(spec: wire.JobSpec, workers: int) -> None:
    """The first mesh must fit, and the batch must be one that it can keep."""
    if spec.mesh is not None and spec.mesh.world_size > workers:
        raise ConfigurationError(
            f"mesh {spec.mesh} needs {spec.mesh.world_size} workers, but {workers} can be had",
            where="--mesh",
            hint="make the mesh smaller, or raise --local or --nproc-per-node",
        )
    if spec.global_batch:
        from regrow.parallel import batch

        for mesh in [spec.mesh] if spec.mesh is not None else [MeshShape(dp=workers)]:
            batch.split(spec.global_batch, spec.micro_batch, mesh.dp)
    if spec.mesh is not None and spec.equal_replicas:
        from regrow.parallel import elastic

        why = elastic.why_not(spec, spec.mesh)
        if why:
            raise ConfigurationError(
                why, where="--mesh", hint="choose another DP, or leave --equal-replicas out: the batch is exact anyway"
            )


async def run_local(spec: wire.JobSpec, request: Request, *, plain: bool) -> tuple[int, dict[str, Any]]:
    """Start a cluster here, run the job to its end, stop everything. (exit code, last document)"""
    root = run_folder(request, spec.job)
    if request.checkpoint_dir:
        check_writable(spec.checkpoint.path)
    plan = ClusterPlan(root=root, nodes=request.nodes, slots=spec.nproc_per_node)
    with LiveView(title=f"job {spec.job}", plain=plain) as view:
        policy = spec.checkpoint
        if (
            policy.mirror_url
            and not policy.fresh_start
            and (name := await asyncio.to_thread(mirroring.bring_back, policy.path, policy.mirror_url))
        ):
            view.note(f"{name} was fetched from {policy.mirror_url}: the folder had no checkpoint")
        view.note(f"starting {request.nodes} agents with {spec.nproc_per_node} workers each; run folder {root}")
        async with LocalCluster(plan) as cluster:
            view.at(cluster.supervisor_address())
            code, document = await _run(cluster.api, spec, view)
        return (await asyncio.to_thread(last_copy, spec.checkpoint, code, document)), document


def last_copy(policy: wire.CheckpointPolicy, code: int, document: dict[str, Any]) -> int:
    """Copy what the agents had no time for when the job ended. Returns the exit code: a job that is done without its copy is degraded."""
    if not policy.mirror_url:
        return code
    try:
        done = remote.mirror(Path(policy.path), remote.Tier(policy.mirror_url), keep=policy.mirror_keep)
    except OperationalError as error:
        document["mirror"] = {"url": policy.mirror_url, "problem": str(error)}
        return code or DEGRADED
    document["mirror"] = {"url": policy.mirror_url, "kept": list(done.kept)}
    return code


async def run_remote(spec: wire.JobSpec, supervisor: str, *, plain: bool) -> tuple[int, dict[str, Any]]:
    """Submit to the cluster whose supervisor is at this URL, and follow."""
    api = SupervisorClient(lambda: supervisor)
    try:
        with LiveView(title=f"job {spec.job}", plain=plain) as view:
            return await _run(api, spec, view)
    finally:
        await api.close()


async def _run(api: SupervisorClient, spec: wire.JobSpec, view: LiveView) -> tuple[int, dict[str, Any]]:
    await submit(api, spec)
    follower = Follower(api, spec.job, view)
    document, interrupted = await follow_with_signals(api, follower, spec.job, view)
    if document.get("state") == "done":
        document = await settled(api, document, SETTLE_SECONDS)
        return DEGRADED if lost_its_last_save(document) else 0, document
    if interrupted:
        return INTERRUPTED, document
    return 1, document


def closing_line(document: dict[str, Any]) -> str:
    """How it ended, for people; a program's traceback in full."""
    outcome = document.get("outcome") or {}
    line = f"job {document.get('job')}: {document.get('state')} at step {document.get('step')}"
    if outcome.get("reason"):
        line += f": {outcome['reason']}"
    void = (document.get("checkpoint") or {}).get("void")
    if void:
        line += f"; its last save, of step {void['step']}, is no checkpoint: {void['reason']}"
    problem = (document.get("mirror") or {}).get("problem")
    if problem:
        line += f"; its newest checkpoints are not in the second storage: {problem}"
    if outcome.get("traceback"):
        line += f"\nrank {outcome.get('rank')} on {outcome.get('node')}:\n{outcome['traceback']}"
    return line
