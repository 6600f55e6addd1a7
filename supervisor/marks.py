"""Which events of the store are in this journal: a table beside its entries, written with them, so that nothing is told twice."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import msgspec

from regrow.supervisor.keys import decision_mark

_KEPT = 4_096
"""Of this process's own entries: they may not be in the file yet."""
_SCHEMA = "create table if not exists marks (mark text primary key) without rowid"
_INSERT = "insert or ignore into marks values (?)"
_DECISIONS = "kind in ('record_generation', 'park_job', 'end_job', 'set_quarantine', 'decided')"
"""What a journal without that table has of events of the store."""


class Marks:
    """Names of events of the store (`recent`) that this journal has."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._newest: dict[str, None] = {}

    def add(self, mark: str) -> None:
        """An entry of this name is on its way into the file."""
        self._newest[mark] = None
        if len(self._newest) > _KEPT:
            del self._newest[next(iter(self._newest))]

    def __contains__(self, mark: str) -> bool:
        """Whether this process has written it, or found it there (`known`)."""
        return mark in self._newest

    def known(self, asked: Iterable[str]) -> set[str]:
        """Those of `asked` that the journal has.

        Raises:
            sqlite3.Error: the file cannot be read.
        """
        asked = tuple(asked)
        found = {mark for mark in asked if mark in self._newest}
        if self._path is not None:
            with contextlib.closing(sqlite3.connect(self._path)) as database:
                found |= {mark for mark in asked if database.execute("select 1 from marks where mark = ?", (mark,)).fetchone()}
        for mark in found:
            self.add(mark)
        return found


def prepare(database: sqlite3.Connection) -> None:
    """Make the table; fill it from a journal that was written without one."""
    if database.execute("select 1 from sqlite_master where name = 'marks'").fetchone():
        return
    bodies = database.execute(f"select body from events where {_DECISIONS}")  # noqa: S608  # a constant
    with database:
        database.execute(_SCHEMA)
        insert(database, (_mark_of(body) for (body,) in bodies.fetchall()))


def insert(database: sqlite3.Connection, marks: Iterable[str]) -> None:
    """In the transaction of the entries."""
    database.executemany(_INSERT, ((mark,) for mark in marks))


def _mark_of(body: str) -> str:
    entry = msgspec.json.decode(body)
    return decision_mark(int(entry["epoch"]), int(entry["data"].get("seq", 0)))
