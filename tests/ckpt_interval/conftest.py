"""Runs the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from regrow.cli import app, output
from regrow.errors import RegrowError

Answer = tuple[int, Any, str]


@pytest.fixture(scope="session")
def regrow() -> Callable[..., Answer]:
    """`regrow("plan", "--dp", 8)` gives (exit status, JSON document or None, standard error), as the program does."""
    built, runner = app.build(), CliRunner()

    def run(*words: object) -> Answer:
        result = runner.invoke(built, [*map(str, words), "--json"])
        if isinstance(result.exception, RegrowError):
            return result.exception.exit_code, {"error": result.exception.document()}, f"regrow: {result.exception}"
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        try:
            return result.exit_code, json.loads(result.stdout), result.stderr
        except ValueError:
            return result.exit_code, None, result.stderr

    assert output.dumps({"x": float("nan")}) == '{"x":null}'
    return run
