"""Which node keeps the copy of a node's arenas. Pure.

A good buddy does not fail together with its node: it is in another failure domain (rack, power, switch), and outside of the
data-parallel replicas that the node takes part in, since a whole model-parallel group tends to go at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from regrow.ids import MeshShape


class Candidate(msgspec.Struct, frozen=True):
    """A node that could keep the copy."""

    node: str
    is_outside: bool
    """It shares no data-parallel replica with the node whose copy it would keep."""


def candidates(nodes: Sequence[str], mesh: MeshShape, node: str) -> list[Candidate]:
    """All other members, those outside of the node's replicas first, each part from half-way round on.

    Half-way round is another rack wherever ranks follow racks, and gives every node exactly one copy to keep.

    Args:
        nodes: Members in rank order, all with the same number of ranks (else all count as outside).
        mesh: Of the generation.
        node: Whose copy is to be placed; with none of that name there are no candidates.
    """
    if node not in nodes:
        return []
    at, count = list(nodes).index(node), len(nodes)
    own = _replicas(at, count, mesh)
    found: list[Candidate] = []
    for index in range(count):
        other = (at + count // 2 + index) % count
        if other != at:
            found.append(Candidate(nodes[other], is_outside=not own & _replicas(other, count, mesh)))
    return [one for one in found if one.is_outside] + [one for one in found if not one.is_outside]


def _replicas(at: int, count: int, mesh: MeshShape) -> frozenset[int]:
    """Data-parallel replicas that the node at this place takes part in."""
    if mesh.world_size % count:
        return frozenset((-1 - at,))
    local = mesh.world_size // count
    return frozenset(mesh.coordinates(rank)["dp"] for rank in range(at * local, (at + 1) * local))


def rank_of(candidate: Candidate, domain: str, own_domain: str) -> int:
    """How good a buddy is, lower is better: another domain counts more than another replica. Unknown domains are all different."""
    same_domain = bool(domain) and domain == own_domain
    return 2 * same_domain + (not candidate.is_outside)
