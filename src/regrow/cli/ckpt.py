"""`regrow ckpt`: what checkpoints there are, whether they are intact, and what is in them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regrow.cli.output import Json, emit, say
from regrow.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Generator

    from regrow.ckpt.catalog import CatalogEntry

Folder = Annotated[Path, typer.Argument(help="A job's checkpoint folder.", show_default=False)]
Where = Annotated[Path, typer.Argument(help="A checkpoint, or a checkpoint folder (its newest, or --step).", show_default=False)]
Step = Annotated[int | None, typer.Option("--step", help="Take the checkpoint of this step.")]


def register(app: typer.Typer) -> None:
    """Add `ckpt` and its commands."""
    from regrow.cli import ckpt_operate, ckpt_tiers

    group = typer.Typer(help="Checkpoints: list, show, verify, compare, export, prune; fork, roll back, skip.", no_args_is_help=True)
    group.command("ls")(_ls)
    group.command("show")(_show)
    group.command("verify")(_verify)
    group.command("diff")(_diff)
    group.command("export")(_export)
    group.command("prune")(_prune)
    ckpt_operate.register(group)
    ckpt_tiers.register(group)
    app.add_typer(group, name="ckpt")


def _ls(
    path: Folder,
    mark: Annotated[str, typer.Option("--best", metavar="METRIC[:N][:max]", help="Mark the N best by a metric.")] = "",
    json: Json = False,
) -> None:
    """List the checkpoints of a folder, newest first, with what the script said of them."""
    from regrow.ckpt.catalog import scan
    from regrow.ckpt.retention import best, parse_best

    metric, num_best, highest = parse_best(mark) if mark else ("", 0, False)
    if not path.is_dir():
        raise no_such(path)
    entries = scan(path, strict=False)
    top = best([entry for entry in entries if entry.state == "restorable"], metric, count=num_best, highest=highest)
    if mark and not top:
        known = sorted({name for entry in entries for name in entry.metrics})
        raise ConfigurationError(
            f"no checkpoint here has the metric {metric}", where=str(path), hint=f"they have {', '.join(known) or 'none'}"
        )

    def human() -> None:
        if not entries:
            say(f"no checkpoints in {path}")
            return
        line = "{:>10}  {:>4}  {:<18} {:>10}  {:>9}  {:<10}  {}"
        print(line.format("step", "gen", "mesh", "from step", "size", "state", "directory"))
        for entry in entries:
            mesh = str(entry.mesh) if entry.sequence >= 0 else "-"
            said = "".join(f"  {name}={one.value:.6g}{_of(one.step, entry.step)}" for name, one in sorted(entry.metrics.items()))
            text = entry.name + said + ("  <- best" if entry.name in top else "") + (f"  ({entry.problem})" if entry.problem else "")
            step = entry.step if entry.step >= 0 else "?"
            origin = entry.parent.step if entry.parent else "-"
            print(line.format(step, max(entry.generation, 0), mesh, origin, size_text(entry.num_bytes), entry.state, text))

    checkpoints = [_brief(entry) | {"best": entry.name in top} for entry in entries]
    emit({"path": str(path), "checkpoints": checkpoints}, as_json=json, human=human)


def _of(measured: int, saved: int) -> str:
    return "" if measured == saved else f" (of step {measured})"


def _show(path: Where, step: Step = None, json: Json = False) -> None:
    """What is in one checkpoint: lineage, mesh, facts, tensors."""
    from regrow.ckpt.assemble import Checkpoint

    directory = directory_of(path, step)
    with Checkpoint(directory) as checkpoint:
        record = checkpoint.record
        boxes = list(checkpoint.boxes())
    tensors = [{"name": box.name, "dtype": box.dtype, "shape": box.shape, "bytes": box.nbytes} for box in boxes]
    document = {
        "path": str(directory),
        "job": record.job,
        "step": record.step,
        "samples": record.samples,
        "generation": record.generation,
        "mesh": record.mesh,
        "world_size": record.world_size,
        "sequence": record.sequence,
        "parent": record.parent,
        "bytes": record.num_bytes,
        "files": record.files,
        "facts": record.facts,
        "metrics": record.metrics,
        "tensors": tensors,
    }

    def human() -> None:
        parent = f"{record.parent.directory} (step {record.parent.step})" if record.parent else "none: a fresh start"
        print(f"{directory}")
        print(f"  job {record.job}  step {record.step}  samples {record.samples}  generation {record.generation}  mesh {record.mesh}")
        print(f"  parent {parent}")
        for name, one in sorted(record.metrics.items()):
            print(f"  {name} {one.value:.6g}{_of(one.step, record.step)}")
        print(f"  {len(record.files)} files, {size_text(record.num_bytes)}, {len(tensors)} tensors")
        for box in boxes:
            print(f"    {box.name}  {box.dtype}{list(box.shape)}")

    emit(document, as_json=json, human=human)


def _verify(path: Where, step: Step = None, json: Json = False) -> None:
    """Read a checkpoint back: flipped bytes, truncated, missing, swapped and foreign files are named. Exit 1 if damaged."""
    from regrow.ckpt.verify import verify

    directory = directory_of(path, step, damaged=True)
    with progress_bar("verify", quiet=json) as progress:
        result = verify(directory, progress=progress)

    def human() -> None:
        for problem in result.problems:
            print(f"{problem.kind:<10} {problem.file}: {problem.detail}")
        state = "intact" if result.valid else "DAMAGED"
        print(f"{directory}: {state}, {size_text(result.bytes_checked)} read")

    emit(result, as_json=json, human=human)
    if not result.valid:
        raise typer.Exit(1)


def _diff(first: Where, second: Where, json: Json = False) -> None:
    """Compare two checkpoints bit for bit, whatever meshes wrote them. Exit 1 when tensors differ."""
    from regrow.ckpt.assemble import Checkpoint, compare

    places = directory_of(first, None), directory_of(second, None)
    with Checkpoint(places[0]) as one, Checkpoint(places[1]) as two, progress_bar("compare", quiet=json) as progress:
        result = compare(one, two, progress=progress)

    def human() -> None:
        for what, names in (
            ("only in the first", result.only_first),
            ("only in the second", result.only_second),
            ("other shape", result.reshaped),
            ("other values", result.changed),
        ):
            for name in names:
                print(f"{what:<18} {name}")
        for key in ("job", "step", "samples", "generation"):
            if key in result.facts:
                print(f"{key:<18} {result.facts[key][0]} -> {result.facts[key][1]}")
        for field in result.fields:
            print(f"{field.field:<18} {field.saved} -> {field.now}  ({field.rule})")
        print(f"{result.equal} tensors are equal")

    document = {"first": str(places[0]), "second": str(places[1]), "difference": result}
    emit(document, as_json=json, human=human)
    if result.only_first or result.only_second or result.reshaped or result.changed:
        raise typer.Exit(1)


def _export(
    path: Where,
    target: Annotated[Path, typer.Argument(help="File to write.", show_default=False)],
    step: Step = None,
    prefix: Annotated[str, typer.Option(help="Tensors whose names start with this; it is taken off.")] = "model.",
    json: Json = False,
) -> None:
    """Write the model as one safetensors file."""
    from regrow.ckpt.assemble import Checkpoint, export

    directory = directory_of(path, step)
    if not target.parent.is_dir():
        raise ConfigurationError("the folder does not exist", where=str(target.parent), hint="create it, or give another file")
    with Checkpoint(directory) as checkpoint, progress_bar("export", quiet=json) as progress:
        try:
            size = export(checkpoint, target, prefix=prefix, progress=progress)
        except FileExistsError as error:
            raise ConfigurationError("the file exists", where=str(target), hint="remove it, or give another name") from error
        num_step = checkpoint.record.step
    document = {"path": str(directory), "step": num_step, "target": str(target), "bytes": size}
    emit(document, as_json=json, human=lambda: print(f"{target}: step {num_step}, {size_text(size)}"))


def _prune(
    path: Folder,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Newest restorable checkpoints to keep.")] = 3,
    every: Annotated[int, typer.Option("--keep-every-steps", min=0, help="Also keep steps that are a multiple of this.")] = 0,
    hours: Annotated[float, typer.Option("--keep-every-hours", min=0.0, help="Also keep one in so many hours.")] = 0.0,
    best: Annotated[str, typer.Option("--keep-best", metavar="METRIC[:N][:max]", help="Also keep the N best by a metric.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: Json = False,
) -> None:
    """Delete old checkpoints. Never the newest restorable one, never what is not ours. Not while the job runs: it prunes by itself."""
    from regrow.ckpt.retention import Retention, parse_best, prune

    metric, num_best, highest = parse_best(best) if best else ("", 0, False)
    if not path.is_dir():
        raise no_such(path)
    policy = Retention(
        keep_last=keep,
        keep_every_steps=every,
        keep_every_seconds=hours * 3600.0,
        keep_best=num_best,
        best_metric=metric,
        best_is_highest=highest,
    )
    choices = prune(path, policy, generation=-1, dry_run=dry_run)

    def human() -> None:
        for choice in choices:
            verb = "keep" if choice.keep else "would remove" if dry_run else "removed"
            print(f"{verb:<13} {choice.name}  ({choice.reason})")

    emit({"path": str(path), "dry_run": dry_run, "choices": choices}, as_json=json, human=human)


def directory_of(path: Path, step: int | None, *, damaged: bool = False) -> Path:
    """The checkpoint that the user means."""
    from regrow.ckpt.catalog import scan
    from regrow.ckpt.manifest import RECORD_NAME, parse_directory

    if not path.is_dir():
        raise no_such(path)
    if (path / RECORD_NAME).exists() or parse_directory(path.name):
        return path
    entries = [entry for entry in scan(path) if entry.state == "restorable" or (damaged and entry.state == "damaged")]
    if step is not None:
        entries = [entry for entry in entries if entry.step == step]
    if not entries:
        which = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise ConfigurationError(f"there is not {which} here", where=str(path), hint=f"`regrow ckpt ls {path}` lists what there is")
    return Path(entries[0].directory)


def no_such(path: Path) -> ConfigurationError:
    """What to say of a path that is no folder.

    Raises:
        ConfigurationError: it is a URL.
    """
    from regrow.ckpt.catalog import check_place

    check_place(path)
    what = "is a file, not a folder" if path.exists() else "does not exist"
    hint = "give a job's checkpoint folder (checkpoint.path of the job) or one step-… directory in it"
    return ConfigurationError(what, where=str(path), hint=hint)


def _brief(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "directory": entry.directory,
        "state": entry.state,
        "problem": entry.problem,
        "step": entry.step,
        "samples": entry.samples,
        "generation": entry.generation,
        "sequence": entry.sequence,
        "mesh": str(entry.mesh) if entry.sequence >= 0 else None,
        "world_size": entry.world_size,
        "bytes": entry.num_bytes,
        "parent": entry.parent,
        "written_at": entry.written_at,
        "metrics": entry.metrics,
    }


@contextmanager
def progress_bar(what: str, *, quiet: bool) -> Generator[Callable[[int, int], None]]:
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    with Progress(what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def size_text(num_bytes: int) -> str:
    """Bytes for people."""
    size = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
