"""The last act of a node for a step: its manifest, published when the files of all its ranks are on storage. Or, of a snapshot that
stays in memory, what the manifest would say."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Executor
from pathlib import Path

from regrow.ckpt import faults
from regrow.ckpt.arenas import Arena
from regrow.ckpt.commit import publish
from regrow.ckpt.manifest import (
    NodeManifest,
    Note,
    RankManifest,
    RankPlan,
    container_name,
    digest,
    encode,
    manifest_name,
    shard_name,
    version_for,
)
from regrow.ckpt.protocol import ProducerHello, Remembered, Submit
from regrow.ckpt.recycling import Recycler
from regrow.ckpt.saves import Key, Save
from regrow.ckpt.storing import NodeFile, NotFiniteError, digest_image, make_directory, remove_own, store_shard
from regrow.wire import ShardFile, ShardsDurable

log = logging.getLogger("regrow.ckpt.writer")


def node_file_of(save: Save) -> NodeFile | None:
    """The file that all ranks of the node write into, once all have submitted; None: each has its own."""
    if not save.hello.node_file:
        return None
    return NodeFile(Path(save.hello.folder) / save.directory / container_name(save.hello.node), save.sizes)


def store_file(
    hello: ProducerHello, message: Submit, arena: Arena, plan: RankPlan, *, threads: Executor, recycler: Recycler, into: NodeFile | None
) -> RankManifest | str:
    """Write a rank's snapshot; returns what its manifest says, or why it failed. Blocking."""
    try:
        path = make_directory(Path(hello.folder), message.directory) / shard_name(hello.rank)
        image, private = memoryview(arena.memory), message.private
        return store_shard(path, image, plan, rank=hello.rank, private=private, threads=threads, recycler=recycler, into=into)
    except OSError as error:
        log.warning("shard failed rank=%d step=%d error=%s", hello.rank, message.step, error)
        return f"rank {hello.rank}: {error.strerror or error} ({error.filename or hello.folder})"


def clear_away(save: Save) -> None:
    """Remove what a step that failed has written here. Blocking."""
    names = [shard_name(rank) for rank in save.written] + [container_name(save.hello.node)] * save.hello.node_file
    remove_own(Path(save.hello.folder) / save.directory, names)


def store_manifest(key: Key, save: Save, buddy: str) -> ShardsDurable | str:
    """Publish the manifest of a step whose files are all on storage; returns the node's report, or why it failed. Blocking.

    `buddy`: node that is to keep a copy of the files in memory; empty: none.
    """
    hello = save.hello
    ranks = tuple(save.written[rank] for rank in sorted(save.written))
    manifest = NodeManifest(
        version=version_for(ranks),
        job=hello.job,
        epoch=hello.epoch,
        generation=hello.generation,
        step=key[2],
        samples=save.samples,
        node=hello.node,
        world_size=hello.world_size,
        ranks=ranks,
        facts=save.facts,
        metrics=save.metrics,
        parent=save.parent,
        buddy=buddy,
    )
    data = encode(manifest)
    name = manifest_name(hello.node)
    directory = Path(hello.folder) / save.directory
    try:
        publish(directory, name, data)
    except OSError as error:
        return f"manifest: {error.strerror or error}"
    faults.point("node.durable")
    return ShardsDurable(
        job=hello.job,
        epoch=hello.epoch,
        generation=hello.generation,
        step=key[2],
        node=hello.node,
        directory=str(directory),
        ranks=tuple(rank.rank for rank in ranks),
        world_size=hello.world_size,
        samples=save.samples,
        files=tuple(ShardFile(rank=rank.rank, name=rank.file, size_bytes=rank.size_bytes, digest=rank.digest) for rank in ranks),
        manifest=name,
        manifest_digest=digest(data),
        write_seconds=time.monotonic() - save.started_at,
        num_bytes=sum(rank.size_bytes for rank in ranks),
    )


def remember(threads: Executor, hello: ProducerHello, message: Submit, arena: Arena, plan: RankPlan) -> Remembered | str:
    """Digest a snapshot that is not to be written, with `threads`; returns what is known of it, or why it is void. Blocking."""
    if message.memory is None:
        return "this snapshot is to be written"
    try:
        manifest = digest_image(memoryview(arena.memory), plan, rank=hello.rank, private=message.private, threads=threads)
    except NotFiniteError as error:
        return f"rank {hello.rank}: {error.strerror}"
    note = Note(samples=message.samples, mesh=message.memory, world_size=hello.world_size, parent=message.parent, facts=message.facts)
    return Remembered(
        job=hello.job,
        epoch=hello.epoch,
        generation=hello.generation,
        step=message.step,
        node=hello.node,
        directory=str(Path(hello.folder) / message.directory),
        manifest=manifest,
        note=note,
    )
