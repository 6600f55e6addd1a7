"""What happened, in order: a ring in memory, an SQLite archive in the state folder, and whoever follows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from regrow.supervisor import marks
from regrow.supervisor.marks import Marks

log = logging.getLogger("regrow.supervisor.journal")

_RING = 20_000
_FOLLOWER_BACKLOG = 5_000
_ROUTINE = frozenset({"steps_completed"})
_HOLD_SECONDS = 0.5
"""Most that an entry of a routine kind waits for others to be archived with."""
_SCHEMA = """
create table if not exists events (
  id integer primary key, epoch integer not null, at real not null, kind text not null,
  job text not null, node text not null, generation integer not null, body text not null);
create index if not exists events_by_job on events (job, id);
"""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the journal."""

    id: int
    epoch: int
    at: float
    """Unix seconds of the supervisor that wrote it: for people."""
    time: str
    kind: str
    job: str = ""
    node: str = ""
    generation: int = 0
    text: str = ""
    data: dict[str, Any] = {}


class Journal:
    """Writes never block the caller: a thread of its own commits to the archive in batches."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.archived: Callable[[], None] = lambda: None
        """Called by the journal's thread when entries are in the file."""
        self._ring: deque[Entry] = deque(maxlen=_RING)
        self._followers: set[asyncio.Queue[Entry | None]] = set()
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._next = 1
        self.marks = Marks(path)
        """Which events of the store (`supervisor.recent`) are here."""
        self._marked: dict[int, str] = {}
        """{entry that is on its way into the file: its mark}."""

    def open(self) -> None:
        """Continue after the last archived entry.

        Raises:
            sqlite3.Error: the archive cannot be opened.
        """
        if self._path is None:
            return
        with contextlib.closing(sqlite3.connect(self._path)) as database:
            database.executescript("pragma journal_mode=wal; pragma synchronous=normal;" + _SCHEMA)
            row = database.execute("select coalesce(max(id), 0) from events").fetchone()
            self._next = int(row[0]) + 1
            recent = database.execute("select body from events order by id desc limit 1000").fetchall()
            marks.prepare(database)
        for (body,) in reversed(recent):
            self._ring.append(msgspec.json.decode(body, type=Entry))
        self._thread = threading.Thread(target=self._archive, name="regrow-journal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is left and end all followers."""
        for follower in self._followers:
            with contextlib.suppress(asyncio.QueueFull):
                follower.put_nowait(None)
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def write(
        self,
        *,
        epoch: int,
        at: float,
        kind: str,
        job: str = "",
        node: str = "",
        generation: int = 0,
        text: str = "",
        data: dict[str, Any] | None = None,
        mark: str = "",
    ) -> Entry:
        """Add an entry and hand it to the archive and the followers. `mark`: name of the event of the store that it tells."""
        stamp = datetime.fromtimestamp(at, tz=UTC).isoformat(timespec="milliseconds")
        entry = Entry(
            id=self._next, epoch=epoch, at=at, time=stamp, kind=kind, job=job, node=node, generation=generation, text=text, data=data or {}
        )
        self._next += 1
        if mark:
            self.marks.add(mark)
        self._ring.append(entry)
        if self._thread is not None:
            if mark:
                self._marked[entry.id] = mark
            self._queue.put(entry)
        for follower in list(self._followers):
            try:
                follower.put_nowait(entry)
            except asyncio.QueueFull:
                self._followers.discard(follower)
                log.warning("a follower of the journal was too slow and is dropped")
        return entry

    def since(self, after: int, *, job: str = "", limit: int = 1_000) -> list[Entry]:
        """Entries in memory with an id above `after`, oldest first; the newest `limit` of them."""
        found = [entry for entry in self._ring if entry.id > after and (not job or entry.job == job)]
        return found[-limit:]

    def follow(self) -> asyncio.Queue[Entry | None]:
        """A queue that gets every entry from now on; None at the end."""
        follower: asyncio.Queue[Entry | None] = asyncio.Queue(_FOLLOWER_BACKLOG)
        self._followers.add(follower)
        return follower

    def unfollow(self, follower: asyncio.Queue[Entry | None]) -> None:
        """Stop following."""
        self._followers.discard(follower)

    def follows(self, follower: asyncio.Queue[Entry | None]) -> bool:
        """False for a follower that was dropped."""
        return follower in self._followers

    def _archive(self) -> None:
        assert self._path is not None
        with contextlib.closing(sqlite3.connect(self._path)) as database:
            while True:
                batch = self._gather()
                entries = [entry for entry in batch if entry is not None]
                rows = [_row(entry) for entry in entries]
                marked = [mark for entry in entries if (mark := self._marked.pop(entry.id, ""))]
                try:
                    with database:
                        database.executemany("insert or ignore into events values (?,?,?,?,?,?,?,?)", rows)
                        marks.insert(database, marked)
                except sqlite3.Error:
                    log.exception("%d journal entries are not archived", len(rows))
                self.archived()
                if None in batch:
                    return

    def _gather(self) -> list[Entry | None]:
        """What goes into one commit. Completed steps wait for what comes next, `_HOLD_SECONDS` at most: a commit is a write to the disk."""
        batch = [self._queue.get()]
        until = time.monotonic() + _HOLD_SECONDS
        while (newest := batch[-1]) is not None and newest.kind in _ROUTINE:
            try:
                batch.append(self._queue.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                return batch
        while not self._queue.empty():
            batch.append(self._queue.get())
        return batch


def _row(entry: Entry) -> tuple[Any, ...]:
    body = msgspec.json.encode(entry).decode()
    return (entry.id, entry.epoch, entry.at, entry.kind, entry.job, entry.node, entry.generation, body)
