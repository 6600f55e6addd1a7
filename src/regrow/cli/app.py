"""Composition of the command line. Each command lives in a file of its own and is registered here in help order."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Annotated

import typer

from regrow.cli import output, pending
from regrow.errors import RegrowError

MODULES = (
    "demo",
    "run",
    "agent",
    "supervisor",
    "status",
    "job",
    "node",
    "events",
    "automation",
    "actuators",
    "plan",
    "interval",
    "ckpt",
    "report",
    "simulate",
    "backtest",
    "chaos",
    "observe",
    "health",
    "autopsy",
    "certs",
    "doctor",
)
"""Files of this package that have `register(app)`, in the order of `regrow --help`."""


def build() -> typer.Typer:
    """The whole app."""
    app = typer.Typer(
        name="regrow",
        help="Keeps a long training run alive on a cluster that breaks every few hours.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_version)
    for name in MODULES:
        module_of(name).register(app)
    return app


def module_of(name: str) -> pending.CommandModule:
    """The file with a command, or what answers in its place while there is none."""
    full = f"regrow.cli.{name}"
    if importlib.util.find_spec(full) is None:
        return pending.NotBuilt(name)
    return importlib.import_module(full)  # type: ignore[return-value]


def _print_version(wanted: bool) -> None:
    if wanted:
        from regrow import __version__

        sys.stdout.write(f"regrow {__version__}\n")
        raise typer.Exit


def _version(
    _wanted: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)] = False,
) -> None:
    """Global options; --version acts in its callback."""


def run() -> None:
    """Entry point: errors of ours become a message and an exit code, never a traceback."""
    as_json = "--json" in sys.argv
    try:
        build()()
    except RegrowError as error:
        sys.exit(output.fail(error, as_json=as_json))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
