"""`regrow node`: what the cluster's nodes are, and an operator's orders on them."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from regrow.cli import remote
from regrow.cli.output import Json, emit

Name = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.")]


def register(app: typer.Typer) -> None:
    """Add `node`."""
    group = typer.Typer(help="List nodes; cordon, drain and clear them.", no_args_is_help=True)
    group.command("ls")(ls)
    group.command("show")(show)
    group.command("cordon")(cordon)
    group.command("uncordon")(uncordon)
    group.command("drain")(drain)
    group.command("clear")(clear)
    app.add_typer(group, name="node")


def ls(supervisor: remote.Address = "", store: remote.StoreUrl = "", cluster: remote.Cluster = "local", as_json: Json = False) -> None:
    """All nodes with their state."""
    document = remote.get(remote.find(supervisor, store, cluster), "/v1/nodes")
    emit(document, as_json=as_json, human=lambda: _table(document["nodes"]))


def show(
    node: Name, supervisor: remote.Address = "", store: remote.StoreUrl = "", cluster: remote.Cluster = "local", as_json: Json = False
) -> None:
    """One node: health, quarantine, what it runs."""
    document = remote.get(remote.find(supervisor, store, cluster), f"/v1/nodes/{node}")
    emit(document, as_json=as_json, human=lambda: _details(document))


def cordon(
    node: Name, supervisor: remote.Address = "", store: remote.StoreUrl = "", cluster: remote.Cluster = "local", as_json: Json = False
) -> None:
    """No new generation uses the node; what runs there goes on."""
    _order(node, "cordon", supervisor, store, cluster, as_json)


def uncordon(
    node: Name, supervisor: remote.Address = "", store: remote.StoreUrl = "", cluster: remote.Cluster = "local", as_json: Json = False
) -> None:
    """Undo cordon and drain."""
    _order(node, "uncordon", supervisor, store, cluster, as_json)


def drain(
    node: Name, supervisor: remote.Address = "", store: remote.StoreUrl = "", cluster: remote.Cluster = "local", as_json: Json = False
) -> None:
    """Cordon, and move its jobs off at their next checkpoint."""
    _order(node, "drain", supervisor, store, cluster, as_json)


def clear(
    node: Name, supervisor: remote.Address = "", store: remote.StoreUrl = "", cluster: remote.Cluster = "local", as_json: Json = False
) -> None:
    """End the quarantine of the node's hardware: it returns on probation."""
    _order(node, "clear", supervisor, store, cluster, as_json)


def _order(node: str, command: str, supervisor: str, store: str, cluster: str, as_json: bool) -> None:
    document = remote.post(remote.find(supervisor, store, cluster), f"/v1/nodes/{node}/{command}")
    emit(document, as_json=as_json, human=remote.writer(f"{command} {node}: ordered\n"))


def _table(nodes: list[dict[str, Any]]) -> None:
    for node in nodes:
        jobs = ", ".join(f"{job['job']} ranks {job['ranks'][0]}-{job['ranks'][-1]}" for job in node["jobs"] if job["ranks"])
        why = (node["quarantine"] or {}).get("reason", "") or node["unusable"] or node["health"].get("reason", "")
        sys.stdout.write(f"{node['node']:<20} {node['state']:<12} {node['slots']:>3} slots  {jobs}{'  ' + why if why else ''}\n")


def _details(node: dict[str, Any]) -> None:
    for name, value in node.items():
        sys.stdout.write(f"{name:<16} {value}\n")
