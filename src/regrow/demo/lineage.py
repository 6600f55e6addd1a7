"""Reads step logs: which completed steps survived, over all generations of a run (numpy only)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from regrow.errors import OperationalError

_NAME = re.compile(r"^g(\d+)-a(\d+)-r(\d+)\.jsonl$")

Array = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Step:
    """One completed step as its ranks wrote it down."""

    step: int
    generation: int
    attempt: int
    mesh: str
    losses: tuple[float, ...]
    """Of every rank: all must say the same."""
    learning_rates: tuple[float, ...]
    tokens: int
    samples: tuple[int, ...]
    """Data set indices of the whole batch, in order."""
    positions: tuple[int, ...]
    """Their stream positions."""
    draws: dict[str, float]
    """What rank 0 drew from each generator."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """One generation (one attempt): what it restored and the steps that it completed."""

    generation: int
    attempt: int
    restored: int
    mesh: str
    num_samples: int
    global_batch: int
    steps: dict[int, Step]
    torn: dict[int, Step]
    """Steps that a rank of every replica wrote down, but not all ranks: one was killed. They stand where the next generation goes on
    beyond them, with what the others held in memory."""


@dataclasses.dataclass(frozen=True)
class Lineage:
    """The steps that the final state stands on, and those that were computed and lost."""

    segments: tuple[Segment, ...]
    steps: dict[int, Step]
    lost: tuple[Step, ...]

    @property
    def num_samples(self) -> int:
        """Size of the data set."""
        return self.segments[0].num_samples if self.segments else 0

    @property
    def before_first_reshard(self) -> frozenset[int]:
        """Steps that were computed before the mesh changed for the first time: there each rank continues its own streams."""
        same = list(itertools.takewhile(lambda segment: segment.mesh == self.segments[0].mesh, self.segments))
        generations = {(segment.generation, segment.attempt) for segment in same}
        return frozenset(number for number, step in self.steps.items() if (step.generation, step.attempt) in generations)

    @property
    def meshes(self) -> tuple[str, ...]:
        """Meshes of the generations that completed a step of the lineage, in order."""
        used = {step.generation: step.mesh for step in self.steps.values()}
        return tuple(used[generation] for generation in sorted(used))


def read_lineage(folder: Path) -> Lineage:
    """Put the logs of all generations together: each one takes up after the step it restored, what lay beyond is lost.

    Raises:
        OperationalError: no log, or a line in the middle of a file that is not JSON.
    """
    segments = _segments(folder)
    if not segments:
        raise OperationalError("no step logs", where=str(folder), hint="run the script with REGROW_STEP_LOG set to this folder")
    steps: dict[int, Step] = {}
    lost: list[Step] = []
    torn: dict[int, Step] = {}
    for segment in segments:
        steps |= {number: step for number, step in torn.items() if number <= segment.restored}
        torn = segment.torn
        lost += [step for number, step in steps.items() if number > segment.restored]
        steps = {number: step for number, step in steps.items() if number <= segment.restored} | segment.steps
    return Lineage(segments=tuple(segments), steps=dict(sorted(steps.items())), lost=tuple(lost))


def _segments(folder: Path) -> list[Segment]:
    groups: dict[tuple[int, int], dict[int, list[dict[str, Any]]]] = {}
    for path in sorted(folder.glob("g*.jsonl")):
        match = _NAME.match(path.name)
        if match:
            groups.setdefault((int(match[1]), int(match[2])), {})[int(match[3])] = _lines(path)
    made = (_segment(generation, attempt, ranks) for (generation, attempt), ranks in sorted(groups.items()))
    return [segment for segment in made if segment is not None]


def _lines(path: Path) -> list[dict[str, Any]]:
    """Lines of a log; the last one may be torn, as its writer may have been killed."""
    found: list[dict[str, Any]] = []
    texts = path.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(texts, 1):
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError as error:
            if number < len(texts):
                raise OperationalError(f"line {number} is not JSON", where=str(path), hint="the log is damaged") from error
    return found


def _segment(generation: int, attempt: int, ranks: dict[int, list[dict[str, Any]]]) -> Segment | None:
    """None: a generation that ended before all of its ranks had begun."""
    heads = {rank: lines[0] for rank, lines in ranks.items() if lines and lines[0]["kind"] == "start"}
    if not heads or len(heads) < next(iter(heads.values()))["world_size"]:
        return None
    head = heads[min(heads)]
    by_rank = {rank: {line["step"]: line for line in lines if line["kind"] == "step"} for rank, lines in ranks.items()}
    steps: dict[int, Step] = {}
    torn: dict[int, Step] = {}
    for number in sorted(set[int]().union(*by_rank.values())):
        told = {rank: lines for rank, lines in by_rank.items() if number in lines}
        speakers = _speakers({rank: heads[rank] for rank in told})
        if len(speakers) == len(_speakers(heads)):
            kept = steps if len(told) == len(by_rank) else torn
            kept[number] = _step(number, (generation, attempt), head["mesh"], told, speakers)
    return Segment(
        generation=generation,
        attempt=attempt,
        restored=head["restored"],
        mesh=head["mesh"],
        num_samples=head["num_samples"],
        global_batch=head["global_batch"],
        steps=steps,
        torn=torn,
    )


def _speakers(heads: dict[int, dict[str, Any]]) -> list[int]:
    """One rank of each replica, in replica order."""
    chosen: dict[int, int] = {}
    for rank in sorted(heads):
        chosen.setdefault(heads[rank]["coordinates"]["dp"], rank)
    return [chosen[replica] for replica in sorted(chosen)]


def _step(step: int, segment: tuple[int, int], mesh: str, by_rank: dict[int, dict[int, dict[str, Any]]], speakers: Iterable[int]) -> Step:
    lines = {rank: steps[step] for rank, steps in by_rank.items()}
    shares = [lines[rank] for rank in speakers]
    return Step(
        step=step,
        generation=segment[0],
        attempt=segment[1],
        mesh=mesh,
        losses=tuple(line["loss"] for line in lines.values()),
        learning_rates=tuple(line["learning_rate"] for line in lines.values()),
        tokens=lines[min(lines)]["tokens"],
        samples=tuple(sample for share in shares for sample in share["samples"]),
        positions=tuple(share["first"] + index for share in shares for index in range(len(share["samples"]))),
        draws=lines[min(lines)]["draw"],
    )


def read_final(folder: Path) -> dict[str, Array]:
    """The state at the end of a run, put together from the ranks' parts: {"model.<name>": array, "optimizer.<name>.exp_avg": ...}.

    Raises:
        OperationalError: no parts, or parts that do not cover a tensor exactly once.
    """
    whole: dict[str, Array] = {}
    filled: dict[str, int] = {}
    for path in sorted(folder.glob("final-r*.npz")):
        with np.load(path) as archive:
            for number, entry in enumerate(json.loads(str(archive["index"]))):
                name, part = entry["name"], archive[str(number)]
                target = whole.setdefault(name, np.zeros(entry["full_shape"], dtype=np.float32))
                target[tuple(slice(start, start + size) for start, size in zip(entry["offset"], part.shape, strict=True))] = part
                filled[name] = filled.get(name, 0) + part.size
    if not whole:
        raise OperationalError("no final state", where=str(folder), hint="the run did not reach its last step")
    torn = [name for name, array in whole.items() if filled[name] != array.size]
    if torn:
        raise OperationalError(f"parts do not cover {torn[0]} exactly once", where=str(folder), hint="parts of two runs lie in one folder?")
    return whole
