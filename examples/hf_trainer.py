"""Hugging Face Trainer as its users write it, no line about Regrow: a tiny GPT-2 on made data, resumed from its own checkpoints.

    pip install transformers accelerate
    torchrun --nproc-per-node 2 hf_trainer.py --output out
    regrow run --local 2 --nproc-per-node 1 hf_trainer.py --output out

Regrow restarts it after a loss with torchrun's environment (adoption level 0). What was trained since the Trainer's last checkpoint is
trained again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Lines(torch.utils.data.Dataset):
    """Counting modulo 61, from another start for each sample."""

    def __len__(self) -> int:
        """Number of samples."""
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """32 tokens; the labels are the same."""
        tokens = (torch.arange(32) * (1 + index % 3) + index) % 61
        return {"input_ids": tokens, "labels": tokens}


class Show(TrainerCallback):
    """One line a step, of rank 0."""

    def on_step_end(self, args, state, *_, **__) -> None:
        """Print where we are."""
        if state.is_world_process_zero:
            print(f"step={state.global_step} world={args.world_size}", flush=True)


def newest(output: Path) -> str | None:
    """The newest whole checkpoint. The Trainer writes `trainer_state.json` last: a folder without it was cut off by a kill."""
    found = sorted(output.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name.split("-")[1]))
    return str(found[-1].parent) if found else None


def main() -> None:
    """Train, or go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("hf_trainer"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps,
        save_steps=options.save_every,
        save_total_limit=2,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        ddp_backend=("nccl" if torch.cuda.is_available() else "gloo") if "WORLD_SIZE" in os.environ else None,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Lines(), callbacks=[Show()])
    last = newest(options.output)
    trainer.train(resume_from_checkpoint=last)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"finished step={trainer.state.global_step} resumed={last is not None}", flush=True)


if __name__ == "__main__":
    main()
