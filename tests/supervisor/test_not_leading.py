"""A supervisor that does not lead pays for no TLS handshake: agents that come all the same are gone at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest

from regrow import certificates, security, wire
from regrow.supervisor.beat_server import BeatServer, Connection

LIMIT = 20.0


class Greeted:
    """Says to everybody that it is enough."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def greeted(self, hello: wire.Hello, connection: Connection) -> wire.Refused:
        assert connection.node == hello.node
        self.names.append(hello.node)
        return wire.Refused(reason="enough")

    def said(self, connection: Connection, message: Any) -> None:
        raise AssertionError(f"nobody was welcomed: {connection.node} {message}")

    def closed(self, connection: Connection, reason: str) -> None:
        raise AssertionError(f"nobody was welcomed: {connection.node} {reason}")


def tls(folder: Path, name: str, side: Literal["server", "client"]) -> security.Tls:
    return security.Tls(security.Files(str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(folder / "ca.pem")), side)


async def greet(port: int, node: str, client: security.Tls) -> wire.ToAgent:
    async with asyncio.timeout(LIMIT):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client.connecting())
        try:
            writer.write(wire.encode(wire.Hello(cluster="t", node=node, incarnation="1", address="127.0.0.1", peer_address="", slots=1)))
            return wire.decode(await reader.readline(), wire.ToAgent)
        finally:
            writer.transport.abort()


async def test_while_it_does_not_lead_nobody_gets_as_far_as_a_handshake(tmp_path: Path) -> None:
    certificates.make_authority(tmp_path, days=10)
    certificates.issue(tmp_path, "supervisor", "s0", hosts=("127.0.0.1",), days=5)
    certificates.issue(tmp_path, "node", "n0", hosts=("127.0.0.1",), days=5)
    leads = False
    receiver = Greeted()
    server = BeatServer(receiver, tls=tls(tmp_path, "s0", "server").listening, welcomes=lambda: leads)
    client = tls(tmp_path, "n0", "client")
    await server.start("127.0.0.1", 0)
    try:
        for _ in range(40):  # more than are taken at a time
            async with asyncio.timeout(LIMIT):
                with pytest.raises(ConnectionError):
                    await asyncio.open_connection("127.0.0.1", server.port, ssl=client.connecting())
        assert server.num_conversations == 0
        assert receiver.names == []
        leads = True
        answer = await greet(server.port, "n0", client)
        assert isinstance(answer, wire.Refused)
        assert answer.reason == "enough"
        assert receiver.names == ["n0"]
    finally:
        await server.stop()
