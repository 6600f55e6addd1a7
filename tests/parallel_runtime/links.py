"""One link of a chain of runs: take up the whole state that another mesh left behind, train some steps, leave it behind."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from regrow.demo import train_gpt
from regrow.demo.lineage import read_final
from regrow.demo.reference import Reference
from regrow.ids import MeshShape
from regrow.parallel import apply_export


def link(
    *, folder: str, log: str, before: str, mesh: str, first: int, last: int, generation: int, arguments: list[str], shard_size: int = 0
) -> None:
    """Steps first..last on `mesh`; `before`: folder with the final state of step first - 1, empty for a fresh start."""
    args = train_gpt.parse(arguments)
    shape = MeshShape.parse(mesh)
    if shape.world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(os.environ["RANK"]), world_size=shape.world_size)
    reference = Reference(args, shape, shard_size=shard_size)
    if before:
        apply_export.load(reference.net, reference.optimizer, read_final(Path(before)), step=first - 1)
        state = reference.scheduler.state_dict() | {"last_epoch": first - 1}
        reference.scheduler.load_state_dict(state)
        for group, rate in zip(reference.optimizer.param_groups, reference.scheduler.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * rate(first - 1)
        reference.scheduler._last_lr = [group["lr"] for group in reference.optimizer.param_groups]
        torch.manual_seed(first * 1000 + reference.rank)
    steps = reference.open_log(Path(log), generation=generation, restored=first - 1)
    for step in range(first, last + 1):
        reference.step(step, steps)
    steps.close()
    end = reference.open_log(Path(folder), generation=generation, restored=last)
    end.end(reference.net, reference.optimizer, step=last, held_out=reference.held_out())
    if dist.is_initialized():
        dist.destroy_process_group()
