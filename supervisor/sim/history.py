"""A site's own records as CSV: job accounting, kernel log, step log. Columns are documented in docs/simulator.md."""

from __future__ import annotations

import csv
import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from regrow.errors import ConfigurationError

T = TypeVar("T")
JOBS, STEPS, KERNEL = ("job", "start", "end", "state"), ("at", "step"), ("at", "line")
"""Columns that must be there."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One row of job accounting: one start of a run. Seconds since 1970, or of the file's own scale."""

    job: str
    start: float
    end: float
    state: str
    num_nodes: int = 1
    gpus: int = 0
    nodes: tuple[str, ...] = ()
    failed_node: str = ""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A completed step."""

    at: float
    step: int
    job: str


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel line that condemns a node by the health monitor's own table."""

    at: float
    node: str
    kind: str
    action: str
    line: str


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel line before anybody judged it."""

    at: float
    node: str
    line: str


def attempts(path: Path) -> list[Attempt]:
    """Read job accounting.

    Raises:
        ConfigurationError: no such file, a column is missing, a value cannot be read (with its line).
    """

    def make(row: dict[str, str], where: str) -> Attempt:
        nodes = tuple(word for word in row.get("nodelist", "").replace(";", " ").split() if word)
        made = Attempt(
            job=row["job"],
            start=instant(row["start"], where),
            end=instant(row["end"], where),
            state=row["state"],
            num_nodes=_count(row.get("nodes", ""), where) or len(nodes) or 1,
            gpus=_count(row.get("gpus", ""), where),
            nodes=nodes,
            failed_node=row.get("failed_node", ""),
        )
        if made.end < made.start:
            raise ConfigurationError(
                f"the attempt ends {made.start - made.end:.0f} s before it starts", where=where, hint="check start and end"
            )
        return made

    return _read(path, "--jobs", JOBS, make)


def progress(path: Path, default_job: str) -> list[Progress]:
    """Read the step log; rows without a job belong to `default_job`.

    Raises:
        ConfigurationError: as above.
    """

    def make(row: dict[str, str], where: str) -> Progress:
        return Progress(at=instant(row["at"], where), step=_count(row["step"], where), job=row.get("job") or default_job)

    return _read(path, "--steps", STEPS, make)


def kernel(path: Path) -> list[KernelRow]:
    """Read the kernel log.

    Raises:
        ConfigurationError: as above.
    """
    return _read(
        path, "--kernel", KERNEL, lambda row, where: KernelRow(at=instant(row["at"], where), node=row.get("node", ""), line=row["line"])
    )


def instant(text: str, where: str) -> float:
    """Seconds of an ISO 8601 instant (without a zone: UTC), or of a number of hours.

    Raises:
        ConfigurationError: neither.
    """
    try:
        return float(text) * 3600.0
    except ValueError:
        pass
    try:
        found = dt.datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise ConfigurationError(
            f"{text!r} is no instant", where=where, hint="use ISO 8601 (2026-01-31T12:00:00Z) or hours as a number"
        ) from error
    return (found if found.tzinfo is not None else found.replace(tzinfo=dt.UTC)).timestamp()


def _count(text: str, where: str) -> int:
    if not text.strip():
        return 0
    try:
        value = int(float(text))
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(f"{text!r} is no whole number", where=where, hint="check the column") from error
    if value < 0:
        raise ConfigurationError(f"{value} is below 0", where=where, hint="check the column")
    return value


def _read(path: Path, flag: str, columns: tuple[str, ...], make: Callable[[dict[str, str], str], T]) -> list[T]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigurationError(
                    f"has no column {', '.join(missing)}",
                    where=f"{flag} {path}",
                    hint=f"needed: {', '.join(columns)}; see docs/simulator.md",
                )
            rows = [make({name: value or "" for name, value in row.items() if name}, f"{path} line {reader.line_num}") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(
            f"cannot be read: {getattr(error, 'strerror', None) or error}", where=f"{flag} {path}", hint="a CSV file"
        ) from error
    if not rows:
        raise ConfigurationError("has no rows", where=f"{flag} {path}", hint="a CSV file with a header and at least one row")
    return rows
