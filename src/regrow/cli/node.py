"""`regrow node`: what the cluster's nodes are, and an operator's orders on them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from regrow.cli import complete, remote, tables
from regrow.cli.output import Json, emit
from regrow.cli.status import node_table

Name = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.", autocompletion=complete.nodes)]


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
    """One node: health, quarantine, what it runs, what its GPUs read now."""
    document = remote.get(remote.find(supervisor, store, cluster), f"/v1/nodes/{node}", readings=1)
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
    screen = tables.console()
    screen.print(node_table(nodes) if nodes else "no node")


def _details(node: dict[str, Any]) -> None:
    screen = tables.console()
    health, record = node["health"], node["quarantine"]
    screen.print(f"node {node['node']}: {node['state']}, {node['slots']} slots, {node['address'] or 'no address'}")
    if node["silent_seconds"] is not None:
        tables.indented(screen, f"silent for {tables.ago(node['silent_seconds'])}")
    if node["unusable"]:
        tables.indented(screen, f"unusable: {node['unusable']}")
    tables.indented(screen, f"health {health['state']}{': ' + health['reason'] if health['reason'] else ''}")
    for text in health["evidence"]:
        tables.indented(screen, f"- {text}")
    if record is not None:
        tables.indented(screen, f"{record['state']}, strike {record['strikes']}: {record['reason']} ({record['key']})")
    runs = [f"{job['job']} rank {rank}" for job in node["jobs"] for rank in job["ranks"]]
    rows = [
        (slot, uuid, runs[slot] if slot < len(runs) else "idle", "suspect" if uuid in health["device_uuids"] else "")
        for slot, uuid in enumerate(node["devices"] or ["-"] * node["slots"])
    ]
    screen.print(tables.table(("#slot", "GPU", "runs", ""), rows))
    reads: dict[str, Any] = node.get("readings") or {"gpus": {}, "problem": ""}
    for slot, uuid in enumerate(node["devices"]):
        if uuid in reads["gpus"]:
            tables.indented(screen, f"GPU {slot}: {_reads(reads['gpus'][uuid])}")
    if node["devices"] and reads["problem"]:
        tables.indented(screen, f"no readings: {reads['problem']}")


def _reads(found: dict[str, float]) -> str:
    """Temperature, memory, power and load of a GPU, as far as it tells them."""
    parts: list[str] = []
    if "temperature_celsius" in found:
        limit = f" (slows down at {found['slowdown_celsius']:.0f})" if "slowdown_celsius" in found else ""
        parts.append(f"{found['temperature_celsius']:.0f} °C{limit}")
    if "memory_used_bytes" in found and "memory_bytes" in found:
        parts.append(f"{found['memory_used_bytes'] / 2**30:.1f} of {found['memory_bytes'] / 2**30:.1f} GiB")
    if "power_watts" in found:
        parts.append(f"{found['power_watts']:.0f} W")
    if "busy_ratio" in found:
        parts.append(f"{100 * found['busy_ratio']:.0f} % busy")
    if found.get("lost") == 1:
        parts.append("lost to the driver")
    return ", ".join(parts) or "nothing"
