"""The command line: one typer app, thin. `main` is the console script."""

from __future__ import annotations


def main() -> None:
    """Run the command line and turn errors into messages and exit codes."""
    from regrow.cli.app import run

    run()
