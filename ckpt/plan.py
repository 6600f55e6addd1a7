"""Who writes what: every box of every tensor exactly once, the load spread over the ranks that hold it. Pure."""

from __future__ import annotations

import math

import msgspec

from regrow.ckpt.envelope import tensor_bytes
from regrow.ckpt.layout import MAX_CHUNK_BYTES, Box, split
from regrow.ckpt.manifest import BLOCK_BYTES
from regrow.errors import ConfigurationError

_SPLIT_BYTES = 16 << 20
STRIP_ROW_BYTES = 1024
"""Shorter runs make the copy of a snapshot too slow."""


def assign(held: list[list[Box]], column_strips: int = 1) -> list[list[Box]]:
    """Give each box to one of its holders.

    The same on every rank, so ranks that know all boxes need not talk again.

    Args:
        held: For each rank the boxes that it holds (empty ones may be listed).
        column_strips: Into how many strips along the last axis a large matrix is cut, so that a later split of its columns
            reads little more than it needs (`strips`).

    Returns:
        For each rank the boxes that it writes, none over MAX_CHUNK_BYTES.

    Raises:
        ConfigurationError: boxes overlap, leave gaps, or disagree on a tensor's shape; names the tensor.
    """
    holders: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    check_tiles(list(holders))
    empty_tensors = {box.name for box in holders if math.prod(box.shape) == 0}
    total = sum(box.nbytes for box in holders)
    limit = min(MAX_CHUNK_BYTES, max(_SPLIT_BYTES, total // (8 * len(held))))
    work: list[tuple[Box, list[int]]] = []
    for box, ranks in holders.items():
        if math.prod(box.sizes) == 0 and box.name not in empty_tensors:
            continue
        parts = split(box, limit if len(set(ranks)) > 1 else MAX_CHUNK_BYTES)
        work += [(strip, ranks) for part in parts for strip in strips(part, column_strips)]
    work.sort(key=lambda item: (-item[0].nbytes, item[0]))
    loads = [0] * len(held)
    written: list[list[Box]] = [[] for _ in held]
    done_empty: set[str] = set()
    for box, ranks in work:
        if box.name in empty_tensors:
            if box.name in done_empty:
                continue
            done_empty.add(box.name)
        rank = min(ranks, key=lambda one: (loads[one], one))
        loads[rank] += box.nbytes + 512
        written[rank].append(box)
    return [sorted(boxes) for boxes in written]


def strips(box: Box, count: int) -> list[Box]:
    """Cut a matrix into strips along its last axis, each at least a digest block and rows of at least `STRIP_ROW_BYTES`; else fewer.

    A row-major matrix keeps all columns in every block: whoever wants half of the columns would read and verify all of it.
    """
    while count > 1:
        width, row_bytes = box.sizes[-1] // count if len(box.sizes) > 1 else 0, 0
        if width * count == (box.sizes[-1] if box.sizes else 0):
            row_bytes = tensor_bytes(box.dtype, (width,))
        if row_bytes >= STRIP_ROW_BYTES and box.nbytes >= count * BLOCK_BYTES:
            axis = len(box.sizes) - 1
            sizes = (*box.sizes[:axis], width)
            starts = [(*box.offsets[:axis], box.offsets[axis] + index * width) for index in range(count)]
            return [Box(box.name, box.dtype, box.shape, start, sizes) for start in starts]
        count //= 2
    return [box]


def check_tiles(boxes: list[Box]) -> None:
    """Distinct boxes must cover each tensor once.

    Raises:
        ConfigurationError: names the tensor and what is wrong.
    """
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    filled: dict[str, int] = {}
    for box in boxes:
        if shapes.setdefault(box.name, (box.dtype, box.shape)) != (box.dtype, box.shape):
            raise ConfigurationError(
                f"tensor {box.name} is {shapes[box.name]} on one rank and {(box.dtype, box.shape)} on another",
                hint="the same name must be the same tensor on all ranks; pipeline stages need global layer numbers",
            )
        filled[box.name] = filled.get(box.name, 0) + math.prod(box.sizes)
    for name, (_, shape) in shapes.items():
        if filled[name] != math.prod(shape):
            how = "overlap" if filled[name] > math.prod(shape) else "leave gaps"
            raise ConfigurationError(
                f"the parts of tensor {name} {list(shape)} that the ranks hold {how}",
                hint="hold it as a DTensor, replicated or sharded, on all ranks of its mesh",
            )


def encode_boxes(boxes: list[Box]) -> bytes:
    """Boxes as bytes for the exchange between ranks."""
    return msgspec.json.encode(boxes)


def decode_boxes(data: bytes) -> list[Box]:
    """The inverse of `encode_boxes`."""
    return msgspec.json.decode(data, type=list[Box])


def chunk_sizes(length: int, parts: int) -> list[int]:
    """Sizes that torch.chunk and DTensor's Shard give: ceil(length / parts) each until exhausted, then zeros."""
    step = math.ceil(length / parts) if length else 0
    return [max(0, min(step, length - index * step)) for index in range(parts)]
