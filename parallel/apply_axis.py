"""The data axis of a mesh: over which ranks parameters are copies or shards, and how a step's gradients are summed over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from regrow.ids import MeshShape
from regrow.parallel import apply_data, apply_gradients
from regrow.parallel.apply_experts import AXES as EXPERT_AXES
from regrow.parallel.apply_experts import is_expert
from regrow.parallel.apply_strategy import Strategy, gives_back
from regrow.parallel.apply_zero import Slices

HSDP_AXES = ("dp_replicate", "dp_shard")
"""Names of the two axes that the data axis becomes when only `shard_size` replicas share the shards of a copy."""

CONTEXT_DATA_AXIS = "dp_cp"
"""Ranks of all replicas and all parts of the sequence, over which sharded parameters are cut."""


class DataAxis:
    """Replicas, parts of the sequence and groups of experts: who sums which gradients with whom."""

    def __init__(self, mesh: Any, shape: MeshShape, strategy: Strategy, coordinates: Mapping[str, int]) -> None:
        """Collective: makes the groups that the mesh has not."""
        self._shape, self._strategy = shape, strategy
        self._mesh = mesh
        self.sharded = strategy.zero_stage >= 2 and shape.dp * shape.cp > 1
        self.slices: list[Slices] = []
        """ZeRO stage 1: the slices that this rank answers for."""
        self.experts: DeviceMesh | None = None
        self._copies: DeviceMesh | None = None
        self._all: DeviceMesh | None = None
        self._expert_mesh: DeviceMesh | None = None
        if mesh is not None:
            self._all = mesh["dp", "cp"]._flatten(CONTEXT_DATA_AXIS) if shape.cp > 1 else mesh["dp"]  # noqa: SLF001 - no public way yet
        if mesh is not None and shape.ep > 1:
            both = mesh["dp"]._unflatten(0, (shape.dp // shape.ep, shape.ep), EXPERT_AXES)  # noqa: SLF001
            self._expert_mesh, self._copies, self.experts = both, both[EXPERT_AXES[0]], both[EXPERT_AXES[1]]
        self._place = self._place_of(coordinates)
        self._parameters: list[nn.Parameter] = []
        self._views: dict[nn.Parameter, nn.Parameter] = {}

    def _place_of(self, coordinates: Mapping[str, int]) -> dict[str, int]:
        """This rank's place on the axes over which parameters are sharded or replicated."""
        shape, shard_size = self._shape, self._strategy.shard_size
        dp, cp, place = coordinates["dp"], coordinates["cp"], {"tp": coordinates["tp"]}
        if self.sharded and shard_size:
            return place | dict(zip(HSDP_AXES, divmod(dp, shard_size), strict=True))
        if self.sharded:
            return place | ({CONTEXT_DATA_AXIS: dp * shape.cp + cp} if shape.cp > 1 else {"dp": dp})
        if shape.ep > 1:
            return place | dict(zip(EXPERT_AXES, divmod(dp, shape.ep), strict=True))
        return place | {"dp": dp, "cp": cp}

    def take(self, module: nn.Module, stages: Sequence[tuple[int, nn.Module]]) -> None:
        """Shard the parameters of this rank's part of the model, or their optimizer state, as the strategy says."""
        if self.sharded:
            self._fully_shard(stages)
        self._parameters = list(module.parameters())
        if self._strategy.zero_stage == 1 and self._shape.dp > 1:
            mine = [parameter for parameter in self._parameters if not is_expert(parameter)]
            self.slices.append(Slices(mine, self._mesh["dp"], self._state_mesh))
            theirs = [parameter for parameter in self._parameters if is_expert(parameter)]
            if theirs and self._copies is not None:
                self.slices.append(Slices(theirs, self._copies, lambda _: cast("DeviceMesh", self._expert_mesh)))
            self._views = {one.parameter: one.view for group in self.slices for one in group.slices}

    def _state_mesh(self, parameter: nn.Parameter) -> DeviceMesh:
        return self._mesh["dp", "tp"] if isinstance(parameter.data, DTensor) else self._mesh["dp"]

    def _fully_shard(self, stages: Sequence[tuple[int, nn.Module]]) -> None:
        axis, strategy = cast("Any", self._all), self._strategy
        if strategy.shard_size:
            axis = axis._unflatten(0, (self._shape.dp // strategy.shard_size, strategy.shard_size), HSDP_AXES)  # noqa: SLF001
        for _, stage in stages:
            apply_data.shard_parameters(stage, axis, reshard_after_forward=gives_back(self._shape, strategy), compute=strategy.compute)

    # --- the gradients of a step --------------------------------------------------------------------------------

    def reduce(self) -> bool:
        """Sum this rank's gradients over whoever holds copies of the parameters. True: a gradient of ours was not finite before."""
        if self._shape.tp > 1 and not self.sharded:
            apply_data.settle_placements(self._parameters, self._mesh["tp"])
        gradients = {parameter: apply_data.local(cast("Tensor", parameter.grad)) for parameter in self._parameters}
        broken = not apply_gradients.all_finite(gradients.values())
        if self.sharded:
            return broken
        shared = [gradient for parameter, gradient in gradients.items() if not is_expert(parameter)]
        if self.slices:
            if self._shape.cp > 1:
                apply_data.sum_in_place(shared, self._mesh["cp"].get_group())
            for group in self.slices:
                group.reduce()
            return broken
        self._sum(shared, self._all)
        self._sum((gradient for parameter, gradient in gradients.items() if is_expert(parameter)), self._copies)
        return broken

    def _sum(self, gradients: Any, axis: DeviceMesh | None) -> None:
        if axis is not None and axis.size() > 1:
            apply_data.sum_in_place(gradients, axis.get_group())

    def gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """The summed gradient that this rank has of `parameter`: of its slice under ZeRO stage 1."""
        return cast("Tensor", self._views.get(parameter, parameter).grad)

    def counts_gradient(self, parameter: nn.Parameter) -> bool:
        """True on the one rank, of all that hold the same elements of its gradient, which counts them."""
        return apply_gradients.counts_here(parameter, self._place, cut=self._cut_of(parameter))

    def _cut_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        if parameter not in self._views:
            return ()
        return (EXPERT_AXES[0],) if is_expert(parameter) else ("dp", *(EXPERT_AXES if self._shape.ep > 1 else ()))

    def counts(self, tensor: Tensor) -> bool:
        """True on the one rank, of all that hold the same elements of `tensor`, which counts them."""
        if isinstance(tensor, DTensor) and self._shape.ep > 1 and "dp" in (tensor.device_mesh.mesh_dim_names or ()):
            return apply_gradients.counts_here(tensor, self._place, cut=EXPERT_AXES)
        return apply_gradients.counts_here(tensor, self._place)
