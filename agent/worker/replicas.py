"""Which parts of the state nobody else has: told once a generation, before anything is lost.

Where every part has a replica (data parallel, HSDP) the loss of a rank costs the step that was in flight. Where one has not (FSDP over all
ranks, one replica of a pipeline) it costs what came after the newest snapshot, and that bound should be known before it is met.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import xxhash

from regrow.agent.worker.environment import WorkerEnvironment
from regrow.ckpt.exchange import Exchange
from regrow.ckpt.layout import Box
from regrow.ckpt.plan import encode_boxes
from regrow.errors import RegrowError

_log = logging.getLogger("regrow.worker")

BOUNDARY = 3
"""After so many steps of a generation: no recovery waits for it."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says."""

    node: str
    shard: str
    """Digest of the boxes that it holds."""


class Soles(msgspec.Struct, frozen=True, kw_only=True):
    """Holders of parts that are nowhere else."""

    ranks: int
    """Ranks whose parts no other rank holds."""
    nodes: int
    """Nodes that hold parts which no other node does."""


def soles(told: list[Held]) -> Soles:
    """Count them. Ranks are replicas of each other when they hold the same boxes; who overlaps in part counts as having none."""
    ranks: dict[str, int] = {}
    nodes: dict[str, set[str]] = {}
    for one in told:
        ranks[one.shard] = ranks.get(one.shard, 0) + 1
        nodes.setdefault(one.shard, set()).add(one.node)
    alone = {next(iter(names)) for names in nodes.values() if len(names) == 1}
    return Soles(ranks=sum(count == 1 for count in ranks.values()), nodes=len(alone))


class Replicas:
    """Asks all ranks at one boundary, and tells the agent."""

    def __init__(self, environment: WorkerEnvironment, exchange: Exchange, tell: Callable[[Soles], None]) -> None:
        self._environment = environment
        self._exchange = exchange
        self._tell = tell
        self._boundaries = 0

    def boundary(self, boxes: Callable[[], list[Box]]) -> None:
        """A step of this generation is over; at the third one collective. `boxes` of this rank's parameters and optimizer state."""
        self._boundaries += 1
        if self._boundaries != BOUNDARY:
            return
        try:
            shard = xxhash.xxh3_128_hexdigest(encode_boxes(boxes()))
        except RegrowError as error:  # a layout that cannot be told is nobody's replica, and no reason to end
            _log.warning("not known which parts of this rank's state have a replica: %s", error)
            shard = f"rank {self._environment.rank}"
        mine = Held(node=self._environment.node, shard=shard)
        found = soles([msgspec.json.decode(data, type=Held) for data in self._exchange(msgspec.json.encode(mine))])
        self._tell(found)
        if self._environment.rank == 0 and (found.ranks or found.nodes):
            _log.warning(
                "no replica of the parts of %d of %d ranks, and %d of %d nodes hold parts that no other node has: when one of these is lost,"
                " what came after the newest snapshot is computed again",
                *(found.ranks, self._environment.world_size, found.nodes, len(self._environment.spec.nodes)),
            )
