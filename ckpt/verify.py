"""Reads a whole checkpoint back and names everything that is not as it was committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from regrow.ckpt import catalog
from regrow.ckpt.layout import gaps
from regrow.ckpt.manifest import (
    BLOCK_BYTES,
    DAMAGED_NAME,
    RECORD_NAME,
    DamagedCheckpointError,
    FileEntry,
    NodeManifest,
    RankManifest,
    RankPlan,
    Record,
    decode_manifest,
    digest,
    file_digest,
    parse_directory,
    read_record,
    stored,
)

Progress = Callable[[int, int], None]
"""Called with (bytes checked, bytes in all)."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with one file.

    `kind`: missing, truncated (or grown), altered, swapped (holds another rank's file), foreign (belongs to another
    checkpoint), pickle (a pickle nobody committed), record (no or bad record), damaged (was set aside), unknown
    (a file that is not ours: no damage).
    """

    file: str
    kind: Literal["missing", "truncated", "altered", "swapped", "foreign", "pickle", "record", "damaged", "unknown"]
    detail: str


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What a read-back found. `valid` is False when any problem is more than an unknown file."""

    path: str
    step: int
    valid: bool
    problems: tuple[Problem, ...]
    bytes_checked: int


def verify(directory: Path, *, progress: Progress | None = None) -> Verification:
    """Read every byte of a checkpoint and compare it with what was committed.

    Raises:
        OSError: storage cannot be read.
    """
    try:
        record = read_record(directory)
    except FileNotFoundError:
        named = parse_directory(directory.name)
        problem = Problem(file=RECORD_NAME, kind="record", detail="there is no record: this never became a checkpoint")
        return Verification(path=str(directory), step=named[0] if named else -1, valid=False, problems=(problem,), bytes_checked=0)
    except DamagedCheckpointError as error:
        problem = Problem(file=RECORD_NAME, kind="record", detail=error.what)
        return Verification(path=str(directory), step=-1, valid=False, problems=(problem,), bytes_checked=0)
    return _Run(directory, record, progress).result()


class _Run:
    def __init__(self, directory: Path, record: Record, progress: Progress | None) -> None:
        self._directory = directory
        self._record = record
        self._progress = progress
        self._problems: list[Problem] = []
        self._checked = 0
        self._block_bytes = BLOCK_BYTES

    def result(self) -> Verification:
        self._look_around()
        manifests = self._manifests()
        self._block_bytes = manifests[0].block_bytes if manifests else BLOCK_BYTES
        by_file = stored(rank for manifest in manifests for rank in manifest.ranks)
        for entry in self._record.files:
            path = self._directory / entry.name
            if entry.kind == "metadata":
                self._check_bytes(entry, path)
            elif entry.kind == "shards":
                self._check_shards(entry, path, by_file)
        if not (self._directory / RECORD_NAME).exists():
            self._problems = []
            self._found(
                RECORD_NAME, "record", "the checkpoint was removed while it was being read: what was found says nothing about storage"
            )
        return Verification(
            path=str(self._directory),
            step=self._record.step,
            valid=not any(problem.kind != "unknown" for problem in self._problems),
            problems=tuple(self._problems),
            bytes_checked=self._checked,
        )

    def _found(self, file: str, kind: str, detail: str) -> None:
        self._problems.append(msgspec.convert({"file": file, "kind": kind, "detail": detail}, Problem))

    def _count(self, num_bytes: int) -> None:
        self._checked += num_bytes
        if self._progress is not None:
            self._progress(self._checked, self._record.num_bytes)

    def _look_around(self) -> None:
        known = {entry.name for entry in self._record.files} | {RECORD_NAME}
        for path in sorted(self._directory.iterdir()):
            if path.name == DAMAGED_NAME:
                self._found(path.name, "damaged", path.read_text(encoding="utf-8", errors="replace").strip())
            elif path.name not in known and not path.name.endswith(".tmp"):
                if path.is_file() and _starts_like_a_pickle(path):
                    self._found(path.name, "pickle", "a pickle that nobody committed: loading it could run code; Regrow never reads it")
                else:
                    self._found(path.name, "unknown", "not part of this checkpoint; left alone")

    def _manifests(self) -> list[NodeManifest]:
        manifests: list[NodeManifest] = []
        for entry in self._record.files:
            if entry.kind != "manifest":
                continue
            path = self._directory / entry.name
            try:
                data = path.read_bytes()
                self._count(len(data))
                manifests.append(decode_manifest(data, entry, self._directory))
            except FileNotFoundError:
                self._found(entry.name, "missing", "the manifest is gone")
            except DamagedCheckpointError as error:
                self._found(entry.name, "altered", error.what)
        return manifests

    def _check_bytes(self, entry: FileEntry, path: Path) -> None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            self._found(entry.name, "missing", "the file is gone (only other programs need it)")
            return
        self._count(len(data))
        if digest(data) != entry.digest:
            self._found(entry.name, "altered", "not what was committed: loading it with another program could run code")

    def _check_shards(self, entry: FileEntry, path: Path, by_file: dict[str, list[RankManifest]]) -> None:
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            whose = f"rank {entry.rank}" if entry.rank >= 0 else f"node {entry.node}'s ranks"
            self._found(entry.name, "missing", f"the file of {whose} is gone")
            return
        if size != entry.size_bytes:
            how = "shorter" if size < entry.size_bytes else "longer"
            self._found(entry.name, "truncated", f"{size} bytes, committed were {entry.size_bytes} ({how})")
        if entry.name not in by_file:
            if entry.name not in {problem.file for problem in self._problems}:
                self._found(entry.name, "altered", "its manifest cannot be read, so its content is not known to be right")
            return
        files = {rank.file: rank for held in by_file.values() for rank in held}
        for rank in by_file[entry.name]:
            actual = scan_file(path, rank, self._block_bytes, self._count)
            if actual.digest != rank.digest:
                self._name_damage(entry, rank, actual, files)

    def _name_damage(self, entry: FileEntry, rank: RankManifest, actual: RankManifest, by_file: dict[str, RankManifest]) -> None:
        wrong = _wrong_blocks(rank, actual, self._block_bytes)
        for other in by_file.values():
            if other.file != rank.file and other.size_bytes == actual.size_bytes:
                at_its_place = msgspec.structs.replace(other, container=rank.container, container_at=rank.container_at)
                seen = scan_file(self._directory / entry.name, at_its_place, self._block_bytes, None)
                if seen.digest == other.digest:
                    where = f" where rank {rank.rank}'s belongs" if rank.container else ""
                    self._found(entry.name, "swapped", f"holds what belongs into {other.file} (rank {other.rank}){where}")
                    return
        origin = self._origin(actual.digest)
        total = sum(len(chunk.blocks) for chunk in rank.chunks)
        if origin or (actual.size_bytes == rank.size_bytes and len(wrong) > 2 and len(wrong) * 2 > total):
            self._found(entry.name, "foreign", f"belongs to {origin or 'another checkpoint'}: {len(wrong)} of {total} blocks differ")
            return
        if actual.size_bytes >= rank.size_bytes and actual.gap_digest != rank.gap_digest:
            self._found(entry.name, "altered", "bytes between the tensors are not what was committed")
        for name, number, at in wrong[:20]:
            from_byte = rank.container_at + at
            self._found(entry.name, "altered", f"tensor {name}, block {number} (file bytes from {from_byte}) is not what was committed")
        if len(wrong) > 20:
            self._found(entry.name, "altered", f"and {len(wrong) - 20} more blocks")

    def _origin(self, actual_digest: str) -> str:
        for other in catalog.scan(self._directory.parent, strict=False):
            if other.sequence >= 0 and other.name != self._directory.name:
                record = read_record(Path(other.directory))
                if any(entry.kind == "shards" and entry.digest == actual_digest for entry in record.files):
                    return other.name
        return ""


def _starts_like_a_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) == b"\x80"


def scan_file(path: Path, rank: RankManifest, block_bytes: int, count: Callable[[int], None] | None) -> RankManifest:
    """The manifest that a file's bytes would have with this layout; bytes beyond its end count as absent."""
    plan = RankPlan(file_bytes=rank.size_bytes, chunks=rank.chunks)
    chunks = []
    rest = xxhash.xxh3_128()
    base = rank.container_at
    size = path.stat().st_size if not rank.container else max(0, min(rank.size_bytes, path.stat().st_size - base))
    with path.open("rb") as file:
        for chunk in rank.chunks:
            blocks: list[str] = []
            file.seek(base + chunk.at)
            left = chunk.nbytes
            for _ in chunk.blocks:
                data = file.read(min(left, block_bytes))
                left -= len(data)
                blocks.append(digest(data))
                if count is not None:
                    count(len(data))
            chunks.append(msgspec.structs.replace(chunk, blocks=tuple(blocks)))
        for start, end in gaps(plan):
            file.seek(base + start)
            data = file.read(end - start)
            rest.update(data)
            if count is not None:
                count(len(data))
    gap_digest = rest.hexdigest()
    return msgspec.structs.replace(
        rank, size_bytes=size, chunks=tuple(chunks), gap_digest=gap_digest, digest=file_digest(tuple(chunks), gap_digest)
    )


def _wrong_blocks(rank: RankManifest, actual: RankManifest, block_bytes: int) -> list[tuple[str, int, int]]:
    wrong: list[tuple[str, int, int]] = []
    for mine, seen in zip(rank.chunks, actual.chunks, strict=True):
        for number, (good, bad) in enumerate(zip(mine.blocks, seen.blocks, strict=True)):
            if good != bad:
                wrong.append((mine.name, number, mine.at + number * block_bytes))
    return wrong
