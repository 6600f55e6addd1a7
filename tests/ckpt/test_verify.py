"""`verify` names flipped bytes, truncated, missing, swapped and foreign files; the command line says so with its exit code."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from ckpt_synthetic import simple
from safetensors.numpy import load_file

from regrow.ckpt.manifest import read_manifests, read_record
from regrow.ckpt.verify import verify
from regrow.cli import app


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def chunk_at(directory: Path, rank: int, name: str) -> int:
    manifests = read_manifests(directory, read_record(directory))
    return next(chunk.at for one in manifests[0].ranks if one.rank == rank for chunk in one.chunks if chunk.name == name)


def only(directory: Path) -> tuple[str, str, str]:
    result = verify(directory)
    assert not result.valid
    assert len(result.problems) == 1, result.problems
    problem = result.problems[0]
    return problem.file, problem.kind, problem.detail


def test_intact(tmp_path):
    seen = []
    result = verify(simple(tmp_path, 3), progress=lambda done, total: seen.append((done, total)))
    assert (result.valid, result.step, result.problems) == (True, 3, ())
    assert result.bytes_checked == seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("name", ["model.w", "model.b", "optimizer.w.exp_avg"])
def test_a_flipped_byte_in_a_tensor_is_named(tmp_path, name):
    directory = simple(tmp_path, 3)
    flip(directory / "rank-00001.safetensors", chunk_at(directory, 1, name) + 2)
    file, kind, detail = only(directory)
    assert (file, kind) == ("rank-00001.safetensors", "altered")
    assert f"tensor {name}, block 0" in detail


def test_every_byte_of_every_file_is_covered(tmp_path):
    """A flip anywhere is found: header, envelopes, padding, manifest, record, DCP's index."""
    directory = simple(tmp_path, 3, world=1)
    rng = np.random.default_rng(1)
    for path in sorted(directory.iterdir()):
        original = path.read_bytes()
        for at in {0, len(original) - 1, *rng.integers(0, len(original), 40).tolist()}:
            flip(path, at)
            result = verify(directory)
            assert not result.valid, (path.name, at)
            assert {problem.file for problem in result.problems} & {path.name, "record.json"}, (path.name, at)
            path.write_bytes(original)
    assert verify(directory).valid


def test_truncated(tmp_path):
    directory = simple(tmp_path, 3)
    path = directory / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    problems = verify(directory).problems
    assert problems[0].file == "rank-00000.safetensors"
    assert problems[0].kind == "truncated"
    assert "(shorter)" in problems[0].detail


def test_missing(tmp_path):
    directory = simple(tmp_path, 3)
    (directory / "rank-00001.safetensors").unlink()
    assert only(directory)[:2] == ("rank-00001.safetensors", "missing")
    directory = simple(tmp_path, 4)
    (directory / "node-n0.json").unlink()
    kinds = {(problem.file, problem.kind) for problem in verify(directory).problems}
    assert ("node-n0.json", "missing") in kinds


def test_swapped(tmp_path):
    directory = simple(tmp_path, 3)
    one, two = directory / "rank-00000.safetensors", directory / "rank-00001.safetensors"
    data = one.read_bytes(), two.read_bytes()
    one.write_bytes(data[1])
    two.write_bytes(data[0])
    problems = verify(directory).problems
    assert [(problem.file, problem.kind) for problem in problems] == [(one.name, "swapped"), (two.name, "swapped")]
    assert "belongs into rank-00001.safetensors (rank 1)" in problems[0].detail


def test_foreign(tmp_path):
    other = simple(tmp_path, 2)
    directory = simple(tmp_path, 3)
    shutil.copy(other / "rank-00001.safetensors", directory / "rank-00001.safetensors")
    file, kind, detail = only(directory)
    assert (file, kind) == ("rank-00001.safetensors", "foreign")
    assert other.name in detail


def test_planted_files(tmp_path):
    directory = simple(tmp_path, 3)
    (directory / "notes.txt").write_text("hello")
    assert verify(directory).valid
    (directory / "extra.pt").write_bytes(pickle.dumps({}))
    assert {(problem.file, problem.kind) for problem in verify(directory).problems} == {("notes.txt", "unknown"), ("extra.pt", "pickle")}
    (directory / "extra.pt").unlink()
    (directory / ".metadata").write_bytes(pickle.dumps({}))
    problems = {problem.file: problem for problem in verify(directory).problems}
    assert "could run code" in problems[".metadata"].detail


class Answer(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., Answer]:
    """`regrow ckpt` in this process, by its entry point."""

    def call(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["regrow", "ckpt", *map(str, arguments)])
        code = 0
        try:
            app.run()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return call


def test_command_line(tmp_path, run):
    folder = tmp_path / "checkpoints"
    first, second = simple(folder, 1, world=2), simple(folder, 2, world=3)
    listed = json.loads(run("ls", folder, "--json").stdout)
    assert [entry["step"] for entry in listed["checkpoints"]] == [2, 1]
    assert "step-000000000002" in run("ls", folder).stdout
    shown = json.loads(run("show", folder, "--step", 1, "--json").stdout)
    assert (shown["step"], len(shown["tensors"])) == (1, 4)
    verified = run("verify", folder, "--json")
    assert (verified.returncode, json.loads(verified.stdout)["valid"]) == (0, True)
    assert set(json.loads(verified.stdout)) == {"path", "step", "valid", "problems", "bytes_checked"}
    different = run("diff", first, second, "--json")
    assert different.returncode == 1
    assert json.loads(different.stdout)["difference"]["changed"] == ["model.b", "model.w", "optimizer.w.exp_avg", "optimizer.w.step"]
    assert run("diff", first, first).returncode == 0
    target = tmp_path / "model.safetensors"
    assert run("export", folder, target).returncode == 0
    assert np.array_equal(load_file(target)["w"], np.arange(24, dtype=np.float32).reshape(6, 4) + 2)
    assert run("export", folder, target).returncode == 2
    flip(second / "rank-00000.safetensors", 5000)
    damaged = run("verify", second, "--json")
    assert damaged.returncode == 1
    assert json.loads(damaged.stdout)["problems"][0]["file"] == "rank-00000.safetensors"
    dry = json.loads(run("prune", folder, "--keep", 1, "--dry-run", "--json").stdout)
    assert [(choice["step"], choice["keep"]) for choice in dry["choices"]] == [(2, True), (1, False)]
    assert run("prune", folder, "--keep", 1).returncode == 0
    assert not first.exists()


@pytest.mark.parametrize("command", [["ls"], ["show"], ["verify"], ["prune"]])
def test_a_wrong_path_is_wrong_usage(tmp_path, command, run):
    result = run(*command, tmp_path / "nothing", "--json")
    assert result.returncode == 2
    assert "does not exist" in json.loads(result.stdout)["error"]["what"]
    assert "try:" in result.stderr


def test_removed_while_it_is_read(tmp_path):
    """Retention takes it away and a later save writes over its files: that is no damage."""
    directory = simple(tmp_path, 3)

    def take_away(done: int, _total: int) -> None:
        if directory.exists() and done > 4096:
            gone = directory.rename(tmp_path / ".regrow-trash-x")
            for path in gone.glob("rank-*"):
                path.write_bytes(b"\xff" * path.stat().st_size)

    result = verify(directory, progress=take_away)
    assert not result.valid
    assert [(problem.file, problem.kind) for problem in result.problems] == [("record.json", "record")]
    assert "removed while it was being read" in result.problems[0].detail
