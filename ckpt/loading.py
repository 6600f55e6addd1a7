"""Reads a checkpoint into live tensors in place: each rank its own boxes, every byte verified on the way."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from regrow.ckpt.fastread import runs_of
from regrow.ckpt.flatten import Item
from regrow.ckpt.reading import WINDOW_BYTES, ShardReader
from regrow.ckpt.reshard import Piece, Source, byte_runs, pieces, split_piece

THREADS = 4
"""Parallel reads of one process: some wait for storage while others check digests."""


def threads_of(num_ranks: int, *, waits: bool) -> int:
    """Parallel reads of each of the ranks that share this node's processors: more than there are would take turns at one
    interpreter lock. `waits`: some may wait for storage, so there are two at least."""
    return max(2 if waits else 1, min(THREADS, len(os.sched_getaffinity(0)) // max(1, num_ranks)))


class Loaded(msgspec.Struct, frozen=True):
    """What a load cost."""

    bytes_needed: int
    bytes_read: int
    """From storage."""
    bytes_from_memory: int = 0
    """From arenas of this node."""
    bytes_from_peers: int = 0
    """From the memory of other nodes."""
    bytes_from_ranks: int = 0
    """Read by another rank, that sent them."""

    def plus(self, other: Loaded) -> Loaded:
        """Both together."""
        return Loaded(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))

    def sources(self) -> dict[str, int]:
        """Bytes by where they came from."""
        return {
            "bytes_from_memory": self.bytes_from_memory,
            "bytes_from_peers": self.bytes_from_peers,
            "bytes_from_storage": self.bytes_read,
            "bytes_from_ranks": self.bytes_from_ranks,
        }


def load_items(
    directory: Path,
    source: Source,
    items: Iterable[Item],
    *,
    threads: int = 0,
    memory: Mapping[str, int] | None = None,
    peers: Collection[str] = (),
    alone: Collection[str] = (),
) -> Loaded:
    """Fill every item's live tensor.

    Args:
        directory: The checkpoint.
        source: Its chunks.
        items: Live tensors and the boxes that they hold; all names must be in the source.
        threads: Parallel reads; 0 takes `THREADS`.
        memory: Descriptors of files that are in memory too (`ShardReader`).
        peers: Names of those that came from other nodes.
        alone: Names of tensors whose part no other process of this node reads: they need not go through the page cache.

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
    reader = ShardReader(directory, source.block_bytes, memory, peers=peers, places=source.places)
    _load_pieces(reader, work, threads, frozenset(alone))
    return Loaded(needed, reader.bytes_read, reader.bytes_from_memory, reader.bytes_from_peers)


def load_pieces(directory: Path, source: Source, work: list[tuple[Piece, torch.Tensor]], *, threads: int = 0) -> int:
    """Fill each target with its piece; returns the bytes read. Arguments and errors as for `load_items`."""
    reader = ShardReader(directory, source.block_bytes, places=source.places)
    _load_pieces(reader, work, threads)
    return reader.bytes_read


def _load_pieces(reader: ShardReader, work: list[tuple[Piece, torch.Tensor]], threads: int, alone: frozenset[str] = frozenset()) -> None:
    work = sorted(work, key=lambda one: (one[0].file, one[0].chunk.at))
    with reader.reading({piece.file for piece, _ in work}):
        count = threads or THREADS
        if count == 1 or len(work) < 2:
            _load_all(reader, work, alone)
        else:
            with ThreadPoolExecutor(count, thread_name_prefix="restore") as pool:
                for done in [pool.submit(_load_all, reader, part, alone) for part in _batches(work, count)]:
                    done.result()


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


def _load_all(reader: ShardReader, work: list[tuple[Piece, torch.Tensor]], alone: frozenset[str]) -> None:
    for piece, target in work:
        _load(reader, piece, target, alone=piece.chunk.name in alone)


def _target(local: torch.Tensor, piece: Piece) -> torch.Tensor:
    part = local
    for axis, (start, size) in enumerate(zip(piece.target, piece.sizes, strict=True)):
        part = part.narrow(axis, start, size)
    return part


@torch.no_grad()
def _load(reader: ShardReader, piece: Piece, target: torch.Tensor, *, alone: bool) -> None:
    chunk = piece.chunk
    if target.device.type == "cpu" and reader.takes(chunk):
        whole = runs_of(piece, target.element_size(), target.stride())
        if whole is not None:
            reader.load_runs(piece.file, chunk, whole, target.data_ptr(), alone=alone)
            return
    runs = byte_runs(piece, target.element_size())
    if len(runs) == 1:
        start, end = runs[0]
        if target.is_contiguous() and target.device.type == "cpu":
            reader.read_run(piece.file, chunk, start, end, memory_of(target), alone=alone)
        else:
            buffer = bytearray(end - start)
            reader.read_run(piece.file, chunk, start, end, memoryview(buffer), alone=alone)
            target.copy_(torch.frombuffer(buffer, dtype=target.dtype).view(piece.sizes))
        return
    for part in split_piece(msgspec.structs.replace(piece, target=(0,) * len(piece.sizes)), target.element_size(), WINDOW_BYTES):
        data, offset, strides = reader.read_strided(part)
        whole = torch.frombuffer(data, dtype=target.dtype)
        _target(target, part).copy_(whole.as_strided(part.sizes, strides, offset))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable. The tensor must outlive the view."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
