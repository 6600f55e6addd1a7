"""`regrow agent`: the daemon of one node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regrow.cli.output import Json, emit


def register(app: typer.Typer) -> None:
    """Add `agent`."""
    app.command("agent")(agent)


def agent(
    node: Annotated[str | None, typer.Option(help="Name of this node; default: the host's name.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Name of the cluster.")] = None,
    store: Annotated[str | None, typer.Option(help="Store URL, etcd://HOST:PORT[,HOST:PORT].", envvar="REGROW_STORE")] = None,
    state: Annotated[Path | None, typer.Option(help="State folder of this node; one agent a folder.")] = None,
    slots: Annotated[int | None, typer.Option(help="Workers that this node runs at most.")] = None,
    address: Annotated[str | None, typer.Option(metavar="HOST", help="Host under which peers reach this node.")] = None,
    peer_port: Annotated[int | None, typer.Option(help="Port for reports of other nodes; 0: any.")] = None,
    metrics: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where /metrics is served; empty: nowhere.")] = None,
    failure_domain: Annotated[str | None, typer.Option(help="Rack or switch that fails as one; copies go to another.")] = None,
    hardware_id: Annotated[str | None, typer.Option(help="What quarantine is keyed by without GPU UUIDs.")] = None,
    node_ttl_seconds: Annotated[float | None, typer.Option(help="Lease of this node's key in the store.")] = None,
    orphan_seconds: Annotated[float | None, typer.Option(help="Life of workers without an agent.")] = None,
    notice_seconds: Annotated[float | None, typer.Option(help="On SIGTERM: time for a save and the leader's release.")] = None,
    kill_seconds: Annotated[float | None, typer.Option(help="A worker alive so long after SIGKILL makes the node unusable.")] = None,
    static_seconds: Annotated[float | None, typer.Option(help="Life of workers without any leader.")] = None,
    warm: Annotated[bool | None, typer.Option("--warm/--no-warm", help="Fork workers from a process with torch imported.")] = None,
    preload: Annotated[str | None, typer.Option(help="Modules that it imports besides torch, comma separated.")] = None,
    fake_nvml: Annotated[str | None, typer.Option(metavar="FILE", help="State file of a fake NVML (demo and tests).")] = None,
    kernel_log: Annotated[str | None, typer.Option(metavar="FILE", help="Kernel log to follow; empty: none.")] = None,
    health_seconds: Annotated[float | None, typer.Option(help="Between two health probes; 0: none.")] = None,
    preflight_seconds: Annotated[float | None, typer.Option(help="Budget of the check before this node joins; 0: none.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file with a table [agent].")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print what is set and why, and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Run this node's agent: watches its hardware and its training processes, obeys the supervisor."""
    flags: dict[str, Any] = dict(locals())
    for name in ("config", "explain", "as_json"):
        del flags[name]
    from regrow import settings as loading
    from regrow.agent.config import AgentSettings, check

    chosen, story = loading.load(AgentSettings, section="agent", file=config, flags=flags)
    if explain:
        document = {item.field: {"value": str(item.value), "source": item.source} for item in story}
        text = "\n".join(f"{item.field:18} {item.value!s:28} {item.source}" for item in story)
        emit(document, as_json=as_json, human=lambda: typer.echo(text))
        return
    checked = check(chosen)
    from regrow.agent.main import serve

    code = serve(checked)
    emit({"node": checked.node, "exit": code}, as_json=as_json, human=lambda: None)
    raise typer.Exit(code)
