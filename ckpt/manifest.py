"""What describes a checkpoint on storage: per-node manifests and the record that makes a directory a checkpoint.

Versioned JSON, digests are xxh3_128 in hex. A reader ignores fields that it does not know; `version` rises only when
an older reader would misread. docs/checkpoint-format.md tells the same for people who write a reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from regrow.errors import OperationalError
from regrow.ids import MeshShape

T = TypeVar("T")

FORMAT = "regrow-checkpoint"
FORMAT_VERSION = 2
"""The highest that is read."""
PLAIN_VERSION = 1
"""Of checkpoints in which each rank has a file of its own."""
BLOCK_BYTES = 1 << 20
"""Tensor data is checksummed in blocks of this size, counted from the start of each chunk."""

RECORD_NAME = "record.json"
DAMAGED_NAME = "damaged.json"
DCP_METADATA_NAME = ".metadata"

_SEAL = re.compile(rb'"digest":"([0-9a-f]{32})"\}\n\Z')
_DIRECTORY = re.compile(r"^step-(\d{12})-g(\d+)-([0-9a-z]+)$")


class DamagedCheckpointError(OperationalError):
    """Bytes on storage are not what was committed: which file, and how."""


class RemovedCheckpointError(DamagedCheckpointError):
    """A checkpoint that was removed (by retention, or by an operator) while it was being read: nothing is wrong with storage."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A box of one tensor, stored row-major in one file."""

    name: str
    dtype: str
    """torch's name without the module: float32, bfloat16 …"""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int
    """Byte offset of the raw data in the file, a multiple of 64."""
    nbytes: int
    envelope: tuple[int, int]
    """Byte offset and length of the torch.save archive that holds the data."""
    blocks: tuple[str, ...] = ()
    """Digest of each block of BLOCK_BYTES (the last may be shorter). Empty in a plan, and for a chunk without data."""


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank's chunks lie in its file. The same for every save of a generation."""

    file_bytes: int
    chunks: tuple[Chunk, ...]
    may_be_infinite: tuple[str, ...] = ()
    """Tensors of the model that are published whatever they hold: masks among the buffers."""


class RankManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of one checkpoint."""

    rank: int
    file: str
    size_bytes: int
    digest: str
    """Of the file: over all block digests in chunk order, then the gap digest."""
    gap_digest: str
    """Of all bytes outside chunk data, in file order."""
    chunks: tuple[Chunk, ...]
    container: str = ""
    """File that holds this one, from byte `container_at` on; empty: it is a file by itself. Offsets of chunks do not count that."""
    container_at: int = 0
    private: dict[str, Any] = {}
    """This rank's own state as plain data: RNG of each generator, optimizer groups, loader position."""


class Parent(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that the generation was restored from."""

    directory: str
    record_digest: str
    generation: int
    step: int


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What a record and a manifest would say of a rank's snapshot that stays in memory (docs/checkpoint-format.md)."""

    samples: int
    mesh: MeshShape
    world_size: int
    parent: Parent | None = None
    facts: dict[str, Any] = {}


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """A number that says how good a state is, and the completed step whose state it is of."""

    value: float
    """Finite."""
    step: int


class NodeManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What one node wrote for one step. The file is `node-<node>.json`."""

    format: str = FORMAT
    version: int = PLAIN_VERSION
    block_bytes: int = BLOCK_BYTES
    job: str
    epoch: int
    generation: int
    step: int
    samples: int
    node: str
    world_size: int
    ranks: tuple[RankManifest, ...]
    facts: dict[str, Any] = {}
    """Job-wide state and facts as rank 0 told them; empty on other nodes."""
    metrics: dict[str, Metric] = {}
    """What this node's ranks were told by the script, by name, at or before the step."""
    parent: Parent | None = None
    buddy: str = ""
    """Node that was to keep a copy of these files in memory; empty: none."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file that belongs to a checkpoint."""

    name: str
    size_bytes: int
    digest: str
    kind: str
    """shards (digest as in RankManifest, of a container as `container_digest`), manifest or metadata (digest of the bytes)."""
    rank: int = -1
    node: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`record.json`, written last: with it the directory is a checkpoint, without it it is nothing."""

    format: str = FORMAT
    version: int = PLAIN_VERSION
    job: str
    epoch: int
    generation: int
    step: int
    samples: int
    sequence: int
    """Grows by one with each record of a folder: the one order of all checkpoints, whatever mesh wrote them."""
    mesh: MeshShape
    world_size: int
    parent: Parent | None = None
    files: tuple[FileEntry, ...] = ()
    num_bytes: int = 0
    written_at: float = 0.0
    """Unix seconds by the clock of the committing node, for people."""
    facts: dict[str, Any] = {}
    metrics: dict[str, Metric] = {}
    """By name; retention can keep the best of one (`regrow.ckpt.retention`)."""
    digest: str = ""
    """Of the file's bytes without these 32 digits. The last field."""


def newest_metrics(one: Mapping[str, Metric], other: Mapping[str, Metric]) -> dict[str, Metric]:
    """Both, and of a name that both have what is of the later step; the first wins where the steps are equal."""
    return {**other, **{name: held for name, held in one.items() if name not in other or other[name].step <= held.step}}


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3_128 in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(chunks: tuple[Chunk, ...], gap_digest: str) -> str:
    """Digest of a shard file from its parts."""
    state = xxhash.xxh3_128()
    for chunk in chunks:
        for block in chunk.blocks:
            state.update(bytes.fromhex(block))
    state.update(bytes.fromhex(gap_digest))
    return state.hexdigest()


def container_digest(ranks: Iterable[RankManifest]) -> str:
    """Digest of a container from the digests of the files that it holds, in their order."""
    state = xxhash.xxh3_128()
    for rank in ranks:
        state.update(bytes.fromhex(rank.digest))
    return state.hexdigest()


def stored(ranks: Iterable[RankManifest]) -> dict[str, list[RankManifest]]:
    """Names of the files on storage, and what each holds, in the order in which it lies there."""
    found: dict[str, list[RankManifest]] = {}
    for rank in ranks:
        found.setdefault(rank.container or rank.file, []).append(rank)
    return {name: sorted(held, key=lambda one: one.container_at) for name, held in found.items()}


def version_for(ranks: Iterable[RankManifest]) -> int:
    """The format that a reader must know."""
    return FORMAT_VERSION if any(rank.container for rank in ranks) else PLAIN_VERSION


def encode(document: msgspec.Struct) -> bytes:
    """Canonical JSON of a manifest or record."""
    return msgspec.json.encode(document) + b"\n"


def seal(record: Record) -> Record:
    """The record with its own digest filled in."""
    open_record = msgspec.structs.replace(record, digest="")
    return msgspec.structs.replace(record, digest=digest(encode(open_record)))


def read_record(directory: Path) -> Record:
    """Read and check `record.json`.

    Raises:
        FileNotFoundError: the directory is no checkpoint.
        DamagedCheckpointError: the record is not intact, or of a newer format.
    """
    path = directory / RECORD_NAME
    return parse_record(path.read_bytes(), path)


def parse_record(data: bytes, path: Path) -> Record:
    """Check the bytes of a `record.json`; `path` is for messages.

    Raises:
        DamagedCheckpointError: the record is not intact, or of a newer format.
    """
    record = _decode(data, Record, path)
    sealed = _SEAL.search(data)
    if sealed is None or digest(data[: sealed.start(1)] + data[sealed.end(1) :]) != record.digest:
        raise DamagedCheckpointError("its digest does not match its content", where=str(path), hint="use an older checkpoint")
    return record


def decode_manifest(data: bytes, entry: FileEntry, directory: Path) -> NodeManifest:
    """Read a node manifest whose bytes must have the digest that the record names."""
    path = directory / entry.name
    if digest(data) != entry.digest:
        pickled = data[:1] == b"\x80"
        what = "is a pickle: refused" if pickled else "is not the manifest that was committed (digest differs)"
        raise DamagedCheckpointError(what, where=str(path), hint="use an older checkpoint")
    return _decode(data, NodeManifest, path)


def read_manifests(directory: Path, record: Record) -> list[NodeManifest]:
    """All node manifests of a checkpoint, each checked against the record.

    Raises:
        DamagedCheckpointError: missing or altered, with the file's name.
    """
    manifests: list[NodeManifest] = []
    for entry in record.files:
        if entry.kind == "manifest":
            try:
                data = (directory / entry.name).read_bytes()
            except FileNotFoundError as error:
                raise DamagedCheckpointError("is missing", where=str(directory / entry.name), hint="use an older checkpoint") from error
            manifests.append(decode_manifest(data, entry, directory))
    return manifests


def _decode(data: bytes, kind: type[T], path: Path) -> T:
    if data[:1] == b"\x80":
        raise DamagedCheckpointError("is a pickle: refused", where=str(path), hint="checkpoints of Regrow hold no pickles that it reads")
    try:
        document = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DamagedCheckpointError(f"cannot be read: {error}", where=str(path), hint="use an older checkpoint") from error
    if getattr(document, "format", "") != FORMAT or getattr(document, "version", 0) > FORMAT_VERSION:
        raise DamagedCheckpointError("has a format that this version does not read", where=str(path), hint="upgrade regrow")
    return document


def directory_name(step: int, generation: int, nonce: str) -> str:
    """Name of a checkpoint's directory below the job's checkpoint folder."""
    return f"step-{step:012d}-g{generation}-{nonce}"


def parse_directory(name: str) -> tuple[int, int, str] | None:
    """(step, generation, nonce) of a directory name of ours, or None. Names never decide validity."""
    match = _DIRECTORY.match(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def shard_name(rank: int) -> str:
    """Name of one rank's file."""
    return f"rank-{rank:05d}.safetensors"


def container_name(node: str) -> str:
    """Name of the one file of all ranks of a node."""
    return f"node-{node}.shards"


def manifest_name(node: str) -> str:
    """Name of one node's manifest."""
    return f"node-{node}.json"
