"""What each rank writes down while it trains, so that two runs can be compared: a JSON line a step, the state at the end.

In the folder REGROW_STEP_LOG: ``g<generation>-a<restart>-r<rank>.jsonl`` (a "start" line, a "step" line for each completed step, an "end" line)
and ``final-r<rank>.npz`` (this rank's parts of parameters and optimizer state). A line is written before the step is
reported as complete, so a checkpoint never knows of a step that the log does not have.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regrow.parallel.apply import MeshModel, StepResult
from regrow.parallel.apply_export import parts

VARIABLE = "REGROW_STEP_LOG"


class StepLog:
    """Writes one rank's log. Without a folder it writes nothing."""

    def __init__(self, folder: Path | None, *, generation: int, restart: int, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"g{generation:06d}-a{restart:03d}-r{rank:05d}.jsonl").open("w", encoding="utf-8")

    @classmethod
    def from_environment(cls, *, generation: int, restart: int, rank: int) -> StepLog:
        """The log that REGROW_STEP_LOG asks for, if any."""
        folder = os.environ.get(VARIABLE, "")
        return cls(Path(folder) if folder else None, generation=generation, restart=restart, rank=rank)

    def start(self, net: MeshModel, *, restored: int, num_samples: int, global_batch: int) -> None:
        """The first line: which mesh, and after which completed step this generation goes on."""
        self._write(
            {
                "kind": "start",
                "restored": restored,
                "mesh": str(net.shape),
                "rank": self._rank,
                "world_size": net.shape.world_size,
                "coordinates": net.coordinates,
                "num_samples": num_samples,
                "global_batch": global_batch,
            }
        )

    def step(self, step: int, result: StepResult, *, first: int, samples: list[int], learning_rate: float) -> None:
        """A completed step. `first`: stream position of `samples`, the data set indices of this rank's replica in order.

        Draws one number from each global generator: a generator that was not restored shows.
        """
        draw = {
            "python": random.random(),
            "numpy": float(np.random.random_sample()),
            "torch": float(torch.rand((), dtype=torch.float64).item()),
        }
        self._write(
            {
                "kind": "step",
                "step": step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "tokens": result.tokens,
                "learning_rate": learning_rate,
                "first": first,
                "samples": samples,
                "draw": draw,
            }
        )

    def end(self, net: MeshModel, optimizer: torch.optim.Optimizer, *, step: int, held_out: float) -> None:
        """The end of training: held-out loss, and this rank's parts of the state."""
        if self._folder is not None:
            mine = list(parts(net, optimizer))
            index = [{"name": part.name, "offset": part.offset, "full_shape": part.full_shape} for part in mine]
            arrays: dict[str, Any] = {str(number): part.array for number, part in enumerate(mine)}
            np.savez(self._folder / f"final-r{self._rank:05d}.npz", index=np.array(json.dumps(index)), **arrays)
        self._write({"kind": "end", "step": step, "held_out": held_out})
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
