"""An all-gather of two nodes, over the network of the workers: each sends a block of known bytes to the other, both at once, and both
tell what they hold in the end.

    asks                                     answers
    PairCheck (a line)             ->
                                   <-        Accepted (a line): whether it has passed with anybody
    its block, raw                <->        its block, raw
    Seen (a line)                 <->        Seen (a line): bytes that were wrong, digest of both blocks

The blocks follow from the nonce and the sender's name, so a receiver knows every byte. Over TLS a changed byte ends the connection
instead: a broken record is told as `wrong`, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import ssl
import time

import msgspec

from regrow import security, wire
from regrow.agent.pair_judge import Exchange

NUM_BYTES = 4 << 20
MAX_BYTES = 8 << 20
CONNECT_SECONDS = 2.5
"""Two tries of the kernel, as in agent/reach.py."""
EXCHANGE_SECONDS = 6.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
"""Both directions of a connection."""


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="pair_accepted"):
    """The partner takes part. `good`: it has passed an exchange with somebody since it started. `busy`: not now."""

    good: bool = False
    busy: bool = False


class Seen(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="pair_seen"):
    """What one side holds at the end: wrong bytes of the other's block, digest of both blocks in the order (asks, answers)."""

    wrong: int = 0
    digest: str


def block(nonce: str, sender: str, num_bytes: int) -> bytes:
    """The bytes that a node sends in the exchange `nonce`."""
    return hashlib.shake_128(f"{nonce}/{sender}".encode()).digest(num_bytes)


async def ask(
    own: str, partner: str, address: str, *, tls: security.Tls | None = None, num_bytes: int = NUM_BYTES, spoil: bool = False
) -> Exchange:
    """One exchange with `partner` at `address` (host:port), over within 2 * CONNECT_SECONDS + EXCHANGE_SECONDS. Never raises.

    Args:
        spoil: chaos: one bit of the block that this node sends is flipped.
    """
    began = time.monotonic()
    request = wire.PairCheck(node=own, nonce=os.urandom(16).hex(), num_bytes=num_bytes)
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            streams = await asyncio.open_connection(
                host.strip("[]"), int(port), limit=wire.MAX_MESSAGE_BYTES, ssl=tls.connecting() if tls is not None else None
            )
    except TimeoutError:
        return Exchange(outcome="late", seconds=time.monotonic() - began, detail="no connection")
    except (OSError, ValueError) as error:
        return Exchange(outcome="absent", seconds=time.monotonic() - began, detail=str(error)[:200])
    try:
        security.expect_role(streams[1], "node")
        found = await _asked(streams, request, partner, spoil)
        return msgspec.structs.replace(found, seconds=time.monotonic() - began)
    except ConnectionRefusedError as error:
        return Exchange(outcome="absent", seconds=time.monotonic() - began, detail=str(error)[:200])
    finally:
        streams[1].transport.abort()


async def _asked(streams: Streams, request: wire.PairCheck, partner: str, spoil: bool) -> Exchange:
    reader, writer = streams
    writer.write(wire.encode(request))
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            accepted = msgspec.json.decode(await reader.readline(), type=Accepted)
    except (OSError, ValueError, TimeoutError) as error:
        return Exchange(outcome="absent", detail=f"takes no part: {error}".rstrip(": "))
    if accepted.busy:
        return Exchange(outcome="absent", detail="busy")
    found = await _exchange(streams, request, own=request.node, other=partner, spoil=spoil)
    return msgspec.structs.replace(found, good=accepted.good)


async def answer(streams: Streams, request: wire.PairCheck, own: str, *, good: bool, spoil: bool = False) -> Exchange:
    """The other side of one exchange, after the request was read; over within EXCHANGE_SECONDS. Never raises."""
    if not 0 < request.num_bytes <= MAX_BYTES:
        return Exchange(outcome="absent", detail=f"asks for {request.num_bytes} bytes")
    began = time.monotonic()
    streams[1].write(wire.encode(Accepted(good=good)))
    found = await _exchange(streams, request, own=own, other=request.node, spoil=spoil)
    return msgspec.structs.replace(found, seconds=time.monotonic() - began)


async def _exchange(streams: Streams, request: wire.PairCheck, *, own: str, other: str, spoil: bool) -> Exchange:
    reader, writer = streams
    size, first = request.num_bytes, own == request.node
    try:
        async with asyncio.timeout(EXCHANGE_SECONDS):
            ours = await asyncio.to_thread(block, request.nonce, own, size)
            expected = await asyncio.to_thread(block, request.nonce, other, size)
            writer.write(_spoiled(ours) if spoil else ours)
            got, _ = await asyncio.gather(reader.readexactly(size), writer.drain())
            wrong, where = await asyncio.to_thread(_compare, got, expected)
            seen = Seen(wrong=wrong, digest=hashlib.sha256(ours + got if first else got + ours).hexdigest())
            writer.write(wire.encode(seen))
            theirs = msgspec.json.decode(await reader.readline(), type=Seen)
    except TimeoutError:
        return Exchange(outcome="late", detail=f"no end within {EXCHANGE_SECONDS:.0f} s")
    except (ssl.SSLError, msgspec.MsgspecError) as error:
        return Exchange(outcome="wrong", detail=f"what came is not what was sent: {error}"[:200])
    except (OSError, EOFError, ValueError) as error:
        return Exchange(outcome="absent", detail=f"the connection ended: {error}"[:200])
    if wrong:
        return Exchange(outcome="wrong", detail=f"{wrong} bytes of {other} arrived wrong, the first at {where}")
    if theirs.wrong:
        return Exchange(outcome="wrong", detail=f"{theirs.wrong} bytes of this node arrived wrong at {other}")
    if theirs.digest != seen.digest:
        return Exchange(outcome="wrong", detail=f"{other} holds something else in the end")
    return Exchange(outcome="ok")


def _compare(got: bytes, expected: bytes) -> tuple[int, int]:
    """Number of bytes that differ, and the first of them."""
    if got == expected:
        return 0, -1
    different = (int.from_bytes(got, "big") ^ int.from_bytes(expected, "big")).to_bytes(len(expected), "big")
    return len(different) - different.count(0), len(different) - len(different.lstrip(b"\0"))


def _spoiled(ours: bytes) -> bytes:
    middle = len(ours) // 2
    return ours[:middle] + bytes([ours[middle] ^ 1]) + ours[middle + 1 :]
