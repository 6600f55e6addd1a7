"""Which peers can this node reach on the network that its workers use? Asked by the leader when a generation does not move.

A peer is reached when its host answers, with a connection or with a refusal: an agent that is down is not a network that is cut.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping

from regrow import wire
from regrow.agent.interfaces import interface_of

SECONDS = 2.5
"""Two tries of the kernel: the second SYN leaves a second after the first, so that one lost packet is no verdict."""
_AT_ONCE = 32
_UNREACHED = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ETIMEDOUT)


class Reach:
    """Tries peers in the background and reports once a request."""

    def __init__(self, own_address: str, report: Callable[[wire.PeersProbed], None]) -> None:
        """`own_address`: where connections start from, so that they take the workers' way, where an interface has it."""
        self._own = own_address
        self._report = report
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, request: wire.ProbePeers) -> None:
        """Answer a request when all peers were tried."""
        task = asyncio.create_task(self._answer(request), name="regrow-reach")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Nobody waits for answers any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, request: wire.ProbePeers) -> None:
        own = self._own if await asyncio.to_thread(interface_of, self._own) else ""
        found = await probe(own, request.peers)
        self._report(
            wire.PeersProbed(
                job=request.job,
                generation=request.generation,
                reached=tuple(name for name, there in found.items() if there),
                unreached=tuple(name for name, there in found.items() if not there),
            )
        )


async def probe(own_address: str, peers: Mapping[str, str], *, seconds: float = SECONDS) -> dict[str, bool]:
    """{peer: does its host answer within `seconds`}. `peers`: {name: host:port}."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(address: str) -> bool:
        async with gate:
            return await _answers(own_address, address, seconds)

    answers = await asyncio.gather(*(one(address) for address in peers.values()))
    return dict(zip(peers, answers, strict=True))


async def _answers(own_address: str, address: str, seconds: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), local_addr=(own_address, 0) if own_address else None)
    except TimeoutError:
        return False
    except OSError as error:
        return error.errno not in _UNREACHED
    writer.transport.abort()
    return True
