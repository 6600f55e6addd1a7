"""Silent data corruption: the vote over data-parallel replicas that must hold the same bytes.

Replicas of one position (same tp, pp, cp index) apply the same update to the same state, so their digests are equal to the
bit. A strict majority of at least three replicas names who is wrong; two replicas can only say that one of them is.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from regrow.ids import MeshShape


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one comparison."""

    verdict: Literal["agree", "diverged", "skipped"]
    suspects: tuple[int, ...] = ()
    """Ranks in the minority, when a strict majority of three or more exists; empty with `diverged`: inconclusive."""
    reason: str


def vote(mesh: MeshShape, digests: dict[int, str]) -> Vote:
    """Compare the digests {rank: hex} of one step over the data-parallel axis.

    `skipped` says why nothing was compared (one replica only, digests missing): that is not agreement.
    """
    if mesh.dp < 2:
        return Vote(verdict="skipped", reason="one replica only: there is nothing to compare with")
    suspects: list[int] = []
    unclear = 0
    groups = _groups(mesh)
    for ranks in groups:
        missing = [rank for rank in ranks if not digests.get(rank)]
        if missing:
            return Vote(verdict="skipped", reason=f"no digest from rank {missing[0]}")
        counts = Counter(digests[rank] for rank in ranks)
        if len(counts) == 1:
            continue
        value, most = counts.most_common(1)[0]
        if len(ranks) >= 3 and 2 * most > len(ranks):
            suspects.extend(rank for rank in ranks if digests[rank] != value)
        else:
            unclear += 1
    if suspects:
        named = tuple(sorted(suspects))
        return Vote(verdict="diverged", suspects=named, reason=f"ranks {list(named)} differ from the majority of {mesh.dp} replicas")
    if unclear:
        return Vote(
            verdict="diverged", reason=f"{unclear} of {len(groups)} positions differ and {mesh.dp} replicas have no strict majority"
        )
    return Vote(verdict="agree", reason=f"{mesh.dp} replicas agree at {len(groups)} positions")


def _groups(mesh: MeshShape) -> list[list[int]]:
    size = mesh.replica_size
    return [[replica * size + offset for replica in range(mesh.dp)] for offset in range(size)]
