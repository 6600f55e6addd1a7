"""`regrow report`: post-mortem of a job or a run folder, or statistics of failures from a CSV or JSON file."""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regrow.cli import remote
from regrow.cli.output import Json, emit, say
from regrow.errors import ConfigurationError

if TYPE_CHECKING:
    from regrow.supervisor.stats.source import Source


def register(app: typer.Typer) -> None:
    """Add `report`."""
    app.command("report")(report)


def report(
    source: Annotated[
        str,
        typer.Argument(
            metavar="JOB|PATH|URL",
            help="CSV or JSON of failures, a run folder, a journal.sqlite, postgresql://… (--archive), or a running job.",
        ),
    ],
    gpus: Annotated[int, typer.Option(help="GPUs observed (a journal knows).")] = 0,
    start: Annotated[str, typer.Option(help="Start of the observation: hours, or an ISO instant.")] = "",
    end: Annotated[str, typer.Option(help="End of the observation: hours, or an ISO instant.")] = "",
    gpus_per_node: Annotated[int, typer.Option(help="GPUs in a node.")] = 8,
    price: Annotated[float, typer.Option(help="Price of a GPU-hour, for the cost of lost time.", min=0)] = 0.0,
    save_seconds: Annotated[float, typer.Option(help="Stall of one save, for the interval that would have been best.", min=0)] = 0.0,
    restore_seconds: Annotated[float, typer.Option(help="Seconds from a failure to training again.", min=0)] = 0.0,
    interval_seconds: Annotated[float, typer.Option(help="The save interval that was in use.", min=0)] = 0.0,
    shares: Annotated[str, typer.Option(help="JSON file {component: percent} of shares to check against the counts.")] = "",
    html: Annotated[str, typer.Option(help="Write a self-contained HTML page here.")] = "",
    markdown: Annotated[str, typer.Option(help="Write Markdown here.")] = "",
    job: Annotated[str, typer.Option(help="Which job, when a journal has several.")] = "",
    supervisor: remote.Address = "",
    store: remote.StoreUrl = "",
    cluster: remote.Cluster = "local",
    as_json: Json = False,
) -> None:
    """Post-mortem: rates with intervals, MTTD and MTTR, batches, lemons, cost, and each incident with its evidence."""
    from regrow.supervisor.stats import render
    from regrow.supervisor.stats import report as statistics
    from regrow.supervisor.stats import source as sources

    found = _find(source, job, supervisor, store, cluster)
    gpus = gpus or found.gpus
    if gpus < 1:
        raise ConfigurationError("the number of GPUs observed is needed for a rate", where="--gpus", hint="for example --gpus 16384")
    known = found.history
    costs = sources.costs(found, save_seconds=save_seconds, restore_seconds=restore_seconds, used_seconds=interval_seconds)
    document = statistics.build(
        known,
        gpus=gpus,
        start_hours=_hours(start, known.start_at, "--start"),
        end_hours=_hours(end, known.start_at, "--end") if end else found.end_hours,
        gpus_per_node=gpus_per_node,
        price_per_gpu_hour=price,
        printed_shares=_shares(shares),
        exposure_gpu_hours=found.exposure_gpu_hours,
        node_hours=found.node_hours,
        costs=costs,
    )
    document["goodput"]["measured"] = found.measured
    document["journal_incidents"] = sources.incidents(found)
    title = f"Failures: {found.name}"
    for target, content in ((html, render.page(document, title)), (markdown, render.markdown(document, title))):
        if target:
            _write(target, content)
    emit(document, as_json=as_json, human=lambda: _print(render.text(document)))


def _find(source: str, job: str, supervisor: str, store: str, cluster: str) -> Source:
    """Whatever `source` names."""
    from regrow.supervisor.stats import source as sources

    if source.startswith(("postgresql://", "postgres://")):
        return sources.of_archive(source, cluster, job)
    if "://" in source:
        raise ConfigurationError(f"{source!r} is not a PostgreSQL URL", where="regrow report", hint="postgresql://USER@HOST:PORT/DATABASE")
    return sources.load(Path(source), job) if _is_path(source) else _live(source, supervisor, store, cluster)


def _is_path(source: str) -> bool:
    """A name without a separator or suffix that is no file here is a job."""
    return Path(source).exists() or "/" in source or Path(source).suffix in (".csv", ".json", ".sqlite")


def _live(job: str, supervisor: str, store: str, cluster: str) -> Source:
    """What the supervisor still has in memory (its newest 20,000 entries)."""
    import msgspec

    from regrow.supervisor.journal import Entry
    from regrow.supervisor.stats import source as sources

    base = remote.find(supervisor, store, cluster)
    document = remote.get(base, "/v1/events", limit=20_000)
    return sources.of_entries(msgspec.convert(document["events"], list[Entry]), job=job, name=job)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _write(target: str, content: str) -> None:
    try:
        Path(target).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot be written: {error.strerror}", where=target) from error
    say(f"wrote {target}")


def _hours(text: str, zero: str, flag: str) -> float | None:
    """Hours on the history's scale."""
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    try:
        instant = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigurationError(f"{text!r} is neither hours nor an ISO instant", where=flag) from error
    if not zero:
        raise ConfigurationError("the file has hours, not instants", where=flag, hint="give hours here too")
    instant = instant if instant.tzinfo else instant.replace(tzinfo=dt.UTC)
    return (instant - dt.datetime.fromisoformat(zero)).total_seconds() / 3600


def _shares(path: str) -> dict[str, float]:
    if not path:
        return {}
    import json

    try:
        document: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in document.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"is not a JSON object of numbers: {error}", where=path) from error
