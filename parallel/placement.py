"""Which rank runs where: TP inside a node, the axis with more traffic on the faster links, buddies in other domains."""

from __future__ import annotations

from collections import Counter

import msgspec

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.parallel.inventory import Inventory, Node


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks on nodes."""

    mesh: MeshShape
    nodes: tuple[str, ...]
    """Node of each rank."""
    gpus: tuple[int, ...]
    """GPU index of each rank on its node."""
    order: str
    """Axes from the innermost to the outermost over the nodes."""
    idle: dict[str, int] = {}
    """Unused GPUs by node; nodes without any are left out."""
    buddies: dict[str, str] = {}
    """Where a node keeps the copy of its checkpoint shards: a used node of another failure domain where there is one."""
    warnings: tuple[str, ...] = ()

    def ranks_on(self, node: str) -> tuple[int, ...]:
        """Ranks of one node in order."""
        return tuple(rank for rank, name in enumerate(self.nodes) if name == node)


def place(mesh: MeshShape, inventory: Inventory, *, dp_bytes: float = 0.0, pp_bytes: float = 0.0) -> Placement:
    """Put a mesh on nodes. Nodes of one failure domain stay together.

    The order is TP, CP, then PP before DP or DP before PP: whichever sends more bytes a step lies further in. Llama 3's
    order TP, CP, PP, DP is taken when the traffic is not given or PP's is larger. A DP group that lies inside one failure
    domain is told, as its loss takes all replicas of a stage at once.

    Raises:
        ConfigurationError: the nodes do not hold the mesh.
    """
    cells = _cells(mesh.tp, inventory)
    needed = mesh.world_size // mesh.tp
    if len(cells) < needed:
        raise ConfigurationError(
            f"the nodes hold {len(cells)} groups of TP {mesh.tp}, {mesh} needs {needed}",
            where="placement",
            hint="plan for this inventory first",
        )
    dp_inside = mesh.pp > 1 and dp_bytes > pp_bytes > 0.0
    nodes, gpus = [""] * mesh.world_size, [0] * mesh.world_size
    for index, (node, first) in enumerate(cells[:needed]):
        rest, cp = divmod(index, mesh.cp)
        outer, inner = divmod(rest, mesh.dp if dp_inside else mesh.pp)
        dp, pp = (inner, outer) if dp_inside else (outer, inner)
        for tp in range(mesh.tp):
            rank = mesh.rank(dp=dp, pp=pp, cp=cp, tp=tp)
            nodes[rank], gpus[rank] = node.name, first + tp
    order = "tp, cp, dp, pp" if dp_inside else "tp, cp, pp, dp"
    return _finish(mesh, tuple(nodes), tuple(gpus), order, inventory)


def _cells(tp: int, inventory: Inventory) -> list[tuple[Node, int]]:
    ordered = sorted(inventory.nodes, key=lambda node: node.domain)
    inside = [(node, start) for node in ordered for start in range(0, node.gpus - tp + 1, tp)]
    if inside or tp <= inventory.gpus_per_node:
        return inside
    # TP over several nodes: every cell begins on a node of its own and takes whole neighbours.
    size = inventory.gpus_per_node
    if tp % size or any(node.gpus != size for node in ordered):
        return []
    step = tp // size
    return [(ordered[index], 0) for index in range(0, len(ordered) - step + 1, step)]


def _finish(mesh: MeshShape, nodes: tuple[str, ...], gpus: tuple[int, ...], order: str, inventory: Inventory) -> Placement:
    names = [node.name for node in sorted(inventory.nodes, key=lambda node: node.domain)]
    nodes, gpus = _spread(nodes, gpus, inventory, names)
    used = Counter(nodes)
    idle = {node.name: node.gpus - used[node.name] for node in inventory.nodes if node.gpus > used[node.name]}
    domain = {node.name: node.domain or node.name for node in inventory.nodes}
    buddies = _buddies([name for name in names if used[name]], domain)
    found: list[str] = []
    if len(used) > 1 and len({domain[name] for name in used}) == 1:
        found.append("all nodes are in one failure domain: buddies cannot survive its loss")
    if mesh.dp > 1:
        risky = _one_domain_groups(mesh, nodes, domain)
        if risky and len({domain[name] for name in used}) > 1:
            found.append(f"{risky} data-parallel groups lie inside one failure domain: its loss needs the checkpoint, not a replica")
    return Placement(mesh=mesh, nodes=nodes, gpus=gpus, order=order, idle=idle, buddies=buddies, warnings=tuple(found))


def _spread(
    nodes: tuple[str, ...], gpus: tuple[int, ...], inventory: Inventory, names: list[str]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """GPU indices beyond a node's own count mean its neighbours (TP over several nodes)."""
    size = {node.name: node.gpus for node in inventory.nodes}
    if all(gpu < size[node] for node, gpu in zip(nodes, gpus, strict=True)):
        return nodes, gpus
    place_of = {name: index for index, name in enumerate(names)}
    whole = [(names[place_of[node] + gpu // size[node]], gpu % size[node]) for node, gpu in zip(nodes, gpus, strict=True)]
    return tuple(node for node, _ in whole), tuple(gpu for _, gpu in whole)


def _buddies(used: list[str], domain: dict[str, str]) -> dict[str, str]:
    """Each node's buddy is the node half the list further that lies in another domain; each node is one node's buddy."""
    count = len(used)
    if count < 2:
        return {}
    offsets = sorted(range(1, count), key=lambda offset: abs(offset - count // 2))
    best = max(offsets, key=lambda offset: sum(domain[used[i]] != domain[used[(i + offset) % count]] for i in range(count)) - offset * 1e-9)
    return {name: used[(index + best) % count] for index, name in enumerate(used)}


def _one_domain_groups(mesh: MeshShape, nodes: tuple[str, ...], domain: dict[str, str]) -> int:
    stride = mesh.replica_size
    return sum(1 for first in range(stride) if len({domain[nodes[rank]] for rank in range(first, mesh.world_size, stride)}) == 1)


def replace_node(placement: Placement, lost: str, new: str) -> Placement:
    """The new node takes exactly the lost one's ranks: nobody else moves a byte.

    Raises:
        ConfigurationError: the lost node holds no rank, or the new one already does.
    """
    if lost not in placement.nodes or new in placement.nodes:
        raise ConfigurationError(f"{new} cannot take the place of {lost}", where="placement", hint="replace a used node by an unused one")
    buddies = {new if name == lost else name: new if other == lost else other for name, other in placement.buddies.items()}
    return msgspec.structs.replace(
        placement, nodes=tuple(new if name == lost else name for name in placement.nodes), buddies=buddies, idle={}
    )


def shrink(placement: Placement, lost: set[str], mesh: MeshShape) -> tuple[int, ...]:
    """Old rank of each new rank when only DP shrinks, so that survivors keep stage and shard and the fewest bytes move.

    Whole replicas keep their relative order; holes are filled with surviving parts of broken replicas that hold the same
    (pp, cp, tp). -1: nobody survived with that part, the new rank must read it.

    Raises:
        ConfigurationError: TP, PP or CP differ, where no rank keeps its part.
    """
    old = placement.mesh
    if (old.tp, old.pp, old.cp) != (mesh.tp, mesh.pp, mesh.cp):
        raise ConfigurationError(f"{old} -> {mesh} changes more than DP", where="placement", hint="place the new mesh from scratch")
    size = old.replica_size
    alive = [[placement.nodes[dp * size + part] not in lost for part in range(size)] for dp in range(old.dp)]
    whole = [dp for dp in range(old.dp) if all(alive[dp])]
    broken = [dp for dp in range(old.dp) if not all(alive[dp])]
    chosen = [[dp * size + part for part in range(size)] for dp in whole[: mesh.dp]]
    while len(chosen) < mesh.dp:
        row: list[int] = []
        for part in range(size):
            donor = next((dp for dp in broken if alive[dp][part]), None)
            if donor is not None:
                alive[donor][part] = False
            row.append(-1 if donor is None else donor * size + part)
        chosen.append(row)
    return tuple(rank for row in chosen for rank in row)
