"""Journals of all supervisors in one PostgreSQL, each entry exactly once, whatever ends or does not answer in between.

The SQLite journal in the state folder is the outbox: an entry is in it before it is sent. An entry's name in the archive is
(journal, id); the journal's own name is made once, with the file. What was sent twice is there once.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import uuid
from pathlib import Path
from typing import Any

from regrow.errors import ConfigurationError, OperationalError

log = logging.getLogger("regrow.supervisor.archive")

_BATCH = 500
_RETRY_SECONDS = (0.5, 30.0)
_CONNECT_SECONDS = 5
_SCHEMA = """
create table if not exists regrow_events (
  journal text not null, id bigint not null, cluster text not null, supervisor text not null, epoch bigint not null,
  at double precision not null, kind text not null, job text not null, node text not null, generation bigint not null,
  body jsonb not null, primary key (journal, id));
create index if not exists regrow_events_by_job on regrow_events (cluster, job, at);
"""
_INSERT = "insert into regrow_events values (%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s::jsonb) on conflict do nothing"


def driver(url: str) -> Any:
    """The module that speaks to PostgreSQL.

    Raises:
        ConfigurationError: another kind of URL, or the driver is not installed.
    """
    if not url.startswith(("postgresql://", "postgres://")):
        raise ConfigurationError(f"{url!r} is not a PostgreSQL URL", where="--archive", hint="use postgresql://USER@HOST:PORT/DATABASE")
    try:
        import psycopg
    except ImportError as error:
        raise ConfigurationError(
            "psycopg is not installed", where="--archive", hint="pip install 'regrow[postgres]'; without --archive the journal is SQLite"
        ) from error
    return psycopg


class Archive:
    """A thread that sends what the journal has and the archive has not."""

    def __init__(self, url: str, journal: Path, *, cluster: str, supervisor: str) -> None:
        self._psycopg = driver(url)
        self._url = url
        self._journal = journal
        self._origin = (cluster, supervisor)
        self._more = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="regrow-archive", daemon=True)
        self.num_behind = 0
        """Entries that the archive does not have, at the last look."""

    def start(self) -> None:
        """Begin to send. The journal's file must be there."""
        self._thread.start()

    def wake(self) -> None:
        """The journal has more."""
        self._more.set()

    def close(self, limit_seconds: float = 2.0) -> None:
        """Send what is left, for so long; the rest is sent by the next start."""
        self._stopping.set()
        self._more.set()
        self._thread.join(limit_seconds)

    def _run(self) -> None:
        pause = _RETRY_SECONDS[0]
        while True:
            try:
                self._send()
                pause = _RETRY_SECONDS[0]
            except (self._psycopg.Error, sqlite3.Error) as error:
                log.warning("archive does not take the journal, again in %.1f s: %s", pause, str(error).strip().splitlines()[:1])
                if self._stopping.wait(pause):
                    return
                pause = min(_RETRY_SECONDS[1], pause * 2)
                continue
            if self._stopping.is_set():
                return

    def _send(self) -> None:
        """Over one connection, until told to stop and all is sent.

        Raises:
            psycopg.Error: the server does not answer, or refuses.
        """
        with (
            contextlib.closing(sqlite3.connect(self._journal)) as outbox,
            self._psycopg.connect(self._url, connect_timeout=_CONNECT_SECONDS, autocommit=True) as server,
        ):
            server.execute(_SCHEMA)
            name = journal_name(outbox)
            row = server.execute("select coalesce(max(id), 0) from regrow_events where journal = %s", (name,)).fetchone()
            sent = int(row[0])
            while True:
                self._more.clear()
                while rows := outbox.execute("select * from events where id > ? order by id limit ?", (sent, _BATCH)).fetchall():
                    self.num_behind = len(rows)
                    with server.transaction(), server.cursor() as cursor:
                        cursor.executemany(_INSERT, [(name, row[0], *self._origin, *row[1:]) for row in rows])
                    sent = rows[-1][0]
                self.num_behind = 0
                if self._stopping.is_set():
                    return
                self._more.wait()


def entries(url: str, cluster: str, job: str = "") -> list[Any]:
    """Bodies of all entries of a cluster, of all its supervisors, in order: term by term, and as they were written within one.

    Args:
        job: only of this job, and those that belong to no job (nodes, leaders); empty: all.

    Raises:
        ConfigurationError: no PostgreSQL URL, no driver, or no archive in this database.
        OperationalError: the server does not answer, or refuses.
    """
    psycopg = driver(url)
    question = "select body from regrow_events where cluster = %s and (%s = '' or job in (%s, '')) order by epoch, id, journal"
    try:
        with psycopg.connect(url, connect_timeout=_CONNECT_SECONDS, autocommit=True) as server:
            rows = server.execute(question, (cluster, job, job)).fetchall()
    except psycopg.errors.UndefinedTable as error:
        raise ConfigurationError(
            "holds no journal", where=without_password(url), hint="give the URL of the supervisors' --archive"
        ) from error
    except psycopg.Error as error:
        told = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OperationalError(
            f"does not answer: {told}", where=without_password(url), hint="check address, user and PGPASSFILE"
        ) from error
    return [row[0] for row in rows]


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    scheme, _, rest = url.partition("://")
    user, at, place = rest.rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}{at}{place}"


def journal_name(outbox: sqlite3.Connection) -> str:
    """The journal's own name, made with its first use: a new state folder is another journal."""
    with outbox:
        outbox.execute("create table if not exists identity (name text not null)")
        outbox.execute("insert into identity select ? where not exists (select 1 from identity)", (uuid.uuid4().hex,))
    return str(outbox.execute("select name from identity").fetchone()[0])
