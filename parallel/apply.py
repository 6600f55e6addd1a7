"""Put a model onto a mesh, with torch's own parts, and run its steps: the gradient is that of one process.

    net = apply_mesh(model, run.mesh, run.mesh_shape, Strategy(micro_batch=2, micro_batches=(4, 4)))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    result = net.forward_backward(inputs, targets, keys)     # loss, gradient norm, tokens; gradients summed and clipped
    optimizer.step()

Order: pipeline cut (global layer numbers), tensor + sequence parallelism, then the data axis. See apply_layers for what
a model offers, apply_data for the sum over replicas, apply_gradients for the norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.parallel import apply_data, apply_gradients, apply_layers, apply_pipeline, apply_tensor
from regrow.parallel.apply_gradients import StepResult
from regrow.parallel.apply_memory import Recompute, recompute_layers
from regrow.parallel.apply_pipeline import LossFunction
from regrow.parallel.loss import IGNORED, num_valid, summed_cross_entropy

HSDP_AXES = ("dp_replicate", "dp_shard")

__all__ = ["MeshModel", "StepResult", "Strategy", "apply_mesh"]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How a step runs on a mesh. Sizes in samples."""

    micro_batch: int
    micro_batches: tuple[int, ...]
    """Micro-batches a step for each data-parallel replica (`parallel.batch.split`); they may differ by one."""
    zero_stage: int = 0
    """0: replicated. 2: gradients and optimizer state sharded. 3: parameters too, also between forward and backward: without a
    pipeline, short replicas then run micro-batches of weight zero, so that all ranks issue the same collectives."""
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


class MeshModel:
    """This rank's part of a model on a mesh. `module` holds its parameters under their mesh-independent names."""

    def __init__(
        self,
        module: nn.Module,
        *,
        shape: MeshShape,
        coordinates: dict[str, int],
        strategy: Strategy,
        order: dict[str, int],
        stages: Sequence[tuple[int, nn.Module]],
        pipeline: apply_pipeline.Pipeline | None,
        loss_fn: LossFunction,
        mesh: Any,
        ties: Mapping[str, str],
    ) -> None:
        self.module = module
        self.aliases = dict(ties)
        """Tied parameters, {alias: canonical name}: what train_state(aliases=...) wants to know."""
        self.shape = shape
        self.coordinates = coordinates
        self.strategy = strategy
        self.num_samples = strategy.micro_batches[coordinates["dp"]] * strategy.micro_batch
        self._stages = stages
        self._pipeline = pipeline
        self._loss_fn = loss_fn
        self._mesh = mesh
        self._padding = max(strategy.micro_batches) - strategy.micro_batches[coordinates["dp"]] if _reshards(shape, strategy) else 0
        self._sharded = any(isinstance(stage, FSDPModule) for _, stage in stages)
        axes = _axes(coordinates, strategy, sharded=self._sharded)
        self._named = list(module.named_parameters())
        self._counts = {name: name not in ties and apply_gradients.counts_here(parameter, axes) for name, parameter in self._named}
        rank = shape.rank(**coordinates)
        self._speaks = coordinates["tp"] == 0
        self._totals = apply_gradients.Totals(order, rank=rank, world_size=shape.world_size, device=apply_layers.device_of(module))

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters (or shards of them)."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their mesh-independent names."""
        return self.module.named_parameters()

    def answers_for(self, name: str) -> bool:
        """Whether this rank, of all that hold the same elements of parameter `name`, is the one to report them."""
        return self._counts[name]

    def forward_backward(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> StepResult:
        """One step up to the optimizer: gradients of the mean loss over the *global* batch, clipped, on every rank.

        Args:
            inputs, targets, keys: this replica's samples in order, [num_samples, ...]; keys from dropout.sample_keys.
                Every rank of a replica passes the same.

        Raises:
            ConfigurationError: a number of samples that is not this replica's share.
        """
        self._check(inputs)
        for parameter in self.parameters():
            parameter.grad = None
        self.module.train()
        for _, stage in self._stages:
            stage.train()
        run = self._accumulate if self._pipeline is None else self._pipeline.forward_backward
        loss = run(inputs, targets, keys)
        broken = self._reduce()
        gradients = [(name, cast("Tensor", parameter.grad)) for name, parameter in self._named]
        result = self._totals.settle(
            ((name, gradient, self._counts[name]) for name, gradient in gradients),
            loss=loss if self._speaks else None,
            tokens=num_valid(targets) if self._speaks and self.coordinates["pp"] == 0 else 0,
            broken=broken,
        )
        apply_gradients.scale((gradient for _, gradient in gradients), result, self.strategy.clip_norm)
        return result

    def evaluate(self, inputs: Tensor, targets: Tensor) -> float:
        """Mean loss per valid token over what all replicas pass, without dropout and gradients, on every rank."""
        self._check(inputs)
        for _, stage in self._stages:
            stage.eval()
        with torch.no_grad():
            loss = (self._sum_loss if self._pipeline is None else self._pipeline.forward)(inputs, targets)
        for _, stage in self._stages:
            stage.train()
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        result = self._totals.settle(
            (),
            loss=loss if self._speaks else None,
            tokens=num_valid(targets) if self._speaks and self.coordinates["pp"] == 0 else 0,
        )
        return result.loss

    def _check(self, inputs: Tensor) -> None:
        if inputs.shape[0] != self.num_samples:
            raise ConfigurationError(
                f"{inputs.shape[0]} samples for replica {self.coordinates['dp']}, whose share is {self.num_samples}",
                where="forward_backward",
                hint="take them from run.batches(...)",
            )

    def _micro_batches(self, inputs: Tensor, targets: Tensor, keys: Tensor | None) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """The samples in micro-batches, then those of weight zero: inputs again, nothing to predict."""
        size = self.strategy.micro_batch
        cut = keys.split(size) if keys is not None else [None] * len(inputs.split(size))
        chunks = list(zip(inputs.split(size), targets.split(size), cut, strict=True))
        source, target, key = chunks[-1]
        return chunks + [(source, torch.full_like(target, IGNORED), key)] * self._padding

    def _accumulate(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> Tensor:
        stage = self._stages[0][1]
        chunks = self._micro_batches(inputs, targets, keys)
        losses: list[Tensor] = []
        for index, (source, target, key) in enumerate(chunks):
            loss = self._loss_fn(stage(source, key=key), target)
            apply_data.announce_backward(stage, last=index == len(chunks) - 1)
            loss.backward()
            losses.append(loss.detach().double())
        return torch.stack(losses).sum()

    def _sum_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        stage = self._stages[0][1]
        losses = [self._loss_fn(stage(source), target).double() for source, target, _ in self._micro_batches(inputs, targets, None)]
        return torch.stack(losses).sum()

    def _reduce(self) -> bool:
        if self.shape.tp > 1 and not self._sharded:
            apply_data.settle_placements(self.parameters(), self._mesh["tp"])
        gradients = [apply_data.local(cast("Tensor", parameter.grad)) for parameter in self.parameters()]
        broken = not apply_gradients.all_finite(gradients)
        if self.shape.dp > 1 and not self._sharded:
            apply_data.sum_in_place(gradients, self._mesh["dp"].get_group())
        self._sum_ties()
        return broken

    def _sum_ties(self) -> None:
        held = dict(self.module.named_parameters(remove_duplicate=False))
        for alias, name in self.aliases.items():
            first, last = name in held, alias in held
            if first != last and self.shape.pp > 1:
                peer = self.shape.pp - 1 if first else 0
                apply_data.sum_tied(held[name if first else alias], self._mesh["pp"].get_group(), peer, first=first)


def apply_mesh(
    model: nn.Module,
    mesh: Any,
    shape: MeshShape,
    strategy: Strategy,
    *,
    loss_fn: LossFunction = summed_cross_entropy,
) -> MeshModel:
    """Cut `model` for this rank. All ranks pass the same whole model (same seed) and keep their part.

    Args:
        model: an apply_layers.LayeredModel.
        mesh: torch DeviceMesh with axes "dp", "pp", "tp" in this order; None on one process.
        shape: the sizes of that mesh.

    Raises:
        ConfigurationError: sizes that do not fit, with the factors.
    """
    _check_sizes(shape, strategy)
    layered = cast("apply_layers.LayeredModel", model)
    num_layers = len(layered.layers)
    kind = apply_pipeline.check_schedule(strategy.schedule, pp=shape.pp, layers=num_layers, micro_batches=strategy.micro_batches)
    per_rank = kind.stages_per_rank if shape.pp > 1 else 1
    ranges = apply_layers.layers_of_stages(num_layers, shape.pp * per_rank, strategy.layers_per_stage if per_rank == 1 else ())
    _check_ties(layered.ties, strategy, two_ends=kind.v_shaped and shape.pp > 1)
    coordinates = shape.coordinates(dist.get_rank() if shape.world_size > 1 else 0)
    coordinates.pop("cp")
    order = apply_layers.parameter_order(model)
    mine = apply_layers.stages_of_rank(shape.pp, coordinates["pp"], per_rank, v_shaped=kind.v_shaped and per_rank > 1)
    module, stages = _cut(model, mesh, strategy, ranges, mine)
    if strategy.zero_stage >= 2 and shape.dp > 1:
        _shard(stages, mesh, shape, strategy)
    pipeline = None
    if shape.pp > 1:
        pipeline = apply_pipeline.Pipeline(
            stages,
            num_stages=shape.pp * per_rank,
            kind=kind,
            num_micro_batches=strategy.micro_batches[coordinates["dp"]],
            micro_batch=strategy.micro_batch,
            loss_fn=loss_fn,
            group=mesh["pp"].get_group(),
            device=apply_layers.device_of(module),
            cut_sequence=shape.tp if strategy.sequence_parallel else 1,
            compute=strategy.compute,
        )
    return MeshModel(
        module,
        shape=shape,
        coordinates=coordinates,
        strategy=strategy,
        order=order,
        stages=stages,
        pipeline=pipeline,
        loss_fn=loss_fn,
        mesh=mesh,
        ties=dict(layered.ties),
    )


def _cut(
    model: nn.Module, mesh: Any, strategy: Strategy, ranges: Sequence[range], mine: Sequence[int]
) -> tuple[nn.Module, list[tuple[int, nn.Module]]]:
    """This rank's part of the model, tensor-parallel already, and its stages by number: views of that part."""
    last = len(ranges) - 1
    held = sorted(layer for stage in mine for layer in ranges[stage])
    module = apply_layers.part(model, held, first=0 in mine, last=last in mine)
    if mesh is not None and mesh["tp"].size() > 1:
        apply_tensor.apply_tensor_parallel(module, mesh["tp"], sequence_parallel=strategy.sequence_parallel)
    apply_layers.tie(module, cast("apply_layers.LayeredModel", model).ties)
    recompute_layers(module, strategy.recompute)
    if len(mine) == 1:
        return module, [(mine[0], module)]
    return module, [(stage, apply_layers.part(module, ranges[stage], first=stage == 0, last=stage == last)) for stage in mine]


def _check_ties(ties: Mapping[str, str], strategy: Strategy, *, two_ends: bool) -> None:
    if ties and two_ends and strategy.zero_stage >= 2:
        raise ConfigurationError(
            f"schedule {strategy.schedule} puts both ends of a tied parameter on one rank, in two sharded stages",
            where="--schedule",
            hint="use 1f1b or interleaved, or ZeRO stage 0",
        )


def _shard(stages: Sequence[tuple[int, nn.Module]], mesh: Any, shape: MeshShape, strategy: Strategy) -> None:
    axis = mesh["dp"]
    if strategy.shard_size:
        axis = axis._unflatten(0, (shape.dp // strategy.shard_size, strategy.shard_size), HSDP_AXES)  # noqa: SLF001 - no public way yet
    for _, stage in stages:
        apply_data.shard_parameters(stage, axis, reshard_after_forward=_reshards(shape, strategy), compute=strategy.compute)


def _reshards(shape: MeshShape, strategy: Strategy) -> bool:
    """Whether parameters are given back after each forward pass: gathering again per micro-batch does not pay in a pipeline."""
    return strategy.zero_stage == 3 and shape.pp == 1 and shape.dp > 1


def _axes(coordinates: Mapping[str, int], strategy: Strategy, *, sharded: bool) -> dict[str, int]:
    """This rank's place on the axes over which parameters are sharded or replicated."""
    if not (sharded and strategy.shard_size):
        return {"dp": coordinates["dp"], "tp": coordinates["tp"]}
    group, place = divmod(coordinates["dp"], strategy.shard_size)
    return {HSDP_AXES[0]: group, HSDP_AXES[1]: place, "tp": coordinates["tp"]}


def _check_sizes(shape: MeshShape, strategy: Strategy) -> None:
    if len(strategy.micro_batches) != shape.dp or min(strategy.micro_batches, default=0) < 1 or strategy.micro_batch < 1:
        raise ConfigurationError(
            f"micro-batches {strategy.micro_batches} of {strategy.micro_batch} for dp = {shape.dp}",
            where="micro_batches",
            hint="use parallel.batch.split(global_batch, micro_batch, dp): every replica needs at least one",
        )
    if strategy.zero_stage not in (0, 2, 3):
        raise ConfigurationError(f"ZeRO stage {strategy.zero_stage} has no runtime here", where="--zero", hint="use 0, 2 or 3")
    if strategy.shard_size and (strategy.zero_stage < 2 or shape.dp % strategy.shard_size):
        raise ConfigurationError(
            f"shard groups of {strategy.shard_size} with ZeRO stage {strategy.zero_stage} and dp = {shape.dp}",
            where="shard_size",
            hint="use a divisor of dp and ZeRO stage 2 or 3",
        )
    if shape.cp > 1:
        raise ConfigurationError(f"cp = {shape.cp} has no runtime here", where="--mesh", hint="use dp, tp and pp")
    if strategy.compute is not None and (strategy.zero_stage < 2 or shape.dp == 1):
        raise ConfigurationError("bf16 compute needs a sharded data axis", where="compute", hint="use zero_stage 2 or 3 with dp > 1")
