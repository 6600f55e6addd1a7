"""Put a model onto a mesh, with torch's own parts, and run its steps: the gradient is that of one process.

    net = apply_mesh(model, run.mesh, run.mesh_shape, Strategy(micro_batch=2, micro_batches=(4, 4)))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    result = net.forward_backward(inputs, targets, keys)     # loss, gradient norm, tokens; gradients summed and clipped
    optimizer.step()

Order: pipeline cut (global layer numbers), tensor + sequence parallelism, then the data axis. See apply_layers for what
a model offers, apply_data for the sum over replicas, apply_gradients for the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.parallel import (
    apply_context,
    apply_data,
    apply_experts,
    apply_gradients,
    apply_layers,
    apply_pipeline,
    apply_strategy,
    apply_tensor,
)
from regrow.parallel.apply_axis import DataAxis
from regrow.parallel.apply_gradients import StepResult
from regrow.parallel.apply_memory import recompute_layers
from regrow.parallel.apply_pipeline import LossFunction
from regrow.parallel.apply_strategy import Strategy
from regrow.parallel.apply_zero import ShardedOptimizer
from regrow.parallel.dropout import place_on_mesh
from regrow.parallel.loss import IGNORED, num_valid, summed_cross_entropy

__all__ = ["MeshModel", "StepResult", "Strategy", "apply_mesh"]


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
        data: DataAxis,
        pipes: dist.ProcessGroup | None,
        ties: Mapping[str, str],
    ) -> None:
        self.module = module
        self.aliases = dict(ties)
        """Tied parameters, {alias: canonical name}: what train_state(aliases=...) wants to know."""
        self.shape = shape
        self.coordinates = coordinates
        self.strategy = strategy
        self.num_samples = strategy.micro_batches[coordinates["dp"]] * strategy.micro_batch
        self.around: Callable[..., Any] = _directly
        """What does this rank's forward and backward passes of a step, before any sum over replicas: `regrow.attach().replay(...)`
        repeats them now and then and compares the gradients."""
        self.computed: Callable[[], None] = _nothing
        """Called between those passes and the sums over replicas: `regrow.attach().computed`, where no earlier sum waits for another rank."""
        self._stages = stages
        self._pipeline = pipeline
        self._loss_fn = loss_fn
        self._data = data
        self._pipes = pipes
        own = strategy.micro_batches[coordinates["dp"]]
        self._padding = max(strategy.micro_batches) - own if apply_strategy.runs_equal_counts(shape, strategy) else 0
        self._named = list(module.named_parameters())
        self._counts = {name: name not in ties and data.counts_gradient(parameter) for name, parameter in self._named}
        rank = shape.rank(**coordinates)
        self._speaks = coordinates["tp"] == 0
        self._totals = apply_gradients.Totals(order, rank=rank, world_size=shape.world_size, device=apply_layers.device_of(module))

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters (or shards of them)."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their mesh-independent names."""
        return self.module.named_parameters()

    def answers_for(self, name: str, tensor: Tensor) -> bool:
        """Whether this rank, of all that hold the same elements of `tensor` (a parameter, or optimizer state of it), reports them."""
        return name not in self.aliases and self._data.counts(tensor)

    def optimizer(self, make: Callable[..., torch.optim.Optimizer], groups: Any, **options: Any) -> torch.optim.Optimizer:
        """`make(groups, **options)`, with its state sharded over the replicas under ZeRO stage 1.

        Args:
            make: an optimizer that treats elements alike (torch.optim.AdamW, regrow.parallel.quantised.AdamW8).
        """
        return make(groups, **options) if not self._data.slices else ShardedOptimizer(make, groups, self._data.slices, **options)

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
        inputs, targets = (self._cut(tensor) for tensor in (inputs, targets))
        run = self._accumulate if self._pipeline is None else self._pipeline.forward_backward
        loss = self.around(run, *self._padded(inputs, targets, keys))
        self.computed()
        broken = self._reduce()
        gradients = [(name, self._data.gradient_of(parameter)) for name, parameter in self._named]
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
        inputs, targets = (self._cut(tensor) for tensor in (inputs, targets))
        for _, stage in self._stages:
            stage.eval()
        with torch.no_grad():
            source, target, _ = self._padded(inputs, targets, inputs)
            loss = (self._sum_loss if self._pipeline is None else self._pipeline.forward)(source, target)
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

    def _cut(self, tensor: Tensor) -> Tensor:
        return apply_context.cut_sequence(tensor, index=self.coordinates["cp"], size=self.shape.cp)

    def _padded(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The samples, then micro-batches of weight zero: the last inputs again, nothing to predict."""
        if not self._padding:
            return inputs, targets, keys
        size, times = self.strategy.micro_batch, self._padding
        last = (inputs[-size:], torch.full_like(targets[-size:], IGNORED), keys[-size:])
        whole = (torch.cat([tensor, *[more] * times]) for tensor, more in zip((inputs, targets, keys), last, strict=True))
        return cast("tuple[Tensor, Tensor, Tensor]", tuple(whole))

    def _accumulate(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> Tensor:
        stage, size = self._stages[0][1], self.strategy.micro_batch
        chunks = list(zip(inputs.split(size), targets.split(size), keys.split(size), strict=True))
        losses: list[Tensor] = []
        for index, (source, target, key) in enumerate(chunks):
            loss = self._loss_fn(stage(source, key=key), target)
            apply_data.announce_backward(stage, last=index == len(chunks) - 1)
            loss.backward()
            losses.append(loss.detach().double())
        return torch.stack(losses).sum()

    def _sum_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        stage, size = self._stages[0][1], self.strategy.micro_batch
        pairs = zip(inputs.split(size), targets.split(size), strict=True)
        return torch.stack([self._loss_fn(stage(source), target).double() for source, target in pairs]).sum()

    def _reduce(self) -> bool:
        broken = self._data.reduce()
        held = dict(self.module.named_parameters(remove_duplicate=False))
        for alias, name in self.aliases.items():
            first, last = name in held, alias in held
            if first != last and self._pipes is not None:
                peer = self.shape.pp - 1 if first else 0
                apply_data.sum_tied(self._data.gradient_of(held[name if first else alias]), self._pipes, peer, first=first)
        return broken


def _directly(compute: Callable[..., Any], *inputs: Tensor) -> Any:
    return compute(*inputs)


def _nothing() -> None:
    return None


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
    apply_strategy.check(shape, strategy)
    layered = cast("apply_layers.LayeredModel", model)
    num_layers = len(layered.layers)
    counts = strategy.micro_batches
    if apply_strategy.runs_equal_counts(shape, strategy):
        counts = (max(counts),) * shape.dp
    kind = apply_pipeline.check_schedule(strategy.schedule, pp=shape.pp, layers=num_layers, micro_batches=counts)
    per_rank = kind.stages_per_rank if shape.pp > 1 else 1
    ranges = apply_layers.layers_of_stages(num_layers, shape.pp * per_rank, strategy.layers_per_stage if per_rank == 1 else ())
    apply_strategy.check_ties(layered.ties, strategy, two_ends=kind.v_shaped and shape.pp > 1)
    apply_strategy.check_model(model, shape, strategy)
    coordinates = shape.coordinates(dist.get_rank() if shape.world_size > 1 else 0)
    order = apply_layers.parameter_order(model)
    mine = apply_layers.stages_of_rank(shape.pp, coordinates["pp"], per_rank, v_shaped=kind.v_shaped and per_rank > 1)
    axis = DataAxis(mesh, shape, strategy, coordinates)
    module, stages = _cut(model, mesh, shape, strategy, ranges, mine, axis)
    axis.take(module, stages)
    pipeline = None
    if shape.pp > 1:
        pipeline = apply_pipeline.Pipeline(
            stages,
            num_stages=shape.pp * per_rank,
            kind=kind,
            num_micro_batches=counts[coordinates["dp"]],
            micro_batch=strategy.micro_batch,
            loss_fn=loss_fn,
            group=mesh["pp"].get_group(),
            device=apply_layers.device_of(module),
            cut=apply_pipeline.Cut(context=shape.cp, sequence=shape.tp if strategy.sequence_parallel else 1),
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
        data=axis,
        pipes=mesh["pp"].get_group() if shape.pp > 1 else None,
        ties=dict(layered.ties),
    )


def _cut(
    model: nn.Module, mesh: Any, shape: MeshShape, strategy: Strategy, ranges: Sequence[range], mine: Sequence[int], axis: DataAxis
) -> tuple[nn.Module, list[tuple[int, nn.Module]]]:
    """This rank's part of the model, tensor-parallel already, and its stages by number: views of that part."""
    last = len(ranges) - 1
    held = sorted(layer for stage in mine for layer in ranges[stage])
    module = apply_layers.part(model, held, first=0 in mine, last=last in mine)
    if mesh is not None and shape.tp > 1:
        apply_tensor.apply_tensor_parallel(module, mesh["tp"], sequence_parallel=strategy.sequence_parallel)
    at = shape.coordinates(dist.get_rank()) if mesh is not None else {"cp": 0, "tp": 0}
    place_on_mesh(module, tp=shape.tp, tp_index=at["tp"], cp=shape.cp, cp_index=at["cp"], sequence_parallel=strategy.sequence_parallel)
    if mesh is not None and shape.cp > 1:
        apply_context.place_on_context(module, mesh["cp"].get_group(), index=at["cp"], size=shape.cp)
    if axis.experts is not None:
        for mixture in apply_experts.mixtures_of(module):
            mixture.shard(axis.experts)
    apply_layers.tie(module, cast("apply_layers.LayeredModel", model).ties)
    recompute_layers(module, strategy.recompute)
    if len(mine) == 1:
        return module, [(mine[0], module)]
    return module, [(stage, apply_layers.part(module, ranges[stage], first=stage == 0, last=stage == last)) for stage in mine]
