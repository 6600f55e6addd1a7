"""`regrow report`: post-mortem statistics of failures, from a CSV or JSON file."""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from regrow.cli.output import Json, emit, say
from regrow.errors import ConfigurationError


def register(app: typer.Typer) -> None:
    """Add `report`."""
    app.command("report")(report)


def report(
    source: Annotated[str, typer.Argument(metavar="FILE", help="CSV or JSON of failures (columns at, node, component, category, ...).")],
    gpus: Annotated[int, typer.Option(help="GPUs observed.")] = 0,
    start: Annotated[str, typer.Option(help="Start of the observation: hours, or an ISO instant.")] = "",
    end: Annotated[str, typer.Option(help="End of the observation: hours, or an ISO instant.")] = "",
    gpus_per_node: Annotated[int, typer.Option(help="GPUs in a node.")] = 8,
    price: Annotated[float, typer.Option(help="Price of a GPU-hour, for the cost of lost time.")] = 0.0,
    shares: Annotated[str, typer.Option(help="JSON file {component: percent} of shares to check against the counts.")] = "",
    html: Annotated[str, typer.Option(help="Write a self-contained HTML page here.")] = "",
    markdown: Annotated[str, typer.Option(help="Write Markdown here.")] = "",
    as_json: Json = False,
) -> None:
    """Post-mortem statistics: rates with intervals, MTBF, batches, lemon nodes, lost GPU hours."""
    from regrow.supervisor.stats import history, render
    from regrow.supervisor.stats import report as statistics

    path = Path(source)
    if not path.is_file():
        raise ConfigurationError(
            "is no file", where=source, hint="give a CSV or JSON file of failures; `regrow job show` reports a live job"
        )
    if gpus < 1:
        raise ConfigurationError("the number of GPUs observed is needed for a rate", where="--gpus", hint="for example --gpus 16384")
    known = history.read(path)
    document = statistics.build(
        known,
        gpus=gpus,
        start_hours=_hours(start, known.start_at, "--start"),
        end_hours=_hours(end, known.start_at, "--end"),
        gpus_per_node=gpus_per_node,
        price_per_gpu_hour=price,
        printed_shares=_shares(shares),
    )
    for target, content in ((html, render.page(document, f"Failures: {path.stem}")), (markdown, render.markdown(document))):
        if target:
            _write(target, content)
    emit(document, as_json=as_json, human=lambda: _print(render.text(document)))


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
