"""AdamW with both moments in 8 bits: 2.5 bytes a parameter in place of 8.

Ours, not that of bitsandbytes or torchao: their blocks run over the flattened tensor, so a shard of a tensor has other
blocks than the whole and cannot be re-sharded; torchao's also compiles its step (73 s for the first one on two busy cores,
torchao 0.18). Here a block is a run of the last axis, so every shard that cuts between blocks holds the same numbers as
the whole tensor does.

The idea of block-wise scales and a non-linear code is that of https://arxiv.org/abs/2110.02861.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from regrow.errors import ConfigurationError

BLOCK = 16
"""Elements of the last axis that share a scale."""
WHOLE_SHAPE = "whole_shape"
"""Attribute of a parameter that is a slice of a larger one: the shape of that."""
_SIGNED_LEVELS, _SIGNED_POWER = 127, 2.0
_UNSIGNED_LEVELS, _UNSIGNED_POWER = 255, 4.0


class AdamW8(torch.optim.Optimizer):
    """AdamW (decoupled weight decay, bias correction) whose moments are stored in 8 bits with a float32 scale for each block.

    Tensors with one axis, or whose last axis is no multiple of the block, keep float32 moments.

    State of a quantised parameter: `exp_avg` int8 and `exp_avg_sq` uint8 of its shape, `exp_avg_scale` and `exp_avg_sq_scale`
    with the last axis shorter by the block. They are placed as the parameter is.
    """

    block = BLOCK

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def materialise(self, make: object) -> None:
        """Make the state exist that the first step would make."""
        del make
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = cast("dict[str, Tensor]", self.state[parameter])
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            if is_quantised(parameter):
                state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.int8)
                state["exp_avg_scale"] = _scales(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.uint8)
                state["exp_avg_sq_scale"] = _scales(parameter)
            else:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self._state_of(parameter)
        state["step"] += 1
        value, gradient = _local(parameter), _local(cast("Tensor", parameter.grad))
        if not value.numel():
            return
        packed = {key: _local(tensor) for key, tensor in state.items()}
        quantised = "exp_avg_scale" in packed
        first = decode_signed(packed["exp_avg"], packed["exp_avg_scale"]) if quantised else packed["exp_avg"]
        second = decode_unsigned(packed["exp_avg_sq"], packed["exp_avg_sq_scale"]) if quantised else packed["exp_avg_sq"]
        (beta1, beta2), step = group["betas"], float(state["step"].item())
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if quantised:
            encode_signed(first, packed["exp_avg"], packed["exp_avg_scale"])
            encode_unsigned(second, packed["exp_avg_sq"], packed["exp_avg_sq_scale"])
        value.mul_(1 - group["lr"] * group["weight_decay"])
        spread = (second.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
        value.addcdiv_(first, spread, value=-group["lr"] / (1 - beta1**step))


def is_quantised(parameter: Tensor) -> bool:
    """Whether the moments of this parameter are stored in 8 bits: the same answer on every mesh.

    Raises:
        ConfigurationError: a shard that cuts through a block.
    """
    whole = getattr(parameter, WHOLE_SHAPE, parameter.shape)
    if len(whole) < 2 or whole[-1] % BLOCK:
        return False
    here = _local(parameter)
    if here.shape[-1] % BLOCK:
        raise ConfigurationError(
            f"a shard of {tuple(here.shape)} of a parameter of {tuple(whole)} cuts through a block of {BLOCK}",
            where="AdamW8",
            hint="choose a tensor-parallel size (under ZeRO stage 1 also a number of replicas) that leaves whole blocks of the last axis",
        )
    return True


def encode_signed(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write `values` as int8 codes in place, to the nearest: x = scale * sign(c) * (|c| / 127)^2."""
    largest = _blocks(values).abs().amax(dim=-1)
    scales.copy_(largest)
    share = _blocks(values) / largest.clamp_min(torch.finfo(values.dtype).tiny).unsqueeze(-1)
    codes.copy_((share.abs().pow(1 / _SIGNED_POWER) * _SIGNED_LEVELS).round().mul_(share.sign()).view_as(values))


def decode_signed(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `encode_signed`."""
    share = codes.to(scales.dtype) / _SIGNED_LEVELS
    return (_blocks(share.abs().pow(_SIGNED_POWER) * share.sign()) * scales.unsqueeze(-1)).view(codes.shape)


def encode_unsigned(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write `values` >= 0 as uint8 codes in place, to the nearest, but what is above zero stays so: x = scale * (c / 255)^4.

    A second moment that became zero under a first moment that did not would make the update explode. Rounding all of them
    up would never let them decay: a step's decay is less than a code.
    """
    largest = _blocks(values).amax(dim=-1)
    scales.copy_(largest)
    share = _blocks(values) / largest.clamp_min(torch.finfo(values.dtype).tiny).unsqueeze(-1)
    nearest = (share.pow(1 / _UNSIGNED_POWER) * _UNSIGNED_LEVELS).round()
    codes.copy_(torch.maximum(nearest, (share > 0).to(nearest.dtype)).view_as(values))


def decode_unsigned(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `encode_unsigned`."""
    return (_blocks((codes.to(scales.dtype) / _UNSIGNED_LEVELS).pow(_UNSIGNED_POWER)) * scales.unsqueeze(-1)).view(codes.shape)


def _blocks(values: Tensor) -> Tensor:
    return values.unflatten(-1, (-1, BLOCK))


def _scales(parameter: Tensor) -> Tensor:
    here = _local(parameter)
    scales = torch.zeros(*here.shape[:-1], here.shape[-1] // BLOCK, dtype=torch.float32, device=here.device)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // BLOCK))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(scales, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
