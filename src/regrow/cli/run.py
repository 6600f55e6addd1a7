"""`regrow run`: torchrun's command line, with a supervisor behind it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from regrow.cli import remote
from regrow.cli.output import Json, emit, say
from regrow.errors import ConfigurationError

_CLUSTERS = "use --local N to start one here, or --supervisor URL or --store URL of a running one"


def register(app: typer.Typer) -> None:
    """Add `run`."""
    app.command("run", context_settings={"allow_interspersed_args": False})(run)


def run(
    script: Annotated[list[str], typer.Argument(metavar="SCRIPT ...", help="Training script and its arguments.")],
    local: Annotated[int, typer.Option(help="Start a cluster of N agents on this machine.")] = 0,
    standalone: Annotated[bool, typer.Option(help="torchrun's word for --local 1.")] = False,
    nnodes: Annotated[str, typer.Option(help="MIN:MAX nodes, or N.", envvar="PET_NNODES")] = "",
    nproc_per_node: Annotated[str, typer.Option(help="Workers a node: a number, cpu, gpu or auto.", envvar="PET_NPROC_PER_NODE")] = "1",
    mesh: Annotated[str, typer.Option(help="Mesh of the full world, like dp=2,tp=2,pp=2.")] = "",
    meshes: Annotated[str, typer.Option(help="Mesh per number of workers: '6:3x2x1 4:2x2x1'.")] = "",
    global_batch: Annotated[int, typer.Option(help="Samples a step, kept exactly on every mesh.")] = 0,
    micro_batch: Annotated[int, typer.Option(help="Samples of one micro-batch.")] = 1,
    equal_replicas: Annotated[bool, typer.Option(help="Same number of micro-batches on all replicas; others idle.")] = False,
    zero: Annotated[int, typer.Option(help="ZeRO stage that the script uses.")] = 0,
    model: Annotated[str, typer.Option(help="Hugging Face config.json for the planner.")] = "",
    job: Annotated[str, typer.Option(help="Name; the same name goes on where it stopped.", envvar="PET_RDZV_ID")] = "",
    rdzv_id: Annotated[str, typer.Option(help="torchrun's word for --job.")] = "",
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module name.")] = False,
    max_restarts: Annotated[int, typer.Option(help="Restart budget.", envvar="PET_MAX_RESTARTS")] = 100,
    priority: Annotated[int, typer.Option(help="Among the cluster's jobs; higher ones are served first.")] = 0,
    run_dir: Annotated[str, typer.Option(help="Folder of the run; default runs/JOB.")] = "",
    checkpoint_dir: Annotated[str, typer.Option(help="Where checkpoints go; default RUN_DIR/checkpoints.")] = "",
    keep_last: Annotated[int, typer.Option(help="Checkpoints kept besides verified ones.")] = 3,
    keep_every_hours: Annotated[float, typer.Option(help="Besides those, keep one checkpoint in so many hours; 0: none.")] = 0.0,
    keep_best: Annotated[
        str, typer.Option(metavar="METRIC[:N][:max]", help="Besides those, keep the N best by a metric of the script.")
    ] = "",
    fresh: Annotated[bool, typer.Option(help="Start at step 0 although there are checkpoints, or none can be read.")] = False,
    accept: Annotated[list[str] | None, typer.Option(metavar="FIELD", help="Difference from the checkpoint that is meant.")] = None,
    memory_interval: Annotated[
        str,
        typer.Option(
            metavar="SECONDS|auto",
            help="Between snapshots that stay in memory, besides the checkpoints on storage; brings --peer-memory. 0: none.",
        ),
    ] = "0",
    mirror: Annotated[str, typer.Option(metavar="URL", help="Copy committed checkpoints there, too (s3://, gs://, file://).")] = "",
    mirror_keep: Annotated[int, typer.Option(help="Checkpoints to have there.", min=1)] = 3,
    node_files: Annotated[bool, typer.Option(help="The ranks of a node write checkpoints into one file, not one each.")] = False,
    peer_memory: Annotated[bool, typer.Option(help="Copy checkpoints into another node's memory too.")] = False,
    hang_seconds: Annotated[float, typer.Option(help="Limit for a step without progress; 0: learned.")] = 0.0,
    hang_phase: Annotated[list[str] | None, typer.Option(metavar="PHASE=SECONDS", help="Limit of eval, save or restore.")] = None,
    hang_idle_seconds: Annotated[float, typer.Option(help="A script that reports nothing is hung when idle so long; 0: off.")] = 0.0,
    preload: Annotated[str, typer.Option(help="Modules that warm workers have imported, comma separated.")] = "",
    in_place: Annotated[
        bool | None,
        typer.Option(help="Survivors keep their processes (scripts under regrow.in_place). By default on CPUs, not with GPUs."),
    ] = None,
    gasp: Annotated[bool, typer.Option(help="Workers leave their newest state in memory before a warm restart kills them (CPUs).")] = True,
    cold: Annotated[bool, typer.Option(help="Start workers cold instead of forking warm ones.")] = False,
    supervisor: remote.Address = "",
    store: remote.StoreUrl = "",
    cluster: remote.Cluster = "local",
    plain: Annotated[bool, typer.Option(help="No live table.")] = False,
    as_json: Json = False,
) -> None:
    """Run a training script under supervision: restarted, re-planned and resumed when parts break."""
    from regrow.local import job as jobs

    nodes = 1 if standalone and not local else local
    if nodes < 0 or (not nodes and not supervisor and not store):
        raise ConfigurationError("no cluster is named", where="regrow run", hint=_CLUSTERS)
    request = jobs.Request(
        script=tuple(script),
        module=module,
        name=job or rdzv_id,
        nodes=nodes,
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        mesh=mesh,
        meshes=meshes,
        global_batch=global_batch,
        micro_batch=micro_batch,
        equal_replicas=equal_replicas,
        zero=zero,
        model=model,
        max_restarts=max_restarts,
        priority=priority,
        run_dir=run_dir,
        checkpoint_dir=checkpoint_dir,
        keep_last=keep_last,
        keep_every_hours=keep_every_hours,
        keep_best=keep_best,
        fresh=fresh,
        hang_seconds=hang_seconds,
        hang_phases=tuple(hang_phase or ()),
        hang_idle_seconds=hang_idle_seconds,
        preload=tuple(word for word in preload.split(",") if word),
        in_place=in_place,
        gasp=gasp,
        accept=tuple(accept or ()),
        node_files=node_files,
        peer_memory=peer_memory,
        memory_interval=memory_interval,
        mirror=mirror,
        mirror_keep=mirror_keep,
        cold=cold,
        cwd=str(Path.cwd()),
    )
    spec = jobs.specification(request)
    quiet = plain or as_json
    work = (
        jobs.run_local(spec, request, plain=quiet) if nodes else jobs.run_remote(spec, remote.find(supervisor, store, cluster), plain=quiet)
    )
    code, document = asyncio.run(work)
    emit(document, as_json=as_json, human=lambda: say(jobs.closing_line(document)))
    raise typer.Exit(code)
