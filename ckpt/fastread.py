"""The fast way from shard files into tensors: read, checked and put in place by a few lines of C (`fast_read.c`), compiled at first use.

Without a compiler, and for what it does not take, `ShardReader`'s own way is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import sys
import threading
from collections.abc import Generator
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from regrow.ckpt import native
from regrow.ckpt.reshard import Piece, strides
from regrow.errors import OperationalError

SOURCE = Path(__file__).with_name("fast_read.c")
OFF_VARIABLE = "REGROW_NO_FAST_READ"
"""Set to 1: Python reads."""
MAX_AXES = 8
SHORT_BYTES = 240
"""Blocks up to this have another kind of digest, which the C code does not know."""
MIN_RUN_BYTES = 64
"""Shorter runs are faster by a strided copy of torch's."""
WINDOW_BYTES = 8 << 20
"""One read around the page cache at most."""
_ROOM = 64
log = logging.getLogger("regrow.ckpt.fastread")


class Outcome(IntEnum):
    """What became of a request; the numbers of the C source."""

    DONE = 0
    DIFFERENT = 1
    TRUNCATED = 2
    FAILED = 3
    TOO_SHORT = 4


class Request(ctypes.Structure):
    """`struct request` of the C source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("handle", "direct")),
        ("map", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("map_bytes", "at", "chunk_bytes", "block_bytes")),
        ("digests", ctypes.c_char_p),
        ("target", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("first", "last", "run_bytes", "axes")),
        *((name, ctypes.c_int64 * MAX_AXES) for name in ("sizes", "from_steps", "to_steps")),
        *((name, ctypes.c_int64) for name in ("map_low", "map_high", "bytes_read", "block", "error")),
    )
    bytes_read: int
    block: int
    error: int


class Scratch(ctypes.Structure):
    """`struct scratch` of the C source, with the memory that it points to."""

    _fields_ = (
        ("block", ctypes.c_void_p),
        ("window", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("window_bytes", "held_handle", "held_start", "held_end")),
    )

    def __init__(self, block_bytes: int) -> None:
        self._memory = mmap.mmap(-1, _ROOM + block_bytes)
        self._aside: mmap.mmap | None = None
        super().__init__(block=address_of(self._memory), held_handle=-1)

    def allow_direct(self) -> None:
        """Make the memory for reads around the page cache."""
        if self._aside is None:
            self._aside = mmap.mmap(-1, WINDOW_BYTES)
            self.window, self.window_bytes = address_of(self._aside), WINDOW_BYTES


class Scratches(threading.local):
    """One scratch for each thread, used again and again: fresh pages cost more than the reading."""

    def __init__(self) -> None:
        self._scratch: Scratch | None = None
        self._block_bytes = 0

    def get(self, block_bytes: int) -> Scratch:
        """This thread's."""
        if self._scratch is None or self._block_bytes != block_bytes:
            self._scratch, self._block_bytes = Scratch(block_bytes), block_bytes
        return self._scratch


class Runs(msgspec.Struct, frozen=True):
    """The bytes of a piece as runs of equal length: offsets and steps in the chunk's data and in the target."""

    first: int
    last: int
    run_bytes: int
    sizes: tuple[int, ...]
    from_steps: tuple[int, ...]
    to_steps: tuple[int, ...]


class FastRead:
    """The compiled library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._load: Any = library.regrow_load
        self._load.argtypes = (ctypes.POINTER(Request), ctypes.POINTER(Scratch))
        self._load.restype = ctypes.c_int
        self._guard: Any = library.regrow_guard
        self._guard.argtypes, self._guard.restype = (ctypes.c_int,), None
        self._guarding = threading.Lock()
        self._num_guarded = 0
        self._digest: Any = library.regrow_digest
        self._digest.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p)
        self._digest.restype = None

    @contextlib.contextmanager
    def guarded(self) -> Generator[None]:
        """Within it a file that is truncated while it is read is an outcome, and not a signal that ends the process."""
        with self._guarding:
            self._num_guarded += 1
            if self._num_guarded == 1:
                self._guard(1)
        try:
            yield
        finally:
            with self._guarding:
                self._num_guarded -= 1
                if self._num_guarded == 0:
                    self._guard(0)

    def load(self, request: Request, scratch: Scratch) -> Outcome:
        """Carry out a request; other threads run meanwhile."""
        return Outcome(self._load(ctypes.byref(request), ctypes.byref(scratch)))

    def digest(self, data: bytes) -> str:
        """xxh3_128 of more than `SHORT_BYTES` bytes."""
        found = ctypes.create_string_buffer(16)
        self._digest(data, len(data), found)
        return found.raw.hex()


@functools.cache
def fast_read() -> FastRead | None:
    """The library; None when there is no compiler, its digests are not right on this machine, or `REGROW_NO_FAST_READ=1`."""
    if os.environ.get(OFF_VARIABLE) == "1" or sys.byteorder != "little" or mmap.PAGESIZE != 4096:
        return None
    try:
        found = FastRead(native.load(SOURCE))
    except (OSError, OperationalError) as error:
        log.info("checkpoints are read by Python: %s", error)
        return None
    sample = bytes(index * 37 % 251 for index in range(5000))
    for size in (SHORT_BYTES + 1, 1024, 1025, 4999):
        if found.digest(sample[:size]) != xxhash.xxh3_128_hexdigest(sample[:size]):
            log.warning("checkpoints are read by Python: the compiled digest is wrong here")
            return None
    return found


def runs_of(piece: Piece, item: int, to_steps: tuple[int, ...]) -> Runs | None:
    """A piece as runs, None where this way does not take it.

    Args:
        piece: What is wanted.
        item: Bytes of an element.
        to_steps: Strides of the target in elements.
    """
    steps = strides(piece.chunk.sizes)
    axes = [axis for axis, size in enumerate(piece.sizes) if size != 1]
    run = 1
    while axes and steps[axes[-1]] == run == to_steps[axes[-1]]:
        run *= piece.sizes[axes.pop()]
    run_bytes = run * item
    if len(axes) > MAX_AXES or (axes and run_bytes < MIN_RUN_BYTES):
        return None
    first = sum(start * step for start, step in zip(piece.source, steps, strict=True))
    last = first + sum((size - 1) * step for size, step in zip(piece.sizes, steps, strict=True)) + 1
    return Runs(
        first * item,
        last * item,
        run_bytes,
        tuple(piece.sizes[axis] for axis in axes),
        tuple(steps[axis] * item for axis in axes),
        tuple(to_steps[axis] * item for axis in axes),
    )


def address_of(memory: mmap.mmap) -> int:
    """Where mapped memory lies; it is the caller's to keep it alive."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
