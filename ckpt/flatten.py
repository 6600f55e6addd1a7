"""Names the tensors of a training state: model and optimizer, plain tensors and DTensors, under canonical names.

model.<fqn>                    parameters and persistent buffers
optimizer.<fqn>.<key>          one tensor of optimizer state of the parameter <fqn>
extra.<key>.<path>             tensors of other objects' state dicts
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from regrow.ckpt import plain
from regrow.ckpt.envelope import ITEM_BYTES
from regrow.ckpt.layout import Box
from regrow.errors import ConfigurationError

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")


class Item:
    """A named tensor of the live state: which box of the whole this rank holds, and the tensor that holds it."""

    __slots__ = ("box", "local")

    def __init__(self, box: Box, local: torch.Tensor) -> None:
        self.box = box
        self.local = local


def clean_name(name: str) -> str:
    """A name without what compilers and wrappers put into it."""
    return _WRAPPERS.sub("", name.removeprefix("module.")).lstrip(".")


_Placed = dict[tuple[Any, ...], tuple[Any, Any]]


def items_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Item]:
    """`item_of` of each; where tensors of one shape lie alike, it is computed once."""
    placed: _Placed = {}
    return {name: item_of(name, value, placed) for name, value in tensors.items()}


def item_of(name: str, value: torch.Tensor, placed: _Placed | None = None) -> Item:
    """Where a tensor lies in its whole. `placed` remembers sizes and offsets from one call to the next.

    Raises:
        ConfigurationError: a placement or type that cannot be stored.
    """
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES or value.layout != torch.strided or value.is_quantized:
        raise ConfigurationError(
            f"tensor {name} of type {value.dtype}, {value.layout} cannot be stored", hint="store it dequantised and dense"
        )
    if not isinstance(value, DTensor):
        return Item(Box(name, dtype, tuple(value.shape), (0,) * value.dim(), tuple(value.shape)), value.detach())
    if any(placement.is_partial() for placement in value.placements):
        raise ConfigurationError(f"tensor {name} is a partial sum on its ranks", hint="reduce it before the save")
    sizes, offsets = _place_of(value, {} if placed is None else placed)
    local = local_of(value)
    if tuple(local.shape) != tuple(sizes):
        raise ConfigurationError(f"tensor {name} holds {tuple(local.shape)} here, its placement says {tuple(sizes)}")
    if not all(sizes):
        offsets = (0,) * len(sizes)
    return Item(Box(name, dtype, tuple(value.shape), tuple(offsets), tuple(sizes)), local)


def _place_of(value: DTensor, placed: _Placed) -> tuple[Any, Any]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    key = (value.shape, id(value.device_mesh), value.placements)
    if key not in placed:
        placed[key] = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return placed[key]


def unwrap(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors that a quantised or otherwise composed tensor is made of, under ``<name>.<part>``; itself when it is plain.

    Raises:
        ConfigurationError: a part of a sharded one has no place of its own in the whole.
    """
    placed = value if isinstance(value, DTensor) else None
    local = local_of(value) if placed is not None else value
    if not is_traceable_wrapper_subclass(local):
        return {name: value}
    attributes, _ = cast("Any", local).__tensor_flatten__()
    parts: dict[str, torch.Tensor] = {}
    for attribute in attributes:
        inner, full = getattr(local, attribute), f"{name}.{attribute}"
        if placed is None or inner.numel() <= 1:
            parts |= unwrap(full, inner)
        elif inner.shape == local.shape:
            parts |= unwrap(full, _place_as(inner, placed))
        else:
            raise ConfigurationError(
                f"part {full} of shape {tuple(inner.shape)} of a sharded {type(local).__name__} has no place in the whole tensor",
                hint="keep quantised state on replicated parameters, or give the object as extra with regrow.ckpt.perrank.PerRank",
            )
    return parts


def _place_as(value: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(value, like.device_mesh, like.placements, shape=like.shape, stride=like.stride(), run_check=False)


def local_of(value: torch.Tensor) -> torch.Tensor:
    """The tensor that this rank holds of `value`, without a graph and without a copy."""
    local: torch.Tensor = getattr(value, "_local_tensor", value)
    return local.detach()


def modules_of(model: Any) -> list[torch.nn.Module]:
    """One module or several (pipeline stages) as a list."""
    return [model] if isinstance(model, torch.nn.Module) else list(cast("Iterable[torch.nn.Module]", model))


class Collected:
    """Live tensors by canonical name; further tensors that are loaded with the same content; what is no tensor."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.copies: list[tuple[str, torch.Tensor]] = []
        self.others: dict[str, Any] = {}


def model_tensors(model: Any, aliases: Mapping[str, str]) -> Collected:
    """Parameters and persistent buffers under their fully qualified names.

    A tensor that several names share is listed once, under the name that `aliases` gives, else the first in order.
    A name in `aliases` is always stored under its target, also where this rank holds only the alias; where it holds
    both as tensors of their own (untied by a parallel layout), the second one becomes a copy.
    """
    found = Collected()
    seen: set[int] = set()
    for module in modules_of(model):
        for raw, value in module.state_dict(keep_vars=True).items():
            name = aliases.get(clean_name(raw), clean_name(raw))
            if name.endswith("_extra_state") or not isinstance(value, torch.Tensor):
                found.others[name] = value
            elif id(value) not in seen:
                seen.add(id(value))
                _add(found, name, value, is_alias=clean_name(raw) in aliases)
    return found


def _add(found: Collected, name: str, value: torch.Tensor, *, is_alias: bool) -> None:
    other = found.tensors.get(name)
    if other is None:
        found.tensors[name] = value
    elif is_alias:
        found.copies.append((name, value))
    else:
        raise ConfigurationError(
            f"two tensors of the model are named {name}", hint='number layers globally, for example ModuleDict {"3": Block}'
        )


def parameter_names(model: Any, aliases: Mapping[str, str]) -> dict[int, str]:
    """id(parameter) -> canonical name."""
    names: dict[int, str] = {}
    for module in modules_of(model):
        for raw, parameter in module.named_parameters(remove_duplicate=False):
            name = clean_name(raw)
            names.setdefault(id(parameter), aliases.get(name, name))
    return names


def optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """None, one optimizer or several as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(cast("Iterable[torch.optim.Optimizer]", optimizer))


def optimizer_state(optimizer: Any, names: dict[int, str]) -> Collected:
    """Tensors of optimizer state by canonical name (``<fqn>.<key>``), and per-parameter values that are not tensors.

    Raises:
        ConfigurationError: the optimizer has parameters that the model does not have.
    """
    found = Collected()
    for one in optimizers_of(optimizer):
        for group in one.param_groups:
            for parameter in group["params"]:
                name = name_of(parameter, names)
                for key, value in one.state.get(parameter, {}).items():
                    full = f"{name}.{key}"
                    if not isinstance(value, torch.Tensor):
                        found.others[full] = plain.encode(value, full)
                    else:
                        placed = _like_parameter(full, value, parameter)
                        if full in found.tensors:
                            found.copies.append((full, placed))
                        else:
                            found.tensors[full] = placed
    return found


def name_of(parameter: torch.Tensor, names: dict[int, str]) -> str:
    """Canonical name of a parameter of the optimizer.

    Raises:
        ConfigurationError: the model does not have it.
    """
    name = names.get(id(parameter))
    if name is None:
        raise ConfigurationError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the model",
            hint="give train_state() the model that the optimizer was made from",
        )
    return name


def _like_parameter(name: str, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Optimizers that keep plain local tensors for DTensor parameters: the state is placed as the parameter is."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or value.numel() <= 1:
        return value
    if value.shape == parameter.to_local().shape:
        return _place_as(value, parameter)
    raise ConfigurationError(
        f"optimizer state {name} of shape {tuple(value.shape)} cannot be placed",
        hint="keep it as a DTensor, or in the parameter's local shape",
    )


def split_tensors(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Take the tensors out of a nested state dict: they go into `tensors`, {"$stored": name} stands in their place."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {"$stored": path}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in cast("Mapping[Any, Any]", value)):
        return {key: split_tensors(item, f"{path}.{key}", tensors) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [split_tensors(item, f"{path}.{index}", tensors) for index, item in enumerate(cast("list[Any]", value))]
    return plain.encode(value, path)


def join_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `split_tensors`."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if list(fields) == ["$stored"]:
            return tensors[fields["$stored"]]
        if len(fields) == 1 and next(iter(fields)).startswith("$"):
            return plain.decode(fields)
        return {key: join_tensors(item, tensors) for key, item in fields.items()}
    if isinstance(value, list):
        return [join_tensors(item, tensors) for item in cast("list[Any]", value)]
    return value


def stored_names(value: Any) -> list[str]:
    """Names of the tensors that `join_tensors` will want."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if list(fields) == ["$stored"]:
            return [fields["$stored"]]
        return [name for item in fields.values() for name in stored_names(item)]
    if isinstance(value, list):
        return [name for item in cast("list[Any]", value) for name in stored_names(item)]
    return []
