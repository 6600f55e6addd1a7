"""`regrow ckpt fork | roll-back-further | skip-batches | lineage`: an operator's acts on a stopped job's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regrow.cli.ckpt import directory_of, no_such, progress_bar
from regrow.cli.output import Json, emit, say
from regrow.cli.remote import Address, Cluster, StoreUrl, find, get
from regrow.errors import ConfigurationError

Folder = Annotated[Path, typer.Argument(help="A job's checkpoint folder.", show_default=False)]
Reason = Annotated[str, typer.Option("--reason", help="Why; kept with the checkpoints.")]
_ENDED = frozenset({"done", "failed", "stopped"})
"""A paused or parked job has its list of checkpoints in the leader's memory already."""


def register(group: typer.Typer) -> None:
    """Add the commands to `regrow ckpt`."""
    group.command("fork")(_fork)
    group.command("roll-back-further")(_roll_back)
    group.command("skip-batches")(_skip)
    group.command("lineage")(_lineage)


def _fork(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a checkpoint folder (its newest, or --step).", show_default=False)],
    target: Annotated[Path, typer.Argument(help="New checkpoint folder.", show_default=False)],
    job: Annotated[str, typer.Option("--job", help="Name of the job that will run there.")],
    step: Annotated[int | None, typer.Option("--step", help="Take the checkpoint of this step.")] = None,
    reason: Reason = "",
    json: Json = False,
) -> None:
    """Start another job from a checkpoint: same state, same position in the data, its own folder and lineage."""
    from regrow.ckpt.catalog import check_place
    from regrow.ckpt.operate import fork, operations

    check_place(target)
    source = directory_of(path, step)
    with progress_bar("verify", quiet=json) as progress:
        made = fork(source, target, job=job, reason=reason, progress=progress)
    act = operations(target)[-1]

    def human() -> None:
        print(f"{made}: step {act.to_step}, {act.to_samples} samples, forked from {source}")

    emit({"directory": str(made), "job": job, "operation": act}, as_json=json, human=human)


def _roll_back(
    path: Folder,
    to_step: Annotated[int | None, typer.Option("--to-step", help="Step to go back to; default: the next older checkpoint.")] = None,
    reason: Reason = "",
    supervisor: Address = "",
    store: StoreUrl = "",
    cluster: Cluster = "local",
    json: Json = False,
) -> None:
    """Make an older checkpoint the one that the job restores; later ones are set aside, not deleted. The job must be stopped."""
    from regrow.ckpt.operate import roll_back

    _must_be_stopped(path, supervisor, store, cluster)
    with progress_bar("verify", quiet=json) as progress:
        act = roll_back(path, to_step=to_step, reason=reason, progress=progress)

    def human() -> None:
        print(f"step {act.from_step} -> {act.to_step}: {act.from_samples - act.to_samples} samples will be trained again")
        for name in act.set_aside:
            print(f"set aside  {name}")

    emit({"path": str(path), "operation": act, **_account(path)}, as_json=json, human=human)


def _skip(
    path: Folder,
    batches: Annotated[int, typer.Option("--batches", min=0, help="Global batches to leave out.")] = 0,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Samples to leave out, instead.")] = 0,
    reason: Reason = "",
    supervisor: Address = "",
    store: StoreUrl = "",
    cluster: Cluster = "local",
    json: Json = False,
) -> None:
    """Leave out the next batches of the data (after a loss spike, usually together with roll-back-further). The job must be stopped."""
    from regrow.ckpt.operate import skip

    if bool(batches) == bool(samples):
        raise ConfigurationError("say how much", where="--batches", hint="give either --batches N or --samples N")
    _must_be_stopped(path, supervisor, store, cluster)
    with progress_bar("verify", quiet=json) as progress:
        act = skip(path, samples=samples, batches=batches, reason=reason, progress=progress)

    def human() -> None:
        print(f"step {act.to_step}: samples {act.from_samples} to {act.to_samples} are left out ({act.to_directory})")

    emit({"path": str(path), "operation": act, **_account(path)}, as_json=json, human=human)


def _lineage(path: Folder, json: Json = False) -> None:
    """Where the newest checkpoint comes from, what operators did, and where the samples went."""
    from regrow.ckpt.operate import lineage, operations

    if not path.is_dir():
        raise no_such(path)
    chain, acts, known = lineage(path), operations(path), _account(path)

    def human() -> None:
        line = "{:>10}  {:>12}  {:>4}  {:<18} {}"
        print(line.format("step", "samples", "gen", "mesh", "restored from"))
        for one in chain:
            origin = f"step {one['parent_step']} ({one['parent']})" if one["parent"] else "a fresh start"
            print(line.format(one["step"], one["samples"], one["generation"], one["mesh"], origin))
        for act in acts:
            print(
                f"operator: {act.kind} step {act.from_step} -> {act.to_step}, samples {act.from_samples} -> {act.to_samples}  {act.reason}"
            )
        if known["account"] is not None:
            count = known["account"]
            print(f"samples: position {count.position}, trained {count.trained}, skipped {count.skipped}, rolled back {count.discarded}")

    if not chain:
        say(f"no restorable checkpoint in {path}")
    emit({"path": str(path), "lineage": chain, "operations": acts, **known}, as_json=json, human=human)


def _account(path: Path) -> dict[str, Any]:
    from regrow.ckpt.catalog import newest_restorable
    from regrow.ckpt.operate import account, operations

    newest = newest_restorable(path)
    return {"account": account(operations(path), newest.samples) if newest else None}


def _must_be_stopped(path: Path, supervisor: str, store: str, cluster: str) -> None:
    """Ask the supervisor, where one is known, whether a job that owns this folder runs."""
    from regrow.ckpt.catalog import newest_restorable

    if not path.is_dir():
        raise no_such(path)
    entry = newest_restorable(path)
    try:
        base = find(supervisor, store, cluster)
    except ConfigurationError:
        say("no supervisor is known: not checked whether the job is stopped")
        return
    jobs = get(base, "/v1/jobs")["jobs"]
    running = [one["job"] for one in jobs if entry is not None and one["job"] == entry.job and one["state"] not in _ENDED]
    if running:
        raise ConfigurationError(
            f"job {running[0]} runs and writes here", where=str(path), hint=f"`regrow job save-and-stop {running[0]}` first"
        )
