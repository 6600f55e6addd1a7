"""After the backward pass: one small sum over the world settles loss, token count and gradient norm on every rank.

Every rank contributes the squares of what it holds, each element of a gradient exactly once, in float64, into the
slot of its parameter in the whole model's order. Every mesh adds the same slots in the same order, so the norm, and with it the
clipping factor, is mesh-independent up to the rounding of the gradients themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from regrow.parallel.apply_data import local


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What every rank knows after a step's backward pass. Gradients are final: call optimizer.step()."""

    loss: float
    """Mean loss per valid token of the global batch, in nats."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    tokens: int
    """Valid tokens of the global batch."""
    broken_ranks: tuple[int, ...] = ()
    """Ranks whose own gradient held a NaN or infinity before replicas were summed: the producer, not its victims."""


class Totals:
    """The vector that is summed over the world: [squares per parameter, loss, tokens, broken flag per rank]."""

    def __init__(self, order: Mapping[str, int], *, rank: int, world_size: int, device: torch.device) -> None:
        self._order = order
        self._rank = rank
        self._world_size = world_size
        self._device = device

    def settle(
        self,
        gradients: Iterable[tuple[str, Tensor, bool]],
        *,
        loss: Tensor | None,
        tokens: int,
        broken: bool = False,
    ) -> StepResult:
        """Sum over all ranks.

        Args:
            gradients: (name, gradient, counts): `counts` on one of the ranks that hold the same elements.
            loss: summed loss, from one rank of each replica that knows it.
            tokens: valid tokens, from one rank of each replica; 0 elsewhere.
            broken: this rank's gradient was not finite before the replicas were summed.
        """
        count = len(self._order)
        totals = torch.zeros(count + 2 + self._world_size, dtype=torch.float64, device=self._device)
        squares = totals[:count]
        for name, gradient, counts in gradients:
            if counts:
                squares[self._order[name]] = torch.linalg.vector_norm(local(gradient), dtype=torch.float64).square()
        if loss is not None:
            totals[count] = loss
        totals[count + 1] = tokens
        totals[count + 2 + self._rank] = float(broken)
        if self._world_size > 1:
            dist.all_reduce(totals)
        valid = int(totals[count + 1].item())
        per_token = 1.0 / max(valid, 1)
        flags = totals[count + 2 :].tolist()
        return StepResult(
            loss=float(totals[count].item()) * per_token,
            grad_norm=float(squares.sum().sqrt().item()) * per_token,
            tokens=valid,
            broken_ranks=tuple(rank for rank, flag in enumerate(flags) if flag),
        )


def scale(gradients: Iterable[Tensor], result: StepResult, clip_norm: float | None) -> None:
    """Turn summed gradients into those of the mean loss, clipped to `clip_norm`, in place."""
    factor = 1.0 / max(result.tokens, 1)
    if clip_norm is not None:
        factor *= min(1.0, clip_norm / (result.grad_norm + 1e-6))
    for gradient in gradients:
        local(gradient).mul_(factor)


def counts_here(tensor: Tensor, place: Mapping[str, int], *, cut: Collection[str] = ()) -> bool:
    """True on the one rank, of all that hold the same elements of `tensor`, which counts them.

    Args:
        place: indices of this rank on the axes over which a parameter is sharded or replicated ("dp", "tp", ...),
            not "pp": stages hold different parameters.
        cut: further axes along which what is counted is cut.
    """
    sharded = set(cut)
    data = tensor.data
    if isinstance(data, DTensor):
        names = data.device_mesh.mesh_dim_names or ()
        sharded |= {name for name, placement in zip(names, data.placements, strict=True) if not placement.is_replicate()}
    return all(index == 0 for name, index in place.items() if name not in sharded)


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether this rank's gradients hold neither NaN nor infinity: their norm shows either."""
    return bool(torch.isfinite(nn.utils.get_total_norm([local(gradient) for gradient in gradients])).item())
