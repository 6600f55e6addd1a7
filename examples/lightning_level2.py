"""Lightning on Regrow's checkpoints: the same steps, samples and losses as if nothing had been.

pip install lightning
regrow run --local 2 --nproc-per-node 1 --global-batch 32 --micro-batch 8 lightning_level2.py
"""

from __future__ import annotations

import argparse
import hashlib

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import TensorDataset

import regrow
from regrow.integrations.lightning import Fit


class Net(lightning.LightningModule):
    """A sum of sines, with dropout and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Mean squared error."""
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self):
        """AdamW, with a rate that falls."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Show(Callback):
    """One line a step, of rank 0: its own loss."""

    def on_train_batch_end(self, trainer, _module, outputs, *_) -> None:
        """Print where we are."""
        if trainer.is_global_zero:
            print(f"step={trainer.global_step} world={trainer.world_size} loss={float(outputs['loss'])!r}", flush=True)


def main() -> None:
    """Train, or go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    run = regrow.attach(level=2, global_batch=32, micro_batch=8)
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(4096, 8)
    data = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    fit = Fit(run, total_steps=options.steps, num_samples=len(data))
    trainer = lightning.Trainer(
        **fit.arguments(),
        strategy="ddp" if run.world_size > 1 else "auto",
        callbacks=[Show(), fit.callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Net()
    trainer.fit(net, fit.loader(data))
    if run.rank == 0 and not run.stopped:
        state = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
        print(f"finished step={trainer.global_step} state={hashlib.sha256(state).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
