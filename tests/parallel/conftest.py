"""Runs the command line in this process, as `regrow.cli.main` does, without building the commands each time."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.main import get_command

from regrow.cli import app
from regrow.errors import RegrowError

Answer = tuple[int, Any, str]


@pytest.fixture(scope="session")
def regrow() -> Callable[..., Answer]:
    """`regrow("plan", "--dp", 8)` gives (exit status, JSON document or None, standard error)."""
    command = get_command(app.build())

    def run(*words: object) -> Answer:
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                command.main(args=[*map(str, words), "--json"], prog_name="regrow")
            except SystemExit as end:
                code = int(end.code or 0)
            except RegrowError as error:
                return error.exit_code, {"error": error.document()}, f"regrow: {error}"
        text = out.getvalue()
        return code, json.loads(text) if text.strip() else None, err.getvalue()

    return run
