"""Case C01: a port that was chosen is never let go before it is used, so nobody can take it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.agent.harness import Harness, until

from regrow.agent import protocol
from regrow.agent.starting import Starter

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


async def spare(shim: Harness, used: set[int]) -> protocol.StoreState:
    """A store that stands and that nobody has used; processes name it, for the kernel may give out a port again."""

    def ready() -> protocol.StoreState | None:
        told = [item for item in shim.news if isinstance(item, protocol.StoreChanged)]
        gone = {item.store.pid for item in told if item.ended}
        stands = [item.store for item in told if not item.store.generation and item.store.pid not in used | gone]
        return stands[0] if stands else None

    return await until(ready)


async def restart(shim: Harness, hog: Hog, number: int, used: set[int]) -> None:
    """One generation gets a store, is reached there, and ends; then the hog takes the port."""
    stands = await spare(shim, used)
    port = port_of(stands.address)
    assert not hog.grab(port), f"port of the spare store {stands} could be taken"
    store = await shim.launcher.open_store("toy", number)
    assert store.address == stands.address
    used.add(stands.pid)
    assert not hog.grab(port), f"port of the store {stands} could be taken while it was handed over"
    with socket.create_connection(("127.0.0.1", port), 30):
        pass
    await shim.launcher.stop("toy", number)
    await until(lambda: any(isinstance(item, protocol.StoreChanged) and item.ended and item.store.pid == stands.pid for item in shim.news))
    hog.grab(port)  # mostly the kernel keeps it for a while after its connections


class Watched(Starter):
    """Tries to take the port at the one moment when a launcher could have let it go: as the process that will serve it starts."""

    def __init__(self, hog: Hog) -> None:
        super().__init__()
        self.hog = hog
        self.taken: list[bool] = []

    def _exec_store(self, listener: int, done: int) -> int:
        with socket.socket(fileno=os.dup(listener)) as bound:
            self.taken.append(self.hog.grab(bound.getsockname()[1]))
        return super()._exec_store(listener, done)


def test_c01_the_port_is_held_while_it_is_handed_over() -> None:
    hog = Hog()
    starter = Watched(hog)
    ready = starter.open_store("127.0.0.1", safe=False)
    try:
        assert starter.taken == [False]
        (store,) = starter.opening.values()
        assert not hog.grab(port_of(store.address)), "nor after the starter has closed its own descriptor"
    finally:
        os.close(ready)
        for pid in starter.opening:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        hog.close()


@pytest.mark.timeout(200)
async def test_c01_two_jobs_side_by_side_restart_under_a_port_hog(harness: Make, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    shims = [harness(imports=True, spare_store=True), Harness(tmp_path / "other", imports=True, spare_store=True)]
    hog = Hog()
    try:
        for shim in shims:
            await shim.up()
        used: list[set[int]] = [set(), set()]
        for number in range(1, RESTARTS + 1):
            await asyncio.gather(*(restart(shim, hog, number, mine) for shim, mine in zip(shims, used, strict=True)))
        assert len(used[0] | used[1]) == 2 * RESTARTS, "each generation has a store of its own"
    finally:
        hog.close()
        await shims[1].leave()
