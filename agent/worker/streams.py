"""Random streams of a rank, where they outlive its process: a file of its slot, shared memory while the node lives.

Survivors hand the state of the last completed step to a rank that is forked anew, but nobody else has its streams. So each
rank writes them down at each boundary, and the process that takes its slot on the same node goes on with them: a run that
lost a worker in place then draws what a run without a fault draws. Two halves in turn: the last two completed steps are
there, and a half that was being written when the process died is told by its digest.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import msgspec
import xxhash

from regrow.ckpt.rng import Streams

HALF_BYTES = 16_384
"""Twice what the streams of Python, NumPy and torch take."""
_HEAD = struct.Struct("<q8s")  # length, digest


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    step: int
    rank: int
    mesh: str
    streams: msgspec.Raw
    """Encoded by itself: streams mostly rest from one step to the next."""


class StreamFile:
    """The file of one slot of a node, in the hands of the rank that has the slot. The last two steps that were written can be read."""

    def __init__(self, path: Path, *, rank: int, mesh: str) -> None:
        """`mesh`: on another one no rank goes on with a stream, for a rank is another part of the work there."""
        self._rank = rank
        self._mesh = mesh
        self._last: tuple[Streams | None, msgspec.Raw] = (None, msgspec.Raw())
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, 2 * HALF_BYTES)
            self._map = mmap.mmap(descriptor, 2 * HALF_BYTES)
        finally:
            os.close(descriptor)

    def write(self, step: int, streams: Streams) -> None:
        """Over the older half. Streams that are longer than a half (no generator of today has such) are not kept."""
        if streams != self._last[0]:
            self._last = (streams, msgspec.Raw(msgspec.msgpack.encode(streams)))
        data = msgspec.msgpack.encode(_Entry(step, self._rank, self._mesh, self._last[1]))
        if len(data) > HALF_BYTES - _HEAD.size:
            return
        at = step % 2 * HALF_BYTES
        self._map[at + _HEAD.size : at + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._map, at, len(data), xxhash.xxh3_64_digest(data))

    def read(self, step: int) -> Streams | None:
        """What this rank wrote after this step on this mesh, in whatever process; None: it is not there, or not whole."""
        at = step % 2 * HALF_BYTES
        length, digest = _HEAD.unpack_from(self._map, at)
        if not 0 < length <= HALF_BYTES - _HEAD.size:
            return None
        data = self._map[at + _HEAD.size : at + _HEAD.size + length]
        if xxhash.xxh3_64_digest(data) != digest:
            return None
        found = msgspec.msgpack.decode(data, type=_Entry)
        if (found.step, found.rank, found.mesh) != (step, self._rank, self._mesh):
            return None
        return msgspec.msgpack.decode(found.streams, type=Streams)
