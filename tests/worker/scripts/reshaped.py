"""reshaped.py: a state on a 2 x 2 mesh, one holder dead, is taken up on a mesh of 4, and compared with what it was."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import regrow
from regrow.agent.worker.live import LiveState

SHAPES = {"wide": (6, 8), "tall": (9, 4), "bias": (8,)}
DEAD = 3


class Model(torch.nn.Module):
    """Parameters of some shapes, the same in the whole whatever the placement."""

    def __init__(self, seed: int, place: Any) -> None:
        super().__init__()
        stream = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(place(name, torch.randn(shape, generator=stream))))

    def gradients(self, place: Any) -> None:
        """As if a backward pass had made them."""
        stream = torch.Generator().manual_seed(7)
        for name, parameter in self.named_parameters():
            parameter.grad = place(name, torch.randn(SHAPES[name], generator=stream))


def made(seed: int, place: Any) -> tuple[Model, torch.optim.Optimizer, Any, LiveState]:
    """A model and what trains it."""
    model = Model(seed, place)
    groups = [{"params": [model.wide, model.tall], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, foreach=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return model, optimizer, schedule, LiveState(model, optimizer, schedule, None, able=True)


def values(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that trains, in whole tensors."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found |= {f"{name}.{key}": value for name, parameter in model.named_parameters() for key, value in optimizer.state[parameter].items()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}


def trained(seed: int, place: Any) -> tuple[Model, torch.optim.Optimizer, Any, LiveState]:
    """After one step and its boundary."""
    model, optimizer, schedule, live = made(seed, place)
    model.gradients(place)
    live.updating()
    optimizer.step()
    schedule.step()
    live.resting(1, 12)
    return model, optimizer, schedule, live


def main() -> None:
    run = regrow.attach()
    before = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    after = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    rows = [Replicate(), Shard(0)]

    def sharded(name: str, value: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(value, after, [Shard(0) if name == "bias" else Shard(1)])

    old, its, _, live = trained(1, lambda _, value: distribute_tensor(value, before, rows))
    expected = values(old, its)
    lost_pair = os.environ.get("LOST") == "pair"  # both holders of the second half of the rows
    dead = {1, 3} if lost_pair else {DEAD}
    held = None if run.rank in dead else live.hold()
    model, optimizer, schedule, fresh = made(2, sharded)
    spec = msgspec.structs.replace(run.spec, in_place=True)
    source = fresh.take_up(held, spec, run.rank, run.exchange, run.control_group)
    found = values(model, optimizer) if source is not None else {}
    document = {
        "step": source.step if source is not None else None,
        "samples": source.samples if source is not None else None,
        "different": [name for name in found if not torch.equal(found[name], expected[name])],
        "names": len(found),
        "rate": optimizer.param_groups[0]["lr"],
        "epoch": schedule.last_epoch,
        "draw": float(torch.rand(())),
    }
    Path(os.environ["OUTPUT"]).write_text(json.dumps(document))
    sys.stdout.flush()


main()
