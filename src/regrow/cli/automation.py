"""`regrow automation`: the one switch that stops every automatic action."""

from __future__ import annotations

from typing import Annotated

import typer

from regrow.cli import remote
from regrow.cli.output import Json, emit
from regrow.errors import ConfigurationError


def register(app: typer.Typer) -> None:
    """Add `automation`."""
    app.command("automation")(automation)


def automation(
    state: Annotated[
        str, typer.Argument(metavar="on|off|show", help="off: quarantine, drains by health and growth stop; recovery goes on.")
    ],
    supervisor: remote.Address = "",
    store: remote.StoreUrl = "",
    cluster: remote.Cluster = "local",
    as_json: Json = False,
) -> None:
    """Stop or allow what the supervisor does by itself. It holds over a supervisor restart."""
    if state not in ("on", "off", "show"):
        raise ConfigurationError(f"{state!r} is not on, off or show", where="regrow automation", hint="for example: regrow automation off")
    base = remote.find(supervisor, store, cluster)
    if state == "show":
        document = {"automation": "on" if remote.get(base, "/v1/status")["automation"] else "off"}
    else:
        document = remote.post(base, f"/v1/automation/{state}")
    emit(document, as_json=as_json, human=remote.writer(f"automation is {document['automation']}\n"))
