"""Lays one rank's boxes out in a file that torch.distributed.checkpoint and safetensors both read in place.

    safetensors header | for each chunk: start of a torch.save archive, raw data (64-byte aligned), end of the archive | padding

safetensors wants every byte covered, so the bytes between tensors are declared as tensors named `__regrow.gap.<n>`.
The file is a multiple of 4096 bytes, so that it can be written with O_DIRECT from memory as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from regrow.ckpt.envelope import tensor_bytes, wrap
from regrow.ckpt.manifest import Chunk, RankPlan

PAGE_BYTES = 4096
MAX_CHUNK_BYTES = 1 << 30
"""Larger boxes are stored as several chunks: a zip without its 64-bit extension ends at 4 GiB."""

GAP_PREFIX = "__regrow.gap."

_SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class Box(msgspec.Struct, frozen=True, order=True):
    """A part of a named tensor: offsets and sizes per axis within the global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the box's data."""
        return tensor_bytes(self.dtype, self.sizes)

    @property
    def is_whole(self) -> bool:
        """Whether the box is the whole tensor."""
        return self.sizes == self.shape


def split(box: Box, limit: int = MAX_CHUNK_BYTES) -> list[Box]:
    """Cut a box along its first axis that is longer than one, until every part is at most `limit` bytes."""
    if box.nbytes <= limit:
        return [box]
    axis = next(index for index, size in enumerate(box.sizes) if size > 1)
    first = box.sizes[axis] // 2
    parts: list[Box] = []
    for offset, size in ((0, first), (first, box.sizes[axis] - first)):
        offsets = (*box.offsets[:axis], box.offsets[axis] + offset, *box.offsets[axis + 1 :])
        sizes = (*box.sizes[:axis], size, *box.sizes[axis + 1 :])
        parts.extend(split(Box(box.name, box.dtype, box.shape, offsets, sizes), limit))
    return parts


class Image(msgspec.Struct, frozen=True):
    """The plan of one rank's file and its bytes that never change."""

    plan: RankPlan
    constants: tuple[tuple[int, bytes], ...]
    """(file offset, bytes) of everything outside chunk data that is not zero."""


def lay_out(boxes: list[Box], labels: dict[str, str] | None = None) -> Image:
    """Plan the file of one rank.

    Args:
        boxes: What the rank stores, none larger than MAX_CHUNK_BYTES (see `split`).
        labels: Strings for the header's `__metadata__`.
    """
    header_bytes = _header_room(boxes, labels or {})
    at = header_bytes
    chunks: list[Chunk] = []
    constants: list[tuple[int, bytes]] = []
    for box in boxes:
        before, after = wrap(box.dtype, box.sizes, at)
        data = at + len(before)
        end = data + box.nbytes + len(after)
        constants += [(at, before), (data + box.nbytes, after)]
        chunks.append(
            Chunk(
                name=box.name,
                dtype=box.dtype,
                shape=box.shape,
                offsets=box.offsets,
                sizes=box.sizes,
                at=data,
                nbytes=box.nbytes,
                envelope=(at, end - at),
            )
        )
        at = end
    file_bytes = max(PAGE_BYTES, _round_up(at, PAGE_BYTES))
    header = _header(chunks, labels or {}, header_bytes, file_bytes)
    return Image(RankPlan(file_bytes=file_bytes, chunks=tuple(chunks)), ((0, header), *constants))


def gaps(plan: RankPlan) -> Iterator[tuple[int, int]]:
    """(start, end) of the bytes outside chunk data, in file order."""
    at = 0
    for chunk in plan.chunks:
        if chunk.at > at:
            yield at, chunk.at
        at = chunk.at + chunk.nbytes
    if plan.file_bytes > at:
        yield at, plan.file_bytes


def _header_room(boxes: list[Box], labels: dict[str, str]) -> int:
    """Bytes kept for the header: it cannot be longer than with the largest offsets that could occur."""
    top = 1 << 50
    worst = [
        Chunk(name=b.name, dtype=b.dtype, shape=b.shape, offsets=b.offsets, sizes=b.sizes, at=top, nbytes=b.nbytes, envelope=(top, 0))
        for b in boxes
    ]
    gap = len(f'"{GAP_PREFIX}{len(boxes)}":') + 100
    return _round_up(8 + len(msgspec.json.encode(_tensors(worst, labels, 0))) + gap * (len(boxes) + 1), PAGE_BYTES)


def _header(chunks: list[Chunk], labels: dict[str, str], room: int, file_bytes: int) -> bytes:
    tensors = _tensors(chunks, labels, room)
    at = room
    for number, chunk in enumerate(chunks):
        tensors[f"{GAP_PREFIX}{number}"] = _gap(at, chunk.at, room)
        at = chunk.at + chunk.nbytes
    if file_bytes > at:
        tensors[f"{GAP_PREFIX}{len(chunks)}"] = _gap(at, file_bytes, room)
    text = msgspec.json.encode(tensors)
    return (room - 8).to_bytes(8, "little") + text + b" " * (room - 8 - len(text))


def _gap(start: int, end: int, room: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": (end - start,), "data_offsets": (start - room, end - room)}


def _tensors(chunks: list[Chunk], labels: dict[str, str], room: int) -> dict[str, object]:
    tensors: dict[str, object] = {"__metadata__": {"format": "pt", **labels}}
    for chunk in chunks:
        label = chunk.name if chunk.sizes == chunk.shape else f"{chunk.name}@{'x'.join(map(str, chunk.offsets))}"
        dtype, shape = safetensors_dtype(chunk.dtype, chunk.sizes)
        tensors[label] = {"dtype": dtype, "shape": shape, "data_offsets": (chunk.at - room, chunk.at - room + chunk.nbytes)}
    return tensors


def safetensors_dtype(dtype: str, sizes: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Type and shape for a safetensors header; types that it does not have become bytes."""
    known = _SAFETENSORS.get(dtype)
    return (known, sizes) if known else ("U8", (tensor_bytes(dtype, sizes),))


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
