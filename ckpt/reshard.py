"""From the boxes that lie on storage to the boxes that a rank wants: which bytes of which file go where. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from regrow.ckpt.layout import Box
from regrow.ckpt.manifest import BLOCK_BYTES, Chunk, NodeManifest
from regrow.errors import OperationalError


class Piece(msgspec.Struct, frozen=True):
    """The part of one stored chunk that belongs into one wanted box."""

    file: str
    chunk: Chunk
    source: tuple[int, ...]
    """Start within the chunk, per axis."""
    target: tuple[int, ...]
    """Start within the wanted box, per axis."""
    sizes: tuple[int, ...]


class Source(msgspec.Struct, frozen=True):
    """All stored chunks of a checkpoint by tensor name."""

    tensors: dict[str, list[tuple[str, Chunk]]]
    block_bytes: int
    places: dict[str, tuple[str, int]] = {}
    """Of the files that lie in another one: its name, and where in it they begin."""

    def box(self, name: str) -> Box:
        """The whole tensor as a box."""
        first = self.tensors[name][0][1]
        return Box(name, first.dtype, first.shape, (0,) * len(first.shape), first.shape)


def source_of(manifests: Iterable[NodeManifest]) -> Source:
    """Index what the manifests of one checkpoint say."""
    tensors: dict[str, list[tuple[str, Chunk]]] = {}
    places: dict[str, tuple[str, int]] = {}
    block_bytes = BLOCK_BYTES
    for manifest in manifests:
        block_bytes = manifest.block_bytes
        for rank in manifest.ranks:
            if rank.container:
                places[rank.file] = rank.container, rank.container_at
            for chunk in rank.chunks:
                tensors.setdefault(chunk.name, []).append((rank.file, chunk))
    return Source(tensors, block_bytes, places)


def compare_names(stored: Iterable[str], wanted: Iterable[str]) -> tuple[list[str], list[str]]:
    """(missing in the checkpoint, in the checkpoint but wanted by no rank), sorted."""
    have, want = set(stored), set(wanted)
    return sorted(want - have), sorted(have - want)


def pieces(source: Source, box: Box) -> list[Piece]:
    """The pieces that fill a box exactly.

    Raises:
        OperationalError: the tensor is not stored, has another shape or type, or the stored parts leave a gap.
    """
    stored = source.tensors.get(box.name)
    if not stored:
        raise OperationalError(f"tensor {box.name} is not in the checkpoint", hint="it was saved by another model")
    found: list[Piece] = []
    needed = _volume(box.sizes)
    for file, chunk in stored:
        if chunk.shape != box.shape or chunk.dtype != box.dtype:
            have, want = f"{chunk.dtype}{list(chunk.shape)}", f"{box.dtype}{list(box.shape)}"
            raise OperationalError(f"tensor {box.name} is {have} in the checkpoint and {want} in the model", where=file)
        piece = intersect(file, chunk, box)
        if piece is not None:
            found.append(piece)
            needed -= _volume(piece.sizes)
    if needed:
        raise OperationalError(f"tensor {box.name}: the checkpoint does not cover {box.offsets}+{box.sizes}")
    return found


def split_piece(piece: Piece, item_bytes: int, limit_bytes: int) -> list[Piece]:
    """Cut a piece until each part lies within `limit_bytes` of the chunk's data, or is one element."""
    steps = strides(piece.chunk.sizes)
    span = 1 + sum((size - 1) * step for size, step in zip(piece.sizes, steps, strict=True))
    axis = next((index for index, size in enumerate(piece.sizes) if size > 1), None)
    if span * item_bytes <= limit_bytes or axis is None:
        return [piece]
    count = min(piece.sizes[axis], -(-span * item_bytes // limit_bytes))
    parts: list[Piece] = []
    for index in range(count):
        first, last = piece.sizes[axis] * index // count, piece.sizes[axis] * (index + 1) // count
        source, target, sizes = list(piece.source), list(piece.target), list(piece.sizes)
        source[axis] += first
        target[axis] += first
        sizes[axis] = last - first
        parts += split_piece(Piece(piece.file, piece.chunk, tuple(source), tuple(target), tuple(sizes)), item_bytes, limit_bytes)
    return parts


def intersect(file: str, chunk: Chunk, box: Box) -> Piece | None:
    """The common part of a stored chunk and a wanted box."""
    source: list[int] = []
    target: list[int] = []
    sizes: list[int] = []
    for stored_at, stored, want_at, want in zip(chunk.offsets, chunk.sizes, box.offsets, box.sizes, strict=True):
        start, end = max(stored_at, want_at), min(stored_at + stored, want_at + want)
        if end <= start:
            return None
        source.append(start - stored_at)
        target.append(start - want_at)
        sizes.append(end - start)
    return Piece(file, chunk, tuple(source), tuple(target), tuple(sizes))


def strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    steps = [1] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        steps[axis] = steps[axis + 1] * sizes[axis + 1]
    return tuple(steps)


def is_run(inner: tuple[int, ...], outer: tuple[int, ...]) -> bool:
    """Whether a part of `inner` sizes is one contiguous run in a row-major array of `outer` sizes."""
    partial = False
    for small, large in zip(reversed(inner), reversed(outer), strict=True):
        if partial and small != 1:
            return False
        partial = partial or small != large
    return True


def byte_runs(piece: Piece, item_bytes: int) -> list[tuple[int, int]]:
    """(start, end) within the chunk's data of the bytes that the piece needs, ascending and merged."""
    steps = strides(piece.chunk.sizes)
    first = sum(start * step for start, step in zip(piece.source, steps, strict=True))
    inner = len(piece.sizes)
    run = 1
    while inner > 0 and run == steps[inner - 1]:
        run *= piece.sizes[inner - 1]
        inner -= 1
        if piece.sizes[inner] != piece.chunk.sizes[inner]:
            break
    starts = [first]
    for axis in range(inner):
        starts = [start + index * steps[axis] for start in starts for index in range(piece.sizes[axis])]
    return [(start * item_bytes, (start + run) * item_bytes) for start in starts]


def blocks_of(runs: list[tuple[int, int]], block_bytes: int) -> list[int]:
    """Indices of the blocks that hold any byte of the runs, ascending."""
    numbers: set[int] = set()
    for start, end in runs:
        numbers.update(range(start // block_bytes, (end - 1) // block_bytes + 1))
    return sorted(numbers)


def _volume(sizes: tuple[int, ...]) -> int:
    volume = 1
    for size in sizes:
        volume *= size
    return volume
