"""Failure histories from files: one row a failure, columns documented here, unknown ones named.

CSV columns (or keys of a JSON list of objects):

    at            ISO 8601 instant, or hours as a number (required)
    node          name of the node
    component     what broke, in the site's words
    category      class of the component
    planned       1 for planned stops, else 0 (default 0)
    incident      rows with one incident count as one failure (default: every row is its own)
    lost_seconds  wall time that the incident cost (default 0)
    detect_seconds, recover_seconds   of it: until it was noticed, and from then to the first new step
    node_age_hours                    how long the node had been in service
    gpus                              GPUs that stood still (default: all of the job)
"""

from __future__ import annotations

import csv
import datetime as dt
import json
import math
from pathlib import Path
from typing import Any

import msgspec

from regrow.errors import ConfigurationError

_MORE = ("detect_seconds", "recover_seconds", "node_age_hours", "gpus")
COLUMNS = ("at", "node", "component", "category", "planned", "incident", "lost_seconds", *_MORE)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One incident. Times in hours since the start of the history's own scale."""

    at_hours: float
    node: str = ""
    component: str = ""
    category: str = ""
    planned: bool = False
    incident: str = ""
    lost_seconds: float = 0.0
    detect_seconds: float | None = None
    recover_seconds: float | None = None
    node_age_hours: float | None = None
    gpus: int = 0
    """GPUs that stood still; 0: all of the job."""
    num_rows: int = 1
    """Rows that were folded into this incident: the first is the symptom, the others its victims."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says."""

    failures: tuple[Failure, ...]
    """In time order, one per incident."""
    start_at: str = ""
    """ISO instant of hour 0, when the file has instants."""
    warnings: tuple[str, ...] = ()


def read(path: Path) -> History:
    """Read a CSV or JSON file.

    Raises:
        ConfigurationError: no such file, no `at` column, or a value that cannot be read, with its line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot be read: {error}", where=str(path), hint="give a CSV or JSON file of failures") from error
    try:
        rows = _json_rows(text, path) if path.suffix == ".json" else _csv_rows(text, path)
    except csv.Error as error:
        raise ConfigurationError(f"is not CSV: {error}", where=str(path), hint="is a quotation mark left open?") from error
    return _history(rows, path)


def _csv_rows(text: str, path: Path) -> list[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(text.splitlines())
    if not reader.fieldnames or "at" not in [name.strip() for name in reader.fieldnames]:
        raise ConfigurationError(
            "has no column `at`", where=f"{path}:1", hint=f"the first line names the columns: {','.join(COLUMNS)} (only at is required)"
        )
    return [(reader.line_num, {(k or "").strip(): (v or "") for k, v in row.items() if not isinstance(v, list)}) for row in reader]


def _json_rows(text: str, path: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"is not JSON: {error}", where=str(path)) from error
    rows = document.get("failures") if isinstance(document, dict) else document
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigurationError("is not a list of objects", where=str(path), hint=f"each object has the keys {', '.join(COLUMNS)}")
    return list(enumerate(rows, start=1))


def _history(rows: list[tuple[int, dict[str, Any]]], path: Path) -> History:
    warnings: list[str] = []
    unknown = sorted({key for _, row in rows for key in row if key and key not in COLUMNS})
    if unknown:
        warnings.append(f"columns not used: {', '.join(unknown)}")
    instants = [_instant(row.get("at", ""), f"{path}:{line}") for line, row in rows]
    dated = [value for value in instants if isinstance(value, dt.datetime)]
    if dated and len(dated) != len(instants):
        raise ConfigurationError("mixes ISO instants and hours in column `at`", where=str(path), hint="use one of the two")
    zero = min(dated) if dated else None
    if zero is not None:
        hours = [(value - zero).total_seconds() / 3600 for value in dated]
    else:
        hours = [value for value in instants if isinstance(value, float)]
    failures = [_failure(row, hour, f"{path}:{line}") for (line, row), hour in zip(rows, hours, strict=True)]
    failures.sort(key=lambda failure: failure.at_hours)
    return History(failures=_fold(failures), start_at=zero.isoformat() if zero else "", warnings=tuple(warnings))


def _instant(value: Any, where: str) -> dt.datetime | float:
    text = str(value).strip()
    try:
        hours = float(text)
    except ValueError:
        try:
            instant = dt.datetime.fromisoformat(text)
        except ValueError as error:
            raise ConfigurationError(
                f"at = {text!r} is neither an ISO instant nor hours", where=where, hint="write 2026-11-30T08:15:00+00:00 or 12.5"
            ) from error
        return instant if instant.tzinfo else instant.replace(tzinfo=dt.UTC)
    if not math.isfinite(hours):
        raise ConfigurationError(f"at = {text!r} is not finite", where=where)
    return hours


def _failure(row: dict[str, Any], hour: float, where: str) -> Failure:
    planned = str(row.get("planned") or "0").strip().lower()
    if planned not in ("0", "1", "true", "false", "yes", "no"):
        raise ConfigurationError(f"planned = {planned!r} is not 0 or 1", where=where)
    text = {key: str(row.get(key) or "").strip() for key in ("node", "component", "category", "incident")}
    gpus = _number(row, "gpus", where)
    return Failure(
        at_hours=hour,
        planned=planned in ("1", "true", "yes"),
        lost_seconds=_number(row, "lost_seconds", where) or 0.0,
        detect_seconds=_number(row, "detect_seconds", where),
        recover_seconds=_number(row, "recover_seconds", where),
        node_age_hours=_number(row, "node_age_hours", where),
        gpus=int(gpus or 0),
        node=text["node"],
        component=text["component"],
        category=text["category"],
        incident=text["incident"],
    )


def _number(row: dict[str, Any], name: str, where: str) -> float | None:
    """A value >= 0; None when there is none."""
    value = row.get(name)
    text = "" if value is None else str(value).strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError as error:
        raise ConfigurationError(f"{name} = {text!r} is not a number", where=where) from error
    if not math.isfinite(number) or number < 0:
        raise ConfigurationError(f"{name} = {text} must be finite and not negative", where=where)
    return number


def _fold(failures: list[Failure]) -> tuple[Failure, ...]:
    """One failure per incident: the first row names it, the longest loss counts, the rest are victims."""
    first: dict[str, int] = {}
    folded: list[Failure] = []
    for failure in failures:
        if failure.incident and failure.incident in first:
            index = first[failure.incident]
            known = folded[index]
            folded[index] = msgspec.structs.replace(
                known, lost_seconds=max(known.lost_seconds, failure.lost_seconds), num_rows=known.num_rows + 1
            )
            continue
        if failure.incident:
            first[failure.incident] = len(folded)
        folded.append(failure)
    return tuple(folded)
