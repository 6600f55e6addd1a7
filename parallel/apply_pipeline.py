"""Pipeline parallelism with torch.distributed.pipelining: stages built by hand from global layer numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from regrow.errors import ConfigurationError
from regrow.parallel.apply_layers import LayeredModel

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(output, targets) -> summed loss of one micro-batch."""


@dataclasses.dataclass(frozen=True)
class ScheduleKind:
    """A schedule as torch names it and how many stages each rank holds."""

    torch_name: str
    stages_per_rank: int = 1
    v_shaped: bool = False
    equal_rounds: bool = False
    """Needs a number of micro-batches that is a multiple of the pipeline's size."""


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind("GPipe"),
    "1f1b": ScheduleKind("1F1B"),
    "interleaved": ScheduleKind("Interleaved1F1B", stages_per_rank=2),
    "interleaved-zb": ScheduleKind("InterleavedZeroBubble", stages_per_rank=2),
    "zbv": ScheduleKind("ZBVZeroBubble", stages_per_rank=2, v_shaped=True),
    "dualpipev": ScheduleKind("DualPipeV", stages_per_rank=2, v_shaped=True),
}


def kind_of(name: str) -> ScheduleKind:
    """The schedule called `name`.

    Raises:
        ConfigurationError: unknown name.
    """
    if name not in SCHEDULES:
        raise ConfigurationError(f"schedule {name!r} is not known", where="--schedule", hint=f"use one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def check_schedule(name: str, *, pp: int, layers: int, micro_batches: Sequence[int]) -> ScheduleKind:
    """The schedule to run for these sizes: 1F1B with fewer micro-batches than stages is GPipe, and becomes it.

    Raises:
        ConfigurationError: a schedule that cannot run these sizes, with the factors.
    """
    kind = kind_of(name)
    fewest = min(micro_batches)
    if name == "1f1b" and fewest < pp:
        return SCHEDULES["gpipe"]
    if layers < pp * kind.stages_per_rank:
        raise ConfigurationError(
            f"schedule {name} on {pp} ranks needs {pp * kind.stages_per_rank} layers, the model has {layers}",
            where="--schedule",
            hint="use 1f1b, or fewer stages",
        )
    least = 2 * pp if name == "dualpipev" else pp if name in ("zbv", "interleaved", "interleaved-zb") else 1
    if fewest < least:
        raise ConfigurationError(
            f"schedule {name} on {pp} ranks needs at least {least} micro-batches per replica, one has {fewest}",
            where="--schedule",
            hint="use 1f1b or gpipe, smaller micro-batches or fewer replicas",
        )
    return kind


@dataclasses.dataclass(frozen=True)
class Cut:
    """Into how many parts the sequence is cut."""

    context: int = 1
    """By context parallelism: model input, hidden states and output."""
    sequence: int = 1
    """By sequence parallelism: hidden states, once more."""


class Pipeline:
    """Runs the micro-batches of a step through this rank's stages."""

    def __init__(
        self,
        stages: Sequence[tuple[int, nn.Module]],
        *,
        num_stages: int,
        kind: ScheduleKind,
        num_micro_batches: int,
        micro_batch: int,
        loss_fn: LossFunction,
        group: dist.ProcessGroup,
        device: torch.device,
        cut: Cut,
        compute: torch.dtype | None,
    ) -> None:
        self._first = any(index == 0 for index, _ in stages)
        self._last = any(index == num_stages - 1 for index, _ in stages)
        self._stages = dict(stages)
        self._kind, self._group, self._num_stages, self._loss_fn = kind, group, num_stages, loss_fn
        self._micro_batch = micro_batch
        built: list[Any] = []
        for index, module in stages:
            source, hidden, output = _stream(module, micro_batch, cut, compute)
            self._buffer = torch.empty_like(hidden, device=device, requires_grad=False)
            stage = PipelineStage(
                module,
                index,
                num_stages,
                device,
                input_args=source if index == 0 else hidden,
                output_args=output if index == num_stages - 1 else hidden,
                group=group,
            )
            built.append(stage)
        schedule = cast("Any", get_schedule_class(kind.torch_name))
        argument = built[0] if kind.stages_per_rank == 1 else built
        self._schedule = schedule(argument, n_microbatches=num_micro_batches, loss_fn=loss_fn, scale_grads=False)

    def forward_backward(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> Tensor | None:
        """Gradients of the summed loss; returns that loss on the rank that holds the last stage."""
        losses: list[Tensor] = []
        arguments = (inputs,) if self._first else ()
        ends: dict[str, Any] = {"target": targets, "losses": losses} if self._last else {}
        self._schedule.step(*arguments, key=keys, return_outputs=False, **ends)
        return torch.stack([loss.detach().double() for loss in losses]).sum() if self._last else None

    @torch.no_grad()
    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Summed loss without gradients, one micro-batch after the other.

        Not the schedule's own eval(): it fails for V-shaped schedules in torch 2.13 (it runs their backward actions), and
        makes the other schedules set themselves up again.
        """
        losses = [
            self._forward_one(source, target)
            for source, target in zip(inputs.split(self._micro_batch), targets.split(self._micro_batch), strict=True)
        ]
        return torch.stack([loss.double() for loss in losses if loss is not None]).sum() if self._last else None

    def _forward_one(self, x: Tensor, target: Tensor) -> Tensor | None:
        for index in sorted(self._stages):
            if index > 0 and index - 1 not in self._stages:
                x = torch.empty_like(self._buffer)
                dist.recv(x, group=self._group, group_src=self._owner(index - 1))
            x = self._stages[index](x)
            if index == self._num_stages - 1:
                return self._loss_fn(x, target)
            if index + 1 not in self._stages:
                dist.send(x.contiguous(), group=self._group, group_dst=self._owner(index + 1))
        return None

    def _owner(self, stage: int) -> int:
        size = dist.get_world_size(self._group)
        return 2 * size - 1 - stage if self._kind.v_shaped and stage >= size else stage % size


def _stream(module: nn.Module, micro_batch: int, cut: Cut, compute: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    """Meta tensors at the ends of a stage: what a rank sends is its own part of the sequence.

    Given ahead, they spare the first step pipelining's extra pass for metadata.
    """
    source, hidden, output = cast("LayeredModel", module).stream(micro_batch)
    batch, sequence, *rest = hidden.shape
    between = torch.empty(
        batch, sequence // cut.context // cut.sequence, *rest, dtype=compute or hidden.dtype, device="meta", requires_grad=True
    )
    source, output = (end[:, : end.shape[1] // cut.context] for end in (source, output))
    return torch.empty_like(source), between, torch.empty_like(output)
