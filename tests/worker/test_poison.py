"""State that holds NaN or infinity for good: told at every step, whatever loss and gradients look like."""

from __future__ import annotations

import math

import torch

from regrow.agent.worker.chaos import Faults
from regrow.agent.worker.digest import Digester
from regrow.agent.worker.watch import StateWatch
from regrow.ckpt.finite import refusal


def watched() -> tuple[StateWatch, torch.nn.Sequential, torch.optim.Optimizer]:
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(6)])
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    return StateWatch([model], [optimizer], Digester(1), Faults(enabled=False, rank=0), every=1), model, optimizer


def test_a_poisoned_state_is_told_as_long_as_it_lasts() -> None:
    """K03: one NaN in a gradient lasts in the state, though later gradients and the loss may be finite for ever."""
    watch, model, optimizer = watched()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    bias = dict(model.named_parameters())["3.bias"]
    spoiled = bias.grad
    assert spoiled is not None
    spoiled[1] = math.nan
    assert watch.before_sync() == "3.bias"
    assert watch.poisoned() == "", "a step that was skipped for it does no harm"
    assert watch.before_sync() == "3.bias"
    optimizer.step()
    assert [watch.poisoned() for _ in range(3)] == ["model.3.bias"] * 3
    with torch.no_grad():
        bias[1] = 0.0
    assert watch.poisoned() == "optimizer.3.bias.exp_avg"


def test_what_a_refused_snapshot_names_is_looked_into() -> None:
    watch, model, _ = watched()
    watch.doubt("")
    watch.doubt("rank 1: No space left on device")
    assert watch.poisoned() == ""
    dict(model.named_parameters())["4.weight"].data[0, 0] = math.inf
    watch.doubt(f"rank 1: {refusal('model.4.weight')} (/some/folder)")
    assert watch.poisoned() == "model.4.weight"
