"""The light job of the recovery benchmark: plain data parallelism, steps of a few milliseconds, the same work under any launcher.

Under torchrun it is what people write: init, load the newest checkpoint, step, save. Under Regrow it uses the worker
library. Each rank appends "<CLOCK_MONOTONIC ns> <step>" to OUT/<rank>.steps when it has applied a step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

ARGUMENTS = argparse.ArgumentParser(description=__doc__)
ARGUMENTS.add_argument("--out", type=Path, required=True, help="folder for step files and pids")
ARGUMENTS.add_argument("--steps", type=int, default=1_000_000)
ARGUMENTS.add_argument("--pause", type=float, default=0.02, help="seconds that a step sleeps, so that eight ranks leave cores free")
ARGUMENTS.add_argument("--plain", action="store_true", help="torch alone: for torchrun")
ARGUMENTS.add_argument("--width", type=int, default=128, help="of the model: how much a step computes")
ARGUMENTS.add_argument("--batch", type=int, default=8, help="samples of a rank in a step")
ARGUMENTS.add_argument("--saves", type=float, default=0.0, help="seconds from one request to save to the next; 0: at every step")
ARGUMENTS.add_argument("--turn", default="", metavar="FILE:WORD", help="take steps only while the file holds this word")
ARGUMENTS.add_argument("--floors", type=int, default=0, help="with --plain: first measure so many bare re-initialisations")


def build(width: int = 128) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    rank: int,
    pause: float,
    batch: int = 8,
    reduce: Callable[[torch.Tensor], object] | None = None,
    may: Callable[[], bool] = lambda: True,
) -> float:
    """One optimizer step, gradients summed over all ranks (or by `reduce`), applied when it `may` be."""
    inputs = torch.randn(batch, 64, generator=torch.Generator().manual_seed(step * 1024 + rank))
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        (reduce or dist.all_reduce)(parameter.grad)
    time.sleep(pause)
    if may():
        optimizer.step()
    return float(loss.detach())


def note(args: argparse.Namespace, rank: int, step: int) -> None:
    """This rank has applied a step."""
    with (args.out / f"{rank}.steps").open("a", encoding="ascii") as log:
        log.write(f"{time.monotonic_ns()} {step}\n")


def await_turn(args: argparse.Namespace) -> None:
    """Two systems that are compared step in turn, so that what else the machine does meets both alike."""
    path, _, word = args.turn.rpartition(":")
    while path and Path(path).read_text(encoding="ascii") != word:
        time.sleep(0.01)


def plain(args: argparse.Namespace) -> None:
    """As under torchrun: the newest checkpoint is a file that rank 0 replaces after each step, so nothing is computed twice."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    path = args.out / "checkpoint.pt"
    if args.floors and not path.exists():
        floors(args, rank, path.with_name("floor.pt"))
    model, optimizer = build(args.width)
    done = load(path, model, optimizer) if path.exists() else 0
    (args.out / f"{rank}.pid").write_text(str(os.getpid()))
    for step in range(done + 1, args.steps + 1):
        await_turn(args)
        update(model, optimizer, step, rank, args.pause, args.batch)
        if rank == 0 and not args.turn:
            save(path, model, optimizer, step)
        note(args, rank, step)


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Whole or not at all."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The completed step of the checkpoint."""
    found = torch.load(path)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return int(found["step"])


def floors(args: argparse.Namespace, rank: int, path: Path) -> None:
    """The floor: processes that are there destroy their group, make a new one, load and take a step. Nobody has to find out,
    agree, stop or start. Seconds of the slowest rank go to OUT/floor.json."""
    model, optimizer = build()
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # it outlives the group
    world = dist.get_world_size()
    update(model, optimizer, 1, rank, args.pause)
    if rank == 0:
        save(path, model, optimizer, 1)
    dist.barrier()
    seconds: list[float] = []
    for number in range(args.floors):
        dist.barrier()
        began = time.monotonic()
        dist.destroy_process_group()
        prefixed = dist.PrefixStore(f"floor{number}", store)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world)
        dist.new_group(backend="gloo")  # Regrow's workers have a second group for their orders
        load(path, model, optimizer)
        update(model, optimizer, 2, rank, args.pause)
        slowest = torch.tensor([time.monotonic() - began], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds.append(float(slowest))
    if rank == 0:
        (args.out / "floor.new").write_text(json.dumps(seconds))
        (args.out / "floor.new").replace(args.out / "floor.json")


def supervised(args: argparse.Namespace) -> None:
    """The same training by the worker library."""
    import regrow

    run = regrow.attach(global_batch=64, micro_batch=1)
    model, optimizer = build(args.width)
    state = run.train_state(model=model, optimizer=optimizer)
    state.restore()
    (args.out / f"{run.rank}.pid").write_text(str(os.getpid()))
    asked = 0.0
    for step in run.steps(args.steps):
        await_turn(args)
        loss = update(model, optimizer, step, run.rank, args.pause, args.batch)
        note(args, run.rank, step)
        if run.rank == 0 and not args.turn and time.monotonic() >= asked + args.saves:
            run.request_save()  # by default as often as the writer has room: torchrun's side saves at every step
            asked = time.monotonic()
        run.complete(step, loss=loss)


def main() -> None:
    """Train until killed."""
    args = ARGUMENTS.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.plain:
        plain(args)
    else:
        import regrow

        regrow.in_place(lambda: supervised(args))


if __name__ == "__main__":
    main()
