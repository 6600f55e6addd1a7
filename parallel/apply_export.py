"""The parts of parameters and optimizer state that this rank answers for, as arrays with their place in the whole.

Each element of the whole state is given by exactly one rank, so that the ranks' parts together are the state, on any mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # pyright: ignore[reportPrivateUsage] - what DCP uses

from regrow.parallel.apply import MeshModel
from regrow.parallel.apply_data import local


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
        if not net.answers_for(name):
            continue
        yield _part(f"model.{name}", parameter.detach())
        if optimizer is not None:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    yield _part(f"optimizer.{name}.{key}", value)


def _part(name: str, tensor: Tensor) -> Part:
    offset = (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    array = local(tensor).detach().to("cpu", torch.float32).numpy()
    return Part(name, array, tuple(offset), tuple(tensor.shape))
