"""The data axis: gradients of replicas are SUMMED, exactly once a step, after the last micro-batch.

Replicated parameters use one all-reduce of our own. DDP asserts with two micro-batches in flight under 1F1B and mixes
badly with DTensor; torch's `replicate` lives at a private path; and a plain sum over one flat buffer is right for any
number of micro-batches per replica. Sharded parameters use FSDP2, told to sum and not to average (gloo has no
PREMUL_SUM, so the sum has to be forced as well).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from regrow.parallel.apply_layers import LayeredModel


def shard_parameters(stage: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool, compute: torch.dtype | None) -> None:
    """fully_shard every layer and the rest of `stage` over `mesh` (1-D: FSDP, 2-D replicate x shard: HSDP), in place.

    Args:
        reshard_after_forward: True keeps memory sharded between forward and backward; every replica must then run the
            same number of micro-batches, or the all-gathers do not pair up and the step hangs.
        compute: dtype of forward and backward (torch.bfloat16), with fp32 master weights; None: that of the parameters.
    """
    policy = MixedPrecisionPolicy() if compute is None else MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in cast("LayeredModel", stage).layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    fully_shard(stage, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def announce_backward(stage: nn.Module, *, last: bool) -> None:
    """Before the backward pass of a micro-batch: FSDP2 reduces gradients and reshards after the last one only."""
    if isinstance(stage, FSDPModule):
        stage.set_is_last_backward(last)
        stage.set_requires_gradient_sync(last)
        stage.set_reshard_after_backward(last)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_in_place(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce (SUM) plain tensors of one dtype over `group` in one flat message."""
    parts = list(tensors)
    if not parts:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in parts])
    dist.all_reduce(flat, group=group)
    pieces = flat.split([tensor.numel() for tensor in parts])
    for tensor, piece in zip(parts, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))


def sum_tied(gradient: Tensor, group: dist.ProcessGroup, peer: int, *, first: bool) -> None:
    """Add the gradients of the two copies of a tied parameter, held by the first and the last stage, in place.

    Both add in the same order, so that their copies stay equal to the bit. `peer`: the other one's rank in `group`.
    """
    mine = local(gradient)
    theirs = torch.empty_like(mine)
    if first:
        dist.send(mine, group=group, group_dst=peer)
        dist.recv(theirs, group=group, group_src=peer)
    else:
        dist.recv(theirs, group=group, group_src=peer)
        dist.send(mine, group=group, group_dst=peer)
    mine.copy_(mine + theirs if first else theirs + mine)


def settle_placements(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Give every gradient the placements of its parameter.

    DTensor leaves partial sums behind (norm weights under sequence parallelism) and whole gradients of sharded
    embeddings. The partial ones travel in one message. `mesh` is the 1-D tensor-parallel mesh.
    """
    astray = [(parameter, cast("DTensor", parameter.grad)) for parameter in parameters if _is_astray(parameter)]
    owed = [gradient.to_local() for _, gradient in astray if any(placement.is_partial() for placement in gradient.placements)]
    sum_in_place(owed, mesh.get_group())
    for parameter, gradient in astray:
        wanted = cast("DTensor", parameter.data)
        whole = DTensor.from_local(gradient.to_local(), wanted.device_mesh, [Replicate()], run_check=False)
        parameter.grad = cast("Tensor", whole.redistribute(placements=wanted.placements))


def _is_astray(parameter: nn.Parameter) -> bool:
    gradient = parameter.grad
    return isinstance(gradient, DTensor) and gradient.placements != cast("DTensor", parameter.data).placements
