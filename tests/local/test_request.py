"""What the command line of `regrow run` becomes, and what it refuses before any side effect."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.local import job


@pytest.fixture
def request_of(tmp_path: Path):
    script = tmp_path / "My Train.py"
    script.write_text("print('hello')\n")
    base = job.Request(script=("My Train.py", "--lr", "1"), nodes=4, nproc_per_node="2", cwd=str(tmp_path))
    return lambda **changes: dataclasses.replace(base, **changes)


def test_defaults(request_of, tmp_path: Path) -> None:
    spec = job.specification(request_of())
    assert spec.job == "my-train"
    assert spec.argv == (str(tmp_path / "My Train.py"), "--lr", "1")
    assert (spec.min_nodes, spec.max_nodes, spec.nproc_per_node) == (1, 4, 2)
    assert spec.checkpoint.path == str(tmp_path / "runs" / "my-train" / "checkpoints")
    assert not (tmp_path / "runs").exists()


def test_everything_given(request_of) -> None:
    spec = job.specification(
        request_of(nnodes="2:3", mesh="3x2x1", meshes="4:2x2x1 2:1x2x1", global_batch=24, micro_batch=2, name="gpt", cold=True, fresh=True)
    )
    assert (spec.min_nodes, spec.max_nodes) == (2, 3)
    assert spec.mesh == MeshShape(3, 2, 1)
    assert spec.mesh_table == {4: MeshShape(2, 2, 1), 2: MeshShape(1, 2, 1)}
    assert spec.start_method == "cold"
    assert spec.checkpoint.fresh_start


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"script": ("missing.py",)}, "missing.py"),
        ({"name": "No Good"}, "--job"),
        ({"nproc_per_node": "0"}, "--nproc-per-node"),
        ({"nproc_per_node": "many"}, "--nproc-per-node"),
        ({"nnodes": "3:2"}, "--nnodes"),
        ({"nnodes": "0"}, "--nnodes"),
        ({"nnodes": "5"}, "--nnodes"),
        ({"mesh": "4x4x1"}, "--mesh"),
        ({"mesh": "fast"}, "--mesh"),
        ({"meshes": "6=3x2x1"}, "--meshes"),
        ({"meshes": "4:3x2x1"}, "--meshes"),
        ({"global_batch": -1}, "--global-batch"),
        ({"micro_batch": 0}, "--micro-batch"),
        ({"keep_last": 0}, "--keep-last"),
        ({"model": "nowhere.json"}, "nowhere.json"),
        ({"checkpoint_dir": "file:///mnt/job"}, "file:///mnt/job"),
        ({"run_dir": "s3://bucket/job"}, "s3://bucket/job"),
    ],
)
def test_wrong_input_names_where_it_stands(request_of, changes: dict[str, object], where: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        job.specification(request_of(**changes))
    assert where in caught.value.where


@pytest.mark.parametrize("url", ["s3://bucket/job", "gs://bucket/job", "S3:/bucket"])
def test_an_object_store_is_no_first_place(request_of, url: str) -> None:
    """It would have become a folder of that name in the current one, and nothing would have reached the store."""
    with pytest.raises(ConfigurationError, match="checkpoints are written to folders") as caught:
        job.specification(request_of(checkpoint_dir=url))
    assert "--mirror URL" in str(caught.value.hint)
    assert job.specification(request_of(checkpoint_dir="some:folder/s3")).checkpoint.path.endswith("some:folder/s3")


def test_batch_that_the_mesh_cannot_keep_is_refused_before_anything_starts(request_of) -> None:
    with pytest.raises(ConfigurationError):
        job.specification(request_of(mesh="2x2x2", global_batch=7, micro_batch=2))


def test_model_shape_from_a_hugging_face_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 6, "vocab_size": 256}))
    shape = job.model_shape(str(file))
    assert (shape.layers, shape.kv_heads, shape.ffn) == (4, 6, 384)
    file.write_text("{}")
    with pytest.raises(ConfigurationError):
        job.model_shape(str(file))


@pytest.mark.parametrize("arguments", [["x.py"], ["--local", "2", "x.py"], ["--local", "-1", "x.py"], []])
def test_command_line_refuses_with_two(tmp_path: Path, arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "regrow", "run", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip()
    assert not list(tmp_path.iterdir())
