"""One generation of a job on a mesh with everything that is done to its state: restored and saved through a checkpoint writer,
digested after each update, damaged by one bit, handed to a rank that was replaced."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from regrow.agent.worker.chaos import Faults
from regrow.agent.worker.digest import Digester
from regrow.agent.worker.live import LiveState
from regrow.agent.worker.watch import StateWatch, named_parameters
from regrow.ckpt import catalog, exchange, flatten
from regrow.ckpt.client import WriterControl
from regrow.ckpt.commit import Collector, write_record
from regrow.ckpt.place import Place
from regrow.ckpt.state import TrainState
from regrow.demo import train_gpt
from regrow.demo.reference import Reference
from regrow.ids import MeshShape
from regrow.supervisor.core import sdc
from regrow.wire import GenerationSpec, ShardsDurable, ShardsFailed

COMMIT_SECONDS = 60.0
SAVED = 2
"""The step that the first generation saves and the others restore."""


class Generation:
    """One rank of it."""

    def __init__(self, *, checkpoints: str, socket: str, mesh: str, arguments: list[str], generation: int, **more: Any) -> None:
        self.args = train_gpt.parse(arguments)
        self.shape = MeshShape.parse(mesh)
        if more.pop("bf16", False):
            more["compute"] = torch.bfloat16
        self.more = more
        self.reference = Reference(self.args, self.shape, **more)
        self.exchange = exchange.over() if self.shape.world_size > 1 else exchange.alone
        entry = catalog.newest_restorable(checkpoints, not_after_step=SAVED)
        self.spec = GenerationSpec(
            job="matrix", epoch=1, generation=generation, mesh=self.shape, world_size=self.shape.world_size, nodes=("n0",),
            restore=entry.restore_point() if entry else None, global_batch=16, micro_batch=2, micro_batches=self.reference.counts,
        )  # fmt: skip
        ranks = tuple(range(self.shape.world_size))
        place = Place(spec=self.spec, rank=self.reference.rank, node="n0", local_ranks=ranks, folder=checkpoints)
        self.socket = socket
        self.state = TrainState.attach(place, writer=socket, exchange=self.exchange, back_pressure="wait", **self.objects(self.reference))
        module, optimizer = self.reference.net.module, self.reference.optimizer
        self.watch = StateWatch([module], [optimizer], Digester(7), Faults(enabled=False, rank=self.reference.rank), every=1)
        optimizer.register_step_pre_hook(lambda *_: self.watch.before_update())
        self.result: dict[str, Any] = {"votes": [], "memory": False}

    def objects(self, reference: Reference) -> dict[str, Any]:
        """What train_state is given."""
        net = reference.net
        return {"model": net.module, "optimizer": reference.optimizer, "scheduler": reference.scheduler, "aliases": net.aliases}

    def train(self, log: Path, last: int) -> None:
        """Restore, and train up to step `last`; step SAVED is saved when it is computed here."""
        first = self.state.restore()
        self.result["restored"] = first
        steps = self.reference.open_log(log, generation=self.spec.generation, restored=first)
        for step in range(first + 1, last + 1):
            self.reference.step(step, steps)
            self.vote(step)
            if step == SAVED:
                report = self.state.save(step, step * 16)
                assert report.outcome == "snapshot", report
                self.commit(step)
        steps.end(self.reference.net, self.reference.optimizer, step=last, held_out=self.reference.held_out())

    def commit(self, step: int) -> None:
        """The committing agent's half, on rank 0."""
        if self.reference.rank == 0:
            asyncio.run(asyncio.wait_for(self.collect(step), COMMIT_SECONDS))
        if self.shape.world_size > 1:
            dist.barrier()

    async def collect(self, step: int) -> None:
        control, collector = await WriterControl.connect(self.socket, "n0"), Collector(self.spec)
        async for message in control.messages():
            if isinstance(message, ShardsDurable | ShardsFailed):
                outcome = collector.add(message)
                await control.acknowledge(message)
                if message.step == step and message.generation == self.spec.generation:
                    assert outcome.pending is not None, outcome
                    write_record(outcome.pending, written_at=time.time())
                    break
        await control.close()

    def vote(self, step: int) -> str:
        """What the supervisor makes of the digests of all ranks."""
        text = self.watch.applied(step)
        texts = self.exchange((self.watch.take_copies() or text).encode())
        verdict = sdc.vote(self.shape, {rank: text.decode() for rank, text in enumerate(texts)}).verdict
        self.result["votes"].append(verdict)
        return verdict

    def flip(self, step: int) -> None:
        """One bit of the last rank's parameters changes between two updates."""
        rank = self.reference.rank
        assert not self.watch.take_mismatch()
        if rank == self.shape.world_size - 1:
            locals_ = (flatten.local_of(parameter) for _, parameter in named_parameters([self.reference.net.module]))
            victim = next(tensor for tensor in locals_ if tensor.numel())
            victim.view(-1).view(torch.int32)[0] ^= 1 << 22
        self.watch.before_update()
        names = [text.decode() for text in self.exchange(self.watch.take_mismatch().encode())]
        self.result["mismatch"] = {rank: name for rank, name in enumerate(names) if name}
        self.result["after_flip"] = self.vote(step + 1)
        self.result["votes"].pop()

    def replace_one(self, step: int) -> None:
        """The last rank lost its process; all build their objects anew and take up what the others hold."""
        rank = self.reference.rank
        before = LiveState(**self.objects(self.reference), able=True)
        before.resting(step, step * 16)
        held = before.hold()
        again = Reference(self.args, self.shape, **self.more)
        after = LiveState(**self.objects(again), able=True)
        source = after.take_up(held if rank < self.shape.world_size - 1 else None, self.spec, rank, self.exchange, None)
        if source is not None:
            names = {id(parameter): name for name, parameter in again.net.named_parameters()}
            mine, theirs = (flatten.optimizer_state(one.optimizer, _names(one)).tensors for one in (again, self.reference))
            mine |= {names[id(parameter)]: parameter for parameter in again.net.parameters()}
            theirs |= dict(self.reference.net.named_parameters())
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(flatten.local_of(mine[name]), flatten.local_of(theirs[name])) for name in mine)
        self.result["memory"] = source is not None


def _names(reference: Reference) -> dict[int, str]:
    return flatten.parameter_names(reference.net.module, reference.net.aliases)


def generation(*, folder: str, last: int, **given: Any) -> None:
    """The call of a job: see tests/parallel_runtime/test_saving.py."""
    world = MeshShape.parse(given["mesh"]).world_size
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(os.environ["RANK"]), world_size=world)
    job = Generation(**given)
    job.train(Path(folder), last)
    if world > 1:
        job.replace_one(last)
    job.flip(last)
    Path(folder, f"result{job.reference.rank}.json").write_text(json.dumps(job.result))
    job.state.close()
    if dist.is_initialized():
        dist.destroy_process_group()
