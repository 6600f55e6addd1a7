"""docs/checkpoint-format.md is true: the reader printed there, which imports nothing of Regrow, reads our checkpoints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ckpt_synthetic import simple

from regrow.ckpt.manifest import read_manifests, read_record

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"


@pytest.fixture
def reader(tmp_path) -> dict[str, object]:
    found = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    source = found[1]
    assert len(source.splitlines()) < 100
    assert "import regrow" not in source
    assert "from regrow" not in source
    space: dict[str, object] = {}
    exec(compile(source, str(DOCUMENT), "exec"), space)
    return space


def test_the_printed_reader_reads(tmp_path, reader):
    simple(tmp_path, 4, world=2)
    directory = simple(tmp_path, 5, world=3)
    assert reader["newest"](tmp_path) == directory
    tensors = reader["load"](directory)
    assert sorted(tensors) == ["model.b", "model.w", "optimizer.w.exp_avg", "optimizer.w.step"]
    assert np.array_equal(tensors["model.w"], np.arange(24, dtype=np.float32).reshape(6, 4) + 5)
    assert tensors["optimizer.w.step"].shape == ()
    assert tensors["optimizer.w.step"] == 5


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "node-n0.json", "record.json"])
def test_the_printed_reader_sees_damage(tmp_path, reader, name):
    directory = simple(tmp_path, 5, world=3)
    at = read_manifests(directory, read_record(directory))[0].ranks[1].chunks[0].at if name.startswith("rank") else 30
    data = bytearray((directory / name).read_bytes())
    data[at] ^= 1
    (directory / name).write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        reader["load"](directory)


def test_the_reader_stands_alone():
    found = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    check = found[1] + "\nimport sys\nassert not [name for name in sys.modules if name.startswith(('regrow', 'torch'))]\n"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
