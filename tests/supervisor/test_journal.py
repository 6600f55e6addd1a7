"""What goes into the journal's file, and when."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from pathlib import Path

import pytest

from regrow.supervisor import journal as journals
from regrow.supervisor.journal import Journal

LIMIT = 30.0


def rows(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        return [kind for (kind,) in database.execute("select kind from events order by id")]


def test_steps_wait_for_what_comes_next_and_nothing_else_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_HOLD_SECONDS", 3600.0)
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    commits: list[int] = []
    archived = threading.Event()
    journal.archived = lambda: (commits.append(len(rows(path))), archived.set())[0]
    journal.open()
    for step in range(5):
        journal.write(epoch=1, at=float(step), kind="steps_completed", job="j")
    journal.write(epoch=1, at=5.0, kind="workers_exited", job="j")
    assert archived.wait(LIMIT)
    assert commits == [6], "one commit"
    journal.write(epoch=1, at=6.0, kind="steps_completed", job="j")
    journal.close()
    assert rows(path) == ["steps_completed"] * 5 + ["workers_exited", "steps_completed"]


def test_steps_are_not_held_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_HOLD_SECONDS", 0.05)
    journal = Journal(tmp_path / "journal.sqlite")
    archived = threading.Event()
    journal.archived = archived.set
    journal.open()
    journal.write(epoch=1, at=0.0, kind="steps_completed", job="j")
    assert archived.wait(LIMIT)
    assert rows(tmp_path / "journal.sqlite") == ["steps_completed"]
    journal.close()
