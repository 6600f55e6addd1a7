"""Commands of the contract that this version does not have yet: they say so and exit with 2."""

from __future__ import annotations

from typing import Protocol

import typer

from regrow.errors import NotBuiltError


class CommandModule(Protocol):
    """A file of this package with commands."""

    def register(self, app: typer.Typer) -> None:
        """Add this file's commands to the app."""
        ...


class NotBuilt:
    """Stands where a command will be."""

    def __init__(self, name: str) -> None:
        self._name = name

    def register(self, app: typer.Typer) -> None:
        """Add a command that answers with what is missing."""
        name = self._name

        @app.command(name, help="(not built yet)", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
        def _command() -> None:
            raise NotBuiltError(f"`regrow {name}` is not built yet", hint="see CHANGELOG.md for what this version has")
