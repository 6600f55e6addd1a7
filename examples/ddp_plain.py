"""A script as torchrun users write it: DDP, no line about Regrow. It runs under torchrun and under `regrow run` alike.

    torchrun --nproc-per-node 2 ddp_plain.py --steps 20
    regrow run --local 2 --nproc-per-node 1 ddp_plain.py --steps 20

Regrow restarts it after a crash with torchrun's environment (adoption level 0); it brings its own checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: its functions take the world's group of their import as a default and keep it
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record
def main() -> None:
    """Fit a small network to a fixed function."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, default=Path("ddp_plain.pt"))
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    first = 1
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
    dist.barrier()

    for step in range(first, args.steps + 1):
        generator = torch.Generator().manual_seed(step * world + rank)
        x = torch.randn(32, 8, generator=generator)
        loss = (model(x) - x.sin().sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            part = args.checkpoint.with_suffix(".part")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
            part.replace(args.checkpoint)
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            print(f"step={step} loss={loss.item():.6f} world={world} restarts={restarts}", flush=True)
    # The reducer goes before the group does: the last owner of a gloo group joins its threads, and a reducer does so with
    # the interpreter's lock in hand, which a thread that drops the last operation's state may be waiting for. With an owner
    # left, the threads outlive the interpreter, and one that asks for its lock then ends the process by SIGABRT.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
