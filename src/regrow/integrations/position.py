"""`run.steps` walked beside a loop that belongs to somebody else: one call after each of its optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
from torch.utils.data import DataLoader

from regrow.errors import ConfigurationError
from regrow.integrations.sampler import StepSampler

if TYPE_CHECKING:
    from regrow.agent.worker.data import BatchPlan
    from regrow.agent.worker.session import Run


class Position:
    """Where the job is: begun after the restore, moved by `completed`."""

    def __init__(self, run: Run, total: int) -> None:
        """`total`: steps of the whole job.

        Raises:
            ConfigurationError: it is below 1.
        """
        if total < 1:
            raise ConfigurationError(
                f"{total} steps in all", where="regrow.integrations", hint="give max_steps: epochs alone are not enough"
            )
        self.run = run
        self.total = total
        self._steps: Iterator[int] | None = None
        self._current = 0

    def begin(self) -> bool:
        """The state is restored. False: nothing is left to do."""
        self._steps = self.run.steps(self.total)
        return self._next()

    def completed(self, **measures: SupportsFloat | None) -> bool:
        """The optimizer step is applied; `measures` go to `run.complete`. False: the loop is to end.

        Raises:
            ConfigurationError: it was not begun.
        """
        if self._current == 0:
            raise ConfigurationError("a step was completed that was not begun", where="regrow.integrations", hint="call begin() first")
        given: dict[str, Any] = dict(measures)
        self.run.complete(self._current, **given)
        return self._next()

    def end(self) -> None:
        """The loop is over. When it ended before its time by its own decision (early stopping), that is the job's end too."""
        if self._steps is not None:
            self.run.finish()

    def _next(self) -> bool:
        assert self._steps is not None
        self._current = next(self._steps, 0)
        return self._current > 0


def check_equal(plan: BatchPlan, where: str) -> None:
    """Each replica has the same number of micro-batches, at least one.

    Raises:
        ConfigurationError: a mean over replicas would weigh samples unequally.
    """
    counts = set(plan.counts)
    if len(counts) != 1 or 0 in counts:
        raise ConfigurationError(
            f"the replicas have {', '.join(map(str, plan.counts))} micro-batches of {plan.recipe.micro_batch}, and their mean is taken",
            where=where,
            hint="choose a global batch that the micro-batch times every possible number of replicas divides",
        )


def loader(run: Run, plan: BatchPlan, dataset: Any, total: int, **options: Any) -> DataLoader[Any]:
    """A DataLoader of this replica's micro-batches from the restored step on; `options` as for torch's (num_workers, collate_fn ...).

    It has a random generator of its own, so that starting it again after a restart draws nothing from the generator that dropout uses.
    """
    generator = torch.Generator()
    generator.manual_seed(run.seed)
    return DataLoader(dataset, batch_sampler=StepSampler(plan, total), generator=generator, **options)
