"""`regrow observe` as typed: wrong words before any side effect, and a sitting with a supervisor that runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.observe.conftest import until

from regrow.observe import session

REGROW = (sys.executable, "-m", "regrow")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--once",), 2, "needs a run that this command starts"),
        (("--chaos", "smoke", "--demo"), 2, "give one of"),
        (("--chaos", "nosuch"), 2, "no such plan"),
        (("--pace", "2"), 2, "is not a share"),
        ((), 2, "no supervisor is known"),
        (("--supervisor", "http://127.0.0.1:1"), 1, "does not answer"),
    ],
)
def test_wrong_words(words: tuple[str, ...], code: int, message: str, tmp_path: Path) -> None:
    done = subprocess.run((*REGROW, "observe", *words), capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert list(tmp_path.iterdir()) == [], "it left something behind"


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(
        (*REGROW, "observe", "--chaos", "smoke"), capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 2
    assert "apt-get install prometheus" in done.stderr


def test_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "runs" / "observe" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "observe" / "run" / "file").touch()
    done = subprocess.run((*REGROW, "observe", "--chaos", "smoke"), capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "holds an earlier run" in done.stderr


def test_a_port_that_is_taken_is_said_with_the_flag_that_helps(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ("--chaos", "smoke", "--alertmanager-port", "0", "--prometheus-port", port)
        done = subprocess.run((*REGROW, "observe", *words), capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert f"port {port} is in use" in done.stderr
    assert "--prometheus-port 0" in done.stderr


async def test_a_run_that_it_starts_is_heard(tmp_path: Path) -> None:
    """Its lines are shown as they come and kept, its exit code is told."""
    program = "import sys; print('one', file=sys.stderr); print('{}'); sys.exit('two')"
    options = session.Options(
        root=tmp_path, started=(sys.executable, "-c", program), once=True, factor=1 / 30, ports=(0, 0), find=lambda: None
    )  # fmt: skip
    addresses: list[dict[str, str]] = []
    lines: list[str] = []
    document = await session.run(options, tell=addresses.append, say=lines.append)
    assert lines == ["one", "two"]
    assert (tmp_path / "run.log").read_text() == "one\ntwo\n"
    assert (tmp_path / "run.json").read_text() == "{}\n"
    assert (document["run_exit_code"], document["alerts"], len(addresses)) == (1, [], 1)


def test_a_supervisor_that_runs_is_found_scraped_and_left_alone(tmp_path: Path) -> None:
    state, log = tmp_path / "runs" / "x" / "supervisor", tmp_path / "log"
    told = state / "supervisor.json"
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            (*REGROW, "supervisor", "--store", "memory://", "--state", str(state)), stdout=output, stderr=output, cwd=tmp_path
        )
    words = ("--prometheus-port", "0", "--alertmanager-port", "0", "--pace", "0.02", "--json")
    observer: subprocess.Popen[str] | None = None
    try:

        async def leads() -> bool:
            return told.exists()

        asyncio.run(until(leads, "the supervisor"))
        address = json.loads(told.read_text())["http"]
        with (tmp_path / "observe.log").open("wb") as output:
            observer = subprocess.Popen((*REGROW, "observe", *words), stdout=subprocess.PIPE, stderr=output, cwd=tmp_path, text=True)
        targets = tmp_path / "runs" / "observe" / "targets.json"

        async def listed() -> bool:
            return targets.exists() and json.loads(targets.read_text()) != []

        asyncio.run(until(listed, "the targets"))
        assert json.loads(targets.read_text())[0] == {"targets": [address], "labels": {"cluster": "local", "role": "supervisor"}}
        observer.send_signal(signal.SIGINT)
        answer, _ = observer.communicate(timeout=60)
        document = json.loads(answer)
        assert observer.returncode == 0
        assert f"page          http://{address}/" in (tmp_path / "observe.log").read_text()
        assert document["alerts"] == []
        assert document["run_exit_code"] is None
        assert supervisor.poll() is None, "it was not ours to stop"
        supervisor.terminate()
        assert supervisor.wait(60) == 0, log.read_text()
        assert not told.exists(), "an orderly end leaves no address behind"
    finally:
        for process in (observer, supervisor):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
