"""A loop on Accelerate as its users write it, no line about Regrow: a small network on made data, resumed from Accelerate's own state.

    pip install accelerate
    accelerate launch --num_processes 2 --cpu accelerate_loop.py --output out
    regrow run --local 2 --nproc-per-node 1 accelerate_loop.py --output out

Regrow takes the place of `accelerate launch`: it starts the script itself, with the environment that Accelerate reads (level 0).
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def newest(output: Path) -> Path | None:
    """The newest whole state: it is written beside its place and renamed when all ranks are done."""
    found = sorted(output.glob("state-*"), key=lambda path: int(path.name.split("-")[1]))
    return found[-1] if found else None


def save(accelerator: Accelerator, output: Path, step: int) -> None:
    """All of it, then the name that counts; two are kept."""
    fresh = output / f"unfinished-{step}"
    accelerator.save_state(str(fresh))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        fresh.replace(output / f"state-{step}")
        for old in sorted(output.glob("state-*"), key=lambda path: int(path.name.split("-")[1]))[:-2]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def main() -> None:
    """Train, or go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("accelerate_loop"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    x = torch.randn(4096, 8)
    data = DataLoader(TensorDataset(x, x.sin().sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
    net, optimizer, data = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), data)
    options.output.mkdir(parents=True, exist_ok=True)
    last = newest(options.output)
    step = 0
    if last is not None:
        accelerator.load_state(str(last))
        step = int(last.name.split("-")[1])
    while step < options.steps:
        epoch, done = divmod(step, len(data))
        data.set_epoch(epoch)
        for inputs, wanted in accelerator.skip_first_batches(data, done):
            loss = (net(inputs) - wanted).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if accelerator.is_main_process:
                print(f"step={step} world={os.environ.get('WORLD_SIZE', '1')}", flush=True)
            if step % options.save_every == 0:
                save(accelerator, options.output, step)
            if step >= options.steps:
                break
    if accelerator.is_main_process:
        print(f"finished step={step}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
