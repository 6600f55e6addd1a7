"""Tensor and sequence parallelism with torch's parallelize_module."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from regrow.errors import ConfigurationError
from regrow.parallel.apply_layers import LayeredModel
from regrow.parallel.dropout import place_on_mesh


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shard the parameters of `model` (a rank's part is enough) over the 1-D `mesh`, in place.

    Raises:
        ConfigurationError: the sequence cannot be cut evenly.
    """
    tp = mesh.size()
    layered = cast("LayeredModel", model)
    sequence = layered.stream(1)[1].shape[1]
    if sequence_parallel and sequence % tp:
        raise ConfigurationError(
            f"sequence of {sequence} cannot be cut evenly over tp = {tp}",
            where="--tp",
            hint="choose a divisor, or turn sequence parallel off",
        )
    styles = layered.tensor_plan(sequence_parallel=sequence_parallel)
    names = [name for name, _ in model.named_modules()]
    for pattern, style in styles.items():
        plan = {name: style for name in names if fnmatchcase(name, pattern)}
        if plan:
            parallelize_module(model, mesh, plan)
    place_on_mesh(model, tp=tp, tp_index=mesh.get_local_rank(), sequence_parallel=sequence_parallel)
