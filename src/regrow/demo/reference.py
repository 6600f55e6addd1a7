"""The twin: the same training without Regrow's supervisor, worker library and checkpoints, on one process or any mesh.

    python -m regrow.demo.reference --folder twin --steps 45 --seed 0 --mesh 1x1x1 --controls 20

It shares the model, the sample order and the step with the example, and nothing else, so that a fault in what moves state
around cannot hide in both. `--controls K` also continues from a copy of the state after step K, once with everything
and once for each thing that a faulty restore could leave out; the comparison must pass the first and catch the others.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from regrow.agent.worker.data import BatchPlan, Recipe
from regrow.demo import train_gpt
from regrow.demo.steplog import StepLog
from regrow.demo.text import Corpus
from regrow.ids import MeshShape
from regrow.parallel.batch import split
from regrow.parallel.dropout import sample_keys

OMISSIONS = ("optimizer", "learning_rate", "rng", "position", "weights", "dropout_key")
"""What a control leaves out. dropout_key: masks keyed by the attempt and not by the data."""

CONTROL_STEPS = 3


@dataclasses.dataclass
class Snapshot:
    """Everything that a restart needs, copied in memory."""

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    generators: tuple[Any, Any, Any]


class Reference:
    """One run of the example's training, step by step."""

    def __init__(self, args: argparse.Namespace, shape: MeshShape, *, seed: int | None = None, **more: Any) -> None:
        """`seed`: of the dropout keys, when it is not the run's; `more`: fields of the strategy that the example does not offer."""
        self.args = args
        self.shape = shape
        self.seed = args.seed if seed is None else seed
        self.rank = dist.get_rank() if shape.world_size > 1 else 0
        sizes = {"dp": shape.dp, "pp": shape.pp, **({"cp": shape.cp} if shape.cp > 1 else {}), "tp": shape.tp}
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if shape.world_size > 1 else None
        self.counts = split(train_gpt.GLOBAL_BATCH, train_gpt.MICRO_BATCH, shape.dp)
        how = dataclasses.replace(train_gpt.strategy(args, train_gpt.MICRO_BATCH, self.counts), **more)
        self.net, self.optimizer, self.scheduler = train_gpt.build(args, mesh, shape, how, torch.device("cpu"))
        self.corpus = Corpus(seq=args.seq, num_samples=args.samples)
        recipe = Recipe(
            num_samples=len(self.corpus), seed=args.seed, global_batch=train_gpt.GLOBAL_BATCH, micro_batch=train_gpt.MICRO_BATCH
        )
        self.plan = BatchPlan(recipe, self.counts, self.net.coordinates["dp"])
        train_gpt.seed_generators(args.seed, self.rank)

    def open_log(self, folder: Path, *, generation: int, restored: int) -> StepLog:
        """A log that begins after completed step `restored`."""
        log = StepLog(folder, generation=generation, restart=0, rank=self.rank)
        log.start(self.net, restored=restored, num_samples=len(self.corpus), global_batch=train_gpt.GLOBAL_BATCH)
        return log

    def step(self, step: int, log: StepLog) -> None:
        """Train one step and write it down."""
        batch = self.plan.step(step)
        inputs, targets = self.corpus.samples(torch.from_numpy(batch.samples))
        keys = sample_keys(self.seed, step, torch.from_numpy(batch.positions))
        result = self.net.forward_backward(inputs, targets, keys)
        self.optimizer.step()
        rate = float(self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        log.step(step, result, first=batch.first, samples=batch.samples.tolist(), learning_rate=rate)

    def held_out(self) -> float:
        """Loss on text that training never sees."""
        start = sum(self.counts[: self.net.coordinates["dp"]]) * train_gpt.MICRO_BATCH
        inputs, targets = (part[start : start + self.net.num_samples] for part in self.corpus.held_out(train_gpt.GLOBAL_BATCH))
        return self.net.evaluate(inputs, targets)

    def snapshot(self, step: int) -> Snapshot:
        """Copy the state after completed step `step` (one process)."""
        return Snapshot(
            step=step,
            model=copy.deepcopy(self.net.module.state_dict()),
            optimizer=copy.deepcopy(self.optimizer.state_dict()),
            scheduler=copy.deepcopy(self.scheduler.state_dict()),
            generators=(random.getstate(), np.random.get_state(), torch.get_rng_state()),
        )

    def restore(self, snapshot: Snapshot, *, without: str = "") -> None:
        """Take the state of a snapshot, except for what `without` names."""
        if without != "weights":
            self.net.module.load_state_dict(snapshot.model)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if without != "optimizer":
            self.optimizer.load_state_dict(copy.deepcopy(snapshot.optimizer))
        if without != "learning_rate":
            self.scheduler.load_state_dict(copy.deepcopy(snapshot.scheduler))
            rates = self.scheduler.get_last_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if without != "rng":
            random.setstate(snapshot.generators[0])
            np.random.set_state(snapshot.generators[1])
            torch.set_rng_state(snapshot.generators[2])
        if without == "position":
            self.plan.rebase(snapshot.step, 0)


def train(args: argparse.Namespace, shape: MeshShape, folder: Path, *, snapshot_at: int = 0, **more: Any) -> Snapshot | None:
    """A run without faults from the first step to the last, logged to `folder`. Returns the state after `snapshot_at`."""
    reference = Reference(args, shape, **more)
    log = reference.open_log(folder, generation=1, restored=0)
    taken: Snapshot | None = None
    for step in range(1, args.steps + 1):
        reference.step(step, log)
        if step == snapshot_at:
            taken = reference.snapshot(step)
    log.end(reference.net, reference.optimizer, step=args.steps, held_out=reference.held_out())
    return taken


def controls(args: argparse.Namespace, snapshot: Snapshot, folder: Path) -> None:
    """Continue from `snapshot` for a few steps: folder/complete with everything, folder/without-<what> for each omission."""
    for omission in ("", *OMISSIONS):
        reference = Reference(args, MeshShape(), seed=args.seed + 1 if omission == "dropout_key" else None)
        reference.restore(snapshot, without=omission)
        log = reference.open_log(folder / (f"without-{omission}" if omission else "complete"), generation=2, restored=snapshot.step)
        for step in range(snapshot.step + 1, min(args.steps, snapshot.step + CONTROL_STEPS) + 1):
            reference.step(step, log)
        log.close()


def main(argv: list[str] | None = None) -> None:
    """Run the twin, and with --controls the negative controls after it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the step logs go")
    parser.add_argument("--mesh", default="1x1x1", help="DP x TP x PP; more than one process: started as torchrun would")
    parser.add_argument(
        "--controls", type=int, default=0, help="continue from a copy of the state after this step, with and without parts of it"
    )
    parser.add_argument("--shard-size", type=int, default=0, help="replicas that share the shards of one copy (HSDP)")
    parser.add_argument("--whole-sequence", action="store_true", help="tensor parallel without sequence parallel")
    parser.add_argument("--bf16", action="store_true", help="forward and backward in bfloat16")
    parser.add_argument("--rendezvous", default="env://", help="init_method of the process group")
    own, rest = parser.parse_known_args(argv)
    args = train_gpt.parse(rest)
    args.seed = args.seed or 0
    shape = MeshShape.parse(own.mesh)
    torch.set_num_threads(1)
    if shape.world_size > 1:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=own.rendezvous, rank=rank, world_size=shape.world_size)
    try:
        more: dict[str, Any] = {
            "shard_size": own.shard_size,
            "compute": torch.bfloat16 if own.bf16 else None,
            "sequence_parallel": not own.whole_sequence,
        }
        snapshot = train(args, shape, own.folder, snapshot_at=own.controls, **more)
        if snapshot is not None:
            controls(args, snapshot, own.folder / "controls")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
