"""How a step runs on a mesh, and which combinations are refused, with the reason, before anything is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import nn

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.parallel.apply_experts import mixtures_of
from regrow.parallel.apply_layers import LayeredModel
from regrow.parallel.apply_memory import Recompute
from regrow.parallel.dropout import LANES

ZERO_STAGES = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How a step runs on a mesh. Sizes in samples."""

    micro_batch: int
    micro_batches: tuple[int, ...]
    """Micro-batches a step for each data-parallel replica (`parallel.batch.split`); they may differ by one."""
    zero_stage: int = 0
    """0: replicated. 1: optimizer state sharded (make it with `MeshModel.optimizer`). 2: gradients too. 3: parameters too, also
    between forward and backward: without a pipeline, short replicas then run micro-batches of weight zero, so that all ranks
    issue the same collectives."""
    schedule: str = "1f1b"
    layers_per_stage: tuple[int, ...] = ()
    """Empty: as even as possible."""
    sequence_parallel: bool = True
    clip_norm: float | None = 1.0
    recompute: Recompute = "none"
    """Activations of a layer: kept, computed again but for matrix products and collectives, or all computed again."""
    shard_size: int = 0
    """Replicas over which a sharded data axis shards (HSDP: dp / shard_size groups hold copies). 0: all of them."""
    compute: torch.dtype | None = None
    """torch.bfloat16: forward and backward in bf16 with fp32 master weights (sharded data axis only)."""


def check(shape: MeshShape, strategy: Strategy) -> None:
    """Refuse what does not fit together.

    Raises:
        ConfigurationError: the first reason, with the factors and what to use instead.
    """
    if len(strategy.micro_batches) != shape.dp or min(strategy.micro_batches, default=0) < 1 or strategy.micro_batch < 1:
        raise ConfigurationError(
            f"micro-batches {strategy.micro_batches} of {strategy.micro_batch} for dp = {shape.dp}",
            where="micro_batches",
            hint="use parallel.batch.split(global_batch, micro_batch, dp): every replica needs at least one",
        )
    for what, where, hint in _refusals(shape, strategy):
        raise ConfigurationError(what, where=where, hint=hint)


def _refusals(shape: MeshShape, strategy: Strategy) -> Iterator[tuple[str, str, str]]:
    """(what, where, hint) for everything that does not fit together."""
    stage = strategy.zero_stage
    if stage not in ZERO_STAGES:
        yield f"ZeRO stage {stage} is not known", "--zero", "use 0, 1, 2 or 3"
    if strategy.shard_size and (stage < 2 or shape.dp % strategy.shard_size or shape.cp > 1):
        what = f"shard groups of {strategy.shard_size} with ZeRO stage {stage}, dp = {shape.dp} and cp = {shape.cp}"
        yield what, "shard_size", "use a divisor of dp, ZeRO stage 2 or 3 and cp = 1"
    if strategy.compute is not None and (stage < 2 or shape.dp == 1):
        yield "bf16 compute needs a sharded data axis", "compute", "use zero_stage 2 or 3 with dp > 1"
    if shape.ep > 1:
        yield from _expert_refusals(shape, strategy)


def _expert_refusals(shape: MeshShape, strategy: Strategy) -> Iterator[tuple[str, str, str]]:
    if shape.dp % shape.ep:
        yield f"ep = {shape.ep} does not divide dp = {shape.dp}", "--mesh", "experts are folded into the data axis: choose a divisor"
    if shape.tp > 1 or shape.cp > 1:
        what = f"ep = {shape.ep} with tp = {shape.tp} and cp = {shape.cp}: expert groups lie along the data axis only"
        yield what, "--mesh", "use tp = 1 and cp = 1, or ep = 1"
    if strategy.zero_stage >= 2:
        what = f"ep = {shape.ep} with ZeRO stage {strategy.zero_stage}: experts are sharded over the data axis already"
        yield what, "--zero", "use ZeRO stage 0 or 1, or ep = 1"


def check_model(model: nn.Module, shape: MeshShape, strategy: Strategy) -> None:
    """Refuse a mesh that this model cannot be cut for.

    Raises:
        ConfigurationError: with the factors.
    """
    sequence = cast("LayeredModel", model).stream(1)[1].shape[1]
    if sequence % shape.cp or (shape.cp > 1 and sequence // shape.cp % LANES):
        raise ConfigurationError(
            f"sequence of {sequence} cannot be cut into {shape.cp} equal parts of a multiple of {LANES} (cp = {shape.cp})",
            where="--mesh",
            hint="choose another cp, or another length of the sequence",
        )
    if strategy.sequence_parallel and sequence // shape.cp % shape.tp:
        raise ConfigurationError(
            f"sequence of {sequence // shape.cp} cannot be cut evenly over tp = {shape.tp}",
            where="--tp",
            hint="choose a divisor, or turn sequence parallel off",
        )
    mixtures = mixtures_of(model)
    if shape.ep > 1 and not mixtures:
        raise ConfigurationError(f"ep = {shape.ep}: the model has no mixture of experts", where="--mesh", hint="use ep = 1")
    if mixtures and shape.tp > 1:
        raise ConfigurationError(
            f"tp = {shape.tp}: mixtures of experts are not cut by tensor parallelism here", where="--tp", hint="use ep, dp and pp"
        )


def check_ties(ties: Mapping[str, str], strategy: Strategy, *, two_ends: bool) -> None:
    """Refuse tied parameters whose ends would lie in two sharded stages of one rank.

    Raises:
        ConfigurationError: with what to use instead.
    """
    if ties and two_ends and strategy.zero_stage >= 2:
        raise ConfigurationError(
            f"schedule {strategy.schedule} puts both ends of a tied parameter on one rank, in two sharded stages",
            where="--schedule",
            hint="use 1f1b or interleaved, or ZeRO stage 0",
        )


def gives_back(shape: MeshShape, strategy: Strategy) -> bool:
    """Whether parameters are given back after each forward pass: gathering again per micro-batch does not pay in a pipeline."""
    return strategy.zero_stage == 3 and shape.pp == 1 and shape.dp * shape.cp > 1


def runs_equal_counts(shape: MeshShape, strategy: Strategy) -> bool:
    """Whether replicas must issue the same collectives in every micro-batch: short ones then run micro-batches of weight zero."""
    return gives_back(shape, strategy) or shape.ep > 1
