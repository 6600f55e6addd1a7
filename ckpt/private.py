"""The part of a training state that is not sharded tensors: hyper-parameters, scheduler, loader, random state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
import torch

from regrow.ckpt import plain
from regrow.ckpt.differences import IMPLEMENTATION_KEYS
from regrow.ckpt.flatten import name_of, optimizers_of
from regrow.errors import OperationalError
from regrow.ids import MeshShape


def groups(optimizer: Any, names: dict[int, str]) -> list[dict[str, Any]]:
    """Hyper-parameters of each parameter group, with the canonical names of its parameters."""
    found: list[dict[str, Any]] = []
    for number, one in enumerate(optimizers_of(optimizer)):
        for index, group in enumerate(one.param_groups):
            hyper = {key: plain.encode(value, f"param_groups[{index}].{key}") for key, value in group.items() if key != "params"}
            found.append({"optimizer": number, "group": index, "hyper": hyper, "params": [name_of(p, names) for p in group["params"]]})
    return found


def restore_groups(optimizer: Any, names: dict[int, str], saved: list[dict[str, Any]]) -> None:
    """Give each live group the hyper-parameters that its parameters had, wherever they were grouped then.

    Raises:
        OperationalError: a parameter was in no group, or the parameters of one group had different ones.
    """
    by_name = {name: group["hyper"] for group in saved for name in group["params"]}
    for one in optimizers_of(optimizer):
        for index, group in enumerate(one.param_groups):
            distinct: dict[bytes, Any] = {}
            for parameter in group["params"]:
                name = name_of(parameter, names)
                if name not in by_name:
                    raise OperationalError(f"parameter {name} was in no optimizer group", hint="it was saved with another optimizer")
                distinct.setdefault(msgspec.json.encode(by_name[name]), by_name[name])
            if len(distinct) > 1:
                raise OperationalError(
                    f"parameters of group {index} had {len(distinct)} different settings in the checkpoint",
                    hint="group parameters as they were grouped when it was saved",
                )
            for hyper in distinct.values():
                _set_hyper(group, plain.decode(hyper))


def _set_hyper(group: dict[str, Any], hyper: dict[str, Any]) -> None:
    for key, value in hyper.items():
        live = group.get(key)
        if key in IMPLEMENTATION_KEYS:
            continue
        if isinstance(live, torch.Tensor):
            live.fill_(float(value))
        else:
            group[key] = value


def set_values(optimizer: Any, names: dict[int, str], saved: Mapping[str, Any]) -> None:
    """Put per-parameter optimizer values that are not tensors (`<fqn>.<key>`) back."""
    by_parameter: dict[str, dict[str, Any]] = {}
    for full, value in saved.items():
        name, _, key = full.rpartition(".")
        by_parameter.setdefault(name, {})[key] = value
    for one in optimizers_of(optimizer) if saved else []:
        for group in one.param_groups:
            for parameter in group["params"]:
                for key, value in by_parameter.get(name_of(parameter, names), {}).items():
                    one.state[parameter][key] = plain.decode(value)


def schedulers_of(scheduler: Any) -> list[Any]:
    """None, one scheduler or several as a list."""
    if scheduler is None:
        return []
    return list(cast("list[Any]", scheduler)) if isinstance(scheduler, list | tuple) else [scheduler]


def choose_rank_state(saved: Mapping[int, Any], *, saved_mesh: MeshShape, mesh: MeshShape, rank: int, what: str) -> Any:
    """Which rank's private state a rank of another mesh takes.

    All equal: that. Same mesh: the same rank's. Same number of replicas: that of the same replica. Else there is no
    right answer.

    Raises:
        OperationalError: the state cannot follow this change of mesh.
    """
    distinct = {msgspec.json.encode(value) for value in saved.values()}
    if len(distinct) <= 1:
        return next(iter(saved.values()), None)
    if saved_mesh == mesh:
        return saved[rank]
    if saved_mesh.dp == mesh.dp:
        replica = mesh.coordinates(rank)["dp"]
        mine = {other: value for other, value in saved.items() if saved_mesh.coordinates(other)["dp"] == replica}
        if len({msgspec.json.encode(value) for value in mine.values()}) == 1:
            return next(iter(mine.values()))
    raise OperationalError(
        f"{what} differs between ranks and the mesh changed from {saved_mesh} to {mesh}",
        hint="make its state a function of samples consumed (run.batches does), so that it is the same on all ranks",
    )
