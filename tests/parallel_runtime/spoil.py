"""A replica whose gradient is not finite."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from regrow.demo.model import Config, Gpt
from regrow.demo.text import Corpus
from regrow.ids import MeshShape
from regrow.parallel.apply import Strategy, apply_mesh
from regrow.parallel.dropout import sample_keys


def spoiled_rank(folder: str) -> None:
    """Rank 1 of three replicas makes a NaN in one element of one gradient; every rank writes down who did it."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    mesh = init_device_mesh("cpu", (3, 1, 1), mesh_dim_names=("dp", "pp", "tp"))
    config = Config(layers=1, hidden=48, seq=48)
    torch.manual_seed(0)
    net = apply_mesh(Gpt(config), mesh, MeshShape(dp=3), Strategy(micro_batch=2, micro_batches=(1, 1, 1)))
    inputs, targets = Corpus(seq=48, num_samples=16).samples([2 * rank, 2 * rank + 1])
    keys = sample_keys(0, 1, torch.tensor([2 * rank, 2 * rank + 1]))
    assert net.forward_backward(inputs, targets, keys).broken_ranks == ()
    if rank == 1:
        weight = net.module.get_parameter("layers.0.mlp.up.weight")
        weight.register_hook(lambda gradient: gradient.clone().index_fill_(0, torch.tensor([3]), float("nan")))
    result = net.forward_backward(inputs, targets, keys)
    Path(folder, f"broken{rank}").write_text(str(result.broken_ranks))
    dist.destroy_process_group()
