"""The global batch stays exact on any number of replicas, or replicas are kept equal where that is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regrow.demo.compare import relative
from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.local.job import Request, specification
from regrow.parallel.elastic import choose_mesh, why_not
from regrow.wire import JobSpec


def test_summed_gradient_is_the_same_on_one_to_four_replicas(ranks: Any) -> None:
    """Cases I03 and I07: 7 micro-batches on 4, 3 and 2 replicas, with samples of unequal weight. The gradient, the loss and its norm
    are means over the tokens that there were, not over replicas or micro-batches; all ranks say the same."""
    done = ranks.run([ranks.job(f"dp{dp}", dp, "gradient:one_step", {"folder": "{folder}", "dp": dp}) for dp in (1, 2, 3, 4)])
    whole = dict(np.load(done["dp1"].ok() / "gradient.npz"))
    loss, norm, tokens = json.loads((done["dp1"].folder / "rank0.json").read_text())
    assert norm == pytest.approx(np.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in whole.values())), rel=1e-6)
    for dp in (2, 3, 4):
        shared = dict(np.load(done[f"dp{dp}"].ok() / "gradient.npz"))
        worst = max(relative(shared[name], whole[name]) for name in whole)
        assert worst < 1e-6, (dp, worst)
        said = [json.loads((done[f"dp{dp}"].folder / f"rank{rank}.json").read_text()) for rank in range(dp)]
        assert said == [said[0]] * dp
        assert said[0][:2] == pytest.approx([loss, norm], rel=1e-6)
        assert said[0][2] == tokens


def job(**changed: Any) -> JobSpec:
    return JobSpec(**{"job": "x", "argv": ("train.py",), "global_batch": 16, "micro_batch": 2, "mesh": MeshShape(dp=8)} | changed)


@pytest.mark.parametrize(("workers", "counts", "equal"), [(7, (2, 1, 1, 1, 1, 1, 1), (2, 2, 2, 2)), (5, (2, 2, 2, 1, 1), (2, 2, 2, 2)), (3, (3, 3, 2), (4, 4))])  # fmt: skip
def test_replicas_are_equal_where_that_is_asked_for(workers: int, counts: tuple[int, ...], equal: tuple[int, ...]) -> None:
    """Case I05 too: what is idle is said."""
    usual, wanted = choose_mesh(job(), workers), choose_mesh(job(equal_replicas=True), workers)
    assert usual is not None
    assert wanted is not None
    assert usual.micro_batches == counts
    assert wanted.micro_batches == equal
    assert f"{workers - len(equal)} of the workers idle" in wanted.reason
    assert why_not(job(equal_replicas=True), MeshShape(dp=workers))


def test_a_mesh_with_unequal_replicas_is_refused_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    request = Request(script=(str(script),), nodes=3, mesh="3x1x1", global_batch=16, micro_batch=2, cwd=str(tmp_path))
    assert specification(request).equal_replicas is False
    command = [sys.executable, "-m", "regrow", "run", "--local", "3", "--mesh", "3x1x1", "--global-batch", "16", "--micro-batch", "2"]
    done = subprocess.run(
        [*command, "--equal-replicas", str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "equal replicas are asked for" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("stage", ["-1", "4"])
def test_a_zero_stage_that_does_not_exist_is_refused(stage: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(ConfigurationError, match="no ZeRO stage"):
        specification(Request(script=(str(script),), zero=int(stage), cwd=str(tmp_path)))
