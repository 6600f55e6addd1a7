"""The parts of the network, clock and storage faults by themselves: real sockets, a real child process, a real namespace."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from regrow.chaos import dcgm, namespace
from regrow.chaos import plan as plans
from regrow.chaos.clock import FakeClock
from regrow.chaos.relay import Relay, Weather
from regrow.ckpt.faults import Faults
from regrow.errors import ConfigurationError, OperationalError

LIMIT = 30.0


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def relayed(node: str = "") -> AsyncIterator[tuple[defaultdict[str, Weather], int]]:
    weather: defaultdict[str, Weather] = defaultdict(Weather)
    async with echo() as port:
        relay = Relay(lambda: ("127.0.0.1", port), weather.__getitem__, node)
        listening = await relay.start()
        try:
            yield weather, listening
        finally:
            await relay.stop()


async def said(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: bytes) -> bytes:
    async with asyncio.timeout(LIMIT):
        writer.write(line)
        return await reader.readline()


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(LIMIT):
            return await reader.read() == b""
    except ConnectionResetError:
        return True


async def test_a_relay_passes_on_and_delays() -> None:
    async with relayed("n0") as (weather, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await said(reader, writer, b"one\n") == b"one\n"
        weather["n0"].set(delay_seconds=0.3)
        began = time.monotonic()
        assert await said(reader, writer, b"two\n") == b"two\n"
        assert time.monotonic() - began >= 0.6, "both ways"
        writer.close()


async def test_a_silent_direction_holds_back_and_lets_go() -> None:
    async with relayed("n0") as (weather, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        weather["n0"].set(silent=frozenset(("up",)))
        writer.write(b"held\n")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await reader.readline()
        weather["n0"].set()
        async with asyncio.timeout(LIMIT):
            assert await reader.readline() == b"held\n", "nothing is lost"
        writer.close()


async def test_a_cut_ends_connections_and_takes_no_new_ones_until_it_heals() -> None:
    async with relayed("n0") as (weather, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await said(reader, writer, b"one\n") == b"one\n"
        weather["n0"].set(cut=True)
        assert await ended(reader)
        fresh_reader, fresh = await asyncio.open_connection("127.0.0.1", port)
        assert await ended(fresh_reader)
        weather["n0"].set()
        again_reader, again = await asyncio.open_connection("127.0.0.1", port)
        assert await said(again_reader, again, b"two\n") == b"two\n"
        for one in (writer, fresh, again):
            one.close()


async def test_a_narrow_link_takes_its_time() -> None:
    async with relayed("n0") as (weather, port):
        weather["n0"].set(rate=20_000)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        began = time.monotonic()
        assert len(await said(reader, writer, b"x" * 9_999 + b"\n")) == 10_000
        assert time.monotonic() - began >= 0.8
        writer.close()


async def test_whose_connection_it_is_says_the_first_line() -> None:
    async with relayed() as (weather, port):
        weather["n1"].set(cut=True)
        for node, answer in (("n0", True), ("n1", False)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            line = json.dumps({"type": "hello", "node": node}).encode() + b"\n"
            assert (await said(reader, writer, line) == line) == answer
            writer.close()


def test_a_shifted_clock_is_wall_time_alone_and_moves_while_the_process_runs(tmp_path: Path) -> None:
    clock = FakeClock(tmp_path / "clock")
    script = "import sys,time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | clock.environment()
    )
    assert child.stdin is not None
    assert child.stdout is not None
    for seconds in (0.0, 600.0, -86_400.25, 0.0):
        clock.shift(seconds)
        child.stdin.write("\n")
        child.stdin.flush()
        wall, steady = map(float, child.stdout.readline().split())
        assert wall - time.time() == pytest.approx(seconds, abs=20.0)
        assert steady == pytest.approx(time.monotonic(), abs=20.0)
    child.communicate(timeout=LIMIT)


def test_storage_faults_come_and_go_with_their_file(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    faults = Faults(f"@{path}")
    faults.point("shard.write")
    path.write_text("shard.write:enospc:0")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            faults.point("shard.write")
    faults.point("shard.fsync")
    path.unlink()
    faults.point("shard.write")


def test_nothing_is_done_to_the_machines_own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(namespace.ENTERED, raising=False)
    for breaks in (lambda: namespace.lose(0.1), lambda: namespace.limit(1e6)):
        with pytest.raises(OperationalError, match="no network of its own"):
            breaks()


_INSIDE = """
import socket, sys, time
from regrow.chaos import dcgm, namespace
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
peer.settimeout(0.5)
client.sendall(b"a")
assert peer.recv(1) == b"a"
import os
namespace.cut_off(os.getpid())
client.sendall(b"b")
try:
    peer.recv(1)
    sys.exit("a packet came through a cut")
except TimeoutError:
    pass
namespace.heal()
peer.settimeout(20)
assert peer.recv(1) == b"b", "TCP sends it again"
namespace.lose(0.2)
for _ in range(20):
    client.sendall(b"c")
    assert peer.recv(1) == b"c"
namespace.limit(100_000)
began = time.monotonic()
import threading
threading.Thread(target=client.sendall, args=(bytes(400_000),)).start()
left = 400_000
while left:
    left -= len(peer.recv(65_536))
assert time.monotonic() - began > 0.8, time.monotonic() - began
namespace.heal()
"""


def test_packets_are_lost_cut_off_and_slowed_in_a_network_namespace() -> None:
    """Root alone can make one; CI is root."""
    if os.geteuid() != 0:
        with pytest.raises(ConfigurationError, match="not root"):
            namespace.enter([])
        return
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode:
        pytest.skip(f"this machine gives no network namespace: {tried.stderr.strip()}")
    inside = [sys.executable, "-c", _INSIDE]
    command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *inside]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=os.environ | {namespace.ENTERED: "1"})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[[fault]]\nkind = 'sick_gemm'", 'kind = "small"'),
        ("[[fault]]\nkind = 'worker_hang'\nphase = 'eval'", 'kind = "small"'),
        ("[[fault]]\nkind = 'command'", "argv"),
        ("[[fault]]\nkind = 'worker_kill'\nargv = ['true']", "argv"),
        ("[[fault]]\nkind = 'net_loss'\nratio = 1.5", "share of packets"),
        ("[[fault]]\nkind = 'net_delay'\ndelay_seconds = -1", "negative"),
        ("[[fault]]\nkind = 'dcgm_inject'\ngpu = -1", "negative"),
        ("[job]\nkind = 'huge'\n[[fault]]\nkind = 'worker_kill'", "huge"),
    ],
)
def test_wrong_faults_say_what_is_wrong(text: str, word: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        plans.parse(text, where="plan")
    assert word in f"{caught.value} {caught.value.hint}"


def test_a_command_carries_its_own_truth() -> None:
    (fault,) = plans.parse("[[fault]]\nkind = 'command'\nargv = ['true']\nincidents = ['hang']\nnames = 'rank'", where="plan").fault
    assert (fault.truth.incidents, fault.truth.names) == (("hang",), "rank")
    assert plans.needs_namespace(plans.load("packets"))
    assert not plans.needs_namespace(plans.load("network"))


DCGMI = """#!/bin/sh
# What dcgmi of DCGM 3 answers; the words are kept.
echo "$@" >> {log}
case "$4" in
  0) echo "Successfully injected field info."; exit 0 ;;
  1) echo "Error injecting field info: The given GPU id is invalid"; exit 0 ;;
  2) sleep 600 ;;
  *) echo "Error: unable to establish a connection to the specified host: localhost"; exit 255 ;;
esac
"""


def fake_dcgmi(folder: Path) -> Path:
    """A `dcgmi` in a folder of its own, and the file that gets its words."""
    log = folder / "dcgmi.log"
    program = folder / "bin" / "dcgmi"
    program.parent.mkdir()
    program.write_text(DCGMI.replace("{log}", str(log)))
    program.chmod(0o755)
    return log


async def test_a_value_is_put_into_dcgm_by_its_own_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = plans.parse("[[fault]]\nkind = 'dcgm_inject'\nvalue = 79\nincidents = ['unhealthy']\nnames = 'node'", where="plan").fault
    assert (fault.truth.incidents, fault.truth.names) == (("unhealthy",), "node")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigurationError, match="dcgmi is not on this machine"):
        dcgm.check()
    log = fake_dcgmi(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    dcgm.check()
    await dcgm.inject(fault.gpu, fault.field, fault.value)
    assert log.read_text() == "test --inject --gpuid 0 --field 230 --value 79\n"
    for gpu, words in ((1, "GPU id is invalid"), (5, "ended with 255: .*unable to establish")):
        with pytest.raises(OperationalError, match=words):
            await dcgm.inject(gpu, 230, 79)
    monkeypatch.setattr(dcgm, "_SECONDS", 0.3)
    with pytest.raises(OperationalError, match="no end"):
        await dcgm.inject(2, 230, 79)
