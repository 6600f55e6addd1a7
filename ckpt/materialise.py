"""Makes an optimizer's state exist before its first step, so that there is something to restore into."""

from __future__ import annotations

import torch


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter that has no state the state that it has before its first step.

    Adam and AdamW: zero moments, step 0, as their own `step` would make them. Others take one step with zero
    gradients and zero learning rate: parameters keep their values, and the state is about to be overwritten. An
    optimizer that knows how (a method `materialise`, which gets this function for optimizers inside it) does it itself.
    """
    own = getattr(optimizer, "materialise", None)
    if own is not None:
        own(materialise)
        return
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not optimizer.state.get(parameter):
                    optimizer.state[parameter] = _adam_state(parameter, group)
        return
    missing = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
    if missing:
        _step_without_effect(optimizer, missing)


def _adam_state(parameter: torch.Tensor, group: dict[str, object]) -> dict[str, torch.Tensor]:
    on_device = bool(group.get("capturable") or group.get("fused"))
    precision = torch.float64 if torch.get_default_dtype() == torch.float64 and not group.get("fused") else torch.float32
    step = torch.zeros((), dtype=precision, device=parameter.device if on_device else "cpu")
    state = {"step": step}
    for key in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group.get("amsgrad") else ())):
        state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
    return state


def _step_without_effect(optimizer: torch.optim.Optimizer, missing: list[torch.Tensor]) -> None:
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in everything]
    rates = [group["lr"] for group in optimizer.param_groups]
    wanted = {id(p) for p in missing}
    for parameter in everything:
        parameter.grad = torch.zeros_like(parameter) if id(parameter) in wanted else None
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    try:
        type(optimizer).step(optimizer)  # of the class: without the wrapper by which a scheduler counts steps
    finally:
        for parameter, gradient in zip(everything, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
