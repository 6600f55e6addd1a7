"""Which parts of the state nobody else has: counted as a table, asked at one boundary of a generation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from regrow.agent.worker.replicas import BOUNDARY, Held, Replicas, Soles, soles
from regrow.ckpt.layout import Box


def ranks(*shards: str, per_node: int = 2) -> list[Held]:
    """Ranks in order, so many on each node."""
    return [Held(node=f"n{rank // per_node}", shard=shard) for rank, shard in enumerate(shards)]


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (ranks("a", "a", "a", "a"), Soles(ranks=0, nodes=0)),
        (ranks("a", "b", "a", "b"), Soles(ranks=0, nodes=0)),
        (ranks("a", "a", "b", "b"), Soles(ranks=0, nodes=2)),
        (ranks("a", "b", "c", "d"), Soles(ranks=4, nodes=2)),
        (ranks("a", "b", "b", "c"), Soles(ranks=2, nodes=2)),
        (ranks("a", "b", "a", "b", "a", "c"), Soles(ranks=1, nodes=1)),
        (ranks("a", "a"), Soles(ranks=0, nodes=1)),
    ],
    ids=["ddp", "hsdp", "replicas on one node", "fsdp", "ends of a pipeline alone", "one stage alone", "one node"],
)
def test_who_has_no_replica(told: list[Held], found: Soles) -> None:
    assert soles(told) == found


def test_all_are_asked_once_and_not_before_the_third_step(caplog: pytest.LogCaptureFixture) -> None:
    said: list[Soles] = []
    asked: list[Held] = []

    def exchange(data: bytes) -> list[bytes]:
        asked.append(msgspec.json.decode(data, type=Held))
        return [data, msgspec.json.encode(Held(node="n1", shard="other"))]

    environment: Any = SimpleNamespace(node="n0", rank=0, world_size=2, spec=SimpleNamespace(nodes=("n0", "n1")))
    asker = Replicas(environment, exchange, said.append)
    for boundary in range(1, 3 * BOUNDARY):
        asker.boundary(lambda: [Box("w", "float32", (8,), (0,), (4,))])
        assert len(asked) == (boundary >= BOUNDARY)
    assert said == [Soles(ranks=2, nodes=2)]
    assert asked[0].node == "n0"
    assert "no replica of the parts of 2 of 2 ranks" in caplog.text
