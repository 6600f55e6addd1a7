"""NCCL's RAS service, served in the shapes that its source prints: JSON (2.28.7 and later) and text (before)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from regrow.agent.health import ras
from regrow.agent.health.autopsy_verdict import RankView, judge
from regrow.agent.health.stackview import Frame, stack_of

HASH = "27a079b828ff1a75"
WAITING = stack_of([Frame("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py", 1), Frame("train", "/t.py", 2)])


def member(rank: int, **more: Any) -> dict[str, Any]:
    counts = {"Broadcast": 3, "AllReduce": more.pop("launched", 100)}
    status = {"init_state": 0, "async_error": more.pop("error", 0), "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    place = {"rank": rank, "host": f"10.0.0.{rank // 2}", "pid": 1000 + rank, "cuda_dev": rank % 2, "nvml_dev": rank % 2}
    return {**place, "status": status, "collective_counts": counts}


def lost(rank: int, *, unresponsive: bool = True) -> dict[str, Any]:
    return {**member(rank), "status": {"unresponsive": unresponsive, "considered_dead": False}}


def document(*ranks: dict[str, Any], missing: tuple[dict[str, Any], ...] = (), size: int = 4) -> bytes:
    one = {"hash": f"0x{HASH}", "secondary_hash": "0x1:0x2", "size": size, "ranks_count": len(ranks), "missing_ranks_count": len(missing)}
    communicators = [{**one, "ranks": list(ranks), "missing_ranks": list(missing)}]
    return json.dumps({"nccl_version": "2.29.1", "communicators_count": 1, "communicators": communicators, "ras": {}}).encode()


HEADING = """NCCL version 2.26.2 compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          2            1          4        4

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
BEHIND = (
    HEADING
    + """    0         1         2         2         4         4   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 6650
  Rank 2 has launched up to operation 6649 -- GPU 0 managed by process 1002 on node 10.0.0.1

"""
)
TWO_BEHIND = BEHIND.replace("  3 ranks", "  6 ranks").replace(
    "  Rank 2 has launched up to operation 6649 -- GPU 0 managed by process 1002 on node 10.0.0.1",
    "  2 ranks have launched up to operation 6649\n  Rank 2 -- GPU 0 managed by process 1002 on node 10.0.0.1\n"
    "  Rank 3 -- GPU 1 managed by process 1003 on node 10.0.0.1",
)
GONE = (
    HEADING
    + """    0         1         2       1-2         4         4   RUNNING  INCOMPLETE

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 1003 on node 10.0.0.1 managing GPU 1

#0-0 (27a079b828ff1a75) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 3

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

"""
)


@asynccontextmanager
async def service(answer: Callable[[], bytes], *, json_known: bool = True) -> AsyncIterator[str]:
    """The server's side of the protocol as NCCL's source has it; closes after a status, as NCCL does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := (await reader.readline()).decode().strip().lower():
            if line.startswith("client protocol "):
                writer.write(b"SERVER PROTOCOL 2\n")
            elif line.startswith("timeout ") or (line.startswith("set format ") and json_known):
                writer.write(b"OK\n")
            elif line == "verbose status":
                writer.write(answer())
                break
            else:
                writer.write(f"ERROR: Unknown command {line}\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def asked(data: bytes, *, json_known: bool = True) -> ras.Ras:
    async with service(lambda: data, json_known=json_known) as address:
        return await ras.ask(address, 20.0)


FOUR = {1000: 0, 1001: 1}
"""Ranks 0 and 1 are on this host."""


async def test_a_rank_that_launched_less_is_named_with_its_place() -> None:
    told = await asked(document(member(0), member(1), member(2, launched=99), member(3)))
    (found,) = ras.findings(told, told, FOUR, 4)
    assert (found.kind, found.ranks, found.sequence, found.everywhere) == ("behind", (2,), 100, True)
    assert "pid 1002 on 10.0.0.1" in found.text


async def test_counts_that_move_between_two_looks_are_a_job_that_moves() -> None:
    before = await asked(document(member(0), member(1), member(2, launched=99), member(3)))
    after = await asked(document(member(0, launched=107), member(1, launched=107), member(2, launched=106), member(3, launched=107)))
    assert ras.findings(before, after, FOUR, 4) == []


async def test_a_rank_without_an_answer_and_one_with_an_error() -> None:
    told = await asked(document(member(0), member(1, error=6), member(2), missing=(lost(3),)))
    gone, broken = ras.findings(told, told, FOUR, 4)
    assert (gone.kind, gone.ranks) == ("gone", (3,))
    assert (broken.kind, broken.ranks) == ("not_completed", (1,))
    assert "async_error 6" in broken.text


async def test_ranks_of_a_smaller_communicator_are_told_by_their_process() -> None:
    """Rank 0 of a tensor parallel pair is no rank 0 of the job."""
    told = await asked(document(member(0, launched=9), member(1), member(2), size=3))
    (found,) = ras.findings(told, told, {1000: 12, 1001: 13}, 16)
    assert found.ranks == (12,)


async def test_a_communicator_that_is_made_or_torn_down_accuses_nobody() -> None:
    told = await asked(document(member(0), member(1), member(2), missing=(lost(3, unresponsive=False),)))
    assert ras.findings(told, told, FOUR, 4) == []


@pytest.mark.parametrize(("text", "kind", "ranks"), [(BEHIND, "behind", (2,)), (TWO_BEHIND, "behind", (2, 3)), (GONE, "gone", (3,))])
async def test_the_text_form(text: str, kind: str, ranks: tuple[int, ...]) -> None:
    told = await asked(text.encode(), json_known=False)
    assert told.version == "2.26.2"
    (found,) = ras.findings(told, told, FOUR, 4)
    assert (found.kind, found.ranks) == (kind, ranks)


async def test_the_answer_decides_the_autopsy_also_for_ranks_of_other_hosts() -> None:
    told = await asked(document(member(0), member(1), member(2, launched=99), member(3)))
    found = ras.findings(told, told, FOUR, 4)
    here = [RankView(rank=rank, pid=1000 + rank, state="S", stack=WAITING) for rank in (0, 1)]
    verdict = judge(here, world_size=4, local_world_size=2, findings=found)
    assert (verdict.status, verdict.cause, verdict.ranks, verdict.sequence) == ("hung", "collective_not_entered", (2,), 100)


@pytest.mark.parametrize("data", [b"", b"{", b'{"communicators": 3}', b'{"communicators": [{"hash": 1}]}', b"hello\n"])
async def test_nonsense_is_an_error_with_words(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a RAS answer"):
        await asked(data)


async def test_something_else_listens_there() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        with pytest.raises(ValueError, match="no NCCL RAS service"):
            await ras.ask(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", 20.0)
