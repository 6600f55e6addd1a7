"""A certificate that was revoked opens nothing any more, without a restart of anybody; those of others go on. Real handshakes."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from regrow import certificates, revocation, security
from regrow.errors import ConfigurationError

LIMIT = 60.0
HOSTS = ("127.0.0.1",)


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    certificates.make_authority(tmp_path, days=10)
    certificates.issue(tmp_path, "supervisor", "s0", hosts=HOSTS, days=5)
    for name in ("n0", "n1"):
        certificates.issue(tmp_path, "node", name, hosts=HOSTS, days=5)
    return tmp_path


def files(folder: Path, name: str) -> security.Files:
    return security.Files(str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(folder / "ca.pem"))


@asynccontextmanager
async def listening(pki: Path) -> AsyncIterator[int]:
    """A server as the supervisor's beat port: it asks for certificates and says whose it saw."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((security.peer_name(writer)[1] + "\n").encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=security.Tls(files(pki, "s0"), "server").listening)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def greet(port: int, pki: Path, name: str) -> str:
    """What the server says to a node; "" when it does not let it in."""
    client = security.Tls(files(pki, name), "client")
    try:
        async with asyncio.timeout(LIMIT):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client.connecting())
            said = (await reader.readline()).decode().strip()
            writer.close()
    except (ssl.SSLError, ConnectionError):
        return ""
    return said


def touch(path: Path) -> None:
    """A file system whose clock is coarse still shows that the file is another one."""
    stamp = path.stat().st_mtime_ns + 1_000_000_000
    os.utime(path, ns=(stamp, stamp))


async def test_a_revoked_node_is_out_and_the_others_are_not(pki: Path) -> None:
    async with listening(pki) as port:
        assert [await greet(port, pki, name) for name in ("n0", "n1")] == ["n0", "n1"]
        first = (pki / "n1.pem").read_bytes(), (pki / "n1.key").read_bytes()
        certificates.issue(pki, "node", "n1", hosts=HOSTS, days=5)
        assert certificates.revoke(pki, "n1") == 2, "the renewed one and the one before"
        touch(pki / "ca.crl")
        assert [await greet(port, pki, name) for name in ("n0", "n1")] == ["n0", ""]
        (pki / "n1.pem").write_bytes(first[0])
        (pki / "n1.key").write_bytes(first[1])
        assert await greet(port, pki, "n1") == ""
        certificates.issue(pki, "node", "n1", hosts=HOSTS, days=5)
        assert await greet(port, pki, "n1") == "n1", "a new certificate under the same name is a new one"


async def test_nodes_refuse_a_revoked_supervisor(pki: Path) -> None:
    certificates.revoke(pki, "s0")
    async with listening(pki) as port:
        assert await greet(port, pki, "n0") == ""


async def test_lists_go_through_a_rotation_of_the_authority(pki: Path) -> None:
    certificates.revoke(pki, "n1")
    certificates.renew_authority(pki, days=10)
    certificates.issue(pki, "supervisor", "s0", hosts=HOSTS, days=5)
    async with listening(pki) as port:
        assert [await greet(port, pki, name) for name in ("n0", "n1")] == ["n0", ""], "both authorities are trusted, with their lists"
        with pytest.raises(ConfigurationError, match="whose key is gone"):
            certificates.revoke(pki, "n0")
        certificates.issue(pki, "node", "n0", hosts=HOSTS, days=5)
        certificates.forget_old_authorities(pki)
        touch(pki / "ca.crl")
        touch(pki / "ca.pem")
        assert [await greet(port, pki, name) for name in ("n0", "n1")] == ["n0", ""]
        assert certificates.revoke(pki, "n0") == 1
        touch(pki / "ca.crl")
        assert await greet(port, pki, "n0") == ""


def test_what_was_revoked_is_shown_and_an_unknown_name_is_refused(pki: Path) -> None:
    certificates.revoke(pki, "n0")
    assert certificates.revoke(pki, "n0") == 0
    assert [one.file for one in certificates.summaries(pki) if one.revoked] == ["n0.pem"]
    with pytest.raises(ConfigurationError, match="no valid certificate"):
        certificates.revoke(pki, "n7")
    (found,) = revocation.lists((pki / "ca.crl").read_bytes())
    assert found.next_update_utc is not None
    assert found.next_update_utc == certificates.x509.load_pem_x509_certificate((pki / "ca.pem").read_bytes()).not_valid_after_utc


async def test_a_daemon_without_a_list_goes_on_without_one_and_one_that_had_it_does_not(pki: Path) -> None:
    held = (pki / "ca.crl").read_bytes()
    async with listening(pki) as port:
        (pki / "ca.crl").unlink()
        assert await greet(port, pki, "n0") == "n0", "what was read last holds"
    async with listening(pki) as port:
        assert await greet(port, pki, "n0") == "n0", "as hosts of an older authority have it"
    (pki / "ca.crl").write_bytes(held.replace(b"A", b"B"))
    with pytest.raises(ConfigurationError, match="cannot be used"):
        security.Tls(files(pki, "s0"), "server")
