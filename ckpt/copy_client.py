"""Talks to writers of other nodes: sends copies of arenas, fetches parts of files. Blocking; runs in the writer's threads."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable

import msgspec

from regrow import security
from regrow.ckpt.peer_wire import IDLE_SECONDS, PeerSocket, Pull, Pulled, PullFile, Push, Pushed
from regrow.ckpt.protocol import CELL_BYTES, Wanted

_VERIFY_BYTES_PER_SECOND = 200e6
"""A buddy that computes digests more slowly is given up."""
_MEASURE_BYTES = 64 << 20


class SlowPeerError(OSError):
    """Storage is faster than this peer."""


def push(address: str, tls: security.Tls | None, message: Push, image: memoryview, opened: Callable[[PeerSocket], None]) -> str:
    """Send a file's bytes to the buddy; returns why it did not keep them, empty when it holds them verified.

    Args:
        address: host:port of the buddy's writer.
        tls: Of this node.
        message: What is sent.
        image: The bytes.
        opened: Gets the connection, so that somebody else can abort it.

    Raises:
        OSError: it cannot be reached, or went silent.
    """
    peer = PeerSocket.connect(address, tls)
    try:
        opened(peer)
        peer.send(message)
        answer = peer.receive(Pushed)
        if answer.outcome == "refused":
            return answer.reason
        peer.send_bytes(image)
        answer = peer.receive(Pushed, patience_seconds=IDLE_SECONDS + len(image) / _VERIFY_BYTES_PER_SECOND)
        return answer.reason if answer.outcome == "refused" else ""
    finally:
        peer.close()


class Image(msgspec.Struct):
    """Parts of a file in memory at their places; the rest is holes."""

    handle: int
    size_bytes: int
    cells: set[int]

    @classmethod
    def make(cls, size_bytes: int) -> Image:
        """Without any part yet.

        Raises:
            OSError: no memory.
        """
        handle = os.memfd_create("regrow-gathered", os.MFD_CLOEXEC)
        os.truncate(handle, size_bytes)
        return cls(handle, size_bytes, set())


def pull(
    address: str,
    tls: security.Tls | None,
    directory: str,
    files: Iterable[tuple[Wanted, Image]],
    *,
    floor_bytes_per_second: float,
    measured: Callable[[int, float], None] = lambda _bytes, _seconds: None,
) -> set[str]:
    """Fetch the missing parts of files from one writer; returns the names of those that are complete now.

    Args:
        address: host:port of the writer.
        tls: Of this node.
        directory: The checkpoint.
        files: What is wanted, and where it goes.
        floor_bytes_per_second: A peer that is slower is given up: storage is faster. Looked at after 64 MiB.
        measured: Gets the bytes that came and the seconds that they took, also when it ends with an error.

    Raises:
        OSError: it cannot be reached, or went silent. What is complete in the images stays.
    """
    asked = [(wanted, image, ranges_of(set(wanted.cells) - image.cells, wanted.size_bytes)) for wanted, image in files]
    peer = PeerSocket.connect(address, tls)
    done: set[str] = set()
    started, received = time.monotonic(), 0
    try:
        peer.send(Pull(directory=directory, files=tuple(PullFile(name=one.name, ranges=ranges) for one, _, ranges in asked)))
        for wanted, image, ranges in asked:
            answer = peer.receive(Pulled)
            if answer.name != wanted.name:
                raise ConnectionAbortedError(f"a peer sent {answer.name} instead of {wanted.name}")
            if not answer.is_held:
                continue
            with mmap.mmap(image.handle, image.size_bytes) as memory, memoryview(memory) as view:
                for start, end in ranges:
                    peer.receive_into(view[start:end])
                    received += end - start
                    rate = received / max(1e-6, time.monotonic() - started)
                    if received >= _MEASURE_BYTES and rate < floor_bytes_per_second:
                        raise SlowPeerError(f"{rate / 1e6:.0f} MB/s, storage has {floor_bytes_per_second / 1e6:.0f}")
            image.cells.update(wanted.cells)
            done.add(wanted.name)
    except SlowPeerError:
        measured(received, time.monotonic() - started)
        raise
    finally:
        peer.close()
    measured(received, time.monotonic() - started)  # not of one that broke: its last silence says nothing of the next
    return done


def ranges_of(cells: set[int], size_bytes: int) -> tuple[tuple[int, int], ...]:
    """Bytes (start, end) of cells, neighbours together up to 16 MiB, the last one cut at the end of the file."""
    found: list[tuple[int, int]] = []
    for cell in sorted(cells):
        start, end = cell * CELL_BYTES, min((cell + 1) * CELL_BYTES, size_bytes)
        if found and found[-1][1] == start and end - found[-1][0] <= 16 * CELL_BYTES:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return tuple(found)
