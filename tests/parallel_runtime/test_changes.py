"""The state moves from mesh to mesh and the loss curve does not notice; on an unchanged mesh it is the same to the bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regrow.demo.compare import compare_state, compare_steps, state_tolerances
from regrow.demo.lineage import read_final, read_lineage
from regrow.ids import MeshShape

SMALL = ["--layers", "3", "--hidden", "48", "--heads", "6", "--seq", "48", "--seed", "4", "--samples", "96"]
OF_SIZE = {1: "1x1x1", 2: "1x2x1", 3: "1x1x3", 4: "2x1x2", 5: "5x1x1", 6: "3x2x1", 7: "7x1x1", 8: "2x2x2"}
"""A mesh for every number of workers: with 5 and 7 only the data axis is left, with unequal micro-batches."""
WAYS = {
    1: ["1x1x1"],
    2: ["1x2x1", "1x1x2", "dp=1,cp=2", "2x1x1/1"],
    3: ["1x1x3", "3x1x1/1", "dp=1,cp=3", "1x3x1"],
    4: ["2x1x2", "2x2x1/1", "dp=2,cp=2", "4x1x1/3/2"],
    5: ["5x1x1", "5x1x1/1", "5x1x1/3"],
    6: ["3x2x1", "3x2x1/1", "dp=3,cp=2", "1x2x3", "2x1x3/2"],
    7: ["7x1x1", "7x1x1/1", "7x1x1/2"],
    8: ["2x2x2", "2x2x2/3", "dp=1,tp=2,pp=2,cp=2", "4x2x1/2/2"],
}
"""Further ways, "MESH/ZeRO stage/shard size"."""


def chain(ranks: Any, log: Path, meshes: list[str], *, steps: int, total: int, name: str = "") -> list[Any]:
    """Jobs that hand the state from one mesh to the next, `steps` steps each."""
    jobs: list[Any] = []
    for number, mesh in enumerate(meshes):
        mesh, zero, shard_size = (*mesh.split("/"), "", "")[:3]
        arguments = [*SMALL, "--steps", str(total), *(["--zero", zero] if zero else [])]
        before = f"{{root}}/{name}{number - 1}" if number else ""
        keywords = {
            "folder": "{folder}", "log": str(log), "before": before, "mesh": mesh, "arguments": arguments,
            "first": number * steps + 1, "last": (number + 1) * steps, "generation": number + 1, "shard_size": int(shard_size or 0),
        }  # fmt: skip
        jobs.append(ranks.job(f"{name}{number}", MeshShape.parse(mesh).world_size, "links:link", keywords))
    return jobs


def check_chain(ranks: Any, tmp_path: Path, meshes: list[str], steps: int) -> None:
    total = steps * len(meshes)
    twin = ranks.training("twin", "1x1x1", *SMALL, "--steps", str(total))
    second = ranks.training("second", "1x2x1", *SMALL, "--steps", str(total))
    done = ranks.run([twin, second, *chain(ranks, tmp_path / "log", meshes, steps=steps, total=total)])
    for result in done.values():
        result.ok()
    ours, theirs = read_lineage(tmp_path / "log"), read_lineage(done["twin"].folder)
    failed = [check for check in compare_steps(ours, theirs, range(1, total + 1)) if not check.passed and check.name != "rng"]
    assert not failed, failed
    tolerances = state_tolerances(done["twin"].folder, done["second"].folder)
    state = compare_state(read_final(done[str(len(meshes) - 1)].folder), read_final(done["twin"].folder), tolerances)
    assert state.passed, state


def test_six_to_seven_to_three(ranks: Any, tmp_path: Path) -> None:
    """From eight to six is the demo's (tests/e2e), and all sizes are the soak's."""
    check_chain(ranks, tmp_path, ["3x2x1", "7x1x1", "1x1x3"], steps=2)


@pytest.mark.soak
def test_unchanged_mesh_is_the_same_to_the_bit(ranks: Any, tmp_path: Path) -> None:
    whole = chain(ranks, tmp_path / "whole", ["2x2x1"], steps=4, total=4, name="whole")
    halves = chain(ranks, tmp_path / "halves", ["2x2x1", "2x2x1"], steps=2, total=4, name="half")
    done = ranks.run([*whole, *halves])
    one, other = read_lineage(tmp_path / "whole"), read_lineage(tmp_path / "halves")
    assert {step: line.losses for step, line in one.steps.items()} == {step: line.losses for step, line in other.steps.items()}
    first, second = read_final(done["whole0"].ok()), read_final(done["half1"].ok())
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.soak
def test_twenty_changes_in_random_order(ranks: Any, tmp_path: Path) -> None:
    """Sizes and, for a size, ways to use it in random order."""
    chance, meshes = random.Random(20), ["2x2x2"]
    while len(meshes) <= 20:
        meshes += [chance.choice(WAYS[size]) for size in chance.sample(sorted(WAYS), len(WAYS))]
    check_chain(ranks, tmp_path, meshes[:21], steps=2)


@pytest.mark.soak
def test_down_to_one_worker_and_back(ranks: Any, tmp_path: Path) -> None:
    """8 - 7 - 6 - 5 - 4 - 3 - 2 - 1 - 8 workers, then 3, 5 and 7 replicas, none of which divides the batch."""
    meshes = [OF_SIZE[size] for size in (8, 7, 6, 5, 4, 3, 2, 1, 8)]
    check_chain(ranks, tmp_path, [*meshes, "3x1x1", "5x1x1/1", "7x1x1/3"], steps=2)


@pytest.mark.soak
def test_changes_between_replicated_and_sharded(ranks: Any, tmp_path: Path) -> None:
    check_chain(ranks, tmp_path, ["2x2x2/3", "3x2x1/3", "7x1x1", "5x1x1/3", "1x1x3", "4x1x1/3/2", "2x2x1/2", "4x2x1/2/2", "1x1x1"], steps=2)
