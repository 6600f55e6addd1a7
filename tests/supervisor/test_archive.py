"""The journal in PostgreSQL, each entry exactly once. A real server of this test's own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from regrow.errors import ConfigurationError
from regrow.supervisor import archive, config
from regrow.supervisor.archive import Archive
from regrow.supervisor.journal import Journal

DEADLINE = 60.0


class Server:
    """PostgreSQL on a loopback port; as root it runs as the user that the package made."""

    def __init__(self) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
        binary = str(found[-1]) if found else shutil.which("postgres")
        assert binary is not None, "PostgreSQL is not installed: tools/system.sh installs it"
        self._bin = Path(binary).parent
        self.root = Path(tempfile.mkdtemp(prefix="regrow-pg-"))
        self._user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
        if self._user:
            shutil.chown(self.root, "postgres", "postgres")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"postgresql://archive@127.0.0.1:{self.port}/postgres"
        self._run("initdb", "-D", str(self.root / "data"), "-U", "archive", "-A", "trust", "--no-sync")
        self.process: subprocess.Popen[bytes] | None = None

    def _run(self, name: str, *arguments: str) -> None:
        subprocess.run([str(self._bin / name), *arguments], check=True, capture_output=True, cwd="/", timeout=DEADLINE, **self._user)

    def start(self) -> None:
        """Serve, and wait until it answers."""
        flags = ("-h", "127.0.0.1", "-p", str(self.port), "-k", str(self.root), "-F")
        self.process = subprocess.Popen(
            [str(self._bin / "postgres"), "-D", str(self.root / "data"), *flags],
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **self._user,
        )
        until("the server answers", self._answers)

    def _answers(self) -> bool:
        try:
            return bool(self.query("select 1"))
        except psycopg.OperationalError:
            return False

    def kill(self) -> None:
        """Immediate shutdown, as after a crash."""
        assert self.process is not None
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(DEADLINE)
        self.process = None

    def query(self, text: str) -> list[Any]:
        """Rows of a query."""
        with psycopg.connect(self.url, connect_timeout=5, autocommit=True) as connection:
            return connection.execute(text).fetchall()  # type: ignore[arg-type]  # the tests' own texts

    def ids(self) -> list[int]:
        """Ids in the archive, in order."""
        try:
            return [row[0] for row in self.query("select id from regrow_events order by id")]
        except psycopg.errors.UndefinedTable:
            return []

    def close(self) -> None:
        """Stop it and remove its folder."""
        if self.process is not None:
            self.kill()
        shutil.rmtree(self.root)


def until(what: str, condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    try:
        yield made
    finally:
        made.close()


def begin(tmp_path: Path, server: Server) -> tuple[Journal, Archive]:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.open()
    made = Archive(server.url, tmp_path / "journal.sqlite", cluster="c", supervisor="s0")
    journal.archived = made.wake
    made.start()
    return journal, made


def write(journal: Journal, count: int) -> None:
    for number in range(count):
        journal.write(epoch=1, at=1_700_000_000.0 + number, kind="tick", job="j", text=f"it's {number}")


def test_each_entry_once_over_ends_of_server_and_sender(tmp_path: Path, server: Server) -> None:
    journal, sender = begin(tmp_path, server)
    write(journal, 700)  # the server is not there yet
    server.start()
    until("all are there", lambda: len(server.ids()) == 700)
    server.kill()
    write(journal, 50)
    server.start()
    until("all are there", lambda: len(server.ids()) == 750)
    journal.close()
    sender.close()
    server.query("delete from regrow_events where id > 720 returning id")  # as if the sender had ended before these were there
    journal, sender = begin(tmp_path, server)
    write(journal, 5)
    until("all are there", lambda: len(server.ids()) == 755)
    journal.close()
    sender.close()
    assert server.ids() == list(range(1, 756))
    (name, cluster, kind, job, body) = server.query("select supervisor, cluster, kind, job, body from regrow_events where id = 7")[0]
    assert (name, cluster, kind, job) == ("s0", "c", "tick", "j")
    assert (body if isinstance(body, dict) else json.loads(body))["text"] == "it's 6"


def test_two_journals_share_an_archive(tmp_path: Path, server: Server) -> None:
    server.start()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        journal, sender = begin(tmp_path / name, server)
        write(journal, 3)
        journal.close()
        sender.wake()
        sender.close(DEADLINE)
    assert server.query("select count(*), count(distinct journal) from regrow_events") == [(6, 2)]


def tell_a_run(folder: Path, server: Server) -> None:
    """A job over a change of leader: each of two supervisors has a journal of its own, with ids of its own."""
    clock = 1_700_000_000.0
    for epoch, steps in ((1, range(1, 11)), (2, range(11, 21))):
        (folder / f"s{epoch}").mkdir()
        journal, sender = begin(folder / f"s{epoch}", server)

        def put(
            kind: str, at: float, *, node: str = "", job: str = "", journal: Journal = journal, epoch: int = epoch, **data: Any
        ) -> None:
            journal.write(epoch=epoch, at=at, kind=kind, job=job, node=node, generation=1 if job else 0, data=data)

        put("leader_started", clock, version="0")
        if epoch == 1:
            put("node_joined", clock, node="n0", slots=2, devices=[])
            put("record_generation", clock, job="train", mesh="dp=2", num_nodes=1, restore=None)
            put("record_generation", clock, job="other", mesh="dp=2", num_nodes=1, restore=None)
        for step in steps:
            clock += 1.0
            put("steps_completed", clock, job="train", step=step, step_seconds=1.0, loss=0.5)
        journal.close()
        sender.wake()
        sender.close(DEADLINE)


def test_a_report_of_the_archive_is_of_all_leaders(tmp_path: Path, server: Server) -> None:
    server.start()

    def report(*words: str) -> tuple[int, Any]:
        argv = [sys.executable, "-m", "regrow", "report", *words, "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=DEADLINE)
        return done.returncode, json.loads(done.stdout)

    code, document = report(server.url, "--cluster", "c", "--job", "train")
    assert (code, document["error"]["what"]) == (2, "holds no journal")
    tell_a_run(tmp_path, server)
    code, document = report(server.url, "--cluster", "c", "--job", "train")
    assert code == 0, document
    assert document["goodput"]["measured"]["lineage_steps"] == 20
    assert document["goodput"]["measured"]["ettr"] == pytest.approx(1.0)
    code, document = report(server.url, "--cluster", "d")
    assert (code, document["error"]["what"]) == (2, "has no entries of cluster 'd'")
    code, document = report("postgresql://me:secret@127.0.0.1:1/x")
    assert code == 1
    assert document["error"]["where"] == "postgresql://me@127.0.0.1:1/x", "a password is not shown"
    assert report("mysql://x/y")[0] == 2


def test_wrong_url_is_said_before_anything_is_done(tmp_path: Path) -> None:
    flags = {"store": "memory://", "state": str(tmp_path / "s"), "archive": "mysql://x/y"}
    with pytest.raises(ConfigurationError, match="not a PostgreSQL URL"):
        config.load(None, flags)
    assert not (tmp_path / "s").exists()
    assert archive.driver("postgresql://a@b/c") is psycopg
