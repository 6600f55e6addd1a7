"""`regrow doctor`: can this machine run it? What is missing, and how to get it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from regrow.cli.output import Json, emit

if TYPE_CHECKING:
    from regrow.cli.checks import Check

_SIGNS = {"ok": "ok     ", "note": "note   ", "warn": "warn   ", "missing": "MISSING"}


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("doctor", help="Can this machine run it? Says what is missing.")
    def _doctor(
        members: Annotated[int, typer.Option("--etcd-members", min=1, help="Judge the etcd binary for a cluster of so many.")] = 1,
        deadline: Annotated[float, typer.Option("--deadline", min=0.1, help="Seconds after which a silent GPU driver is hung.")] = 10.0,
        store: Annotated[str, typer.Option(help="Store URL: does it answer?", envvar="REGROW_STORE")] = "",
        as_json: Json = False,
    ) -> None:
        from regrow.cli import checks

        found = checks.run_all(members=members, deadline_seconds=deadline, store=store)
        code = checks.exit_code(found)
        answer = {0: "this machine can run Regrow", 3: "this machine can run Regrow, with limits", 1: "this machine cannot run Regrow yet"}[
            code
        ]
        emit({"ready": code != 1, "answer": answer, "checks": found}, as_json=as_json, human=lambda: _tell(found, answer))
        raise typer.Exit(code)


def _tell(found: list[Check], answer: str) -> None:
    for one in found:
        sys.stdout.write(f"{_SIGNS[one.status]}  {one.name:<14} {one.detail}\n")
        if one.hint:
            sys.stdout.write(f"{'':25}try: {one.hint}\n")
    sys.stdout.write(f"{answer}\n")
