"""Shards without copies: what arrives in an all-gather is compared with what its owner holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regrow import wire
from regrow.places import block_text
from regrow.supervisor.core import sdc

WIDTH = 30
"""Of the layers, in float32: four owners have 8, 8, 8 and 6 rows."""


def first(rows: int, size: int = 4, columns: int = WIDTH) -> str:
    """The middle layer's weight of an owner of so many rows."""
    return f"model.1.weight, {block_text(1, rows * columns * size)}"


def said(folder: Path, world: int) -> dict[str, dict[int, wire.DigestEvidence]]:
    """{step: {rank: its evidence}}."""
    found: dict[str, dict[int, wire.DigestEvidence]] = {}
    for rank in range(world):
        for step, (received, receivers) in json.loads((folder / f"said-{rank}.json").read_text()).items():
            told = {int(owner): tensor for owner, tensor in received.items()}
            found.setdefault(step, {})[rank] = wire.DigestEvidence(received=told, receivers=receivers)
    return found


def test_who_sends_and_who_receives_a_wrong_bit_is_told_apart(ranks: Any) -> None:
    """Four shards cut unevenly, bfloat16 on the wire, HSDP; and a run in which every bit is right says nothing."""

    def job(name: str, where: str, rank: int, owner: int, **more: Any) -> Any:
        return ranks.job(name, 4, "gathers:train", {"folder": "{folder}", "where": where, "rank": rank, "owner": owner, **more})

    done = ranks.run(
        [
            job("clean", "arrived", -1, 0),
            job("sent", "sent", 2, 2),
            job("arrived", "arrived", 1, 3, bf16=True),
            job("copies", "arrived", 1, 0, copies=2),
            job("backward", "backward", 3, 1),
            job("tensor", "backward", 2, 0, tensor=2),
        ]
    )
    assert said(done["clean"].ok(), 4) == {}
    sent = said(done["sent"].ok(), 4)
    assert {step: {rank: one.received for rank, one in by.items()} for step, by in sent.items()} == {
        "5": {rank: {2: first(8)} for rank in range(4)}
    }
    blamed = sdc.blame(sent["5"])
    assert blamed is not None
    assert blamed.rank == 2
    arrived = said(done["arrived"].ok(), 4)
    assert {step: {rank: one.received for rank, one in by.items()} for step, by in arrived.items()} == {"5": {1: {3: first(6, size=2)}}}
    blamed = sdc.blame(arrived["5"])
    assert blamed is not None
    assert blamed.rank == 1
    copies = said(done["copies"].ok(), 4)
    assert {step: {rank: one.received for rank, one in by.items()} for step, by in copies.items()} == {"5": {1: {0: first(15)}}}
    blamed = sdc.blame(copies["5"])
    assert blamed is not None
    assert blamed.rank == -1, "of two that share shards nobody can be named"
    backward = said(done["backward"].ok(), 4)
    assert {step: {rank: one.received for rank, one in by.items()} for step, by in backward.items()} == {
        "5": {3: {1: f"{first(8)} (for the backward pass)"}}
    }
    blamed = sdc.blame(backward["5"])
    assert blamed is not None
    assert blamed.rank == 3
    tensor = said(done["tensor"].ok(), 4)
    assert {step: {rank: one.received for rank, one in by.items()} for step, by in tensor.items()} == {
        "5": {2: {0: f"{first(8)} (for the backward pass)"}}  # half of the rows by tensor parallelism, half of these by FSDP
    }
