"""Lightning as its users write it, no line about Regrow: a small network on made data, resumed from Lightning's own `last.ckpt`.

    pip install lightning
    torchrun --nproc-per-node 2 lightning_fit.py --output out
    regrow run --local 2 --nproc-per-node 1 lightning_fit.py --output out

Lightning reads torchrun's environment, which Regrow gives (adoption level 0). It wants to know the number of nodes and of devices:
they are read from the environment, so that the script runs on what is left after a loss.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Fit(lightning.LightningModule):
    """A sum of sines."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Mean squared error."""
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)


class Show(Callback):
    """One line a step, of rank 0."""

    def on_train_batch_end(self, trainer, *_) -> None:
        """Print where we are."""
        if trainer.is_global_zero:
            print(f"step={trainer.global_step} world={trainer.world_size}", flush=True)


def main() -> None:
    """Train, or go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("lightning_fit"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(4096, 8)
    data = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    keep = ModelCheckpoint(dirpath=options.output, every_n_train_steps=options.save_every, save_last=True, save_top_k=1)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp",
        max_steps=options.steps,
        callbacks=[keep, Show()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = options.output / "last.ckpt"
    trainer.fit(Fit(), DataLoader(data, batch_size=16, shuffle=True), ckpt_path=str(last) if last.exists() else None)
    if trainer.is_global_zero:
        print(f"finished step={trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
