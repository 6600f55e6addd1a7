"""The support matrix (docs/parallelism-runtime.md), row by row: each strategy is saved through the checkpoint writer, restored on
its own mesh to the bit and on three others within the tolerance, digested, damaged by one bit, and handed on from memory."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regrow.demo.lineage import read_final, read_lineage
from regrow.ids import MeshShape

SMALL = ["--layers", "2", "--hidden", "48", "--seq", "48", "--seed", "6", "--samples", "64", "--steps", "3", "--warmup", "1"]
LAST = 3
LOSS = 1e-6
"""Largest relative difference of a loss in float32 on another mesh."""
COARSE = 2e-3
"""The same in bf16 or with moments in 8 bits, where rounding on another mesh may move a code."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A strategy: its mesh and flags, three other ways to go on, and what is expected of it."""

    mesh: str
    flags: str = ""
    others: tuple[str, ...] = ()
    """"MESH flags": the flags that change the function (--tied, --experts, --eight-bit) have to be given again."""
    replicas: bool = True
    """Whether digests find something to compare, and survivors can replace a rank from memory."""
    memory: bool | None = None
    """The second of these where it differs from the first."""
    tolerance: float = LOSS
    more: tuple[tuple[str, Any], ...] = ()


QUICK = {
    "zero1-tp": Row("2x2x1", "--zero 1", ("3x1x1 --zero 1", "1x1x2", "2x2x1 --zero 3"), memory=False),
    "context": Row("dp=2,cp=2", "", ("3x1x1", "dp=1,cp=3", "1x2x1")),
    "experts": Row("dp=2,ep=2", "--experts 4", ("1x1x1 --experts 4", "3x1x1 --experts 4 --zero 1", "dp=4,ep=4 --experts 4"), memory=False),
}
MORE = {
    "replicated": Row("3x1x1", "", ("1x1x1", "1x2x1", "2x1x1 --zero 3")),
    "zero1": Row("3x1x1", "--zero 1", ("1x1x1", "2x1x1 --zero 3", "1x1x2"), memory=False),
    "zero1-pp": Row("2x1x2", "--zero 1", ("3x1x1", "1x2x1", "4x1x1 --zero 1"), memory=False),
    "zero2": Row("3x1x1", "--zero 2", ("1x1x1", "2x1x1 --zero 1", "1x1x2"), replicas=False),
    "zero3": Row("3x1x1", "--zero 3", ("1x1x1", "4x1x1 --zero 3", "1x2x1"), replicas=False),
    "zero3-tp-pp": Row("2x2x2", "--zero 3", ("3x2x1 --zero 3", "1x1x1", "2x1x2"), replicas=False),
    "hsdp": Row("4x1x1", "--zero 3", ("1x1x1", "3x1x1 --zero 3", "2x2x1"), more=(("shard_size", 2),)),
    "tensor": Row("2x2x1", "", ("1x1x1", "3x1x1 --zero 3", "1x3x1")),
    "whole-sequence": Row("2x2x1", "", ("1x1x1", "3x1x1", "1x1x2"), more=(("sequence_parallel", False),)),
    "pipeline": Row("2x1x2", "", ("1x1x1", "3x1x1", "1x2x1")),
    "gpipe": Row("2x1x2", "--schedule gpipe", ("1x1x1", "3x1x1", "1x2x1")),
    "interleaved": Row("2x1x2", "--layers 4 --schedule interleaved", ("1x1x1 --layers 4", "1x1x3 --layers 4", "2x2x1 --layers 4")),
    "interleaved-zb": Row("2x1x2", "--layers 4 --schedule interleaved-zb", ("1x1x1 --layers 4", "1x1x3 --layers 4", "3x1x1 --layers 4")),
    "zbv": Row("2x1x2", "--layers 4 --schedule zbv", ("1x1x1 --layers 4", "1x1x4 --layers 4", "3x1x1 --layers 4 --zero 3")),
    "dualpipev": Row("2x1x2", "--layers 4 --schedule dualpipev", ("1x1x1 --layers 4", "1x1x4 --layers 4", "1x2x1 --layers 4")),
    "selective": Row("2x2x1", "--recompute selective", ("1x1x1", "3x1x1 --recompute full", "1x1x2")),
    "full": Row("2x1x2", "--recompute full", ("1x1x1", "3x1x1", "1x2x1 --recompute selective")),
    "tied": Row("2x1x2", "--tied", ("1x1x1 --tied", "3x1x1 --tied --zero 3", "1x2x1 --tied")),
    "tied-zero1": Row("2x1x2", "--tied --zero 1", ("1x1x1 --tied", "3x1x1 --tied --zero 1", "1x2x1 --tied"), memory=False),
    "context-tp": Row("dp=1,tp=2,cp=2", "", ("2x1x1", "dp=2,cp=2", "1x1x2"), replicas=False, memory=True),
    "context-pp": Row("dp=2,pp=2,cp=2", "", ("3x1x1", "1x2x1", "dp=1,cp=4")),
    "context-zero1": Row("dp=2,cp=2", "--zero 1", ("3x1x1", "dp=1,cp=2", "1x1x2")),
    "context-zero3": Row("dp=2,cp=2", "--zero 3", ("3x1x1 --zero 3", "dp=1,cp=3", "1x2x1"), replicas=False),
    "experts-pp": Row(
        "dp=3,pp=2,ep=3", "--experts 6", ("1x1x1 --experts 6", "dp=2,ep=2 --experts 6", "2x1x2 --experts 6"), memory=False
    ),
    "experts-zero1": Row("dp=4,ep=2", "--experts 4 --zero 1", ("1x1x1 --experts 4", "dp=2,ep=2 --experts 4", "3x1x1 --experts 4 --zero 3"), memory=False),
    "experts-copies": Row("dp=4,ep=2", "--experts 4", ("1x1x1 --experts 4", "dp=2,ep=2 --experts 4", "1x1x2 --experts 4")),
    "eight-bit": Row("3x1x1", "--eight-bit", ("1x1x1 --eight-bit", "2x1x1 --eight-bit --zero 3", "1x1x2 --eight-bit"), tolerance=COARSE),
    "eight-bit-zero1": Row(
        "3x1x1", "--eight-bit --zero 1", ("1x1x1 --eight-bit", "2x1x1 --eight-bit --zero 3", "2x1x1 --eight-bit"), memory=False, tolerance=COARSE
    ),
    "eight-bit-zero3": Row(
        "3x1x1", "--eight-bit --zero 3", ("1x1x1 --eight-bit", "2x1x1 --eight-bit --zero 1", "1x3x1 --eight-bit"), replicas=False, tolerance=COARSE
    ),
    "bf16": Row("3x1x1", "--zero 2", ("1x1x1", "2x1x1 --zero 3", "1x1x2"), replicas=False, tolerance=COARSE, more=(("bf16", True),)),
}  # fmt: skip


@pytest.fixture(scope="module")
def writer() -> Iterator[str]:
    """Socket of a checkpoint writer."""
    with tempfile.TemporaryDirectory(prefix="rgpr") as short:
        path = Path(short) / "w.sock"
        command = [sys.executable, "-m", "regrow.ckpt.writer", "--socket", str(path), "--state", str(Path(short) / "state")]
        with (Path(short) / "log").open("wb") as log:
            process = subprocess.Popen(command, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        appeared = threading.Event()
        try:
            while not path.exists():
                assert process.poll() is None, (Path(short) / "log").read_text()
                appeared.wait(0.02)
            yield str(path)
        finally:
            process.terminate()
            process.wait(30)


def generations(ranks: Any, writer: str, checkpoints: Path, name: str, row: Row, base: int) -> list[Any]:
    """The job that saves, the same mesh again, and the others."""
    launches = [f"{row.mesh} {row.flags}", f"{row.mesh} {row.flags}", *row.others]
    jobs: list[Any] = []
    for number, launch in enumerate(launches):
        mesh, *flags = launch.split()
        keywords: dict[str, Any] = {
            "folder": "{folder}", "checkpoints": str(checkpoints / name), "socket": writer, "mesh": mesh, "last": LAST,
            "arguments": [*SMALL, *flags], "generation": base + number, **(dict(row.more) if number < 2 else {}),
        }  # fmt: skip
        jobs.append(ranks.job(f"{name}-{number}", MeshShape.parse(mesh).world_size, "saving:generation", keywords))
    return jobs


def check_rows(ranks: Any, writer: str, checkpoints: Path, rows: dict[str, Row]) -> None:
    """All rows in one process tree; every row that fails is told. A row has generations of its own: the writer outlives it."""
    jobs: list[Any] = []
    for name, row in rows.items():
        jobs += generations(ranks, writer, checkpoints, name, row, 1 + 10 * list(QUICK | MORE).index(name))
    done = ranks.run(jobs)
    problems: dict[str, str] = {}
    for name, row in rows.items():
        try:
            check_row(row, [done[f"{name}-{number}"].ok() for number in range(2 + len(row.others))])
        except AssertionError as error:
            problems[name] = str(error)[-1500:]
    assert not problems, json.dumps(problems, indent=1).replace("\\n", "\n")


def check_row(row: Row, folders: list[Path]) -> None:
    first, again, *others = folders
    one, two = read_lineage(first), read_lineage(again)
    assert two.steps[LAST].losses == one.steps[LAST].losses, "not the same to the bit on its own mesh"
    state, other = read_final(first), read_final(again)
    assert all(np.array_equal(state[name], other[name]) for name in state), "state is not the same to the bit"
    loss = one.steps[LAST].losses[0]
    for folder, launch in zip(others, row.others, strict=True):
        resharded = read_lineage(folder)
        deviation = max(abs(value - loss) / loss for value in resharded.steps[LAST].losses)
        assert deviation < row.tolerance, f"{launch}: loss differs by {deviation:.1e}"
        assert resharded.steps[LAST].samples == one.steps[LAST].samples, launch
    for number, folder in enumerate(folders[:2]):
        results = [json.loads(path.read_text()) for path in sorted(folder.glob("result*.json"))]
        check_state_kept(row, results, number)


def check_state_kept(row: Row, results: list[dict[str, Any]], number: int) -> None:
    """Restored what was saved; digests agree and tell the flipped bit; survivors replace a rank where there are copies."""
    last = len(results) - 1
    verdict, flipped = ("agree", "diverged") if row.replicas else ("skipped", "skipped")
    for result in results:
        assert result["restored"] == (2 if number else 0), result
        assert set(result["votes"]) == {verdict}, result
        assert result["after_flip"] == flipped, result
        assert list(result["mismatch"]) == [str(last)], f"the rank whose memory changed is not named: {result}"
        assert result["memory"] == (row.replicas if row.memory is None else row.memory), result


def test_strategies_are_saved_resharded_digested_and_handed_on(ranks: Any, writer: str, tmp_path: Path) -> None:
    check_rows(ranks, writer, tmp_path, QUICK)


@pytest.mark.soak
@pytest.mark.parametrize("name", MORE)
def test_more_strategies_are_saved_resharded_digested_and_handed_on(ranks: Any, writer: str, tmp_path: Path, name: str) -> None:
    check_rows(ranks, writer, tmp_path, {name: MORE[name]})
