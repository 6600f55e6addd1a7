"""Which layers a rank keeps, and the contract of a model that a mesh can cut."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from regrow.errors import ConfigurationError
from regrow.parallel.mesh import layers_per_stage


class LayeredModel(Protocol):
    """What a model offers to be cut.

    `layers` is a ModuleDict under *global* layer numbers ("0", "1", ...), so that a tensor has the same name on every
    mesh. Children named in `first_parts` belong to the first stage, those in `last_parts` to the last; a stage without
    one finds None there. Parameters live in submodules, never on the model itself.
    """

    layers: nn.ModuleDict
    first_parts: Sequence[str]
    last_parts: Sequence[str]
    ties: Mapping[str, str]
    """Parameters that are one tensor: {name in a last part: name in a first part}, which is the canonical one. Often empty."""

    def tensor_plan(self, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """Styles for parallelize_module by name; `*` stands for any layer."""
        ...

    def stream(self, micro_batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Meta tensors of one micro-batch: model input, hidden states between layers [batch, sequence, ...], output."""
        ...


def stages_of_rank(pp: int, pp_index: int, per_rank: int, *, v_shaped: bool) -> tuple[int, ...]:
    """Stages that one pipeline rank holds: one, a loop (rank, rank + pp, ...) or the two ends of a V."""
    if v_shaped:
        return (pp_index, 2 * pp - 1 - pp_index)
    return tuple(pp_index + pp * index for index in range(per_rank))


def layers_of_stages(layers: int, num_stages: int, counts: Sequence[int]) -> list[range]:
    """Global layer numbers of every stage. `counts` empty: as even as `layers_per_stage` makes it.

    Raises:
        ConfigurationError: counts that do not sum to the number of layers, or not one per stage.
    """
    chosen = tuple(counts) or layers_per_stage(layers, num_stages)
    if len(chosen) != num_stages or sum(chosen) != layers or min(chosen) < 1:
        raise ConfigurationError(
            f"layers per stage {chosen} do not put {layers} layers on {num_stages} stages",
            where="layers_per_stage",
            hint=f"use {layers_per_stage(layers, num_stages)}, or leave it empty",
        )
    starts = [sum(chosen[:index]) for index in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, chosen, strict=True)]


def part(model: nn.Module, layers: Sequence[int], *, first: bool, last: bool) -> nn.Module:
    """A view of `model` with only these layers. It shares its submodules with `model`, which stays as it was."""
    if next(model.parameters(recurse=False), None) is not None:
        raise ConfigurationError("the model has parameters of its own", where=type(model).__name__, hint="put them into a submodule")
    whole = cast("LayeredModel", model)
    view = copy.copy(model)
    children: dict[str, nn.Module | None] = dict(model.named_children())
    children["layers"] = nn.ModuleDict({str(layer): whole.layers[str(layer)] for layer in layers})
    children |= dict.fromkeys((*(() if first else whole.first_parts), *(() if last else whole.last_parts)))
    vars(view)["_modules"] = children  # nn.Module has no shallow copy of its own: copy.copy shares the dict of children
    return view


def tie(module: nn.Module, ties: Mapping[str, str]) -> None:
    """Make tied parameters one tensor again where this rank holds both: tensor parallelism shards each by itself.

    Raises:
        ConfigurationError: the two are sharded in different ways.
    """
    held = dict(module.named_parameters(remove_duplicate=False))
    for alias, name in ties.items():
        if alias not in held or name not in held or held[alias] is held[name]:
            continue
        one, other = held[alias].data, held[name].data
        if getattr(one, "placements", None) != getattr(other, "placements", None):
            raise ConfigurationError(
                f"tied parameters {alias} and {name} are sharded differently", hint="give both the same axis in tensor_plan"
            )
        parent, _, attribute = alias.rpartition(".")
        setattr(module.get_submodule(parent), attribute, held[name])


def parameter_order(model: nn.Module) -> dict[str, int]:
    """Position of every parameter of the whole model: the order in which norms are added up on every mesh."""
    return {name: index for index, (name, _) in enumerate(model.named_parameters())}


def device_of(model: nn.Module) -> torch.device:
    """Device of the first parameter."""
    return next(model.parameters()).device
