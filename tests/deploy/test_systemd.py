"""The units as systemd reads them, and the daemons as a service manager sees them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from regrow import settings
from regrow.agent.config import AgentSettings
from regrow.notify import from_environment
from regrow.store.embedded import EmbeddedEtcd
from regrow.supervisor.config import SupervisorConfig

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
LIMIT = 60.0
EXPOSURE = {"regrow-supervisor": 2.0, "regrow-agent": 3.5}
"""Highest exposure by systemd's own scale, 0 (safe) to 10. The agent's training scripts need devices and the network."""


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("systemd-analyze")
    assert tool is not None, "systemd-analyze is missing: tools/system.sh installs it"
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", EXPOSURE)
def test_units_are_read_without_a_complaint(name: str, tmp_path: Path) -> None:
    text = (UNITS / f"{name}.service").read_text()
    assert "/opt/regrow/bin/regrow" in text
    unit = tmp_path / f"{name}.service"
    unit.write_text(text.replace("/opt/regrow/bin/regrow", str(Path(sys.executable).with_name("regrow"))))
    done = analyze("verify", "--man=no", str(unit))
    complaints = [line for line in done.stderr.splitlines() if name in line]
    assert (done.returncode, complaints) == (0, [])


@pytest.mark.parametrize(("name", "limit"), EXPOSURE.items())
def test_units_stay_within_their_exposure(name: str, limit: float) -> None:
    done = analyze("security", "--offline=true", f"--threshold={round(limit * 10)}", str(UNITS / f"{name}.service"))
    assert done.returncode == 0, done.stdout.splitlines()[-1:]


@pytest.mark.parametrize(("file", "section", "kind"), [("agent", "agent", AgentSettings), ("supervisor", "supervisor", SupervisorConfig)])
def test_example_settings_are_known(file: str, section: str, kind: type[object]) -> None:
    found, _ = settings.load(kind, section=section, file=UNITS / f"{file}.toml", environ={})
    assert tomllib.loads((UNITS / f"{file}.toml").read_text())[section]["cluster"] == found.cluster  # type: ignore[attr-defined]


def test_the_stop_limit_leaves_time_for_a_save() -> None:
    text = (UNITS / "regrow-agent.service").read_text()
    stop = int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0])
    assert stop > AgentSettings().notice_seconds + 30
    assert "KillMode=process" in text


class Manager:
    """The socket of a service manager."""

    def __init__(self, path: Path) -> None:
        self.said: list[str] = []
        self._changed = asyncio.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def _read(self) -> None:
        self.said += self._socket.recv(4096).decode().splitlines()
        self._changed.set()

    async def hears(self, word: str, times: int = 1) -> None:
        async with asyncio.timeout(LIMIT):
            while self.said.count(word) < times:
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[Manager]:
    made = Manager(tmp_path / "n")
    yield made
    made.close()


def started_as(daemon: str, store: str, folder: Path) -> list[str]:
    """The command line of the unit, with its example settings: without TLS, with this test's store, and any free ports."""
    unit = (UNITS / f"regrow-{daemon}.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.+)$", unit, re.MULTILINE)
    (owned,) = re.findall(r"^StateDirectory=(.+)$", unit, re.MULTILINE)
    kept = [entry for entry in (UNITS / f"{daemon}.toml").read_text().splitlines() if not re.match(r"(tls_|http_tls|tokens)", entry)]
    text = re.sub(r'^store = ".*"$', f'store = "{store}"', "\n".join(kept), flags=re.MULTILINE)
    text = re.sub(r'"(?:10\.0\.1\.1|0\.0\.0\.0)(?::\d+)?"', lambda match: '"127.0.0.1:0"' if ":" in match[0] else '"127.0.0.1"', text)
    (folder / f"{daemon}.toml").write_text(re.sub(r"^peer_port = \d+$", "peer_port = 0", text, flags=re.MULTILINE))
    places = {f"/etc/regrow/{daemon}.toml": f"{folder}/{daemon}.toml", f"/var/lib/{owned}": f"{folder}/s"}
    words = str(line).split()
    assert words.pop(0) == "/opt/regrow/bin/regrow"
    assert set(places) <= set(words), "the settings of this page, and the folder that systemd makes"
    return [str(Path(sys.executable).with_name("regrow")), *(places.get(word, word) for word in words)]


@pytest.mark.parametrize("daemon", ["supervisor", "agent"])
async def test_daemons_say_when_they_serve_feed_the_watchdog_and_say_when_they_stop(daemon: str, manager: Manager, tmp_path: Path) -> None:
    etcd = EmbeddedEtcd(tmp_path / "etcd")
    await etcd.start()
    quick = {"REGROW_AGENT_NODE": "n0", "REGROW_AGENT_WARM": "false", "REGROW_AGENT_KERNEL_LOG": "", "REGROW_AGENT_HEALTH_SECONDS": "0"}
    command = started_as(daemon, etcd.url, tmp_path)
    environment = {**os.environ, **quick, "NOTIFY_SOCKET": str(tmp_path / "n"), "WATCHDOG_USEC": "300000"}
    log = (tmp_path / "log").open("wb")
    child = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
    ended = asyncio.create_task(child.wait())
    try:
        ready = asyncio.create_task(manager.hears("READY=1"))
        await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
        assert not ended.done(), (tmp_path / "log").read_text()
        await ready
        await manager.hears("WATCHDOG=1", 4)
        child.send_signal(signal.SIGTERM)
        await manager.hears("STOPPING=1")
        assert await asyncio.wait_for(asyncio.shield(ended), LIMIT) == 0, (tmp_path / "log").read_text()
    finally:
        if child.returncode is None:
            child.kill()
        await ended
        await etcd.stop()
        log.close()


async def test_a_stopped_daemon_feeds_no_watchdog(manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
    monkeypatch.setenv("WATCHDOG_USEC", "60000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    others = from_environment()
    assert others.watchdog_seconds == 0.0, "the watchdog of another process is not ours to feed"
    assert "NOTIFY_SOCKET" not in os.environ
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
    monkeypatch.setenv("WATCHDOG_USEC", "60000")
    ours = from_environment()
    ours.ready("here")
    await manager.hears("WATCHDOG=1", 2)
    ours.stopping()
    await manager.hears("STOPPING=1")
    assert manager.said[-1] == "STOPPING=1"
