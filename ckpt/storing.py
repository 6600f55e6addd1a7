"""Writes one rank's file image to storage and checksums it. Blocking; runs in the writer's threads."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Executor, Future, wait
from pathlib import Path

import msgspec
import xxhash

from regrow.ckpt import faults
from regrow.ckpt.finite import is_checked, is_finite, refusal
from regrow.ckpt.layout import PAGE_BYTES, gaps
from regrow.ckpt.manifest import BLOCK_BYTES, Chunk, RankManifest, RankPlan, file_digest, shard_name
from regrow.ckpt.recycling import Recycler
from regrow.syncing import sync_directory

WRITE_BYTES = 8 << 20
"""One write call: large enough for full speed with O_DIRECT."""

PORTION_BYTES = 256 << 20
"""What one thread checksums of one file."""

_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
log = logging.getLogger("regrow.ckpt")


class NotFiniteError(OSError):
    """The snapshot holds NaN or infinity: it is not written, so it can never be published."""


def checksum(image: memoryview, plan: RankPlan, threads: Executor) -> list[Future[tuple[Chunk, ...]]]:
    """Begin to digest the plan's chunks, a portion of about `PORTION_BYTES` a task; the results are the chunks with block digests.

    A task fails with NotFiniteError when a parameter or a tensor of optimizer state holds NaN or infinity.
    """
    exempt = frozenset(plan.may_be_infinite)
    portions: list[list[Chunk]] = [[]]
    size = 0
    for chunk in plan.chunks:
        if size >= PORTION_BYTES:
            portions.append([])
            size = 0
        portions[-1].append(chunk)
        size += chunk.nbytes
    return [threads.submit(_digest, image, portion, exempt) for portion in portions]


def _digest(image: memoryview, chunks: list[Chunk], exempt: frozenset[str]) -> tuple[Chunk, ...]:
    done: list[Chunk] = []
    for chunk in chunks:
        end = chunk.at + chunk.nbytes
        checked = is_checked(chunk.name) and chunk.name not in exempt
        blocks: list[str] = []
        for at in range(chunk.at, end, BLOCK_BYTES):
            block = image[at : min(at + BLOCK_BYTES, end)]
            blocks.append(xxhash.xxh3_128_hexdigest(block))
            if checked and not is_finite(chunk.dtype, block):
                raise NotFiniteError(errno.EDOM, refusal(chunk.name))
        done.append(msgspec.structs.replace(chunk, blocks=tuple(blocks)))
    return tuple(done)


def gap_digest(image: memoryview, plan: RankPlan) -> str:
    """Digest of all bytes of a file outside chunk data."""
    rest = xxhash.xxh3_128()
    for start, end in gaps(plan):
        rest.update(image[start:end])
    return rest.hexdigest()


def store_shard(
    path: Path,
    image: memoryview,
    plan: RankPlan,
    *,
    rank: int,
    private: dict[str, object],
    threads: Executor,
    recycler: Recycler | None = None,
    into: NodeFile | None = None,
) -> RankManifest:
    """Write `image` to a new file, synced, while other threads checksum it.

    Args:
        path: The file; it must not exist: nothing that is there is ever overwritten.
        image: At least plan.file_bytes, page-aligned memory.
        plan: The image's layout.
        rank: Whose file it is.
        private: Goes into the manifest as it is.
        threads: Where the checksums are computed.
        recycler: Has files of removed checkpoints whose blocks may be used again.
        into: The file of all ranks of the node: the image becomes its part of it, and there is no file at `path`.

    Raises:
        NotFiniteError: a parameter or a tensor of optimizer state holds NaN or infinity. The file has been removed again.
        OSError: storage failed; the file has been removed again if it was ours (that of all ranks is left to the caller).
    """
    image = image[: plan.file_bytes]
    digests = checksum(image, plan, threads)
    try:
        if into is not None:
            into.write(rank, image, recycler)
        else:
            write_file(path, image, over=recycler is not None and recycler.take(path.parent.parent, path, len(image)))
    except OSError as error:
        if error.errno == errno.ENOSPC and recycler is not None:
            recycler.free(path.parent.parent)
        raise
    finally:
        wait(digests)  # nobody reads the arena after we return
    try:
        chunks = tuple(chunk for portion in digests for chunk in portion.result())
    except NotFiniteError:
        if into is None:
            path.unlink(missing_ok=True)
        raise
    manifest = _manifest(path.name, image, plan, chunks, rank=rank, private=private)
    if into is not None:
        return msgspec.structs.replace(manifest, container=into.path.name, container_at=into.start_of(rank))
    if recycler is not None:
        recycler.wrote(path)
    return manifest


def digest_image(image: memoryview, plan: RankPlan, *, rank: int, private: dict[str, object], threads: Executor) -> RankManifest:
    """What `store_shard` says of an image, of one that is not written. Arguments as there.

    Raises:
        NotFiniteError: a parameter or a tensor of optimizer state holds NaN or infinity.
    """
    image = image[: plan.file_bytes]
    digests = checksum(image, plan, threads)
    wait(digests)
    chunks = tuple(chunk for portion in digests for chunk in portion.result())
    return _manifest(shard_name(rank), image, plan, chunks, rank=rank, private=private)


def _manifest(
    name: str, image: memoryview, plan: RankPlan, chunks: tuple[Chunk, ...], *, rank: int, private: dict[str, object]
) -> RankManifest:
    gap = gap_digest(image, plan)
    return RankManifest(
        rank=rank,
        file=name,
        size_bytes=plan.file_bytes,
        digest=file_digest(chunks, gap),
        gap_digest=gap,
        chunks=chunks,
        private=private,
    )


def write_file(path: Path, image: memoryview, *, over: bool = False) -> None:
    """A file with these bytes (a multiple of 4096), synced; O_DIRECT where the file system has it.

    `over`: the file is there, of this size and nobody's; else it is made anew and must not exist.
    """
    faults.point("shard.open")
    handle, is_direct = _open(path, 0 if over else os.O_CREAT | os.O_EXCL)
    try:
        if not over:
            _allocate(handle, len(image))
        _write(handle, image, is_direct=is_direct)
        faults.point("shard.fsync")
        os.fsync(handle)
        faults.point("shard.done")
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


class NodeFile:
    """One file with the images of all ranks of a node, one after the other: few large files for a parallel file system.

    Each rank's thread writes its part; the first one makes the file. Safe for several threads.
    """

    def __init__(self, path: Path, sizes: Mapping[int, int]) -> None:
        """Nothing is made yet.

        Args:
            path: The file; it must not exist.
            sizes: Bytes of each rank's image, multiples of 4096; they lie in the order of the ranks.
        """
        self.path = path
        ranks = sorted(sizes)
        self._starts = dict(zip(ranks, itertools.accumulate((sizes[rank] for rank in ranks), initial=0), strict=False))
        self._num_bytes = sum(sizes.values())
        self._left = set(ranks)
        self._is_made = False
        self._lock = threading.Lock()

    def start_of(self, rank: int) -> int:
        """Where a rank's image begins, in bytes."""
        return self._starts[rank]

    def write(self, rank: int, image: memoryview, recycler: Recycler | None) -> None:
        """Write and sync a rank's image.

        Raises:
            OSError: storage failed. The file is left as it is.
        """
        with self._lock:
            if not self._is_made:
                self._make(recycler)
                self._is_made = True
        handle, is_direct = _open(self.path, 0)
        try:
            _write(handle, image, is_direct=is_direct, start=self._starts[rank])
            faults.point("shard.fsync")
            os.fsync(handle)
            faults.point("shard.done")
        finally:
            os.close(handle)
        with self._lock:
            self._left.discard(rank)
            if not self._left and recycler is not None:
                recycler.wrote(self.path)

    def _make(self, recycler: Recycler | None) -> None:
        if recycler is not None and recycler.take(self.path.parent.parent, self.path, self._num_bytes):
            return
        faults.point("shard.open")
        handle = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            _allocate(handle, self._num_bytes)
            os.ftruncate(handle, self._num_bytes)
        except BaseException:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)


def make_directory(folder: Path, name: str) -> Path:
    """The checkpoint's directory, made if need be, its name synced."""
    directory = folder / name
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        sync_directory(folder)
    return directory


def remove_own(directory: Path, names: list[str]) -> None:
    """Remove files of a save that failed, and the directory when that leaves it empty."""
    for name in names:
        with contextlib.suppress(OSError):
            (directory / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def _open(path: Path, how: int) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CLOEXEC | how
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644), True
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        if how:
            path.unlink(missing_ok=True)  # some file systems create the name and then refuse the flag
        return os.open(path, flags, 0o644), False


def _allocate(handle: int, num_bytes: int) -> None:
    faults.point("shard.allocate")
    try:
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise


def _write(handle: int, image: memoryview, *, is_direct: bool, start: int = 0) -> None:
    at = 0
    while at < len(image):
        faults.point("shard.write")
        try:
            written = os.pwrite(handle, image[at : at + WRITE_BYTES], start + at)
        except OSError as error:
            if not (is_direct and error.errno in _NO_DIRECT):
                raise
            is_direct = _stop_direct(handle)
            continue
        if is_direct and written % PAGE_BYTES:
            written -= written % PAGE_BYTES
            if not written:
                is_direct = _stop_direct(handle)
        at += written


def _stop_direct(handle: int) -> bool:
    import fcntl

    log.info("O_DIRECT is refused here: writing through the page cache")
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False
