"""ZeRO stage 1: parameters and gradients whole on every replica, optimizer state in shards (https://arxiv.org/abs/1910.02054).

Each replica answers for a slice of every parameter. Gradients are reduce-scattered once a step, so that a replica has the
summed gradient of its slices only; the optimizer updates these in place; an all-gather hands them to the others. Together
they move as many bytes as the all-reduce of a replicated data axis.

torch's ZeroRedundancyOptimizer gives whole parameters to ranks and names its state by position, so its state cannot be
saved under names nor enter another mesh; hence slices, shown as DTensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage] - what FSDP2 uses

from regrow.parallel.apply_data import local
from regrow.parallel.mesh import chunk_sizes
from regrow.parallel.quantised import WHOLE_SHAPE


def _named(new: str, old: str) -> Callable[..., Any]:
    """A collective of torch under its name from 2.13 on, or the one before, which that version calls deprecated."""
    return cast("Callable[..., Any]", getattr(dist, new if hasattr(dist, new) else old))


_reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
_all_gather = _named("all_gather_single", "all_gather_into_tensor")

Make = Callable[[torch.optim.Optimizer], None]
"""Makes the state of an optimizer exist before its first step."""


@dataclasses.dataclass(frozen=True)
class _Slice:
    """A parameter and this replica's slice of it: a view of the same memory."""

    parameter: nn.Parameter
    view: nn.Parameter
    axis: int
    sizes: tuple[int, ...]
    """Along `axis`, for each replica."""
    mesh: DeviceMesh
    placements: tuple[Any, ...]

    def pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """`tensor`, of the parameter's local shape, cut for the replicas."""
        return tensor.split(list(self.sizes), dim=self.axis)

    def show(self, value: Tensor, shrink: int) -> Tensor:
        """Optimizer state of the slice as the DTensor that it is of the whole. Scales of blocks are `shrink` times shorter on the last axis."""
        if value.dim() != self.view.dim() or value.dim() == 0:
            return value
        shape = list(self.parameter.shape)
        if value.shape != self.view.shape:
            shape[-1] //= shrink
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(value, self.mesh, self.placements, run_check=False, shape=torch.Size(shape), stride=stride)


class Slices:
    """The slices of parameters that one group of replicas shares, and the messages between them."""

    def __init__(self, parameters: Iterable[nn.Parameter], axis: DeviceMesh, mesh_of: Callable[[nn.Parameter], DeviceMesh]) -> None:
        """`axis`: 1-D mesh of the replicas; `mesh_of`: the mesh over which the state of a parameter is placed, that axis first."""
        self._group = axis.get_group()
        self._count, self._index = axis.size(), axis.get_local_rank()
        self.slices = [self._cut(parameter, mesh_of(parameter)) for parameter in parameters]
        lengths = [[piece.numel() for piece in one.pieces(local(one.parameter.detach()))] for one in self.slices]
        self._length = max((sum(column) for column in zip(*lengths, strict=True)), default=0)

    def _cut(self, parameter: nn.Parameter, mesh: DeviceMesh) -> _Slice:
        data = parameter.data
        inner = tuple(data.placements) if isinstance(data, DTensor) else (Replicate(),) * (mesh.ndim - 1)
        taken = {placement.dim for placement in inner if isinstance(placement, Shard)}
        axis = next((number for number in range(data.dim()) if number not in taken), None)
        whole = local(parameter.detach())
        placement: Any = Shard(axis) if axis is not None else _StridedShard(0, split_factor=mesh.size(1))
        axis = axis or 0  # tensor parallelism cuts its only axis: cut that part once more, as FSDP2 does
        sizes = chunk_sizes(whole.shape[axis], self._count)
        view = nn.Parameter(whole.split(list(sizes), dim=axis)[self._index])
        setattr(view, WHOLE_SHAPE, data.shape)
        return _Slice(parameter, view, axis, sizes, mesh, (placement, *inner))

    def reduce(self) -> None:
        """Sum the gradients of the replicas; each keeps those of its slices, and the parameters have none any more."""
        rows = self._pack(lambda one: one.pieces(local(cast("Tensor", one.parameter.grad))))
        mine = rows.new_empty(self._length)
        _reduce_scatter(mine, rows.view(-1), group=self._group)
        for one, piece in zip(self.slices, self._unpack(mine, self._index), strict=True):
            one.view.grad = piece
            one.parameter.grad = None

    def gather(self) -> None:
        """Give every replica the slices that the others have updated."""
        mine = torch.cat([one.view.detach().reshape(-1) for one in self.slices])
        mine = torch.cat([mine, mine.new_zeros(self._length - mine.numel())])
        rows = mine.new_empty(self._count, self._length)
        _all_gather(rows.view(-1), mine, group=self._group)
        for replica in range(self._count):
            if replica != self._index:
                for one, piece in zip(self.slices, self._unpack(rows[replica], replica), strict=True):
                    one.pieces(local(one.parameter.detach()))[replica].copy_(piece)

    def _pack(self, pieces: Callable[[_Slice], Sequence[Tensor]]) -> Tensor:
        """A row of pieces for each replica, all of one length."""
        table = [pieces(one) for one in self.slices]
        rows = table[0][0].new_zeros(self._count, self._length)
        for replica in range(self._count):
            row = torch.cat([parts[replica].reshape(-1) for parts in table])
            rows[replica, : row.numel()] = row
        return rows

    def _unpack(self, row: Tensor, replica: int) -> list[Tensor]:
        shapes = [one.pieces(local(one.parameter.detach()))[replica].shape for one in self.slices]
        parts = row.split([*[shape.numel() for shape in shapes], row.numel() - sum(shape.numel() for shape in shapes)])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]


class ShardedOptimizer(torch.optim.Optimizer):
    """Any elementwise optimizer over this replica's slices. Groups, rates and hooks are those of the whole parameters.

    `state` shows each tensor of the inner optimizer's state under its parameter, placed over the replicas, so that it is
    saved, digested and re-sharded like any other.
    """

    def __init__(
        self, make: Callable[..., torch.optim.Optimizer], parameters: Any, groups_of_replicas: Sequence[Slices], **options: Any
    ) -> None:
        """`make(groups, **options)` is the inner optimizer."""
        super().__init__(parameters, {})
        self._slices = tuple(groups_of_replicas)
        self._views = {one.parameter: one for group in self._slices for one in group.slices}
        inner_groups = [{**group, "params": [self._views[parameter].view for parameter in group["params"]]} for group in self.param_groups]
        self.inner = make(inner_groups, **options)
        for group, known in zip(self.param_groups, self.inner.param_groups, strict=True):
            for key, value in known.items():
                group.setdefault(key, value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the slices with the gradients that `Slices.reduce` left, and hand them round."""
        del closure
        for group, known in zip(self.param_groups, self.inner.param_groups, strict=True):
            known.update({key: value for key, value in group.items() if key != "params"})
        self.inner.step()
        for group in self._slices:
            group.gather()
        self._show()

    def materialise(self, make: Make) -> None:
        """Let `make` create the inner optimizer's state, and show it."""
        make(self.inner)
        self._show()

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over what `state_dict` of an optimizer on the same mesh gave."""
        super().load_state_dict(state_dict)
        for parameter, one in self._views.items():
            given = cast("dict[str, Any]", self.state[parameter])
            self.inner.state[one.view] = {key: local(value) if isinstance(value, Tensor) else value for key, value in given.items()}

    def _show(self) -> None:
        shrink = int(getattr(self.inner, "block", 1))
        for parameter, one in self._views.items():
            known = self.inner.state.get(one.view, {})
            if len(self.state[parameter]) != len(known):  # tensors are updated in place: shown once
                self.state[parameter] = {
                    key: one.show(value, shrink) if isinstance(value, Tensor) else value for key, value in known.items()
                }
