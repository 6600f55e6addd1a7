"""Hugging Face Trainer on Regrow's checkpoints: the same steps, samples and losses as if nothing had been.

    pip install transformers accelerate
    regrow run --local 2 --nproc-per-node 1 --global-batch 16 --micro-batch 8 hf_trainer_level2.py

One line differs from a script of one's own: RegrowTrainer in place of Trainer. The output folder is not needed to go on.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from hf_trainer import Lines
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from regrow.integrations.trainer import RegrowTrainer


class Show(TrainerCallback):
    """One line a step."""

    def on_log(self, args, state, *_, logs=None, **__) -> None:
        """The loss of the step, over all ranks."""
        if state.is_world_process_zero and "loss" in (logs or {}):
            print(f"step={state.global_step} world={args.world_size} loss={logs['loss']!r}", flush=True)


def main() -> None:
    """Train, or go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="hf_trainer_level2")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        warmup_steps=10,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = RegrowTrainer(model=model, args=arguments, train_dataset=Lines(), callbacks=[Show()])
    trainer.train()
    if trainer.run.rank == 0 and not trainer.run.stopped:
        state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        print(f"finished step={trainer.state.global_step} state={hashlib.sha256(state).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
