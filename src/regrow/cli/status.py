"""`regrow status`: the cluster at a glance, live on a terminal."""

from __future__ import annotations

import collections
import contextlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regrow.cli import remote, tables
from regrow.cli.output import Json, emit
from regrow.errors import RegrowError

if TYPE_CHECKING:
    from rich.console import RenderableType

_USUAL = ("member", "spare")
_MOST_NODES = 16


def register(app: typer.Typer) -> None:
    """Add `status`."""
    app.command("status")(status)


def status(
    once: Annotated[bool, typer.Option("--once", help="Print once also on a terminal.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2, max=3600)] = 1.0,
    supervisor: remote.Address = "",
    store: remote.StoreUrl = "",
    cluster: remote.Cluster = "local",
    as_json: Json = False,
) -> None:
    """Jobs, nodes and quarantine. On a terminal it stays and follows until Ctrl-C; elsewhere, and with --once or --json, once."""
    base = remote.find(supervisor, store, cluster)
    document = remote.get(base, "/v1/status")
    if as_json or once or not sys.stdout.isatty():
        emit(document, as_json=as_json, human=lambda: tables.console().print(view(document)))
        return
    try:
        _live(lambda: remote.find(supervisor, store, cluster), base, document, every)
    except KeyboardInterrupt:
        return


def _live(find: Callable[[], str], base: str, document: dict[str, Any], every: float) -> None:
    """Draw again and again. A supervisor that does not answer is said so, and looked for again: the leader may have moved."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    screen = tables.console()
    with Live(view(document), console=screen, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            try:
                document = remote.get(base, "/v1/status")
                live.update(view(document), refresh=True)
            except RegrowError as error:
                live.update(Group(Text(f"{error.what}; what was last seen:", style="bold red"), view(document)), refresh=True)
                with contextlib.suppress(RegrowError):
                    base = find()


def view(document: dict[str, Any]) -> RenderableType:
    """The whole screen."""
    from rich.console import Group
    from rich.text import Text

    nodes = document["nodes"]
    counts = collections.Counter(str(node["state"]) for node in nodes)
    facts = [f"supervisor {document['supervisor']}", f"epoch {document['epoch']}"]
    facts += [] if document["store_up"] else ["the store is DOWN"]
    facts += [] if document["automation"] else ["automation is OFF"]
    parts: list[RenderableType] = [Text(", ".join(facts)), Text()]
    parts += [_jobs(document["jobs"]) if document["jobs"] else Text("no job"), *_reasons(document["jobs"]), Text()]
    parts.append(Text(f"{len(nodes)} nodes: " + (", ".join(f"{count} {state}" for state, count in counts.most_common()) or "none")))
    odd = [node for node in nodes if node["state"] not in _USUAL]
    shown = nodes if len(nodes) <= _MOST_NODES else odd[:_MOST_NODES]
    if shown:
        parts.append(node_table(shown))
    left = (len(odd) if len(nodes) > _MOST_NODES else len(nodes)) - len(shown)
    if left > 0:
        parts.append(Text(f"and {left} more: regrow node ls"))
    return Group(*parts)


def _jobs(jobs: list[dict[str, Any]]) -> RenderableType:
    rows = [
        (
            job["job"],
            job["state"],
            job["generation"],
            job["step"],
            job["mesh"] or "-",
            f"{job['loss']:.4f}" if job["loss"] is not None else "-",
            tables.percent(job["goodput"]),
            _saved(job.get("checkpoint") or {}),
        )
        for job in jobs
    ]
    return tables.table(("job", "state", "#gen", "#step", "mesh", "#loss", "#goodput", "saved"), rows)


def _saved(checkpoint: dict[str, Any]) -> str:
    """Step of the newest checkpoint and its age: what a failure now would cost."""
    return "-" if checkpoint.get("step") is None else f"{checkpoint['step']}, {tables.ago(checkpoint['age_seconds'])}"


def _reasons(jobs: list[dict[str, Any]]) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    told = [f"{job['job']}: {job['reason']}" for job in jobs if job["reason"] and job["state"] not in ("running", "done")]
    told += [f"{job['job']}: {incident_line(job['newest_incident'])}" for job in jobs if job.get("newest_incident")]
    return [Padding(Text(line), (0, 0, 0, 2)) for line in told]


def incident_line(item: dict[str, Any]) -> str:
    """The newest incident in a line."""
    where = f" {item['node']}" if item["node"] else ""
    where += f" rank {item['rank']}" if item["rank"] >= 0 else ""
    if item["recovered"]:
        how = f"recovered by {item['rung'].replace('_', ' ')} in {item['seconds']:.2f} s"
    else:
        how = "closed" if item["closed"] else f"open, in {(item['phase'] or 'detect').replace('_', ' ')}"
    at = time.strftime("%H:%M:%S", time.localtime(item["at"]))
    return f"newest incident {at} {item['kind'].replace('_', ' ')}{where}, {how}"


def node_table(nodes: list[dict[str, Any]]) -> RenderableType:
    """Nodes with what they run and why they do not."""
    rows: list[tuple[Any, ...]] = []
    for node in nodes:
        runs = " ".join(f"{job['job']} {tables.ranks(job['ranks'])}" for job in node["jobs"] if job["ranks"])
        record = node["quarantine"] or {}
        why = record.get("reason", "") or node["unusable"] or node["health"].get("reason", "")
        if node["silent_seconds"] is not None:
            why = f"silent for {tables.ago(node['silent_seconds'])}" + (f"; {why}" if why else "")
        if node.get("gone_seconds") is not None:
            why = f"gone for {tables.ago(node['gone_seconds'])}" + (f"; {why}" if why else "")
        rows.append((node["node"], node["state"], node["slots"], runs or "-", why))
    return tables.table(("node", "state", "#slots", "runs (ranks)", "why"), rows)
