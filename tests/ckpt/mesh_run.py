"""Runs phases of a small 3D-parallel job in forked ranks (gloo), one phase a line of JSON on stdin.

A phase builds the model on a mesh, restores or trains, saves, and compares every local tensor with a reference model
that was never sharded. Prints one JSON line a phase: {"ok": bool, "errors": [...], "reports": [...]}.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from regrow.ckpt import exchange
from regrow.ckpt.place import Place
from regrow.ckpt.state import TrainState
from regrow.ids import MeshShape
from regrow.wire import GenerationSpec, RestorePoint

HIDDEN, FFN, LAYERS = 12, 22, 3


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(HIDDEN, FFN)
        self.down = torch.nn.Linear(FFN, HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.register_buffer("scale", torch.ones(()))


class Model(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tok = torch.nn.Embedding(7, HIDDEN)
        self.layers = torch.nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.head = torch.nn.Linear(HIDDEN, 7, bias=False)
        self.head.weight = self.tok.weight


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    decay = [p for n, p in model.named_parameters() if "norm" not in n]
    rest = [p for n, p in model.named_parameters() if "norm" in n]
    return torch.optim.AdamW([{"params": decay, "lr": 0.01}, {"params": rest, "lr": 0.02, "weight_decay": 0.0}], foreach=False)


def gradient(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash_of(name) + step)
    return torch.randn(shape, generator=generator)


def hash_of(name: str) -> int:
    return sum(ord(c) * (i + 1) for i, c in enumerate(name.replace("head.weight", "tok.weight")))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        for name, parameter in model.named_parameters():
            whole = gradient(name, parameter.shape, step)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.grad = whole
        optimizer.step()
        for block in getattr(model, "layers", {}).values():
            block.scale.mul_(1.5)


def build(mesh: MeshShape, rank: int, seed: int, zero: int) -> torch.nn.Module:
    model = Model(seed)
    at = mesh.coordinates(rank)["pp"]
    per = [LAYERS // mesh.pp + (1 if i < LAYERS % mesh.pp else 0) for i in range(mesh.pp)]
    first = sum(per[:at])
    for number in range(LAYERS):
        if not first <= number < first + per[at]:
            del model.layers[str(number)]
    if at != 0:
        del model.tok
    if at != mesh.pp - 1:
        del model.head
    axes = init_device_mesh("cpu", (mesh.dp, mesh.pp, mesh.tp), mesh_dim_names=("dp", "pp", "tp"))
    if mesh.tp > 1:
        plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
        parallelize_module(model.layers, axes["tp"], plan)
    if zero:
        for block in model.layers.values():
            fully_shard(block, mesh=axes["dp"])
        fully_shard(model, mesh=axes["dp"])
    return model


def check(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, reference: Model, reference_optimizer: torch.optim.Optimizer
) -> list[str]:
    wanted = dict(reference.named_parameters(remove_duplicate=False)) | dict(reference.named_buffers())
    errors = []
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        pairs = [("", value, wanted[name])]
        if isinstance(value, torch.nn.Parameter):
            state, other = optimizer.state[value], reference_optimizer.state[wanted[name]]
            pairs += [(key, state[key], other[key]) for key in other]
        for key, mine, whole in pairs:
            expected = whole.detach()
            if isinstance(mine, DTensor):
                expected = distribute_tensor(expected, mine.device_mesh, mine.placements, src_data_rank=None).to_local()
                mine = mine.to_local()
            if not torch.equal(mine.detach(), expected):
                errors.append(f"{name} {key} differs")
    return errors


def run_rank(phase: dict, rank: int) -> dict:
    mesh = MeshShape.parse(phase["mesh"])
    dist.init_process_group("gloo", init_method=f"file://{phase['store']}", rank=rank, world_size=mesh.world_size)
    model = build(mesh, rank, phase["seed"], phase.get("zero", 0))
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    restore = RestorePoint(**phase["restore"]) if phase.get("restore") else None
    nodes = len(phase["writers"])
    per_node = -(-mesh.world_size // nodes)
    node = rank // per_node
    spec = GenerationSpec(
        job="mesh", epoch=1, generation=phase["generation"], mesh=mesh, world_size=mesh.world_size,
        nodes=tuple(f"n{i}" for i in range(nodes)), restore=restore,
    )  # fmt: skip
    place = Place(
        spec=spec, rank=rank, node=f"n{node}", folder=phase["folder"],
        local_ranks=tuple(range(node * per_node, min(mesh.world_size, (node + 1) * per_node))),
    )  # fmt: skip
    state = TrainState.attach(
        place, writer=phase["writers"][node], exchange=exchange.over(), model=model, optimizer=optimizer, scheduler=scheduler,
        aliases={"head.weight": "tok.weight"}, back_pressure=phase.get("back_pressure", "wait"),
        read_once=phase.get("read_once", "measured"),
    )  # fmt: skip
    first = state.restore()
    draws = draw() if first else []
    reference = Model(phase["reference_seed"])
    reference_optimizer = optimizer_of(reference)
    train(reference, reference_optimizer, 1, first)
    errors = check(model, optimizer, reference, reference_optimizer) if first else []
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1000 * phase["generation"] + rank)
    reports = []
    for step in range(first + 1, first + 1 + phase.get("steps", 0)):
        train(model, optimizer, step, step)
        if phase.get("slow_rank") == rank:
            time.sleep(0.01)
        report = state.save(step, step * 8)
        reports.append([step, report.outcome, report.reason])
    then = draw()
    train(reference, reference_optimizer, first + 1, first + phase.get("steps", 0))
    errors += check(model, optimizer, reference, reference_optimizer) if phase.get("steps") else []
    dist.barrier()
    state.close()
    dist.destroy_process_group()
    rates = [group["lr"] for group in optimizer.param_groups]
    loaded = state.loaded.sources() if state.loaded else {}
    return {"rank": rank, "errors": errors, "reports": reports, "draws": draws, "then": then, "lr": rates, "loaded": loaded}


def draw() -> list[float]:
    """The next number of each generator."""
    return [float(torch.rand(())), float(np.random.random_sample()), random.random()]


def run_phase(phase: dict) -> dict:
    folder = Path(phase["store"]).parent
    world = MeshShape.parse(phase["mesh"]).world_size
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                result = run_rank(phase, rank)
                (folder / f"result-{phase['generation']}-{rank}.json").write_text(json.dumps(result))
                code = 0
            except BaseException as error:  # noqa: BLE001 - the rank's exit code tells
                traceback.print_exc()
                (folder / f"failure-{phase['generation']}-{rank}").write_text(f"{type(error).__name__}: {error}")
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    if any(codes):
        failures = [path.read_text() for path in sorted(folder.glob(f"failure-{phase['generation']}-*"))]
        return {"ok": False, "errors": [f"exit codes {codes}"], "failures": failures, "ranks": []}
    ranks = [json.loads((folder / f"result-{phase['generation']}-{rank}.json").read_text()) for rank in range(world)]
    errors = [f"rank {one['rank']}: {error}" for one in ranks for error in one["errors"]]
    return {"ok": not errors, "errors": errors, "ranks": ranks}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run_phase(json.loads(line))), flush=True)
