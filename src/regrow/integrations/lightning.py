"""Lightning on Regrow's checkpoints and position: exact step, samples and random state after a restart.

    run = regrow.attach(level=2)
    fit = regrow.integrations.lightning.Fit(run, total_steps=10_000, num_samples=len(data))
    trainer = lightning.Trainer(**fit.arguments(), strategy="ddp", callbacks=[fit.callback, ...])
    trainer.fit(module, fit.loader(data, num_workers=2))

Needs `pip install lightning`. Tried with Lightning 2.6: DDP and one process, automatic optimization with one optimizer.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import TYPE_CHECKING, Any

from regrow.errors import ConfigurationError
from regrow.integrations.position import Position, check_equal, loader

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from regrow.agent.worker.session import Run

_callbacks: Any = importlib.import_module("lightning.pytorch.callbacks")
_Callback: Any = _callbacks.Callback
_ClusterEnvironment: Any = importlib.import_module("lightning.pytorch.plugins.environments").ClusterEnvironment
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


class RegrowEnvironment(_ClusterEnvironment):
    """Ranks and sizes as the generation has them: nodes may have different numbers of workers."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def creates_processes_externally(self) -> bool:
        """The agents start them."""
        return True

    @property
    def main_address(self) -> str:
        """Of the generation's store; the process group is there already."""
        return self._run.environment.master_address.rpartition(":")[0] or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """As `main_address`."""
        return int(self._run.environment.master_address.rpartition(":")[2] or 0)

    @staticmethod
    def detect() -> bool:
        """Only when it is given on purpose."""
        return False

    def world_size(self) -> int:
        """Workers of the generation."""
        return self._run.world_size

    def set_world_size(self, size: int) -> None:
        """The generation has it already."""

    def global_rank(self) -> int:
        """Rank in the generation."""
        return self._run.rank

    def set_global_rank(self, rank: int) -> None:
        """The generation has it already."""

    def local_rank(self) -> int:
        """Rank on this node."""
        return self._run.local_rank

    def node_rank(self) -> int:
        """Place of the node in the generation."""
        return int(os.environ.get("GROUP_RANK", "0"))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Any numbers: ranks are not computed from them."""


class Follow(_Callback):
    """Restores before the data is opened, and completes each optimizer step."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self._seen = 0
        self._evaluating = contextlib.ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Model and optimizer are there, the loader is not open yet.

        Raises:
            ConfigurationError: a strategy, or a number of optimizers, that is not supported.
        """
        name = type(trainer.strategy).__name__
        if name not in _STRATEGIES or len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"{name} with {len(trainer.optimizers)} optimizers is not supported",
                where="lightning",
                hint=f"{', '.join(_STRATEGIES)}; one optimizer",
            )
        plugin = trainer.precision_plugin
        scaler: Any = getattr(plugin, "scaler", None)
        state = self._position.run.train_state(
            model=pl_module,
            optimizer=trainer.optimizers[0],
            scheduler=[entry.scheduler for entry in trainer.lr_scheduler_configs] or None,
            extra={"scaler": scaler} if scaler is not None else None,
        )
        step = state.restore()
        total = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        total.ready = total.completed = self._seen = step
        self._position.begin()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """After the last micro-batch of a step the update is applied and the schedule has moved."""
        if trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        if not self._position.completed(learning_rate=float(rate)):
            trainer.should_stop = True

    def on_validation_start(self, *_: Any) -> None:
        """A phase of its own, which has its own limit for hangs."""
        self._evaluating.enter_context(self._position.run.phase("eval"))

    def on_validation_end(self, *_: Any) -> None:
        """Back to steps."""
        self._evaluating.close()

    def on_fit_end(self, *_: Any) -> None:
        """Also after early stopping."""
        self._position.end()


class Fit:
    """One fit of a job."""

    def __init__(self, run: Run, *, total_steps: int, num_samples: int) -> None:
        """`num_samples`: size of the data set.

        Raises:
            ConfigurationError: the job states no global batch, or its replicas have unequal shares.
        """
        self._run = run
        self._total = total_steps
        self.plan = run.batches(num_samples=num_samples)
        check_equal(self.plan, "lightning")
        self.position = Position(run, total_steps)
        self.callback = Follow(self.position)

    def arguments(self) -> dict[str, Any]:
        """Arguments of lightning.Trainer that follow from the job."""
        return {
            "devices": self._run.environment.local_world_size,
            "num_nodes": int(os.environ.get("GROUP_WORLD_SIZE", "1")),
            "accelerator": "cpu" if self._run.device.type == "cpu" else "gpu",
            "plugins": [RegrowEnvironment(self._run)],
            "accumulate_grad_batches": self.plan.counts[self.plan.replica],
            "max_steps": self._total,
            "use_distributed_sampler": False,
            "enable_checkpointing": False,
        }

    def loader(self, dataset: Any, **options: Any) -> DataLoader[Any]:
        """This replica's micro-batches; `options` as for torch's DataLoader."""
        return loader(self._run, self.plan, dataset, self._total, **options)
