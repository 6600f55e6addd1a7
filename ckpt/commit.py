"""From durable shards to a checkpoint: who has reported (pure), and the record that is written when all have.

`Collector` has no I/O and no clock. `write_record` makes the directory a checkpoint on storage; the transaction in the
store that makes it *committed* is the committing agent's.
"""

from __future__ import annotations

import math
import os
import uuid
from pathlib import Path
from typing import Any, Literal

import msgspec

from regrow.ckpt import catalog, dcp, faults
from regrow.ckpt.manifest import (
    DCP_METADATA_NAME,
    RECORD_NAME,
    FileEntry,
    Metric,
    NodeManifest,
    Parent,
    RankManifest,
    Record,
    container_digest,
    decode_manifest,
    digest,
    encode,
    newest_metrics,
    seal,
    stored,
    version_for,
)
from regrow.errors import FencedError, OperationalError
from regrow.ids import MeshShape
from regrow.syncing import sync_directory
from regrow.wire import CheckpointRecord, GenerationSpec, ShardsDurable, ShardsFailed


class PendingCommit(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose shards are durable on all nodes: ready for its record."""

    job: str
    epoch: int
    generation: int
    step: int
    samples: int
    directory: str
    mesh: MeshShape
    world_size: int
    parent: Parent | None
    reports: tuple[ShardsDurable, ...]
    write_seconds: float
    num_bytes: int


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What a message led to."""

    kind: Literal["waiting", "complete", "void", "refused", "duplicate"]
    step: int
    reason: str = ""
    missing: tuple[int, ...] = ()
    """Ranks that have not reported yet."""
    pending: PendingCommit | None = None
    superseded: tuple[int, ...] = ()
    """Older steps that were incomplete and now never will be a checkpoint."""


class Collector:
    """All ranks or none, of one generation. Give it every message; it says when a step is complete."""

    def __init__(self, spec: GenerationSpec) -> None:
        self._spec = spec
        self._reports: dict[int, dict[str, ShardsDurable]] = {}
        self._void: dict[int, str] = {}
        self._complete: set[int] = set()

    @property
    def open_steps(self) -> dict[int, tuple[int, ...]]:
        """Steps that wait, with the ranks that are missing."""
        return {step: self._missing(step) for step in sorted(self._reports)}

    def add(self, message: ShardsDurable | ShardsFailed) -> Collected:
        """Fold one message. Repeated ones are harmless."""
        spec, step = self._spec, message.step
        epoch = message.epoch if isinstance(message, ShardsDurable) else spec.epoch
        if (message.job, epoch, message.generation) != (spec.job, spec.epoch, spec.generation):
            told = f"job {message.job} epoch {epoch} generation {message.generation}"
            reason = f"{told} is not job {spec.job} epoch {spec.epoch} generation {spec.generation}"
            return Collected(kind="refused", step=step, reason=reason)
        if step in self._complete:
            return Collected(kind="duplicate", step=step)
        if isinstance(message, ShardsFailed):
            return self._give_up(step, f"node {message.node}: {message.reason}")
        if step in self._void:
            return Collected(kind="void", step=step, reason=self._void[step])
        newest = max(self._complete, default=-1)
        if step < newest:  # its record would come after the newer one's and be taken for the newest
            return self._give_up(step, f"superseded by step {newest}")
        problem = self._problem(message)
        if problem:
            return self._give_up(step, problem)
        reports = self._reports.setdefault(step, {})
        reports[message.node] = message
        missing = self._missing(step)
        if missing:
            return Collected(kind="waiting", step=step, missing=missing)
        return self._finish(step)

    def _give_up(self, step: int, reason: str) -> Collected:
        self._reports.pop(step, None)
        self._void.setdefault(step, reason)
        return Collected(kind="void", step=step, reason=self._void[step])

    def _problem(self, message: ShardsDurable) -> str:
        if message.world_size != self._spec.world_size:
            return f"node {message.node} saved for {message.world_size} ranks, the generation has {self._spec.world_size}"
        if {file.rank for file in message.files} != set(message.ranks):
            return f"node {message.node} reported files of other ranks than it has"
        for other in self._reports.get(message.step, {}).values():
            if other.node == message.node:
                if (other.manifest_digest, other.ranks) != (message.manifest_digest, message.ranks):
                    return f"node {message.node} reported this step twice with different content"
                continue
            if other.directory != message.directory:
                return f"nodes {other.node} and {message.node} wrote to different directories"
            if other.samples != message.samples:
                return f"nodes {other.node} and {message.node} disagree about samples consumed ({other.samples}, {message.samples})"
            both = set(other.ranks) & set(message.ranks)
            if both:
                return f"nodes {other.node} and {message.node} both wrote rank {min(both)}"
        return ""

    def _missing(self, step: int) -> tuple[int, ...]:
        have = {rank for report in self._reports.get(step, {}).values() for rank in report.ranks}
        return tuple(rank for rank in range(self._spec.world_size) if rank not in have)

    def _finish(self, step: int) -> Collected:
        spec = self._spec
        reports = tuple(sorted(self._reports.pop(step).values(), key=lambda report: min(report.ranks, default=0)))
        self._complete.add(step)
        superseded = tuple(older for older in sorted(self._reports) if older < step)
        for older in superseded:
            self._give_up(older, f"superseded by step {step}")
        pending = PendingCommit(
            job=spec.job,
            epoch=spec.epoch,
            generation=spec.generation,
            step=step,
            samples=reports[0].samples,
            directory=reports[0].directory,
            mesh=spec.mesh,
            world_size=spec.world_size,
            parent=parent_of(spec),
            reports=reports,
            write_seconds=max(report.write_seconds for report in reports),
            num_bytes=sum(report.num_bytes for report in reports),
        )
        return Collected(kind="complete", step=step, pending=pending, superseded=superseded)


def parent_of(spec: GenerationSpec) -> Parent | None:
    """The restore point of a generation as the lineage that its checkpoints carry."""
    point = spec.restore
    if point is None or not point.directory:
        return None
    name = Path(point.directory).name
    return Parent(directory=name, record_digest=point.record_digest, generation=point.generation, step=point.step)


def write_record(pending: PendingCommit, *, written_at: float) -> Record:
    """Make the directory a checkpoint: check that all parts are there, write DCP's index, then the record, synced.

    Blocking I/O; call it in a thread. Safe to repeat after a crash at any point.

    Args:
        pending: From `Collector`.
        written_at: Unix seconds, for people.

    Raises:
        FencedError: the folder has a record of a later generation that is not an ancestor of this one.
        OperationalError: shards are not what was reported, or storage fails.
    """
    directory = Path(pending.directory)
    try:
        manifests = _read_reported(directory, pending)
        ranks = sorted((rank for manifest in manifests for rank in manifest.ranks), key=lambda rank: rank.rank)
        check_coverage(ranks)
        entries = catalog.scan(directory.parent, strict=False)
        own = next((entry for entry in entries if entry.name == directory.name and entry.sequence >= 0), None)
        _check_owner(pending, entries)
        _check_fence(pending, entries)
        sequence = own.sequence if own else max((0, *(entry.sequence for entry in entries))) + 1
        index = dcp.metadata(ranks)
        publish(directory, DCP_METADATA_NAME, index)
        record = seal(_record(pending, manifests, index, sequence, written_at))
        publish(directory, RECORD_NAME, encode(record))
        sync_directory(directory.parent)
    except FileNotFoundError as error:
        raise OperationalError(
            f"{error.filename} was reported as written and is not to be seen here",
            where=str(directory),
            hint="the checkpoint folder must be the same storage on all nodes",
        ) from error
    except OSError as error:
        raise OperationalError(f"record cannot be written: {error}", where=str(directory), hint="check space and permissions") from error
    return record


def checkpoint_record(record: Record, directory: str) -> CheckpointRecord:
    """What the committing agent puts into the store for a record on storage."""
    return CheckpointRecord(
        step=record.step,
        generation=record.generation,
        epoch=record.epoch,
        directory=directory,
        record_digest=record.digest,
        samples=record.samples,
        num_bytes=record.num_bytes,
    )


def _read_reported(directory: Path, pending: PendingCommit) -> list[NodeManifest]:
    manifests: list[NodeManifest] = []
    seen: set[int] = set()
    for report in pending.reports:
        data = (directory / report.manifest).read_bytes()
        entry = FileEntry(name=report.manifest, size_bytes=len(data), digest=report.manifest_digest, kind="manifest", node=report.node)
        manifest = decode_manifest(data, entry, directory)
        token = (manifest.job, manifest.epoch, manifest.generation, manifest.step)
        if token != (pending.job, pending.epoch, pending.generation, pending.step):
            raise OperationalError("manifest is of another job, generation or step", where=str(directory / report.manifest))
        for name, held in stored(manifest.ranks).items():
            size = (directory / name).stat().st_size
            if size != sum(rank.size_bytes for rank in held) or seen & {rank.rank for rank in held}:
                raise OperationalError(f"{name} is not what node {report.node} reported", where=str(directory))
            seen |= {rank.rank for rank in held}
        manifests.append(manifest)
    if seen != set(range(pending.world_size)):
        raise OperationalError(f"ranks {sorted(set(range(pending.world_size)) - seen)} are missing", where=str(directory))
    return manifests


def check_coverage(ranks: list[RankManifest]) -> None:
    """Every tensor must be covered by its chunks exactly once.

    Raises:
        OperationalError: names the first tensor with a gap, an overlap, or two shapes.
    """
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    filled: dict[str, int] = {}
    corners: set[tuple[str, tuple[int, ...]]] = set()
    for rank in ranks:
        for chunk in rank.chunks:
            if shapes.setdefault(chunk.name, (chunk.dtype, chunk.shape)) != (chunk.dtype, chunk.shape):
                raise OperationalError(f"tensor {chunk.name} has two shapes or types", where=rank.file)
            if chunk.nbytes and (chunk.name, chunk.offsets) in corners:
                raise OperationalError(f"tensor {chunk.name} is stored twice at offsets {chunk.offsets}", where=rank.file)
            corners.add((chunk.name, chunk.offsets))
            filled[chunk.name] = filled.get(chunk.name, 0) + math.prod(chunk.sizes)
    for name, (_, shape) in shapes.items():
        if filled[name] != math.prod(shape):
            raise OperationalError(
                f"tensor {name} of {math.prod(shape)} elements is covered by {filled[name]}", hint="a bug in the save plan"
            )


def _ancestors(pending: PendingCommit, entries: list[catalog.CatalogEntry]) -> set[str]:
    ancestors = {pending.parent.directory} if pending.parent else set[str]()
    for entry in entries:  # newest first: children come before their parents
        if entry.name in ancestors and entry.parent:
            ancestors.add(entry.parent.directory)
    return ancestors


def _check_owner(pending: PendingCommit, entries: list[catalog.CatalogEntry]) -> None:
    """One job a folder: its retention deletes what the other needs. A job that goes on from another's checkpoint takes the folder over."""
    ancestors = _ancestors(pending, entries)
    since = max((entry.sequence for entry in entries if entry.name in ancestors), default=-1)
    for entry in entries:
        if entry.state == "restorable" and entry.sequence > since and entry.job != pending.job:
            raise OperationalError(
                f"the folder is that of job {entry.job}: it holds {entry.name}, from which job {pending.job} does not go on",
                where=str(Path(pending.directory).parent),
                hint="give each job a checkpoint folder of its own; `regrow ckpt fork` starts one from another's checkpoint",
            )


def _check_fence(pending: PendingCommit, entries: list[catalog.CatalogEntry]) -> None:
    ancestors = _ancestors(pending, entries)
    family = {entry.generation for entry in entries if entry.name in ancestors and entry.sequence >= 0}
    if pending.parent:
        family.add(pending.parent.generation)
    for entry in entries:
        later = entry.sequence >= 0 and entry.job == pending.job and entry.generation > pending.generation
        if later and entry.generation not in family:
            raise FencedError(
                f"generation {pending.generation} may not publish: {entry.name} is of generation {entry.generation}",
                where=pending.directory,
                hint="nothing to do: the job continues in the later generation",
            )


def _record(pending: PendingCommit, manifests: list[NodeManifest], index: bytes, sequence: int, written_at: float) -> Record:
    files: list[FileEntry] = []
    facts: dict[str, Any] = {}
    metrics: dict[str, Metric] = {}
    for manifest, report in zip(manifests, pending.reports, strict=True):
        facts |= manifest.facts
        metrics = newest_metrics(metrics, manifest.metrics)
        size = (Path(pending.directory) / report.manifest).stat().st_size
        files.append(FileEntry(name=report.manifest, size_bytes=size, digest=report.manifest_digest, kind="manifest", node=report.node))
        files.extend(_shards(name, held, manifest.node) for name, held in stored(manifest.ranks).items())
    files.append(FileEntry(name=DCP_METADATA_NAME, size_bytes=len(index), digest=digest(index), kind="metadata"))
    return Record(
        version=version_for(rank for manifest in manifests for rank in manifest.ranks),
        job=pending.job,
        epoch=pending.epoch,
        generation=pending.generation,
        step=pending.step,
        samples=pending.samples,
        sequence=sequence,
        mesh=pending.mesh,
        world_size=pending.world_size,
        parent=pending.parent,
        files=tuple(files),
        num_bytes=sum(file.size_bytes for file in files),
        written_at=written_at,
        facts=facts,
        metrics=metrics,
    )


def _shards(name: str, held: list[RankManifest], node: str) -> FileEntry:
    size = sum(rank.size_bytes for rank in held)
    if held[0].container:
        return FileEntry(name=name, size_bytes=size, digest=container_digest(held), kind="shards", node=node)
    return FileEntry(name=name, size_bytes=size, digest=held[0].digest, kind="shards", rank=held[0].rank, node=node)


def publish(directory: Path, name: str, data: bytes) -> None:
    """Put a whole file in place: temporary name, fsync, rename, fsync of the directory."""
    temporary = directory / f".{name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with temporary.open("xb") as file:
            faults.point(f"publish.{name}.write")
            file.write(data)
            file.flush()
            faults.point(f"publish.{name}.fsync")
            os.fsync(file.fileno())
        faults.point(f"publish.{name}.rename")
        temporary.replace(directory / name)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    faults.point(f"publish.{name}.sync")
    sync_directory(directory)
