"""Case C01: a port that was chosen is never let go before it is used, so nobody can take it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.agent.harness import Harness, until

from regrow.agent import protocol

Make = Callable[..., Harness]
RESTARTS = 25


class Hog:
    """Takes every port as soon as it can, and keeps it."""

    def __init__(self) -> None:
        self.held: dict[int, socket.socket] = {}

    def grab(self, port: int) -> bool:
        """True when it got the port."""
        taker = socket.socket()
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # over what is left of closed connections
        try:
            taker.bind(("127.0.0.1", port))
            taker.listen()
        except OSError:
            taker.close()
            return False
        self.held[port] = taker
        return True

    def close(self) -> None:
        """Let go of all."""
        for taker in self.held.values():
            taker.close()


def port_of(address: str) -> int:
    """Of host:port."""
    return int(address.rpartition(":")[2])


async def spare(shim: Harness, used: set[str]) -> str:
    """Address of a store that nobody has used."""

    def ready() -> str:
        stores = [item.store for item in shim.news if isinstance(item, protocol.StoreChanged)]
        gone = {item.store.address for item in shim.news if isinstance(item, protocol.StoreChanged) and item.ended}
        return next((store.address for store in stores if not store.generation and store.address not in used | gone), "")

    return await until(ready)


async def restart(shim: Harness, hog: Hog, number: int, used: set[str]) -> None:
    """One generation gets a store, is reached there, and ends; then the hog has the port."""
    stands = await spare(shim, used)
    assert not hog.grab(port_of(stands)), f"port of the spare store {stands} could be taken"
    store = await shim.launcher.open_store("toy", number)
    assert store.address == stands
    used.add(stands)
    assert not hog.grab(port_of(stands)), f"port of the store {stands} could be taken while it was handed over"
    with socket.create_connection(("127.0.0.1", port_of(stands)), 30):
        pass
    await shim.launcher.stop("toy", number)
    await until(lambda: any(isinstance(item, protocol.StoreChanged) and item.ended and item.store.address == stands for item in shim.news))
    await until(lambda: hog.grab(port_of(stands)))


@pytest.mark.timeout(200)
async def test_c01_two_jobs_side_by_side_restart_under_a_port_hog(harness: Make, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    shims = [harness(imports=True, spare_store=True), Harness(tmp_path / "other", imports=True, spare_store=True)]
    hog = Hog()
    try:
        for shim in shims:
            await shim.up()
        used: list[set[str]] = [set(), set()]
        for number in range(1, RESTARTS + 1):
            await asyncio.gather(*(restart(shim, hog, number, mine) for shim, mine in zip(shims, used, strict=True)))
        assert len(used[0] | used[1]) == 2 * RESTARTS, "a port is never used twice, nor by both"
    finally:
        hog.close()
        await shims[1].leave()
