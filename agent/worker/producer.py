"""Which operation made the first number that is not finite, seen while the work is done again."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from regrow.agent.worker.digest import local_part


class Producer:
    """What was found. Empty: everything was finite."""

    def __init__(self) -> None:
        self.name = ""

    def found(self, name: str) -> None:
        """The first one counts: later ones are its victims."""
        self.name = self.name or name


@contextlib.contextmanager
def traced(modules: Iterable[nn.Module]) -> Generator[Producer]:
    """While it is entered: the first module without children whose output is not finite although its inputs are, else, where the whole
    forward pass is finite, the first parameter in the order of the backward pass whose gradient is not."""
    producer = Producer()
    handles: list[Any] = []
    for module in modules:
        for name, part in module.named_modules():
            if not any(part.children()):
                handles.append(part.register_forward_hook(_of_module(producer, name)))
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                handles.append(cast("Any", parameter).register_post_accumulate_grad_hook(_of_gradient(producer, name)))
    try:
        yield producer
    finally:
        for handle in handles:
            handle.remove()


def _of_module(producer: Producer, name: str) -> Any:
    def look(_: nn.Module, inputs: Any, output: Any) -> None:
        if not producer.name and not _finite(output) and _finite(inputs):
            producer.found(f"output of {name or 'the model'}")

    return look


def _of_gradient(producer: Producer, name: str) -> Any:
    def look(parameter: Tensor) -> None:
        if not producer.name and parameter.grad is not None and not _finite(parameter.grad):
            producer.found(f"gradient of {name}")

    return look


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        part = local_part(value).detach()
        return not part.is_floating_point() or bool(torch.isfinite(part).all())
    return all(_finite(one) for one in cast("list[Any]", value)) if isinstance(value, tuple | list) else True
