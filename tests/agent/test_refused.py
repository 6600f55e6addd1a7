"""A supervisor that does not lead is not asked again and again: the next leader record ends the wait."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from regrow import wire
from regrow.agent.beat import BeatConnection

LIMIT = 30.0


class Source:
    """An agent that only greets."""

    def __init__(self) -> None:
        self.taken = asyncio.Event()

    def hello(self) -> wire.Hello:
        return wire.Hello(cluster="c", node="n", incarnation="i", address="127.0.0.1", peer_address="127.0.0.1:1", slots=1)

    def beat_message(self, seq: int) -> wire.Beat:
        return wire.Beat(seq=seq)

    def welcomed(self, welcome: wire.Welcome) -> bool:
        self.taken.set()
        return welcome.epoch > 0

    def ordered(self, message: Any) -> None:
        del message

    def disconnected(self) -> None:
        return

    def refused(self, refusal: wire.Refused) -> None:
        del refusal


async def test_refusals_of_one_that_does_not_lead_come_more_and_more_seldom() -> None:
    attempts: list[float] = []
    came = asyncio.Event()
    leads = False

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        attempts.append(time.monotonic())
        answer = wire.Welcome(epoch=2, leader="s", beat_seconds=0.1) if leads else wire.Refused(reason="does not lead", leading=False)
        writer.write(wire.encode(answer))
        came.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = BeatConnection(source := Source())
    running = asyncio.create_task(connection.run())
    record = wire.LeaderRecord(supervisor="s", epoch=1, beat_address=f"127.0.0.1:{port}", http_address="")
    connection.set_leader(record)
    async with asyncio.timeout(LIMIT):
        while len(attempts) < 4:
            came.clear()
            await came.wait()
    gaps = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert all(gap >= least for gap, least in zip(gaps, (0.35, 0.7, 1.4), strict=True)), gaps
    leads = True
    asked = time.monotonic()
    connection.set_leader(wire.LeaderRecord(supervisor="s", epoch=2, beat_address=f"127.0.0.1:{port}", http_address=""))
    async with asyncio.timeout(LIMIT):
        await source.taken.wait()
    assert attempts[-1] - asked < 2.0, "the next attempt would have been due after 2.8 s at the earliest"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    server.close()
    await server.wait_closed()
