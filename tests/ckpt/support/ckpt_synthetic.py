"""Checkpoints made of numpy arrays through the real storing and committing code, without torch and processes."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from regrow.ckpt.commit import Collector, publish, write_record
from regrow.ckpt.layout import Box, lay_out
from regrow.ckpt.manifest import Metric, NodeManifest, Record, digest, directory_name, encode, manifest_name, shard_name
from regrow.ckpt.plan import assign, chunk_sizes
from regrow.ckpt.recycling import Recycler
from regrow.ckpt.storing import store_shard
from regrow.ids import MeshShape
from regrow.wire import GenerationSpec, RestorePoint, ShardFile, ShardsDurable

THREADS = ThreadPoolExecutor(2)


def spec_of(world: int, generation: int = 1, restore: RestorePoint | None = None, epoch: int = 1) -> GenerationSpec:
    """A generation of `world` data-parallel ranks."""
    return GenerationSpec(
        job="job", epoch=epoch, generation=generation, mesh=MeshShape(dp=world), world_size=world, nodes=("n0",), restore=restore
    )


def shard(name: str, shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[int | None, ...], rank: int) -> Box:
    """The box of a rank as DTensor places it: mesh axes in order, each replicates (None) or cuts one axis in torch.chunk's sizes."""
    where = np.unravel_index(rank, mesh)
    offsets, sizes = [0] * len(shape), list(shape)
    for parts, axis, at in zip(mesh, placements, where, strict=True):
        if axis is not None:
            cuts = chunk_sizes(sizes[axis], parts)
            offsets[axis] += sum(cuts[: int(at)])
            sizes[axis] = cuts[int(at)]
    if not all(sizes):
        offsets = [0] * len(shape)
    return Box(name, "float32", shape, tuple(offsets), tuple(sizes))


def write_shards(
    folder: Path,
    step: int,
    spec: GenerationSpec,
    held: list[list[Box]],
    arrays: dict[str, np.ndarray],
    nonce: str = "abc",
    node: str = "n0",
    strips: int = 1,
    recycler: Recycler | None = None,
    metrics: dict[str, Metric] | None = None,
) -> ShardsDurable:
    """All ranks of a job on one node: stored, with its manifest; no record."""
    directory = folder / directory_name(step, spec.generation, nonce)
    directory.mkdir(parents=True, exist_ok=True)
    ranks = []
    for rank, boxes in enumerate(assign(held, strips)):
        image = lay_out(boxes, {"rank": str(rank)})
        memory = mmap.mmap(-1, image.plan.file_bytes)
        view = memoryview(memory)
        for at, data in image.constants:
            view[at : at + len(data)] = data
        for chunk in image.plan.chunks:
            part = arrays[chunk.name][tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))]
            view[chunk.at : chunk.at + chunk.nbytes] = np.ascontiguousarray(part).tobytes()
        ranks.append(store_shard(directory / shard_name(rank), view, image.plan, rank=rank, private={}, threads=THREADS, recycler=recycler))
    manifest = NodeManifest(
        job=spec.job,
        epoch=spec.epoch,
        generation=spec.generation,
        step=step,
        samples=step * 8,
        node=node,
        world_size=len(held),
        ranks=tuple(ranks),
        metrics=metrics or {},
    )
    data = encode(manifest)
    publish(directory, manifest_name(node), data)
    return ShardsDurable(
        job=spec.job,
        epoch=spec.epoch,
        generation=spec.generation,
        step=step,
        node=node,
        directory=str(directory),
        ranks=tuple(range(len(held))),
        world_size=len(held),
        samples=step * 8,
        files=tuple(ShardFile(rank=one.rank, name=one.file, size_bytes=one.size_bytes, digest=one.digest) for one in ranks),
        manifest=manifest_name(node),
        manifest_digest=digest(data),
    )


def commit(spec: GenerationSpec, report: ShardsDurable, written_at: float = 0.0) -> Record:
    """The committing agent's half."""
    pending = Collector(spec).add(report).pending
    assert pending is not None
    return write_record(pending, written_at=written_at)


def simple(
    folder: Path,
    step: int,
    *,
    generation: int = 1,
    world: int = 2,
    nonce: str = "abc",
    restore: RestorePoint | None = None,
    fill: Callable[[int], float] = float,
    metrics: dict[str, Metric] | None = None,
) -> Path:
    """A small committed checkpoint whose values depend on the step. Returns its directory."""
    spec = spec_of(world, generation, restore)
    arrays = {
        "model.w": np.arange(24, dtype=np.float32).reshape(6, 4) + fill(step),
        "model.b": np.full(5, fill(step), dtype=np.float32),
        "optimizer.w.step": np.array(fill(step), dtype=np.float32),
        "optimizer.w.exp_avg": np.arange(24, dtype=np.float32).reshape(6, 4) * fill(step),
    }  # fmt: skip
    held = [
        [
            shard("model.w", (6, 4), (world,), (0,), rank),
            shard("model.b", (5,), (world,), (0,), rank),
            shard("optimizer.w.step", (), (world,), (None,), rank),
            shard("optimizer.w.exp_avg", (6, 4), (world,), (1,), rank),
        ]
        for rank in range(world)
    ]
    report = write_shards(folder, step, spec, held, arrays, nonce, metrics=metrics)
    commit(spec, report, written_at=float(step))
    return Path(report.directory)
