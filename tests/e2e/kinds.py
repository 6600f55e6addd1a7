"""The toy's training in the ways in which people write it: `--kind` (see test_in_place_kinds.py). The losses are those of toy.py whatever the kind.

Each rank appends {"generation", "restored"} and {"step", "loss"} lines to LOG/g<generation>-r<rank>.jsonl.
"""

import argparse
import ctypes
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import regrow
from regrow.agent.worker.data import BatchPlan


class Samples(Dataset[torch.Tensor]):
    """Made from their numbers."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


class Holder(torch.nn.Module):
    """A module that keeps a process group of its own, and reduces its gradients over it."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.body = body
        self.group = dist.new_group(backend="gloo")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def reduce(self) -> None:
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad, group=self.group)


def reduce_over_world(model: torch.nn.Module) -> Callable[[], None]:
    def reduce() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    return reduce


def reduce_in_two_stages(model: torch.nn.Module, rank: int) -> Callable[[], None]:
    """Over sub-groups that the script makes: first in pairs, then across them."""
    pairs = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))]
    across = [dist.new_group(ranks) for ranks in ((0, 2), (1, 3))]

    def reduce() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=pairs[rank // 2])
            dist.all_reduce(parameter.grad, group=across[rank % 2])

    return reduce


def built(kind: str, body: torch.nn.Module, run: regrow.Run) -> tuple[Callable[..., Any], Callable[[], None], int]:
    """The module that is called, how its gradients are summed, and by what they are divided when that is done by others."""
    if kind == "ddp":
        return DistributedDataParallel(body), lambda: None, run.world_size
    if kind in ("fsdp2", "hsdp"):
        mesh = run.mesh["dp"] if kind == "fsdp2" else init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(body, mesh=mesh)
        return body, lambda: None, run.world_size
    if kind == "compiled":
        return torch.compile(body, backend="aot_eager"), reduce_over_world(body), 1
    if kind == "holder":
        holder = Holder(body)
        return holder, holder.reduce, 1
    return body, reduce_in_two_stages(body, run.rank) if kind == "subgroups" else reduce_over_world(body), 1


def batches(kind: str, run: regrow.Run, plan: BatchPlan, first: int, last: int) -> Iterator[torch.Tensor]:
    numbers = [plan.step(step).samples.tolist() for step in range(first, last + 1)]
    loader = DataLoader(Samples(), batch_sampler=numbers, num_workers=1 if kind == "loader" else 0)
    yield from loader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--kind", required=True)
    args = parser.parse_args()

    run = regrow.attach(global_batch=8, micro_batch=1, seed=1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    model, reduce, divided = built(args.kind, body, run)
    optimizer = torch.optim.AdamW(body.parameters(), lr=0.01, foreach=False)
    plan = run.batches(num_samples=64, seed=1)
    state = run.train_state(model=body, optimizer=optimizer)
    restored = state.restore()
    data = batches(args.kind, run, plan, restored + 1, args.steps)
    args.log.mkdir(parents=True, exist_ok=True)
    with (args.log / f"g{run.spec.generation}-r{run.rank}.jsonl").open("a", buffering=1) as log:
        log.write(json.dumps({"generation": run.spec.generation, "restored": restored}) + "\n")
        for step in run.steps(args.steps):
            x = next(data)
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().sum() / run.global_batch
            (loss * divided).backward()
            total = loss.detach().clone()
            reduce()
            dist.all_reduce(total)
            optimizer.step()
            time.sleep(0.05 + (0.03 * run.rank if args.kind == "speeds" else 0.0))
            log.write(json.dumps({"step": step, "loss": float(total)}) + "\n")
            held = args.log / "held"
            if args.kind in ("deaf", "woken") and run.rank == 2 and step == 10 and not held.exists():
                if args.kind == "deaf":  # what asks for its stack does not end its sleep
                    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
                held.touch()
                ctypes.PyDLL(None).sleep(6)  # in C, and no other thread of this process runs meanwhile
            run.complete(step, loss=float(total))


if __name__ == "__main__":
    regrow.in_place(main)
