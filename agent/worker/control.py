"""Orders that all ranks agree on: an asynchronous MAX all-reduce of a few words, one exchange behind the training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

MAX_OVERHEAD = 0.004
"""Share of the step time that exchanges may cost."""
MAX_LAG_SECONDS = 1.0
"""Exchanges are at most this far apart, whatever they cost."""
MAX_PERIOD = 50
"""And at most this many steps."""


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says, and after MAX over all ranks what all agree on. All int64."""

    save: int = 0
    """Save at this boundary."""
    stop: int = 0
    """Then stop."""
    busy: int = 0
    """A rank has no room for another snapshot: nobody saves (a save is all ranks or none)."""
    refuse: int = 0
    """A rank's state must not be published (non-finite loss or gradient, memory that changed at rest)."""
    step_us: int = 0
    cost_us: int = 0
    """Of one exchange."""
    digest_us: int = 0
    """Of a digest of everything and its check at rest."""
    memory: int = 0
    """Save at this boundary, into memory alone. `save` wins."""


NUM_WORDS = len(Words.__struct_fields__)


def exchange_period(words: Words) -> int:
    """Steps from one exchange to the next, from numbers that all ranks agree on."""
    step, cost = max(1, words.step_us), words.cost_us
    by_cost = math.ceil(cost / (MAX_OVERHEAD * step))
    by_lag = max(1, int(MAX_LAG_SECONDS * 1e6 / step))
    return max(1, min(by_cost, by_lag, MAX_PERIOD))


class ControlVector:
    """One exchange in flight at most. `due(step)` is the same on every rank, so no rank waits alone.

    `all_reduce` starts a MAX over all ranks of the words and returns a function that waits for the result; None for one rank.
    """

    def __init__(self, all_reduce: Callable[[tuple[int, ...]], Callable[[], tuple[int, ...]]] | None = None, *, first: int = 1) -> None:
        self._all_reduce = all_reduce
        self._pending: Callable[[], tuple[int, ...]] | None = None
        self._due = first
        self.period = 1
        self.num_exchanges = 0

    def due(self, step: int) -> bool:
        """Is there an exchange at the boundary after `step`?"""
        return step >= self._due

    def agreed(self) -> Words:
        """What all ranks said at the exchange that was started last; nothing before the first. Waits for it."""
        if self._pending is None:
            return Words()
        words = Words(**dict(zip(Words.__struct_fields__, self._pending(), strict=True)))
        self._pending = None
        if words.step_us:
            self.period = exchange_period(words)
        return words

    def start(self, step: int, words: Words) -> None:
        """Start the exchange of the boundary after `step`."""
        said = msgspec.structs.astuple(words)
        self._pending = (lambda: said) if self._all_reduce is None else self._all_reduce(said)
        self._due = step + self.period
        self.num_exchanges += 1


def group_all_reduce(group: Any) -> Callable[[tuple[int, ...]], Callable[[], tuple[int, ...]]]:
    """The MAX all-reduce of a torch process group on CPU tensors."""
    import torch
    import torch.distributed as dist

    buffer = torch.zeros(NUM_WORDS, dtype=torch.int64)

    def start(words: tuple[int, ...]) -> Callable[[], tuple[int, ...]]:
        buffer.copy_(torch.tensor(words, dtype=torch.int64))
        work = dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=group, async_op=True)

        def wait() -> tuple[int, ...]:
            if work is not None:
                work.wait()
            return tuple(int(value) for value in buffer.tolist())

        return wait

    return start
