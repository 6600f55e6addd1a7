"""Reads verified bytes of shard files: whole blocks, each checked against the manifest before its bytes are used."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import xxhash

from regrow.ckpt.envelope import ITEM_BYTES
from regrow.ckpt.manifest import Chunk, DamagedCheckpointError
from regrow.ckpt.reshard import Piece, blocks_of, byte_runs, strides

READ_BYTES = 4 << 20
"""One read call at most."""


class ShardReader:
    """Open shard files of one checkpoint. Safe for several threads after `open_files`."""

    def __init__(self, directory: Path, block_bytes: int, memory: Mapping[str, int] | None = None) -> None:
        """Nothing is opened yet.

        Args:
            directory: The checkpoint.
            block_bytes: Of its digests.
            memory: Descriptors of files that are in memory too, by name. They are read first; where what they hold is not what
                was committed (an arena that was filled anew), the file is read instead. They stay the caller's.
        """
        self._directory = directory
        self._block_bytes = block_bytes
        self._handles: dict[str, int] = {}
        self._lock = threading.Lock()
        self._memory = dict(memory or {})
        self.bytes_read = 0
        self.bytes_from_memory = 0

    def open_files(self, names: set[str]) -> None:
        """Open what will be read.

        Raises:
            DamagedCheckpointError: a file is missing.
        """
        for name in sorted(names - set(self._handles) - set(self._memory)):
            self._handles[name] = self._open(name)

    def _open(self, name: str) -> int:
        try:
            return os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise DamagedCheckpointError("is missing", where=str(self._directory / name), hint="use an older checkpoint") from error

    def close(self) -> None:
        """Close all files."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def read_run(self, file: str, chunk: Chunk, start: int, end: int, target: memoryview) -> None:
        """Fill `target` with bytes start..end of a chunk's data; blocks that lie whole within go there directly.

        Raises:
            DamagedCheckpointError: a block is not what was committed.
        """
        block = self._block_bytes
        at = start
        while at < end:
            number = at // block
            block_start, block_end = number * block, min((number + 1) * block, chunk.nbytes)
            if at == block_start and block_end <= end:
                last = min(at + READ_BYTES, end)
                last = chunk.nbytes if last == chunk.nbytes else last - last % block
                part = target[at - start : last - start]
                self._fetch(file, chunk, number, part)
                at = last
            else:
                scratch = memoryview(bytearray(block_end - block_start))
                self._fetch(file, chunk, number, scratch)
                last = min(block_end, end)
                target[at - start : last - start] = scratch[at - block_start : last - block_start]
                at = last

    def read_strided(self, piece: Piece) -> tuple[bytearray, int, tuple[int, ...]]:
        """The blocks that a piece touches, in a buffer that stands for the chunk's data from some byte on.

        Returns:
            Buffer, offset of the piece's first element in it (elements), strides of the piece (elements).

        Raises:
            DamagedCheckpointError: a block is not what was committed.
        """
        chunk, block = piece.chunk, self._block_bytes
        item = ITEM_BYTES[chunk.dtype]
        numbers = blocks_of(byte_runs(piece, item), block)
        base = numbers[0] * block
        buffer = bytearray(min((numbers[-1] + 1) * block, chunk.nbytes) - base)
        view = memoryview(buffer)
        first = numbers[0]
        for position, number in enumerate(numbers):
            following = numbers[position + 1] if position + 1 < len(numbers) else None
            if following == number + 1 and (number + 1 - first) * block < READ_BYTES:
                continue
            start, end = first * block, min((number + 1) * block, chunk.nbytes)
            part = view[start - base : end - base]
            self._fetch(piece.file, chunk, first, part)
            first = following if following is not None else first
        steps = strides(chunk.sizes)
        offset = sum(start * step for start, step in zip(piece.source, steps, strict=True)) - base // item
        return buffer, offset, steps

    def _fetch(self, file: str, chunk: Chunk, first: int, target: memoryview) -> None:
        """Fill `target` with whole blocks from number `first` on: from memory where that is right, else from storage."""
        at = chunk.at + first * self._block_bytes
        handle = self._memory.get(file)
        if handle is not None:
            if os.preadv(handle, [target], at) == len(target) and self._wrong_block(chunk, first, target) is None:
                with self._lock:
                    self.bytes_from_memory += len(target)
                return
            with self._lock:
                self._memory.pop(file, None)
                if file not in self._handles:
                    self._handles[file] = self._open(file)
        self._fill(file, at, target)
        number = self._wrong_block(chunk, first, target)
        if number is not None:
            raise DamagedCheckpointError(
                f"tensor {chunk.name}: block {number} of the chunk at byte {chunk.at} is not what was committed",
                where=str(self._directory / file),
                hint="set this checkpoint aside and use an older one",
            )

    def _fill(self, file: str, at: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self._handles[file], [target[done:]], at + done)
            if count == 0:
                where = str(self._directory / file)
                raise DamagedCheckpointError(f"ends at byte {at + done}: truncated", where=where, hint="use an older checkpoint")
            done += count
        with self._lock:
            self.bytes_read += done

    def _wrong_block(self, chunk: Chunk, first: int, data: memoryview) -> int | None:
        block = self._block_bytes
        for index in range(0, len(data), block):
            number = first + index // block
            if xxhash.xxh3_128_hexdigest(data[index : index + block]) != chunk.blocks[number]:
                return number
        return None
