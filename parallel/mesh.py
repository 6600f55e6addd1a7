"""Meshes: layers on pipeline stages, groups of ranks along an axis, and which factors of a world are candidates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape

AXES = ("tp", "cp", "pp", "dp")
"""Axes from the innermost (the most frequent traffic) to the outermost; `ep` is folded into dp x tp."""


@lru_cache(maxsize=1024)
def layers_per_stage(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline stage; they sum to `layers` and differ by at most one.

    Stages that get one layer less are taken in the order last, first, last but one, second ...: the last stage also
    carries the output head and the loss, the first the embedding and the most micro-batches in flight. Llama 3 does
    the same: 126 layers on 16 stages are 7, 8 x 14, 7 (https://arxiv.org/abs/2407.21783, section 3.3.2).

    Raises:
        ConfigurationError: a size below 1, or fewer layers than stages.
    """
    if layers < 1 or pp < 1:
        raise ConfigurationError(f"{layers} layers on {pp} stages", where="--pp", hint="use at least one of each")
    if layers < pp:
        raise ConfigurationError(
            f"{layers} layers cannot fill {pp} pipeline stages", where="--pp", hint=f"use at most {layers} stages: each holds a layer"
        )
    most = -(-layers // pp)
    counts = [most] * pp
    ends = _outside_in(pp)
    for _ in range(most * pp - layers):
        counts[next(ends)] -= 1
    return tuple(counts)


def _outside_in(size: int) -> Iterator[int]:
    low, high = 0, size - 1
    while low <= high:
        yield high
        if low < high:
            yield low
        low, high = low + 1, high - 1


def groups(mesh: MeshShape, axis: str) -> list[tuple[int, ...]]:
    """Ranks that communicate with each other along `axis` ("tp", "cp", "pp" or "dp"), in rank order.

    Raises:
        ValueError: not an axis of the rank order.
    """
    if axis not in AXES:
        raise ValueError(f"{axis!r} is not one of {AXES}")
    stride = 1
    for name in AXES:
        if name == axis:
            break
        stride *= getattr(mesh, name)
    size = int(getattr(mesh, axis))
    heads = (rank for rank in range(mesh.world_size) if (rank // stride) % size == 0)
    return [tuple(head + index * stride for index in range(size)) for head in heads]


def divisors(number: int) -> tuple[int, ...]:
    """Divisors of a positive number in ascending order."""
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return tuple(small + [number // value for value in reversed(small) if value * value != number])


def factorisations(workers: int) -> Iterator[MeshShape]:
    """All DP x TP x PP meshes of exactly `workers` workers."""
    for tp in divisors(workers):
        for pp in divisors(workers // tp):
            yield MeshShape(dp=workers // tp // pp, tp=tp, pp=pp)


def chunk_sizes(size: int, ranks: int) -> tuple[int, ...]:
    """Sizes of a dimension's shards as torch.chunk makes them: ceil(n / k) each until nothing is left, then 0."""
    each = -(-size // ranks)
    return tuple(max(0, min(each, size - rank * each)) for rank in range(ranks))
