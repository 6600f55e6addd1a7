"""Silent data corruption: the vote over data-parallel replicas that must hold the same bytes.

Replicas of one position (same tp, pp, cp index) apply the same update to the same state, so their digests are equal to the
bit. A strict majority of at least three replicas names who is wrong; two replicas can only say that one of them is.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from regrow.ids import MeshShape
from regrow.wire import AT_REST


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one comparison."""

    verdict: Literal["agree", "diverged", "skipped"]
    suspects: tuple[int, ...] = ()
    """Ranks in the minority, when a strict majority of three or more exists; empty with `diverged`: inconclusive."""
    reason: str
    rested: bool = False
    """With `skipped`: every rank compared its memory with itself, though none with another."""


def vote(mesh: MeshShape, digests: dict[int, str]) -> Vote:
    """Compare the digests {rank: hex} of one step over the data-parallel axis.

    Under HSDP it is the copies of a shard that are compared. `skipped` says why nothing was compared (one replica only, digests
    missing, nothing replicated): that is not agreement.
    """
    if mesh.dp < 2:
        looked = len(digests) == mesh.world_size and all(digests.values())
        return Vote(verdict="skipped", reason="one replica only: there is nothing to compare with", rested=looked)
    suspects: list[int] = []
    unclear = alone = 0
    groups = _groups(mesh, digests)
    for ranks in groups:
        missing = [rank for rank in ranks if not digests.get(rank)]
        if missing:
            return Vote(verdict="skipped", reason=f"no digest from rank {missing[0]}")
        counts = Counter(digests[rank] for rank in ranks)
        if len(counts) == 1:
            alone += AT_REST in counts or len(ranks) < 2
            continue
        value, most = counts.most_common(1)[0]
        if len(ranks) >= 3 and 2 * most > len(ranks):
            suspects.extend(rank for rank in ranks if digests[rank] != value)
        else:
            unclear += 1
    if suspects:
        named = tuple(sorted(suspects))
        return Vote(verdict="diverged", suspects=named, reason=f"ranks {list(named)} differ from the majority of {len(groups[0])} replicas")
    if unclear:
        return Vote(
            verdict="diverged", reason=f"{unclear} of {len(groups)} positions differ and {len(groups[0])} replicas have no strict majority"
        )
    if alone == len(groups):
        return Vote(verdict="skipped", reason="nothing is replicated over the data axis: each rank is compared with itself", rested=True)
    return Vote(verdict="agree", reason=f"{len(groups[0])} replicas agree at {len(groups) - alone} positions")


def _groups(mesh: MeshShape, digests: dict[int, str]) -> list[list[int]]:
    """Ranks that must hold the same bytes: of one position, and under HSDP ("<k>/<hex>") of one shard."""
    size = mesh.replica_size
    told = {text.partition("/")[0] for text in digests.values() if "/" in text}
    apart = int(number) if len(told) == 1 and (number := told.pop()).isdigit() and int(number) else 1
    return [
        [replica * size + offset for replica in range(first, mesh.dp, apart)]
        for offset in range(size)
        for first in range(min(apart, mesh.dp))
    ]
