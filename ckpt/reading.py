"""Reads verified bytes of shard files: whole blocks, each checked against the manifest before its bytes are used."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Collection, Generator, Mapping
from pathlib import Path

import xxhash

from regrow.ckpt.envelope import ITEM_BYTES
from regrow.ckpt.fastread import SHORT_BYTES, FastRead, Outcome, Request, Runs, Scratches, address_of, fast_read
from regrow.ckpt.layout import PAGE_BYTES
from regrow.ckpt.manifest import RECORD_NAME, Chunk, DamagedCheckpointError, RemovedCheckpointError
from regrow.ckpt.reshard import Piece, blocks_of, byte_runs, strides

DIRECT_BYTES = 8 << 20
"""One read around the page cache at most."""
WINDOW_BYTES = 16 << 20
"""What is read of a chunk at once where only some of each row is wanted (`reshard.split_piece`)."""


class Scratch(threading.local):
    """Memory of one thread that is used again and again: fresh pages cost more than the reading."""

    def __init__(self) -> None:
        self._blocks: mmap.mmap | None = None
        self._direct: mmap.mmap | None = None
        self.holds: tuple[int, int, int] = (-1, 0, 0)
        """What `direct` holds: (descriptor, start, end) in the file."""

    def blocks(self, size: int) -> memoryview:
        """At least `size` bytes; what was in it before is void."""
        if self._blocks is None or len(self._blocks) < size:
            self._blocks = mmap.mmap(-1, size)
        return memoryview(self._blocks)[:size]

    def direct(self) -> memoryview:
        """Page-aligned, for reads with O_DIRECT."""
        if self._direct is None:
            self._direct = mmap.mmap(-1, DIRECT_BYTES)
        return memoryview(self._direct)


class ShardReader:
    """Open shard files of one checkpoint. Safe for several threads."""

    def __init__(
        self,
        directory: Path,
        block_bytes: int,
        memory: Mapping[str, int] | None = None,
        *,
        peers: Collection[str] = (),
        places: Mapping[str, tuple[str, int]] | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            directory: The checkpoint.
            block_bytes: Of its digests.
            memory: Descriptors of files that are in memory too, by name. They are read first; where what they hold is not what
                was committed (an arena that was filled anew), the file is read instead. They stay the caller's.
            peers: Names of those that came from other nodes.
            places: Of the files that lie in another one on storage: its name, and where in it they begin.
        """
        self._directory = directory
        self._places = dict(places or {})
        self._block_bytes = block_bytes
        self._handles: dict[str, int] = {}
        self._direct: dict[str, int] = {}
        self._lock = threading.Lock()
        self._memory = dict(memory or {})
        self._peers = frozenset(peers)
        self._scratch = Scratch()
        self._fast: FastRead | None = fast_read()
        self._scratches = Scratches()
        self._maps: dict[int, tuple[mmap.mmap, int] | None] = {}
        self.bytes_read = 0
        self.bytes_from_memory = 0
        self.bytes_from_peers = 0

    @contextlib.contextmanager
    def reading(self, names: set[str]) -> Generator[None]:
        """Files are open within it.

        Raises:
            DamagedCheckpointError: a file is missing.
        """
        try:
            self.open_files(names)
            with self._fast.guarded() if self._fast is not None else contextlib.nullcontext():
                yield
        finally:
            self.close()

    def open_files(self, names: set[str]) -> None:
        """Open what will be read.

        Raises:
            DamagedCheckpointError: a file is missing.
        """
        for name in sorted(names - set(self._handles) - set(self._memory)):
            self._handles[name] = self._open(name)

    def _open(self, name: str, flags: int = 0) -> int:
        try:
            return os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC | flags)
        except FileNotFoundError as error:
            raise self._removed() or DamagedCheckpointError("is missing", where=self._path(name), hint="use an older checkpoint") from error

    def _path(self, name: str) -> str:
        """Of the file on storage that holds this one, or is it."""
        return str(self._directory / self._places.get(name, (name, 0))[0])

    def _start(self, name: str) -> int:
        """Where it begins there."""
        return self._places.get(name, (name, 0))[1]

    def close(self) -> None:
        """Close all files."""
        for handle in (*self._handles.values(), *self._direct.values()):
            if handle >= 0:
                os.close(handle)
        self._handles.clear()
        self._direct.clear()
        self._maps.clear()

    def takes(self, chunk: Chunk) -> bool:
        """Whether `load_runs` reads this chunk."""
        short = chunk.nbytes % self._block_bytes or self._block_bytes
        return self._fast is not None and short > SHORT_BYTES

    def load_runs(self, file: str, chunk: Chunk, runs: Runs, address: int, *, alone: bool = False) -> None:
        """Put runs of a chunk's data where they belong, every block that they touch verified. Other threads run meanwhile.

        Args:
            file: Name.
            chunk: One that this way `takes`.
            runs: Which bytes, and the steps of the target.
            address: Of the target's first byte.
            alone: No other process of this node reads these bytes, so what is not cached may be read around the page cache.

        Raises:
            DamagedCheckpointError: a block is not what was committed.
            OSError: storage failed.
        """
        digests = bytes.fromhex("".join(chunk.blocks))
        handle = self._memory.get(file)
        if handle is not None:
            outcome, request = self._request((handle, -1), chunk.at, chunk, runs, digests, address)
            if outcome is Outcome.DONE:
                self._count(file, request.bytes_read, in_memory=True)
                return
            with self._lock:
                self._memory.pop(file, None)
        handle = self._handle(file)
        at = self._start(file) + chunk.at
        outcome, request = self._request((handle, self._direct_handle(file) if alone else -1), at, chunk, runs, digests, address)
        self._count(file, request.bytes_read, in_memory=False)
        if outcome is Outcome.FAILED:
            raise OSError(request.error, os.strerror(request.error), self._path(file))
        if outcome is Outcome.TRUNCATED:
            raise self._truncated(file, at + request.block * self._block_bytes)
        if outcome is not Outcome.DONE:
            raise self._altered(file, chunk, request.block)

    def _request(
        self, handles: tuple[int, int], at: int, chunk: Chunk, runs: Runs, digests: bytes, address: int
    ) -> tuple[Outcome, Request]:
        assert self._fast is not None
        handle, direct = handles
        scratch = self._scratches.get(self._block_bytes)
        if direct >= 0:
            scratch.allow_direct()
        base, size = self._map(handle)
        request = Request(handle=handle, direct=direct, map=base, map_bytes=size, target=address, digests=digests)
        request.at, request.chunk_bytes, request.block_bytes = at, chunk.nbytes, self._block_bytes
        request.first, request.last, request.run_bytes, request.axes = runs.first, runs.last, runs.run_bytes, len(runs.sizes)
        request.sizes[: len(runs.sizes)] = runs.sizes
        request.from_steps[: len(runs.sizes)] = runs.from_steps
        request.to_steps[: len(runs.sizes)] = runs.to_steps
        return self._fast.load(request, scratch), request

    def _map(self, handle: int) -> tuple[int | None, int]:
        """Where a whole file is mapped, and its bytes; nowhere when that is not possible."""
        with self._lock:
            if handle not in self._maps:
                try:
                    memory = mmap.mmap(handle, 0, mmap.MAP_SHARED, mmap.PROT_READ)
                    self._maps[handle] = memory, address_of(memory)
                except (OSError, ValueError):
                    self._maps[handle] = None
            found = self._maps[handle]
        return (found[1], len(found[0])) if found is not None else (None, 0)

    def _count(self, file: str, num_bytes: int, *, in_memory: bool) -> None:
        with self._lock:
            if not in_memory:
                self.bytes_read += num_bytes
            elif file in self._peers:
                self.bytes_from_peers += num_bytes
            else:
                self.bytes_from_memory += num_bytes

    def _altered(self, file: str, chunk: Chunk, number: int) -> DamagedCheckpointError:
        what = f"tensor {chunk.name}: block {number} of the chunk at byte {chunk.at} is not what was committed"
        return self._removed() or DamagedCheckpointError(
            what, where=self._path(file), hint="set this checkpoint aside and use an older one"
        )

    def _truncated(self, file: str, at: int) -> DamagedCheckpointError:
        hint = "use an older checkpoint"
        return self._removed() or DamagedCheckpointError(f"is truncated: nothing from byte {at}", where=self._path(file), hint=hint)

    def _removed(self) -> RemovedCheckpointError | None:
        """What it is when the checkpoint has gone: its files may hold a later one's bytes already."""
        if (self._directory / RECORD_NAME).exists():
            return None
        return RemovedCheckpointError(
            "was removed while it was being read", where=str(self._directory), hint="restore the newest checkpoint"
        )

    def read_run(self, file: str, chunk: Chunk, start: int, end: int, target: memoryview, *, alone: bool = False) -> None:
        """Fill `target` with bytes start..end of a chunk's data; blocks that lie whole within go there directly.

        `alone`: no other process of this node reads these bytes, so what is not cached may be read around the page cache.

        Raises:
            DamagedCheckpointError: a block is not what was committed.
        """
        block = self._block_bytes
        for number in range(start // block, (end - 1) // block + 1):
            first, last = number * block, min((number + 1) * block, chunk.nbytes)
            ahead = end - first if alone else 0
            if start <= first and last <= end:
                self._fetch(file, chunk, number, target[first - start : last - start], ahead)
            else:
                scratch = self._scratch.blocks(last - first)
                self._fetch(file, chunk, number, scratch, ahead)
                low, high = max(first, start), min(last, end)
                target[low - start : high - start] = scratch[low - first : high - first]

    def read_strided(self, piece: Piece) -> tuple[memoryview, int, tuple[int, ...]]:
        """The blocks that a piece touches, in a buffer that stands for the chunk's data from some byte on.

        Returns:
            Buffer (this thread's, good until its next read), offset of the piece's first element in it (elements), strides of the
            piece (elements).

        Raises:
            DamagedCheckpointError: a block is not what was committed.
        """
        chunk, block = piece.chunk, self._block_bytes
        item = ITEM_BYTES[chunk.dtype]
        numbers = blocks_of(byte_runs(piece, item), block)
        base = numbers[0] * block
        buffer = self._scratch.blocks(min((numbers[-1] + 1) * block, chunk.nbytes) - base)
        for number in numbers:
            start, end = number * block, min((number + 1) * block, chunk.nbytes)
            self._fetch(piece.file, chunk, number, buffer[start - base : end - base], 0)
        steps = strides(chunk.sizes)
        offset = sum(start * step for start, step in zip(piece.source, steps, strict=True)) - base // item
        return buffer, offset, steps

    def _fetch(self, file: str, chunk: Chunk, number: int, target: memoryview, ahead: int) -> None:
        """Fill `target` with a block: from memory where that is right, else from storage.

        A block at a time: its digest is taken while it is still in the processor's cache.
        """
        at = chunk.at + number * self._block_bytes
        handle = self._memory.get(file)
        if handle is not None:
            if os.preadv(handle, [target], at) == len(target) and xxhash.xxh3_128_hexdigest(target) == chunk.blocks[number]:
                self._count(file, len(target), in_memory=True)
                return
            with self._lock:
                self._memory.pop(file, None)
        self._fill(file, self._start(file) + at, target, ahead)
        if xxhash.xxh3_128_hexdigest(target) != chunk.blocks[number]:
            raise self._altered(file, chunk, number)

    def _handle(self, file: str) -> int:
        """The file on storage; opened now when another thread has just found that memory holds something else."""
        with self._lock:
            if file not in self._handles:
                self._handles[file] = self._open(file)
            return self._handles[file]

    def _fill(self, file: str, at: int, target: memoryview, ahead: int) -> None:
        handle = self._handle(file)
        done = _cached(handle, target, at) if ahead else 0
        if ahead and done < len(target):
            done += self._around_cache(file, at + done, target[done:], ahead - done)
        while done < len(target):
            count = os.preadv(handle, [target[done:]], at + done)
            if count == 0:
                raise self._truncated(file, at + done)
            done += count
        self._count(file, done, in_memory=False)

    def _around_cache(self, file: str, at: int, target: memoryview, ahead: int) -> int:
        """Copy what this thread has read with O_DIRECT, reading up to `ahead` bytes now if need be; bytes copied, 0: not possible."""
        handle = self._direct_handle(file)
        held, start, end = self._scratch.holds
        if held != handle or not start <= at < end:
            start = at - at % PAGE_BYTES
            size = min(DIRECT_BYTES, -(-(at + ahead - start) // PAGE_BYTES) * PAGE_BYTES)
            self._scratch.holds = (-1, 0, 0)
            try:
                count = os.preadv(handle, [self._scratch.direct()[:size]], start) if handle >= 0 else 0
            except OSError:
                return 0  # the way through the page cache says what is wrong
            end = start + count
            if end <= at:
                return 0
            self._scratch.holds = (handle, start, end)
        part = min(len(target), end - at)
        target[:part] = self._scratch.direct()[at - start : at - start + part]
        return part

    def _direct_handle(self, file: str) -> int:
        with self._lock:
            if file not in self._direct:
                try:
                    self._direct[file] = self._open(file, os.O_DIRECT)
                except OSError:
                    self._direct[file] = -1
            return self._direct[file]


def _cached(handle: int, target: memoryview, at: int) -> int:
    """Bytes that the page cache gave at once."""
    try:
        return os.preadv(handle, [target], at, os.RWF_NOWAIT)
    except OSError:
        return 0
