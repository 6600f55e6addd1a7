"""Tensor and sequence parallelism with torch's parallelize_module."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from regrow.parallel.apply_layers import LayeredModel


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shard the parameters of `model` (a rank's part is enough) over the 1-D `mesh`, in place."""
    styles = cast("LayeredModel", model).tensor_plan(sequence_parallel=sequence_parallel)
    names = [name for name, _ in model.named_modules()]
    for pattern, style in styles.items():
        plan = {name: style for name in names if fnmatchcase(name, pattern)}
        if plan:
            parallelize_module(model, mesh, plan)
