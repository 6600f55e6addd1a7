"""The compiled way from shard files into tensors: the same bytes as the slow one, the same damage found, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from ckpt_synthetic import simple
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.ckpt import fastread
from regrow.ckpt.flatten import Item
from regrow.ckpt.layout import Box
from regrow.ckpt.loading import load_items, memory_of
from regrow.ckpt.manifest import Chunk, DamagedCheckpointError, RemovedCheckpointError, read_manifests, read_record
from regrow.ckpt.reading import ShardReader
from regrow.ckpt.reshard import Source, source_of

NAME = "rank-00000.safetensors"


def stored(folder: Path, value: torch.Tensor, block_bytes: int, at: int = 64) -> Source:
    """A file with one tensor's bytes somewhere in it, as the manifests would describe it."""
    data = value.contiguous().view(torch.uint8).numpy().tobytes()
    (folder / NAME).write_bytes(os.urandom(at) + data + os.urandom(77))
    (folder / "record.json").touch()
    sizes = tuple(value.shape)
    blocks = tuple(xxhash.xxh3_128_hexdigest(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes))
    chunk = Chunk(
        name="w", dtype=str(value.dtype).removeprefix("torch."), shape=sizes, offsets=(0,) * len(sizes), sizes=sizes, at=at,
        nbytes=len(data), envelope=(0, 0), blocks=blocks,
    )  # fmt: skip
    return Source({"w": [(NAME, chunk)]}, block_bytes)


def box_of(source: Source, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    whole = source.box("w")
    return Box("w", whole.dtype, whole.shape, offsets, sizes)


def spaces(sizes: tuple[int, ...], dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Room for a box: plain, within wider rows, or with its axes the other way round."""
    if kind == "plain":
        return torch.zeros(sizes, dtype=dtype)
    if kind == "wider":
        return torch.zeros(tuple(size + 3 for size in sizes), dtype=dtype)[tuple(slice(1, 1 + size) for size in sizes)]
    return torch.zeros(sizes[::-1], dtype=dtype).permute(*range(len(sizes) - 1, -1, -1))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_part_of_any_tensor_into_any_target(data, tmp_path_factory):
    assert fastread.fast_read() is not None, "no compiler here: nothing is tested"
    folder = tmp_path_factory.mktemp("any")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
    sizes = data.draw(
        st.sampled_from([(1,), (7,), (241,), (100_003,), (33, 64), (64, 1000), (1000, 33), (7, 33, 64), (1, 300, 1), (5, 1, 640)])
    )
    value = torch.randint(-100, 100, sizes).to(dtype)
    source = stored(folder, value, 1 << data.draw(st.sampled_from([10, 16, 20])), at=64 * data.draw(st.integers(1, 70)))
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
    wanted = tuple(data.draw(st.integers(1, size - offset)) for size, offset in zip(sizes, offsets, strict=True))
    target = spaces(wanted, dtype, data.draw(st.sampled_from(["plain", "wider", "turned"])))
    alone = data.draw(st.sampled_from([(), ("w",)]))
    load_items(folder, source, [Item(box_of(source, offsets, wanted), target)], alone=alone)
    assert torch.equal(target, value[tuple(slice(at, at + size) for at, size in zip(offsets, wanted, strict=True))])


@pytest.mark.parametrize("alone", [(), ("w",)])
@pytest.mark.parametrize("cached", [True, False])
def test_every_flipped_byte_is_found(tmp_path, alone, cached):
    """In whole groups, in a block's short end, at its very last byte; from the map and by reading."""
    value = torch.arange(3 * 4096 + 21, dtype=torch.int32)
    source = stored(tmp_path, value, 16384)
    good = (tmp_path / NAME).read_bytes()
    for place in (0, 1023, 1024, 16383, 16384, 3 * 16384, 3 * 16384 + 83):
        bad = bytearray(good)
        bad[64 + place] ^= 1
        (tmp_path / NAME).write_bytes(bad)
        with (tmp_path / NAME).open("rb") as file:
            os.fsync(file.fileno())
            if not cached:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with pytest.raises(DamagedCheckpointError, match=f"tensor w: block {place // 16384} "):
            load_items(tmp_path, source, [Item(source.box("w"), torch.zeros_like(value))], alone=alone)


def test_a_file_that_ends_too_early(tmp_path):
    value = torch.arange(100_000, dtype=torch.int32)
    source = stored(tmp_path, value, 16384)
    os.truncate(tmp_path / NAME, 100_000)
    with pytest.raises(DamagedCheckpointError, match="truncated"):
        load_items(tmp_path, source, [Item(source.box("w"), torch.zeros_like(value))])


CUT_WHILE_READING = """
import os, random, sys, threading, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import torch
from test_fast_read import NAME, stored
from regrow.ckpt.flatten import Item
from regrow.ckpt.loading import load_items
from regrow.ckpt.manifest import DamagedCheckpointError

folder = Path(sys.argv[1])
value = torch.arange(8 << 20, dtype=torch.int32)
source, target = stored(folder, value, 1 << 20), torch.zeros_like(value)
data, item = (folder / NAME).read_bytes(), Item(source.box("w"), target)
load_items(folder, source, [item])
began = time.perf_counter()
load_items(folder, source, [item])
whole, cut = time.perf_counter() - began, 0
for turn in range(24):
    (folder / NAME).write_bytes(data)
    timer = threading.Timer(whole * turn / 24, os.truncate, (folder / NAME, 0))
    timer.start()
    try:
        load_items(folder, source, [item])
    except DamagedCheckpointError as error:
        assert "truncated" in str(error), error
        cut += 1
    timer.join()
print(cut)
"""


def test_a_file_that_is_cut_while_it_is_read_kills_nobody(tmp_path):
    """The kernel answers an access behind the end of a mapped file with SIGBUS; the reader tells of a truncated file, each time."""
    folders = [str(Path(__file__).parent), str(Path(__file__).with_name("support"))]
    command = [sys.executable, "-c", CUT_WHILE_READING, str(tmp_path), *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 12, "most of the cuts came while it was read"


def test_memory_that_holds_something_else_is_not_believed(tmp_path):
    """The file is read instead, and what was read from where is counted."""
    value = torch.arange(100_000, dtype=torch.int32)
    source = stored(tmp_path, value, 16384)
    for content, wanted in ((b"", (400_000, 0)), ((tmp_path / NAME).read_bytes(), (0, 400_000))):
        memory = os.memfd_create("arena")
        os.truncate(memory, 500_000)
        os.pwrite(memory, content, 0)
        target = torch.zeros_like(value)
        cost = load_items(tmp_path, source, [Item(source.box("w"), target)], memory={NAME: memory})
        os.close(memory)
        assert torch.equal(target, value)
        assert (cost.bytes_read, cost.bytes_from_memory) == wanted


def fast_way(reader: ShardReader, file: str, chunk: Chunk, runs: fastread.Runs, target: torch.Tensor) -> None:
    reader.load_runs(file, chunk, runs, target.data_ptr())


def slow_way(reader: ShardReader, file: str, chunk: Chunk, runs: fastread.Runs, target: torch.Tensor) -> None:
    reader.read_run(file, chunk, runs.first, runs.last, memory_of(target))


def test_removed_while_it_is_read_is_not_called_damage(tmp_path):
    """Retention renames the directory and a later save writes over the file: the reader is told that, not of bad storage."""
    directory = simple(tmp_path, 1, world=1)
    source = source_of(read_manifests(directory, read_record(directory)))
    file, chunk = source.tensors["model.w"][0]
    for read in (fast_way, slow_way):
        reader = ShardReader(directory, source.block_bytes)
        reader.open_files({file})
        gone = directory.rename(tmp_path / ".regrow-trash-x")
        with (gone / file).open("r+b") as later:
            later.seek(chunk.at)
            later.write(b"\xff" * chunk.nbytes)
        target = torch.zeros(chunk.nbytes, dtype=torch.uint8)
        runs = fastread.Runs(0, chunk.nbytes, chunk.nbytes, (), (), ())
        with pytest.raises(RemovedCheckpointError, match="was removed while it was being read"):
            read(reader, file, chunk, runs, target)
        with pytest.raises(RemovedCheckpointError):
            ShardReader(directory, source.block_bytes).open_files({file})
        reader.close()
        gone.rename(directory)


def test_without_a_compiler_python_reads(tmp_path):
    value = torch.arange(100_000, dtype=torch.int32)
    stored(tmp_path, value, 16384)
    program = "from regrow.ckpt import fastread; assert fastread.fast_read() is None"
    environment = {**os.environ, "PATH": "/nowhere", "CC": "", "XDG_CACHE_HOME": str(tmp_path / "empty")}
    for one in (environment | {fastread.OFF_VARIABLE: "1"}, {**os.environ, fastread.OFF_VARIABLE: "1"}):
        subprocess.run([sys.executable, "-c", program], check=True, env=one, timeout=120)


def test_the_slow_way_gives_the_same(tmp_path, monkeypatch):
    value = torch.randint(-100, 100, (300, 500), dtype=torch.int32)
    source = stored(tmp_path, value, 16384)
    found: list[torch.Tensor] = []
    for ways in (fastread.fast_read, lambda: None):
        monkeypatch.setattr("regrow.ckpt.reading.fast_read", ways)
        target = torch.zeros((200, 300), dtype=torch.int32)
        load_items(tmp_path, source, [Item(box_of(source, (50, 100), (200, 300)), target)])
        found.append(target)
    assert torch.equal(found[0], value[50:250, 100:400])
    assert torch.equal(found[0], found[1])
