"""`regrow actuators`: what Slurm, Kubernetes or a program of the site was told of quarantined nodes, and a trial from this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regrow.cli import remote, tables
from regrow.cli.output import Json, emit
from regrow.errors import ConfigurationError

if TYPE_CHECKING:
    from regrow.supervisor.actuators.port import Actuator, Call


def register(app: typer.Typer) -> None:
    """Add `actuators`."""
    group = typer.Typer(help="Slurm, Kubernetes or a program that is told of quarantined nodes.", no_args_is_help=True)
    group.command("ls")(ls)
    group.command("try")(trial)
    app.add_typer(group, name="actuators")


def ls(supervisor: remote.Address = "", store: remote.StoreUrl = "", cluster: remote.Cluster = "local", as_json: Json = False) -> None:
    """The last order for each node and what became of it. Exit 3 when one failed or is held."""
    document = remote.get(remote.find(supervisor, store, cluster), "/v1/actuators")
    emit(document, as_json=as_json, human=lambda: _table(document))
    troubled = any(one["held"] or any(order["state"] == "failed" for order in one["orders"]) for one in document["actuators"])
    raise typer.Exit(3 if troubled else 0)


def trial(
    actuator: Annotated[str, typer.Argument(help="slurm, kubernetes or command.")],
    node: Annotated[str, typer.Argument(help="Name of the node.")],
    config: Annotated[Path, typer.Option(help="The supervisor's TOML file, with [actuators].")],
    back: Annotated[bool, typer.Option("--back", help="Bring the node back instead of taking it out.")] = False,
    reason: Annotated[str, typer.Option(help="What is given as the reason.")] = "trial",
    really: Annotated[bool, typer.Option("--really", help="Do it. Without this it is only shown.")] = False,
    as_json: Json = False,
) -> None:
    """Try a way out from this machine, before it is switched on: shows what would be done; --really does it."""
    from regrow.ids import check_name
    from regrow.supervisor.actuators import config as settings
    from regrow.supervisor.actuators.port import Call, safe_reason

    loaded, _ = settings.load(config)
    check_name("node", node)
    if actuator not in settings.KINDS:
        raise ConfigurationError(f"{actuator!r} is not an actuator", where="regrow actuators try", hint=", ".join(settings.KINDS))
    made = settings.make(actuator, loaded)
    call = Call(node=node, direction="in" if back else "out", reason=safe_reason(reason), hardware=f"node:{node}", id=f"trial-{node}")
    document: dict[str, Any] = {"actuator": actuator, "node": node, "would": made.preview(call), "done": False, "detail": ""}
    if really:
        document |= _really(made, call)
    emit(document, as_json=as_json, human=lambda: _say(document))


def _really(made: Actuator, call: Call) -> dict[str, Any]:
    import asyncio

    from regrow.supervisor.actuators.port import LeftAlone

    outcome = asyncio.run(made.act(call))
    return {"done": not isinstance(outcome, LeftAlone), "detail": outcome.detail}


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(f"{'order' if document['detail'] else 'would'}: {document['would']}\n")
    if document["detail"]:
        sys.stdout.write(f"{'done' if document['done'] else 'left alone'}: {document['detail']}\n")


def _table(document: dict[str, Any]) -> None:
    screen = tables.console()
    if not document["actuators"]:
        screen.print(f"no actuator runs (mode {document['mode']}): [actuators] in the supervisor's settings", markup=False)
        return
    for one in document["actuators"]:
        pause = f", paused: {one['paused']}" if one["paused"] else ""
        screen.print(f"{one['actuator']}: {one['mode']}{pause}, at most {one['per_hour']} nodes out an hour", markup=False)
        rows = [
            (order["node"], order["direction"], order["state"], order["num_attempts"], order["detail"] or order["reason"])
            for order in one["orders"]
        ]
        rows += [(want["node"], "out", "held", 0, want["reason"]) for want in one["held"]]
        if rows:
            screen.print(tables.table(("node", "order", "state", "#tries", ""), rows))
