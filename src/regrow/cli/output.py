"""How commands answer: one JSON document on stdout with --json, text for people without; errors and logs on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer

from regrow.errors import RegrowError

Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout.")]


def emit(document: Any, *, as_json: bool, human: Callable[[], None]) -> None:
    """Print `document` as JSON, or let `human` print it for people."""
    if as_json:
        sys.stdout.write(dumps(document) + "\n")
    else:
        human()


def dumps(document: Any) -> str:
    """JSON text of plain data, structs and dataclasses; infinities and NaN become null."""
    return msgspec.json.encode(document).decode()


def fail(error: RegrowError, *, as_json: bool) -> int:
    """Report an error for people on stderr (and as a document with --json) and return its exit code."""
    sys.stderr.write(f"regrow: {error}\n")
    if as_json:
        sys.stdout.write(dumps({"error": error.document()}) + "\n")
    return error.exit_code


def say(text: str) -> None:
    """A line of progress for people: always on stderr, so that stdout stays one document."""
    sys.stderr.write(text + "\n")
