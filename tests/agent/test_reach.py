"""Whom a node reaches: an answer of any kind is an answer, silence is none. Packets are dropped in a network namespace."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest
from tests.e2e import network

from regrow import wire
from regrow.agent.reach import Reach, probe

LIMIT = 30.0


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


async def test_a_host_that_accepts_and_one_that_refuses_are_there() -> None:
    """An agent that is down is not a network that is cut."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peers = {"up": f"127.0.0.1:{server.getsockname()[1]}", "agent-down": closed_port()}
        assert await probe("127.0.0.1", peers) == {"up": True, "agent-down": True}


async def test_one_report_for_a_request() -> None:
    told: asyncio.Queue[wire.PeersProbed] = asyncio.Queue()
    reach = Reach("127.0.0.1", told.put_nowait)
    reach.ask(wire.ProbePeers(job="j", generation=3, peers={"a": closed_port(), "b": closed_port()}))
    async with asyncio.timeout(LIMIT):
        report = await told.get()
    assert report == wire.PeersProbed(job="j", generation=3, reached=("a", "b"))
    await reach.close()


async def test_nobody_waits_for_an_answer_at_the_end() -> None:
    told: list[wire.PeersProbed] = []
    reach = Reach("", told.append)
    reach.ask(wire.ProbePeers(job="j", generation=3, peers={"a": closed_port()}))
    await reach.close()
    assert told == []


@pytest.fixture
def hosts() -> Iterator[network.Network]:
    made = network.Network(["x", "y"])
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.skipif(bool(network.why_not()), reason=network.why_not() or "never")
def test_a_host_whose_packets_are_dropped_is_not_reached(hosts: network.Network) -> None:
    own, there = hosts.address("x", network.DATA), hosts.address("y", network.DATA)
    by_management = hosts.address("y", network.MANAGEMENT)

    def ask() -> dict[str, bool]:
        return asyncio.run(probe(own, {"data": f"{there}:9", "nobody": "10.78.0.99:9"}, seconds=1.0))

    assert hosts.call("x", ask) == {"data": True, "nobody": False}, "a port that is closed answers, a host that is not there does not"
    hosts.cut("y", [network.DATA])
    assert hosts.call("x", ask) == {"data": False, "nobody": False}
    assert hosts.call("x", lambda: asyncio.run(probe("", {"management": f"{by_management}:9"}))) == {"management": True}
