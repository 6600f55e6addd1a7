"""A writer that nobody talks to ends; one that has a client does not."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ORPHAN_SECONDS = 1.5


def start(folder: Path) -> subprocess.Popen[bytes]:
    argv = [
        sys.executable,
        "-m",
        "regrow.ckpt.writer",
        "--socket",
        str(folder / "w.sock"),
        "--state",
        str(folder / "s"),
        "--orphan",
        str(ORPHAN_SECONDS),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "REGROW_LIFELINE"}
    return subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL)


def connect(folder: Path) -> socket.socket:
    deadline = time.monotonic() + 30
    while True:
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(str(folder / "w.sock"))
        except OSError:
            client.close()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return client


def test_writer_without_clients_ends(short_path: Path) -> None:
    process = start(short_path)
    assert process.wait(30) == 0
    assert not (short_path / "w.sock").exists()


def test_writer_with_a_client_stays_and_ends_a_while_after_it(short_path: Path) -> None:
    process = start(short_path)
    client = connect(short_path)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(ORPHAN_SECONDS * 2)
    client.close()
    left = time.monotonic()
    assert process.wait(30) == 0
    assert time.monotonic() - left >= ORPHAN_SECONDS * 0.9


def test_sigterm_ends_it_at_once(short_path: Path) -> None:
    process = start(short_path)
    connect(short_path).close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
