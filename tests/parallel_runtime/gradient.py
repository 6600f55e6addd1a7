"""The whole gradient of one step on a mesh, before clipping, with what every rank says of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from regrow.demo.model import Config, Gpt
from regrow.demo.text import Corpus
from regrow.ids import MeshShape
from regrow.parallel.apply import Strategy, apply_mesh
from regrow.parallel.batch import split
from regrow.parallel.dropout import sample_keys

SAMPLES = 14
"""Seven micro-batches of two: no number of replicas above one divides them."""


def one_step(folder: str, dp: int) -> None:
    """Every rank writes its result, rank 0 the gradient too."""
    rank, counts = int(os.environ["RANK"]), split(SAMPLES, 2, dp)
    mesh = None
    if dp > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=dp)
        mesh = init_device_mesh("cpu", (dp, 1, 1), mesh_dim_names=("dp", "pp", "tp"))
    torch.manual_seed(0)
    strategy = Strategy(micro_batch=2, micro_batches=counts, clip_norm=None)
    net = apply_mesh(Gpt(Config(layers=1, hidden=48, seq=48)), mesh, MeshShape(dp=dp), strategy)
    first = 2 * sum(counts[:rank])
    places = torch.arange(first, first + 2 * counts[rank])
    inputs, targets = Corpus(seq=48, num_samples=SAMPLES).samples(places)
    targets = targets.masked_fill(torch.arange(48) < places.unsqueeze(1), -100)  # samples of unequal weight
    result = net.forward_backward(inputs, targets, sample_keys(0, 1, places))
    Path(folder, f"rank{rank}.json").write_text(json.dumps([result.loss, result.grad_norm, result.tokens]))
    if rank == 0:
        np.savez(Path(folder, "gradient.npz"), **{name: parameter.grad.numpy() for name, parameter in net.named_parameters()})
    if dp > 1:
        dist.destroy_process_group()
