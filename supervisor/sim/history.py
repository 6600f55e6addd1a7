"""A site's own records as CSV: job accounting, kernel log, step log. Columns are documented in docs/simulator.md."""

from __future__ import annotations

import csv
import datetime as dt
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from regrow.errors import ConfigurationError

T = TypeVar("T")
_SAMPLE_BYTES = 4096
_ALIASES = {"jobname": "job", "jobstate": "state", "nnodes": "nodes", "numnodes": "nodes", "host": "node", "time": "at", "message": "line"}
"""Names that accounting and logs use for our columns, in lower case."""
_RUNNING = ("", "unknown", "none")
_RANGE = re.compile(r"(?P<low>\d+)-(?P<high>\d+)")
_LIST = re.compile(r"[^,\s;\[]+(?:\[[^\]]*\][^,\s;\[]*)*")
_MOST_NODES = 100_000
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
        nodes = node_names(row.get("nodelist", ""), where)
        start = instant(row["start"], where)
        running = row["end"].strip().lower() in _RUNNING
        made = Attempt(
            job=row["job"],
            start=start,
            end=_OPEN if running else instant(row["end"], where),
            state=row["state"].split(" ", 1)[0],
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

    found = _read(path, "--jobs", JOBS, make)
    newest = max(at for one in found for at in (one.start, one.end) if at < _OPEN)
    return [msgspec.structs.replace(one, end=newest) if one.end == _OPEN else one for one in found]


_OPEN = float("inf")
"""End of an attempt that still runs: it is taken as ended with the newest instant of the file."""


def node_names(text: str, where: str) -> tuple[str, ...]:
    """Names in a list with spaces, commas or semicolons between them, ranges as Slurm writes them: gpu[01-03,7] is four.

    Raises:
        ConfigurationError: a range that runs backwards, or names too many.
    """
    found: list[str] = []
    for word in _LIST.findall(text):
        parts = re.split(r"\[([^\]]*)\]", word)
        choices = [_choices(part, where) if place % 2 else [part] for place, part in enumerate(parts)]
        found += ["".join(pieces) for pieces in itertools.product(*choices)]
    return tuple(found)


def _choices(inside: str, where: str) -> list[str]:
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            found.append(part.strip())
            continue
        low, high, width = int(match["low"]), int(match["high"]), len(match["low"])
        if not 0 <= high - low < _MOST_NODES:
            raise ConfigurationError(f"{part!r} is no range of nodes", where=where, hint="as in gpu[001-128]")
        found += [f"{number:0{width}d}" for number in range(low, high + 1)]
    return found


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
            sample = file.read(_SAMPLE_BYTES)
            file.seek(0)
            header = sample.partition("\n")[0]
            reader = csv.DictReader(file, delimiter=max(",|\t;", key=header.count))
            names = [name.strip().lower() for name in reader.fieldnames or ()]
            reader.fieldnames = [_ALIASES.get(name, name) for name in names]
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
