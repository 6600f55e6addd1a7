"""A batch sampler over `run.batches`: torch's own DataLoader, with workers and prefetching, gives each replica its share of every step.

The position is the number of completed steps that the checkpoint says, never what a loader has fetched: a sample that was prefetched
and not trained on is given again, one that was trained on never, on any number of replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import Sampler

from regrow.agent.worker.data import BatchPlan
from regrow.errors import ConfigurationError


class StepSampler(Sampler[list[int]]):
    """Micro-batches (lists of data set indices) of this replica for the steps after the restored one up to `last`.

    Make it after `state.restore()`, and give it to ``DataLoader(batch_sampler=...)``.

    Args:
        plan: what `run.batches` returned.
        last: the last step of the run.

    Raises:
        ConfigurationError: `last` is below 1.
    """

    def __init__(self, plan: BatchPlan, last: int) -> None:
        if last < 1:
            raise ConfigurationError(
                f"the last step is {last}", where="StepSampler", hint="give the total number of steps, as to run.steps()"
            )
        self._plan = plan
        self._last = last

    @property
    def micro_batches(self) -> int:
        """Micro-batches of this replica in one step."""
        return self._plan.counts[self._plan.replica]

    def __len__(self) -> int:
        return max(0, self._last - self._plan.base_step) * self.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._plan.base_step + 1, self._last + 1):
            for samples in self._plan.step(step):
                yield samples.tolist()

    def steps(self, loader: Iterable[Any]) -> Iterator[list[Any]]:
        """What the loader made of each step's micro-batches, a list for each step; to be walked beside `run.steps`."""
        batches = iter(loader)
        while part := list(islice(batches, self.micro_batches)):
            yield part
