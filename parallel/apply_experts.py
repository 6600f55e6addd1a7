"""A mixture of experts whose experts lie on several ranks: tokens travel to them and back by all-to-all.

No token is dropped and no expert has a capacity: what a token gets does not depend on who else is in the batch, so the
result is that of one process on any mesh. For the same reason there is no balance loss: one over a micro-batch or a
replica is not a sum over samples (docs/parallelism-runtime.md).

Experts are folded into the data axis: replicas in groups of `ep` consecutive ones share one set of experts.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from regrow.errors import ConfigurationError

AXES = ("ep_replicate", "ep")
"""Names of the two axes that the data axis becomes: groups that hold copies of the experts, ranks of a group."""


class Experts(nn.Module):
    """The experts that this rank holds: two matrices each with GELU between, stacked along the first axis."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, hidden, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, hidden))
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """`tokens` [rows, hidden] sorted by expert, `counts` rows for each expert here."""
        up, down = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.up, self.down))
        rows = [functional.gelu(part @ up[index]) @ down[index] for index, part in enumerate(tokens.split(counts))]
        return torch.cat(rows)


class MixtureOfExperts(nn.Module):
    """A feed-forward layer of `experts` experts, of which each token uses the `chosen` best by its router.

    The weights of the chosen ones are the softmax over them alone.
    """

    def __init__(self, experts: int, hidden: int, inner: int, *, chosen: int = 2) -> None:
        super().__init__()
        if not 1 <= chosen <= experts:
            raise ConfigurationError(f"{chosen} of {experts} experts a token", where="experts", hint="choose at least 1 and at most all")
        self.num_experts = experts
        self.chosen = chosen
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts, hidden, inner)
        self._group: dist.ProcessGroup | None = None

    def shard(self, mesh: DeviceMesh) -> None:
        """Keep only this rank's experts, of those spread evenly over the 1-D `mesh`.

        Raises:
            ConfigurationError: they cannot be spread evenly.
        """
        if self.num_experts % mesh.size():
            raise ConfigurationError(
                f"{self.num_experts} experts cannot be spread evenly over ep = {mesh.size()}", where="--mesh", hint="choose a divisor"
            )
        each, index = self.num_experts // mesh.size(), mesh.get_local_rank()
        for name, weight in list(self.experts.named_parameters()):
            mine = weight.detach()[index * each : (index + 1) * each].clone()
            placed = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride())
            setattr(self.experts, name, nn.Parameter(placed))
        self._group = mesh.get_group()

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        tokens = x.flatten(0, 1)
        values, experts = self.router(tokens).float().topk(self.chosen, dim=-1)
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self.num_experts)
        sent = tokens[order // self.chosen]
        done = self.experts(sent, counts.tolist()) if self._group is None else self._travel(sent, counts, self._group)
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel(), device=order.device))
        weights = values.softmax(dim=-1).to(x.dtype).unsqueeze(-1)
        return (done[back].unflatten(0, (-1, self.chosen)) * weights).sum(dim=1).view_as(x)

    def _travel(self, sent: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Rows sorted by expert go to the ranks that hold these, are computed there and come back in the same order."""
        size = dist.get_world_size(group)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        by_source = theirs.view(size, -1)
        leave, arrive = counts.view(size, -1).sum(1).tolist(), by_source.sum(1).tolist()
        rows = cast("Tensor", _Exchange.apply(sent, arrive, leave, group))
        each = by_source.shape[1]
        expert = torch.arange(each, device=rows.device).repeat(size).repeat_interleave(by_source.flatten())
        order = expert.argsort(stable=True)
        done = self.experts(rows[order], by_source.sum(0).tolist())
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel(), device=order.device))
        return cast("Tensor", _Exchange.apply(done[back], leave, arrive, group))


class _Exchange(torch.autograd.Function):
    """all_to_all_single of rows; its gradient is the exchange the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, arrive: list[int], leave: list[int], group: Any) -> Tensor:
        ctx.plan = arrive, leave, group
        out = rows.new_empty(sum(arrive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), arrive, leave, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        arrive, leave, group = ctx.plan
        (gradient,) = gradients
        out = gradient.new_empty(sum(leave), *gradient.shape[1:])
        dist.all_to_all_single(out, gradient.contiguous(), leave, arrive, group=group)
        return out, None, None, None


def mixtures_of(model: nn.Module) -> list[MixtureOfExperts]:
    """The mixtures of experts of a model."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether a parameter is spread over the ranks of an expert group."""
    data = parameter.data
    return isinstance(data, DTensor) and AXES[1] in (data.device_mesh.mesh_dim_names or ())
