"""Reads a checkpoint into live tensors in place: each rank its own boxes, every byte verified on the way."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from regrow.ckpt.flatten import Item
from regrow.ckpt.reading import ShardReader
from regrow.ckpt.reshard import Piece, Source, byte_runs, pieces


class Loaded(msgspec.Struct, frozen=True):
    """What a load cost."""

    bytes_needed: int
    bytes_read: int
    """From storage."""
    bytes_from_memory: int = 0
    """From arenas of this node."""


def load_items(
    directory: Path, source: Source, items: Iterable[Item], *, threads: int = 0, memory: Mapping[str, int] | None = None
) -> Loaded:
    """Fill every item's live tensor.

    Args:
        directory: The checkpoint.
        source: Its chunks.
        items: Live tensors and the boxes that they hold; all names must be in the source.
        threads: Parallel reads; 0 takes as many as there are cores, at most 4.
        memory: Descriptors of files that are in memory too (`ShardReader`).

    Raises:
        DamagedCheckpointError: missing or altered bytes, with file and tensor.
        OperationalError: a tensor is missing or has another shape.
    """
    work: list[tuple[Piece, torch.Tensor]] = []
    needed = 0
    for item in items:
        if not all(item.box.sizes):
            continue
        needed += item.box.nbytes
        work += [(piece, _target(item.local, piece)) for piece in pieces(source, item.box)]
    reader = ShardReader(directory, source.block_bytes, memory)
    _load_pieces(reader, work, threads)
    return Loaded(needed, reader.bytes_read, reader.bytes_from_memory)


def load_pieces(directory: Path, block_bytes: int, work: list[tuple[Piece, torch.Tensor]], *, threads: int = 0) -> int:
    """Fill each target with its piece; returns the bytes read. Arguments and errors as for `load_items`."""
    reader = ShardReader(directory, block_bytes)
    _load_pieces(reader, work, threads)
    return reader.bytes_read


def _load_pieces(reader: ShardReader, work: list[tuple[Piece, torch.Tensor]], threads: int) -> None:
    work = sorted(work, key=lambda one: (one[0].file, one[0].chunk.at))
    try:
        reader.open_files({piece.file for piece, _ in work})
        count = threads or min(4, os.cpu_count() or 1)
        if count == 1 or len(work) < 2:
            _load_all(reader, work)
        else:
            with ThreadPoolExecutor(count, thread_name_prefix="restore") as pool:
                for done in [pool.submit(_load_all, reader, part) for part in _batches(work, count)]:
                    done.result()
    finally:
        reader.close()


def _batches(work: list[tuple[Piece, torch.Tensor]], threads: int) -> list[list[tuple[Piece, torch.Tensor]]]:
    """Parts of about equal bytes in file order, a few for each thread: handing over single small tensors costs more than they do."""
    total = sum(target.numel() * target.element_size() for _, target in work)
    limit = max(1 << 20, total // (4 * threads))
    batches: list[list[tuple[Piece, torch.Tensor]]] = [[]]
    size = 0
    for one in work:
        if size > limit:
            batches.append([])
            size = 0
        batches[-1].append(one)
        size += one[1].numel() * one[1].element_size()
    return batches


def _load_all(reader: ShardReader, work: list[tuple[Piece, torch.Tensor]]) -> None:
    for one in work:
        _load(reader, *one)


def _target(local: torch.Tensor, piece: Piece) -> torch.Tensor:
    part = local
    for axis, (start, size) in enumerate(zip(piece.target, piece.sizes, strict=True)):
        part = part.narrow(axis, start, size)
    return part


@torch.no_grad()
def _load(reader: ShardReader, piece: Piece, target: torch.Tensor) -> None:
    chunk = piece.chunk
    runs = byte_runs(piece, target.element_size())
    if len(runs) == 1:
        start, end = runs[0]
        if target.is_contiguous() and target.device.type == "cpu":
            reader.read_run(piece.file, chunk, start, end, memory_of(target))
        else:
            buffer = bytearray(end - start)
            reader.read_run(piece.file, chunk, start, end, memoryview(buffer))
            target.copy_(torch.frombuffer(buffer, dtype=target.dtype).view(piece.sizes))
        return
    data, offset, strides = reader.read_strided(piece)
    whole = torch.frombuffer(data, dtype=target.dtype)
    target.copy_(whole.as_strided(piece.sizes, strides, offset))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable. The tensor must outlive the view."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
