"""Silent data corruption: the vote over data-parallel replicas that must hold the same bytes.

Replicas of one position (same tp, pp, cp index) apply the same update to the same state, so their digests are equal to the
bit. A strict majority of at least three replicas names who is wrong; two replicas can only say that one of them is.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from regrow.ids import MeshShape
from regrow.places import MASK, block_text, locate
from regrow.wire import AT_REST, DigestEvidence

_PLACES_DIGITS = 48
_MOST_TENSORS = 1_000_000


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
    positions = groups(mesh, digests)
    for ranks in positions:
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
        return Vote(
            verdict="diverged", suspects=named, reason=f"ranks {list(named)} differ from the majority of {len(positions[0])} replicas"
        )
    if unclear:
        return Vote(
            verdict="diverged",
            reason=f"{unclear} of {len(positions)} positions differ and {len(positions[0])} replicas have no strict majority",
        )
    if alone == len(positions):
        return Vote(verdict="skipped", reason="nothing is replicated over the data axis: each rank is compared with itself", rested=True)
    return Vote(verdict="agree", reason=f"{len(positions[0])} replicas agree at {len(positions) - alone} positions")


def located(mesh: MeshShape, digests: dict[int, str], evidence: dict[int, DigestEvidence]) -> str:
    """The tensor and block in which the first two ranks that should agree and do not differ; empty: cannot be told.

    The ranks of the first replica have told the names; a leader that came later has the tensor's number alone.
    """
    for ranks in groups(mesh, digests):
        first = ranks[0]
        other = next((rank for rank in ranks[1:] if digests.get(rank) != digests.get(first)), -1)
        if other < 0 or first not in evidence or other not in evidence:
            continue
        one, two = evidence[first].places, evidence[other].places
        if len(one) != _PLACES_DIGITS or len(two) != _PLACES_DIGITS:
            continue
        total = (_word(digests[first].rpartition("/")[2]) - _word(digests[other].rpartition("/")[2])) & MASK
        places, plain, weighted = ((_word(one[at : at + 16]) - _word(two[at : at + 16])) & MASK for at in range(0, _PLACES_DIGITS, 16))
        number, block = locate(total, places), locate(plain, weighted)
        names = evidence[first].names
        if not 0 < number <= (len(names) or _MOST_TENSORS):
            return f"ranks {first} and {other} differ in more than one tensor"
        tensor = names[number - 1] if names else f"tensor {number}"
        sizes = evidence[first].sizes
        where = block_text(block, sizes[number - 1] if number <= len(sizes) else 0) if block else "more than one block"
        return f"{tensor} differs in {where} between ranks {first} and {other}"
    return ""


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """Whose fault it is that parameters arrived otherwise than their owners have them."""

    rank: int
    """-1: cannot be told."""
    reason: str


def blame(evidence: dict[int, DigestEvidence]) -> Blame | None:
    """Judge what ranks received in all-gathers of shards, {receiver: what it says}; None: everything arrived.

    What most receivers of an owner have otherwise was wrong when it was sent; what fewer than half have otherwise went wrong at them. At
    exactly half, as with two ranks, it cannot be told.
    """
    by_owner: dict[int, dict[int, str]] = {}
    for receiver, told in evidence.items():
        for owner, tensor in told.received.items():
            by_owner.setdefault(owner, {})[receiver] = tensor
    if not by_owner:
        return None
    for owner, found in sorted(by_owner.items()):
        size = max(evidence[receiver].receivers for receiver in found)
        if 2 * len(found) > size:
            return Blame(
                rank=owner, reason=f"{next(iter(found.values()))} of rank {owner} arrived otherwise at {len(found)} of {size} ranks"
            )
    owner, found = min(by_owner.items())
    receiver, tensor = next(iter(found.items()))
    size = evidence[receiver].receivers
    rank = receiver if 2 * len(found) < size and len({*found, *(r for one in by_owner.values() for r in one)}) == 1 else -1
    return Blame(
        rank=rank, reason=f"rank {receiver} received {tensor} of rank {owner} otherwise than its owner has it, {len(found)} of {size} did"
    )


def _word(text: str) -> int:
    return int(text, 16) if text and all(digit in "0123456789abcdef" for digit in text) else 0


def groups(mesh: MeshShape, digests: dict[int, str]) -> list[list[int]]:
    """Ranks that must hold the same bytes: of one position, and under HSDP ("<k>/<hex>") of one shard."""
    size = mesh.replica_size
    told = {text.partition("/")[0] for text in digests.values() if "/" in text}
    apart = int(number) if len(told) == 1 and (number := told.pop()).isdigit() and int(number) else 1
    return [
        [replica * size + offset for replica in range(first, mesh.dp, apart)]
        for offset in range(size)
        for first in range(min(apart, mesh.dp))
    ]
