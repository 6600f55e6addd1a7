"""Ranks that train a small network under FSDP2, also over tensor parallelism, of which one sends or receives a wrong bit in one
all-gather."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from regrow.agent.worker.chaos import Faults, flip_bit
from regrow.agent.worker.digest import Digester, local_part
from regrow.agent.worker.watch import StateWatch

WIDTH = 30
"""Over four ranks its rows are cut unevenly: 8, 8, 8, 6."""


def _net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)])


class _Flips:
    """Hooks of one layer that flip a bit of what is sent, or of what arrived, in one step."""

    def __init__(self, layer: Any, where: str, owner: int, pieces: int, *, acts: bool) -> None:
        self._pieces = pieces
        self.on = False
        self._layer = layer
        self._shard = local_part(layer.weight.detach())
        self._where, self._owner, self._acts = where, owner, acts
        layer.register_forward_pre_hook(lambda *_: self._before(), prepend=True)
        layer.register_forward_pre_hook(lambda *_: self._after())
        layer.register_forward_hook(lambda _layer, _inputs, output: output.register_hook(lambda _gradient: self._backward()) and None)

    def _before(self) -> None:
        if self.on and self._acts and self._where == "sent":
            flip_bit(self._shard, 3, 20)

    def _after(self) -> None:
        if not (self.on and self._acts) or self._where == "backward":
            return
        if self._where == "sent":
            flip_bit(self._shard, 3, 20)  # at rest it is right again
        else:
            assert not isinstance(self._layer.weight, DTensor)
            flip_bit(self._gathered().chunk(dist.get_world_size())[self._owner], 3, 12)
        self.on = False

    def _backward(self) -> None:
        """The layer was gathered anew for its backward pass: of what its neighbour in the group sent."""
        if self.on and self._acts and self._where == "backward":
            flip_bit(self._gathered().chunk(self._pieces)[self._owner], 3, 12)
            self.on = False

    def _gathered(self) -> torch.Tensor:
        return local_part(self._layer.weight.data)


def train(*, folder: str, where: str, rank: int, owner: int, bf16: bool = False, copies: int = 1, tensor: int = 1) -> None:
    """Eight steps; in the fifth `rank` sends (where="sent") or receives of `owner` (where="arrived", "backward") a wrong bit. Writes what
    it said. `owner`: in its group of shards."""
    own, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=own, world_size=world)
    if tensor > 1:
        mesh = init_device_mesh("cpu", (world // tensor, tensor), mesh_dim_names=("dp", "tp"))
    elif copies > 1:
        mesh = init_device_mesh("cpu", (copies, world // copies), mesh_dim_names=("dp", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    net = _net()
    over = mesh
    if tensor > 1:
        parallelize_module(net, mesh["tp"], {"1": ColwiseParallel(output_layouts=Replicate())})
        over = mesh["dp"]
    for layer in net:
        fully_shard(layer, mesh=over, mp_policy=policy)
    fully_shard(net, mesh=over, mp_policy=policy)
    flips = _Flips(net[1], where, owner, mesh.size() // copies // tensor, acts=own == rank)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, foreach=False)
    watch = StateWatch([net], [optimizer], Digester(5), Faults(enabled=False, rank=own), every=1)
    optimizer.register_step_pre_hook(lambda *_: watch.before_update())
    said: dict[int, Any] = {}
    for step in range(1, 9):
        flips.on = step == 5
        for _ in range(2):  # two micro-batches: what is gathered first is looked at
            net(torch.full((2, WIDTH), 0.1 * step + own // tensor)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.applied(step)
        found = watch.take_evidence(names=False)
        assert not watch.take_mismatch()
        if found is not None and found.received:
            said[step] = [found.received, found.receivers]
    Path(folder, f"said-{own}.json").write_text(json.dumps(said))
