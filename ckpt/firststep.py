"""Between a restore and the first update nothing may change what was restored: a script that initialises its model or its
optimizer anew after `restore()` trains from nothing under a high step number. Looked at once, by samples of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import xxhash

from regrow.ckpt.flatten import local_of
from regrow.errors import OperationalError

SAMPLE_ELEMENTS = 4096
"""Elements at the start and at the end of a tensor that are compared."""

Collect = Callable[[], Mapping[str, torch.Tensor]]


class FirstStep:
    """Remembers samples of parameters and optimizer state, and compares them when the first optimizer is about to step."""

    def __init__(self, collect: Collect, optimizers: Iterable[torch.optim.Optimizer], *, step: int, leave_out: Iterable[str]) -> None:
        """Take the samples now.

        Args:
            collect: Names all live tensors; called again at the first update.
            optimizers: Whose step ends the watch.
            step: That was restored, for the message.
            leave_out: Tensors that a forward pass may change (buffers).
        """
        self._collect = collect
        self._step = step
        self._left_out = set(leave_out)
        self._samples = self._look()
        self._hooks: list[Any] = [one.register_step_pre_hook(self._before_update) for one in optimizers]

    def _look(self) -> dict[str, int]:
        return {
            name: sample(local_of(value))
            for name, value in self._collect().items()
            if name.startswith(("model.", "optimizer.")) and name not in self._left_out
        }

    def _before_update(self, *_: object) -> None:
        self.end()
        now = self._look()
        changed = sorted(name for name, value in self._samples.items() if now.get(name) != value)
        if changed:
            more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
            raise OperationalError(
                f"{', '.join(changed[:5])}{more} changed between the restore of step {self._step} and the first update",
                hint="initialise model and optimizer before state.restore(); if it is meant, give train_state(check_first_step=False)",
            )

    def end(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


@torch.no_grad()
def sample(value: torch.Tensor) -> int:
    """Digest of the first and last elements of a local tensor."""
    if not value.numel():
        return 0
    flat = value.view(-1) if value.is_contiguous() else value.flatten()
    if flat.device.type != "cpu":
        flat = torch.cat((flat[:SAMPLE_ELEMENTS], flat[-SAMPLE_ELEMENTS:])).cpu()
    data, size = flat.view(torch.uint8).numpy().data, SAMPLE_ELEMENTS * flat.element_size()
    state = xxhash.xxh3_64(data[:size])
    state.update(data[-size:])
    return state.intdigest()
