"""State that is each rank's own (residuals of compressed gradients, a loader's shuffle buffer …) and what a new mesh does to it.

Its tensors are stored as ``rank.<rank>.<name>.<path>``: no rank's take the place of another's, and their shapes may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from regrow.errors import OperationalError
from regrow.ids import MeshShape

PREFIX = "rank."

Merge = Callable[[Sequence[Mapping[str, Any]], int, int], Mapping[str, Any]]
"""(state dicts of all saved ranks in rank order, our rank, our world size) -> the state dict to load."""


class PerRank:
    """Marks an object of `extra` as this rank's own."""

    def __init__(self, thing: Any, *, on_change: Literal["refuse", "reset", "replica"] | Merge = "refuse") -> None:
        """On the mesh that saved it every rank gets its own state back.

        Args:
            thing: Has state_dict() and load_state_dict().
            on_change: On another mesh: "refuse" the restore; "reset": leave the object as it was made; "replica": the state of
                the first rank of data-parallel replica d modulo the saved number of replicas; or a function that merges.
        """
        self.thing = thing
        self.on_change: Literal["refuse", "reset", "replica"] | Merge = on_change


def prefix_of(rank: int, name: str) -> str:
    """Where the tensors of a rank's object are stored."""
    return f"{PREFIX}{rank:05d}.{name}"


def choose(
    mark: PerRank, name: str, saved: Mapping[int, Callable[[], Mapping[str, Any]]], *, saved_mesh: MeshShape, mesh: MeshShape, rank: int
) -> Mapping[str, Any] | None:
    """The state that a rank loads; None: it keeps what it has.

    Args:
        mark: The rule.
        name: Of the object, for messages.
        saved: Reads the state dict of each saved rank.
        saved_mesh: Of the checkpoint.
        mesh: Of this generation.
        rank: Ours.

    Raises:
        OperationalError: the rule is to refuse another mesh.
    """
    if saved_mesh == mesh:
        return saved[rank]()
    if callable(mark.on_change):
        return mark.on_change([saved[one]() for one in sorted(saved)], rank, mesh.world_size)
    if mark.on_change == "reset":
        return None
    if mark.on_change == "replica":
        replica = mesh.coordinates(rank)["dp"] % saved_mesh.dp
        return saved[min(one for one in saved if saved_mesh.coordinates(one)["dp"] == replica)]()
    raise OperationalError(
        f"per-rank state {name!r} cannot follow the change of mesh from {saved_mesh} to {mesh}",
        hint='give PerRank(…, on_change="reset", "replica" or a function that merges), or restore on the mesh that saved it',
    )
