"""Hugging Face's Trainer on Regrow's checkpoints and position: exact step, samples and random state after a restart.

    import regrow.integrations.trainer as regrow_trainer

    trainer = regrow_trainer.RegrowTrainer(model=model, args=arguments, train_dataset=data)
    trainer.train()

Needs `pip install transformers accelerate`. Tried with transformers 5.24: DDP and one process; not with FSDP, DeepSpeed or TP.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
import torch.distributed as dist

import regrow
from regrow.errors import ConfigurationError
from regrow.integrations.position import Position, check_equal, loader

_transformers: Any = importlib.import_module("transformers")
_Trainer: Any = _transformers.Trainer
_Callback: Any = _transformers.TrainerCallback


class _Follow(_Callback):
    """Restores before the first step, and completes each one."""

    def __init__(self, trainer: RegrowTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """The model is wrapped and the optimizer is there: restore, and go on from that step."""
        control.should_training_stop = not self._trainer.restored(state)

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """The update is applied."""
        control.should_training_stop |= not self._trainer.completed(state)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Also after early stopping."""
        self._trainer.position.end()


class RegrowTrainer(_Trainer):
    """`transformers.Trainer` with three things changed: which samples come, where it goes on, and what is saved when.

    The per-device batch and the accumulation follow from the job (`regrow run --global-batch N --micro-batch M`), whatever the
    arguments say. Saves are Regrow's, at its interval; set ``save_strategy="no"`` unless the Trainer's own are wanted too.
    """

    def __init__(self, *arguments: Any, args: Any, **more: Any) -> None:
        """As for Trainer; `args` must state max_steps.

        Raises:
            ConfigurationError: max_steps or the global batch is not stated, or a way of sharding that is not supported.
        """
        if args.max_steps < 1:
            raise ConfigurationError(
                "max_steps is not stated", where="TrainingArguments", hint="the position in the job is counted in steps"
            )
        if args.fsdp or args.deepspeed:
            raise ConfigurationError(
                "FSDP and DeepSpeed are not supported here", where="TrainingArguments", hint="use DDP, or run.mesh in a loop of your own"
            )
        self.run = run = regrow.attach(level=2, **_by_hand(args))
        if not run.global_batch:
            raise ConfigurationError(
                "the job states no global batch", where="RegrowTrainer", hint="regrow run --global-batch N --micro-batch M ..."
            )
        args.per_device_train_batch_size = run.micro_batch
        args.gradient_accumulation_steps = max(1, run.local_micro_batches)
        self.position = Position(run, args.max_steps)
        self._own_loss = 0.0
        self._plan: Any = None
        super().__init__(*arguments, args=args, **more)
        self.add_callback(_Follow(self))

    def get_train_dataloader(self) -> Any:
        """This replica's micro-batches, not sharded again by accelerate."""
        dataset: Any = (
            self._remove_unused_columns(self.train_dataset, description="training")
            if _has_columns(self.train_dataset)
            else self.train_dataset
        )
        self._plan = self.run.batches(num_samples=len(dataset))
        if not (self.model_accepts_loss_kwargs and self.args.average_tokens_across_devices):
            check_equal(self._plan, "RegrowTrainer")
        options = {
            "num_workers": self.args.dataloader_num_workers,
            "pin_memory": self.args.dataloader_pin_memory and self.run.device.type == "cuda",
        }
        return loader(self.run, self._plan, dataset, self.position.total, collate_fn=self.data_collator, **options)

    def restored(self, state: Any) -> bool:
        """Restore everything. False: no step is left."""
        optimizer: Any = self.optimizer
        scaler: Any = self.accelerator.scaler
        bound = self.run.train_state(
            model=self.accelerator.unwrap_model(self.model_wrapped),
            optimizer=getattr(optimizer, "optimizer", optimizer),
            scheduler=self.lr_scheduler,
            extra={"scaler": scaler} if scaler is not None else None,
        )
        state.global_step = bound.restore()
        self._initial_global_step = self._globalstep_last_logged = state.global_step
        return self.position.begin()

    def completed(self, state: Any) -> bool:
        """A step is applied. False: the loop is to end."""
        loss = self._mean_loss() if state.global_step % max(1, int(self.args.logging_steps)) == 0 else None
        self._own_loss = 0.0
        return self.position.completed(loss=loss, learning_rate=self.lr_scheduler.get_last_lr()[0])

    def training_step(self, *arguments: Any, **more: Any) -> Any:
        """One micro-batch; its loss is kept on the device."""
        loss = super().training_step(*arguments, **more)
        self._own_loss = self._own_loss + loss.detach()
        return loss

    def evaluate(self, *arguments: Any, **more: Any) -> Any:
        """In a phase of its own, which has its own limit for hangs."""
        with self.run.phase("eval"):
            return super().evaluate(*arguments, **more)

    def _mean_loss(self) -> float:
        """Of the global batch: reading it waits for the device, so only every logging_steps."""
        value = torch.tensor([float(self._own_loss)], dtype=torch.float64)
        if self.run.control_group is not None:
            dist.all_reduce(value, group=self.run.control_group)
        return float(value) / self.run.world_size


def _by_hand(args: Any) -> dict[str, Any]:
    """For a script that is started by hand: what its arguments say. A job states it, whatever they say."""
    if "REGROW_SPEC" in os.environ:
        return {}
    micro_batch = args.per_device_train_batch_size
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return {"global_batch": micro_batch * args.gradient_accumulation_steps * world, "micro_batch": micro_batch}


def _has_columns(dataset: Any) -> bool:
    return hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns")
