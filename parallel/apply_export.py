"""State without a mesh: the parts that this rank answers for, as arrays with their place in the whole, and the way back.

Each element of the whole state is given by exactly one rank, so that the ranks' parts together are the state, on any mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # pyright: ignore[reportPrivateUsage] - what DCP uses

from regrow.parallel.apply import MeshModel
from regrow.parallel.apply_data import local
from regrow.parallel.apply_zero import ShardedOptimizer
from regrow.parallel.quantised import AdamW8


@dataclasses.dataclass(frozen=True)
class Part:
    """A block of one tensor: its name, where it starts in the whole tensor, and the shape of that."""

    name: str
    array: npt.NDArray[np.float32]
    offset: tuple[int, ...]
    full_shape: tuple[int, ...]


def parts(net: MeshModel, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Part]:
    """Parameters ("model.<name>") and, with an optimizer, its tensors ("optimizer.<name>.exp_avg", ...), in float32."""
    for name, parameter in net.named_parameters():
        if net.answers_for(name, parameter):
            yield _part(f"model.{name}", parameter.detach())
        if optimizer is not None:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and net.answers_for(name, value):
                    yield _part(f"optimizer.{name}.{key}", value)


def load(net: MeshModel, optimizer: torch.optim.Optimizer, whole: Mapping[str, npt.NDArray[np.float32]], *, step: int) -> None:
    """Set this rank's parameters and optimizer tensors from the whole state, as `parts` of any mesh make it up.

    Args:
        whole: {"model.<name>": array, "optimizer.<name>.<key>": array}.
        step: completed optimizer steps.

    Raises:
        KeyError: a parameter that `whole` does not have.
    """
    if isinstance(optimizer, ShardedOptimizer | AdamW8):
        optimizer.materialise(_adam_state)
    else:
        _adam_state(optimizer)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            known = net.aliases.get(name, name)
            parameter.copy_(_like(parameter, whole[f"model.{known}"]))
            for key, value in optimizer.state[parameter].items():
                if key == "step":
                    value.fill_(float(step))
                else:
                    local(value).copy_(local(_like(value, whole[f"optimizer.{known}.{key}"])))


def _adam_state(optimizer: torch.optim.Optimizer) -> None:
    """What Adam and AdamW make at their first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros(()), **moments}


def _like(parameter: Tensor, array: npt.NDArray[np.float32]) -> Tensor:
    """The part of `array` that this rank holds of `parameter`, placed as it is."""
    full = torch.from_numpy(array).to(parameter.device)
    if not isinstance(parameter, DTensor):
        return full
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    piece = full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))].contiguous()
    return DTensor.from_local(
        piece, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _part(name: str, tensor: Tensor) -> Part:
    offset = (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    array = local(tensor).detach().to("cpu", torch.float32).numpy()
    return Part(name, array, tuple(offset), tuple(tensor.shape))
