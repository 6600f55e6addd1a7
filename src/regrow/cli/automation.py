"""`regrow automation`: the one switch that stops every automatic action."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from regrow.cli import remote
from regrow.cli.output import Json, emit
from regrow.errors import ConfigurationError


def register(app: typer.Typer) -> None:
    """Add `automation`."""
    app.command("automation")(automation)


def automation(
    state: Annotated[
        str,
        typer.Argument(
            metavar="on|off|show",
            help="off: quarantine, drains by health and growth are only written down; recovery goes on. show: what would have been done.",
        ),
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
        status = remote.get(base, "/v1/status")
        document = {"automation": "on" if status["automation"] else "off", "observed": status.get("observed", [])}
    else:
        document = remote.post(base, f"/v1/automation/{state}")
    emit(document, as_json=as_json, human=lambda: _print(document))


def _print(document: dict[str, Any]) -> None:
    sys.stdout.write(f"automation is {document['automation']}\n")
    for item in document.get("observed", []):
        sys.stdout.write(f"  would {item['would']}\n    not done: {item['why']}\n")
