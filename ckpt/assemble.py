"""Whole tensors out of a checkpoint without torch: for export and comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from regrow.ckpt import differences
from regrow.ckpt.differences import FieldDifference
from regrow.ckpt.envelope import ITEM_BYTES
from regrow.ckpt.layout import Box, safetensors_dtype
from regrow.ckpt.manifest import read_manifests, read_record
from regrow.ckpt.reading import WINDOW_BYTES, ShardReader
from regrow.ckpt.reshard import Piece, Source, byte_runs, pieces, source_of, split_piece

Progress = Callable[[int, int], None]


class Checkpoint:
    """An open checkpoint. Close it, or use it in a `with` statement."""

    def __init__(self, directory: Path) -> None:
        """Read record and manifests.

        Raises:
            FileNotFoundError: not a checkpoint.
            DamagedCheckpointError: record or a manifest is not as committed.
        """
        self.record = read_record(directory)
        self.manifests = read_manifests(directory, self.record)
        self.source: Source = source_of(self.manifests)
        self._reader = ShardReader(directory, self.source.block_bytes, places=self.source.places)
        self._reader.open_files({file for stored in self.source.tensors.values() for file, _ in stored})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def boxes(self) -> Iterator[Box]:
        """All tensors, by name."""
        for name in sorted(self.source.tensors):
            yield self.source.box(name)

    def read(self, box: Box, target: memoryview) -> None:
        """Fill `target` with a tensor's bytes, row-major, verified."""
        item = ITEM_BYTES[box.dtype]
        if not box.nbytes:
            return
        whole: np.ndarray[Any, Any] = np.frombuffer(target, dtype=f"V{item}").reshape(box.sizes)
        for piece in pieces(self.source, box):
            self._read_piece(piece, whole, item)

    def _read_piece(self, piece: Piece, whole: np.ndarray[Any, Any], item: int) -> None:
        runs = byte_runs(piece, item)
        if len(runs) == 1:
            part = _part(whole, piece)
            start, end = runs[0]
            buffer = bytearray(end - start)
            self._reader.read_run(piece.file, piece.chunk, start, end, memoryview(buffer))
            part[...] = np.frombuffer(buffer, dtype=f"V{item}").reshape(piece.sizes)
            return
        for one in split_piece(piece, item, WINDOW_BYTES):
            data, offset, strides = self._reader.read_strided(one)
            flat = np.frombuffer(data, dtype=f"V{item}")[offset:]
            _part(whole, one)[...] = np.lib.stride_tricks.as_strided(flat, one.sizes, tuple(step * item for step in strides))


def _part(whole: np.ndarray[Any, Any], piece: Piece) -> np.ndarray[Any, Any]:
    return whole[(*(slice(start, start + size) for start, size in zip(piece.target, piece.sizes, strict=True)), ...)]


def export(checkpoint: Checkpoint, target: Path, *, prefix: str = "model.", progress: Progress | None = None) -> int:
    """Write the tensors whose names start with `prefix` (taken off) as one safetensors file; returns its bytes.

    The file appears under its name when it is complete.

    Raises:
        FileExistsError: `target` is there already.
        DamagedCheckpointError: a block is not as committed.
    """
    boxes = [box for box in checkpoint.boxes() if box.name.startswith(prefix)]
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(checkpoint.record.step), "job": checkpoint.record.job}}
    at = 0
    for box in boxes:
        dtype, shape = safetensors_dtype(box.dtype, box.shape)
        header[box.name.removeprefix(prefix)] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + box.nbytes)}
        at += box.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    temporary = target.with_name(f".{target.name}.part")
    if target.exists():
        raise FileExistsError(target)
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            done = 0
            for box in boxes:
                data = bytearray(box.nbytes)
                checkpoint.read(box, memoryview(data))
                file.write(data)
                done += box.nbytes
                if progress is not None:
                    progress(done, at)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return 8 + len(text) + at


def _fields(first: Checkpoint, second: Checkpoint) -> list[FieldDifference]:
    pair = [differences.fields_of(one.record.facts, mesh=one.record.mesh, world_size=one.record.world_size) for one in (first, second)]
    launched = [
        [group for manifest in one.manifests for rank in manifest.ranks for group in rank.private.get("launched", [])]
        for one in (first, second)
    ]
    return differences.compare(pair[0], pair[1]) + differences.compare_groups(launched[0], launched[1])


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How two checkpoints differ."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    reshaped: tuple[str, ...]
    changed: tuple[str, ...]
    equal: int
    facts: dict[str, tuple[Any, Any]]
    fields: tuple[FieldDifference, ...] = ()
    """What a launch of the second kind would be told when it restores the first."""


def compare(first: Checkpoint, second: Checkpoint, *, progress: Progress | None = None) -> Difference:
    """Compare all tensors bit for bit, whatever meshes wrote them, and the records' facts."""
    mine, other = {box.name: box for box in first.boxes()}, {box.name: box for box in second.boxes()}
    common = sorted(mine.keys() & other.keys())
    reshaped = [name for name in common if mine[name] != other[name]]
    changed: list[str] = []
    total = sum(mine[name].nbytes for name in common)
    done = 0
    for name in common:
        if name not in reshaped:
            parts = (bytearray(mine[name].nbytes), bytearray(mine[name].nbytes))
            first.read(mine[name], memoryview(parts[0]))
            second.read(other[name], memoryview(parts[1]))
            if parts[0] != parts[1]:
                changed.append(name)
        done += mine[name].nbytes
        if progress is not None:
            progress(done, total)
    a, b = first.record, second.record
    pairs = {key: (getattr(a, key), getattr(b, key)) for key in ("job", "step", "samples", "generation", "mesh", "world_size", "facts")}
    return Difference(
        only_first=tuple(sorted(mine.keys() - other.keys())),
        only_second=tuple(sorted(other.keys() - mine.keys())),
        reshaped=tuple(reshaped),
        changed=tuple(changed),
        equal=len(common) - len(reshaped) - len(changed),
        fields=tuple(_fields(first, second)),
        facts={key: pair for key, pair in pairs.items() if pair[0] != pair[1]},
    )
