"""A worker as the writer sees it, without torch: arenas, fill, submit. Runs in the test or as a process of its own.

As a process: ``python ckpt_producer.py '{"socket":…, "folder":…, "generation":…, "rank":…, "local_ranks":[…], "steps":[…], "then":…}'``
prints one line a step; `then` is exit, hang, or take (take an arena and hang without a submission).
"""

from __future__ import annotations

import json
import mmap
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from ckpt_synthetic import shard, spec_of

from regrow.ckpt.layout import Image, lay_out
from regrow.ckpt.manifest import directory_name
from regrow.ckpt.plan import assign
from regrow.ckpt.protocol import ProducerHello, Submit
from regrow.ckpt.sinks import WriterSink


class Producer:
    """One rank of a generation."""

    def __init__(
        self,
        socket: str,
        folder: Path,
        *,
        generation: int = 1,
        rank: int = 0,
        local_ranks: tuple[int, ...] = (0,),
        world_size: int = 0,
        rows: int = 64,
        node: str = "n0",
        node_file: bool = False,
    ) -> None:
        self.generation = generation
        self.rank = rank
        self.world = world_size or len(local_ranks)
        self.spec = spec_of(self.world, generation)
        hello = ProducerHello(
            job="job",
            node=node,
            epoch=1,
            generation=generation,
            rank=rank,
            world_size=self.world,
            local_ranks=local_ranks,
            folder=str(folder),
            node_file=node_file,
        )
        self.sink = WriterSink(socket, hello)
        self._shape = (rows, 1024)
        self._image: Image | None = None
        self._arenas: list[mmap.mmap] = []

    def connect(self) -> None:
        """Plan and get arenas."""
        held = [[shard("w", self._shape, (self.world,), (0,), rank)] for rank in range(self.world)]
        self._image = lay_out(assign(held)[self.rank])
        self._arenas = self.sink.prepare(self._image.plan)

    def fill(self, arena: int, step: int) -> None:
        """The image of a step: all values are the step's number."""
        assert self._image is not None
        memory = memoryview(self._arenas[arena])
        memory[:] = bytes(len(memory))
        for at, data in self._image.constants:
            memory[at : at + len(data)] = data
        for chunk in self._image.plan.chunks:
            memory[chunk.at : chunk.at + chunk.nbytes] = np.full(chunk.nbytes // 4, step, np.float32).tobytes()

    def save(self, step: int, *, wait_seconds: float = 60.0, nonce: str = "abc", samples: int | None = None) -> bool:
        """Snapshot and submit; False when it was skipped."""
        arena = self.sink.take(wait_seconds)
        if arena is None:
            self.sink.skip(step, "both arenas are still being written")
            return False
        self.fill(arena, step)
        directory = directory_name(step, self.generation, nonce)
        self.sink.submit(Submit(arena=arena, step=step, samples=step * 8 if samples is None else samples, directory=directory))
        return True


def main(options: dict[str, Any]) -> None:
    """A producer process."""
    producer = Producer(
        options["socket"],
        Path(options["folder"]),
        generation=options["generation"],
        rank=options["rank"],
        local_ranks=tuple(options["local_ranks"]),
        node_file=options.get("node_file", False),
    )
    producer.connect()
    print("connected", flush=True)
    for step in options["steps"]:
        print(step, producer.save(step), flush=True)
    if options["then"] == "take":
        assert producer.sink.take() is not None
    if options["then"] != "exit":
        print("hanging", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
