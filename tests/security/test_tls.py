"""Mutual TLS on the beat connection and the peer port, HTTPS with tokens, and rotation while connections live. Real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from regrow import certificates, security, wire
from regrow.agent.peer import PeerClient, PeerServer, Report, Settled
from regrow.cli.app import build
from regrow.errors import ConfigurationError, RegrowError
from regrow.supervisor.beat_server import BeatServer, Connection

LIMIT = 60.0
HOSTS = ("127.0.0.1", "localhost")


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    folder = tmp_path / "pki"
    certificates.make_authority(folder, days=10)
    certificates.issue(folder, "supervisor", "s0", hosts=HOSTS, days=5)
    for name in ("n0", "n1"):
        certificates.issue(folder, "node", name, hosts=HOSTS, days=5)
    return folder


def files(folder: Path, name: str) -> security.Files:
    return security.Files(str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(folder / "ca.pem"))


class Receiver:
    def __init__(self) -> None:
        self.greetings: list[str] = []
        self.said_by: list[str] = []
        self.heard = asyncio.Condition()

    def greeted(self, hello: wire.Hello, _connection: Connection) -> wire.Welcome | wire.Refused:
        self.greetings.append(hello.node)
        return wire.Refused(reason="enough")

    def said(self, connection: Connection, _message: object) -> None:
        self.said_by.append(connection.node)

    def closed(self, _connection: Connection, _reason: str) -> None:
        return


@asynccontextmanager
async def beat_server(tls: security.Tls) -> AsyncIterator[tuple[BeatServer, Receiver]]:
    receiver = Receiver()
    server = BeatServer(receiver, tls=tls.listening)
    await server.start("127.0.0.1", 0)
    try:
        yield server, receiver
    finally:
        await server.stop()


async def greet(port: int, node: str, context: ssl.SSLContext | None) -> str:
    """The supervisor's answer to this greeting, or how the connection failed."""
    try:
        async with asyncio.timeout(LIMIT):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(wire.encode(wire.Hello(cluster="t", node=node, incarnation="1", address="127.0.0.1", peer_address="", slots=1)))
            line = await reader.readline()
            writer.transport.abort()
            return str(json.loads(line)["reason"]) if line else "closed"
    except (OSError, ssl.SSLError) as error:
        return type(error).__name__


async def test_only_the_node_itself_gets_in(pki: Path, tmp_path: Path) -> None:
    certificates.make_authority(tmp_path / "other", days=10)
    certificates.issue(tmp_path / "other", "node", "n0", hosts=HOSTS, days=5)
    stranger = security.Files(str(tmp_path / "other/n0.pem"), str(tmp_path / "other/n0.key"), str(pki / "ca.pem"))
    certificates.issue(pki, "client", "plain", hosts=(), days=5)
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname = False
    anonymous.load_verify_locations(pki / "ca.pem")
    async with beat_server(security.Tls(files(pki, "s0"), "server")) as (server, receiver):

        async def as_node(shown: security.Files, node: str) -> str:
            return await greet(server.port, node, security.Tls(shown, "client").connecting())

        assert await as_node(files(pki, "n0"), "n0") == "enough"
        assert "does not name node n1" in await as_node(files(pki, "n0"), "n1")
        assert "does not name node s0" in await as_node(files(pki, "s0"), "s0")
        assert "does not name node n0" in await as_node(files(pki, "plain"), "n0")
        assert await as_node(stranger, "n0") in ("SSLError", "ConnectionResetError", "closed")
        assert await greet(server.port, "n0", anonymous) in ("SSLError", "ConnectionResetError", "closed")
        assert await greet(server.port, "n0", None) in ("ConnectionResetError", "closed")
    assert receiver.greetings == ["n0"]


async def test_certificates_and_authority_are_replaced_while_connections_live(pki: Path) -> None:
    server_tls, client_tls = security.Tls(files(pki, "s0"), "server"), security.Tls(files(pki, "n0"), "client")
    async with beat_server(server_tls) as (server, _receiver):

        def serial(writer: asyncio.StreamWriter) -> str:
            return str(writer.get_extra_info("peercert")["serialNumber"])

        _, old = await asyncio.open_connection("127.0.0.1", server.port, ssl=client_tls.connecting())
        first = serial(old)
        certificates.renew_authority(pki, days=10)
        for kind, name in (("supervisor", "s0"), ("node", "n0")):
            certificates.issue(pki, kind, name, hosts=HOSTS, days=5)  # type: ignore[arg-type]
        certificates.forget_old_authorities(pki)
        assert await greet(server.port, "n0", client_tls.connecting()) == "enough"
        _, new = await asyncio.open_connection("127.0.0.1", server.port, ssl=client_tls.connecting())
        assert serial(new) != first
        assert not old.is_closing()
        assert (server_tls.num_reloads, client_tls.num_reloads) == (1, 1)
        (pki / "s0.pem").write_text("half a file")
        assert await greet(server.port, "n0", client_tls.connecting()) == "enough"
        for writer in (old, new):
            writer.transport.abort()


async def test_reports_between_nodes_are_mutual_too(pki: Path) -> None:
    got: asyncio.Queue[Report] = asyncio.Queue()
    settled: asyncio.Queue[Settled] = asyncio.Queue()

    async def handle(report: Report) -> Settled:
        got.put_nowait(report)
        return Settled(job=report.job, generation=report.generation, step=report.step, outcome="committed")

    server = PeerServer("127.0.0.1", 0, handle, tls=security.Tls(files(pki, "n0"), "server"))
    await server.start()
    report = wire.ShardsFailed(job="j", generation=1, step=5, node="n1", reason="disk")
    client = PeerClient(server.address, settled.put_nowait, tls=security.Tls(files(pki, "n1"), "client"))
    client.report(report)
    assert (await asyncio.wait_for(settled.get(), LIMIT)).step == 5
    await client.close()

    impostor = PeerClient(server.address, settled.put_nowait, tls=security.Tls(files(pki, "s0"), "client"))
    impostor.report(wire.ShardsFailed(job="j", generation=1, step=6, node="n1", reason="forged"))
    _, plain = await asyncio.open_connection("127.0.0.1", int(server.address.rpartition(":")[2]))
    plain.write(wire.encode(wire.ShardsFailed(job="j", generation=1, step=7, node="n1", reason="forged")))
    honest = PeerClient(server.address, settled.put_nowait, tls=security.Tls(files(pki, "n1"), "client"))
    honest.report(wire.ShardsFailed(job="j", generation=1, step=8, node="n1", reason="disk"))
    while (await asyncio.wait_for(settled.get(), LIMIT)).step != 8:
        pass
    assert [got.get_nowait().step for _ in range(got.qsize())] == [5, 8]
    await asyncio.gather(impostor.close(), honest.close())
    plain.transport.abort()
    await server.close()


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "regrow", *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def inside(*arguments: str) -> Result:
    """The command in this process: errors of ours as their exit code."""
    found = CliRunner().invoke(build(), list(arguments))
    if isinstance(found.exception, RegrowError):
        found.exit_code = found.exception.exit_code
    return found


def test_commands_make_show_and_refuse(tmp_path: Path) -> None:
    folder = str(tmp_path / "pki")
    assert inside("certs", "ca", "--dir", folder).exit_code == 0
    assert inside("certs", "ca", "--dir", folder).exit_code == 2
    made = json.loads(inside("certs", "issue", "node", "n7", "--host", "10.0.0.7", "--dir", folder, "--days", "3", "--json").stdout)
    assert Path(made["key"]).stat().st_mode & 0o777 == 0o600
    assert not (Path(folder) / "ca.key").stat().st_mode & 0o077
    shown = inside("certs", "show", "--dir", folder, "--json")
    assert shown.exit_code == 3, "three days are less than two weeks"
    listed = json.loads(shown.stdout)["certificates"]
    assert [one["file"] for one in listed] == ["n7.pem", "ca.pem"]
    assert listed[0]["names"] == ["10.0.0.7", "regrow:node:n7"]
    assert inside("certs", "issue", "boss", "x", "--dir", folder).exit_code == 2
    assert inside("certs", "issue", "node", "../x", "--dir", folder).exit_code == 2
    tokens = str(tmp_path / "tokens")
    token = inside("certs", "token", "alice", "--role", "operate", "--file", tokens).stdout.strip()
    assert len(token) >= 43
    assert token not in Path(tokens).read_text()
    assert inside("certs", "token", "alice", "--file", tokens, "--remove").exit_code == 0
    assert inside("certs", "token", "alice", "--file", tokens, "--remove").exit_code == 2


def test_keys_that_others_can_read_are_refused(pki: Path) -> None:
    (pki / "n0.key").chmod(0o644)
    with pytest.raises(ConfigurationError, match="open to others"):
        files(pki, "n0").check("[agent]")
    with pytest.raises(ConfigurationError, match="tls_ca not given"):
        security.Files(str(pki / "n1.pem"), str(pki / "n1.key"), "").check("[agent]")


async def test_a_whole_run_over_tls_and_https(pki: Path, tmp_path: Path) -> None:
    """Real supervisor and agent processes on a real etcd: the agent joins over mTLS, an operator asks over HTTPS with a token."""
    from regrow.store.embedded import EmbeddedEtcd

    tokens = tmp_path / "tokens"
    token = inside("certs", "token", "root", "--role", "admin", "--file", str(tokens)).stdout.strip()
    etcd = EmbeddedEtcd(tmp_path / "etcd")
    await etcd.start()
    environment = {**os.environ, "REGROW_SUPERVISOR_TOKENS": str(tokens), "REGROW_SUPERVISOR_HTTP_TLS": "1"}
    for section, name, ca in (("SUPERVISOR", "s0", "CLIENT_CA"), ("AGENT", "n0", "CA")):
        shown = files(pki, name)
        environment |= {f"REGROW_{section}_TLS_CERTIFICATE": shown.certificate, f"REGROW_{section}_TLS_KEY": shown.key}
        environment[f"REGROW_{section}_TLS_{ca}"] = shown.ca
    common = ("--cluster", "t", "--store", etcd.url)
    commands = (
        ("supervisor", *common, "--state", str(tmp_path / "s"), "--ttl", "2"),
        ("agent", *common, "--state", str(tmp_path / "a"), "--node", "n0", "--no-warm", "--kernel-log", "", "--health-seconds", "0"),
    )
    log = (tmp_path / "log").open("wb")
    children = [
        await asyncio.create_subprocess_exec(sys.executable, "-m", "regrow", *line, env=environment, stdout=log, stderr=log)
        for line in commands
    ]
    try:
        trust = ssl.create_default_context(cafile=str(pki / "ca.pem"))
        async with (
            asyncio.timeout(LIMIT),
            httpx.AsyncClient(verify=trust, headers={"authorization": f"Bearer {token}"}, trust_env=False) as client,
        ):
            connected: list[str] = []
            while connected != ["n0"]:
                assert all(child.returncode is None for child in children), (tmp_path / "log").read_text()
                await asyncio.sleep(0.1)
                if not (tmp_path / "s/supervisor.json").exists():
                    continue
                base = json.loads((tmp_path / "s/supervisor.json").read_text())["http"]
                answer = await client.get(f"{base}/v1/nodes")
                connected = [node["node"] for node in answer.json().get("nodes", ()) if node.get("connected")]
            assert base.startswith("https://")
        shown = await asyncio.to_thread(command, "node", "ls", "--json", *common, REGROW_TOKEN=token, REGROW_CA=str(pki / "ca.pem"))
        assert [node["node"] for node in json.loads(shown.stdout)["nodes"]] == ["n0"], shown.stderr
    finally:
        for child in reversed(children):
            child.terminate()
            await child.wait()
        await etcd.stop()
        log.close()
