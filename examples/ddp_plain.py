"""A plain DistributedDataParallel script that knows nothing of Regrow: `torchrun` or `regrow run` start it alike.

    regrow run --local 2 --nproc-per-node 2 examples/ddp_plain.py --steps 200 --snapshot /tmp/ddp.pt

It saves a snapshot every few steps, as such scripts do, and goes on from it when it is started again.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--snapshot", type=Path, required=True)
    parser.add_argument("--every", type=int, default=5)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)

    first = 0
    if args.snapshot.exists():
        saved = torch.load(args.snapshot, weights_only=True)
        model.load_state_dict(saved["model"])
        first = int(saved["step"])
    if dist.get_rank() == 0:
        print(f"start at step {first}, attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", flush=True)
    for step in range(first, args.steps):
        generator = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
        x = torch.randn(32, 16, generator=generator)
        loss = (parallel(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % args.every == 0:
            part = args.snapshot.with_suffix(".part")
            torch.save({"model": model.state_dict(), "step": step + 1}, part)
            part.replace(args.snapshot)
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
