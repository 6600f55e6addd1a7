"""Trains until a file says that it is enough; a script of torchrun's kind without a line about Regrow."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
enough = torch.zeros(1)
step = 0
while not enough.item():
    step += 1
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    enough[0] = float(Path(sys.argv[1]).exists())
    dist.all_reduce(enough, op=dist.ReduceOp.MAX)
    if step == 3:
        print(f"trains rank={rank} world={world}", flush=True)
del model
dist.destroy_process_group()
