"""The copy: from live tensors into an arena that is the image of this rank's file. One copy, no allocation."""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from regrow.ckpt import streaming
from regrow.ckpt.flatten import Item
from regrow.ckpt.layout import Image, gaps
from regrow.ckpt.manifest import Chunk

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for whichever device of the process copies."""
PORTION_BYTES = 8 << 20
"""What one of several threads that copy takes at once; with a late copy, also the one that waits for it."""
log = logging.getLogger("regrow.ckpt.snapshot")


class Slot:
    """One chunk of the image: its place in each arena and the part of the live tensor that goes there."""

    __slots__ = ("chunk", "places", "source")

    def __init__(self, chunk: Chunk, places: list[torch.Tensor], source: torch.Tensor) -> None:
        self.chunk = chunk
        self.places = places
        self.source = source


class Share:
    """Slots that are copied together: plain memory by one table for each arena, the rest by torch."""

    def __init__(self, slots: list[Slot], num_arenas: int) -> None:
        self._copier = streaming.copier()
        plain = [slot for slot in slots if self._copier is not None and _is_plain(slot.source)]
        taken = {id(slot) for slot in plain}
        self.slots = [slot for slot in slots if id(slot) not in taken]
        self._tables = [
            streaming.table([row for slot in plain for row in _rows(slot, number)]) for number in range(num_arenas if plain else 0)
        ]
        self._plain = plain  # whose addresses the tables hold
        self._cuts = _cuts([int(size) for size in self._tables[0][:, 2]]) if self._tables else []
        self.num_bytes = sum(slot.chunk.nbytes for slot in slots)

    def copy(self, arena: int, threads: int = 1) -> None:
        """Into the arena, plain memory by so many threads; device tensors on the current stream, without waiting."""
        numbers = itertools.count()
        started: list[threading.Thread] = []
        problems: list[BaseException] = []
        try:
            for _ in range(min(threads, len(self._cuts)) - 1):
                one = threading.Thread(target=self._copy_beside, args=(arena, numbers, problems))
                one.start()
                started.append(one)
        except RuntimeError:  # no more threads may be started here: with fewer, then
            pass
        try:
            self._copy_cuts(arena, numbers)
        finally:
            for one in started:
                one.join()
        if problems:
            raise problems[0]
        for slot in self.slots:
            slot.places[arena].copy_(slot.source, non_blocking=slot.source.is_cuda)

    def _copy_beside(self, arena: int, numbers: Iterator[int], problems: list[BaseException]) -> None:
        try:
            self._copy_cuts(arena, numbers)
        except BaseException as error:  # noqa: BLE001  # whoever joins raises it
            problems.append(error)

    def _copy_cuts(self, arena: int, numbers: Iterator[int]) -> None:
        for number in numbers:
            if number >= len(self._cuts):
                return
            self.copy_some(arena, number)

    def copy_some(self, arena: int, number: int) -> bool:
        """The same in portions, from number 0 on; False: there is none of this number."""
        if number < len(self._cuts):
            start, end = self._cuts[number]
            if self._copier is not None:
                self._copier(self._tables[arena][start:end])
            return True
        for slot in self.slots if number == len(self._cuts) else ():
            slot.places[arena].copy_(slot.source)
        return number == len(self._cuts)


class Late:
    """The rest of a snapshot, copied by a thread while the next forward and backward run, and in the end by whoever waits for it."""

    def __init__(self, share: Share, arena: int) -> None:
        self._share = share
        self._arena = arena
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._copy, name="late-copy", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while self._share.copy_some(self._arena, next(self._numbers)):
            pass

    def join(self) -> None:
        """Copy what nobody has begun with; returns when all bytes are in the arena."""
        self._copy()
        self._thread.join()


class Snapshotter:
    """Arenas of one layout with views into them, made once; a snapshot then only copies."""

    def __init__(self, image: Image, arenas: list[mmap.mmap], *, threads: int = 1) -> None:
        """`threads` copy at once where a snapshot is not late."""
        self._image = image
        self._threads = threads
        self._raw = [torch.frombuffer(arena, dtype=torch.uint8, count=image.plan.file_bytes) for arena in arenas]
        for raw in self._raw:
            for start, end in gaps(image.plan):
                raw[start:end] = 0
            for at, data in image.constants:
                raw[at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._places = [[_view(raw, chunk) for raw in self._raw] for chunk in image.plan.chunks]
        self._now = self._late = Share([], 0)
        self._stream: torch.cuda.Stream | None = None

    def bind(self, items: Mapping[str, Item], late: Collection[str] = ()) -> None:
        """Say which live tensors the chunks come from. Again when tensor objects were replaced.

        `late`: names of those that only the optimizer changes: they may be copied after `copy` has returned.
        """
        slots = [
            Slot(chunk, places, part_of(items[chunk.name], chunk))
            for chunk, places in zip(self._image.plan.chunks, self._places, strict=True)
            if chunk.nbytes
        ]
        can_wait = [slot for slot in slots if slot.chunk.name in late and _is_plain(slot.source)]
        taken = {id(slot) for slot in can_wait}
        self._late = Share(can_wait, len(self._raw))
        self._now = Share([slot for slot in slots if id(slot) not in taken], len(self._raw))
        if self._stream is None and any(slot.source.is_cuda for slot in slots):
            self._stream = torch.cuda.Stream()
            for raw in self._raw:
                _pin(raw)

    @torch.no_grad()
    def copy(self, arena: int) -> Late | None:
        """Fill an arena from the bound tensors; returns what is still being copied, None when all bytes are there.

        Device tensors go over a stream of their own into pinned memory, and are waited for.
        """
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            self._now.copy(arena, self._threads)
        if stream is not None:
            stream.synchronize()
        return Late(self._late, arena) if self._late.num_bytes else None


def _rows(slot: Slot, arena: int) -> list[tuple[int, int, int]]:
    """A slot in pieces of `PORTION_BYTES` at most, so that several threads can share one large tensor."""
    to, source, size = slot.places[arena].data_ptr(), slot.source.data_ptr(), slot.chunk.nbytes
    return [(to + at, source + at, min(PORTION_BYTES, size - at)) for at in range(0, size, PORTION_BYTES)]


def _cuts(sizes: list[int]) -> list[tuple[int, int]]:
    """(start, end) of successive pieces of about `PORTION_BYTES`."""
    cuts: list[tuple[int, int]] = []
    start, held = 0, 0
    for index, size in enumerate(sizes):
        held += size
        if held >= PORTION_BYTES or index == len(sizes) - 1:
            cuts.append((start, index + 1))
            start, held = index + 1, 0
    return cuts


def _is_plain(source: torch.Tensor) -> bool:
    return source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg()


def _pin(raw: torch.Tensor) -> None:
    """Page-lock an arena for all devices of this process, until its tensor goes. Without it copies are right and slower.

    A mapping that goes while it is registered leaves its addresses taken: the arenas of the next writer could not be registered there.
    """
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(raw.data_ptr(), raw.numel(), _PORTABLE))
    if code != 0:
        log.warning("arena not pinned code=%d bytes=%d", code, raw.numel())
        return
    weakref.finalize(raw, _unpin, runtime, raw.data_ptr()).atexit = False  # then the driver does it


def _unpin(runtime: Any, address: int) -> None:
    code = int(runtime.cudaHostUnregister(address))
    if code != 0:
        log.warning("arena not unpinned code=%d", code)


def part_of(item: Item, chunk: Chunk) -> torch.Tensor:
    """The part of the live local tensor that a chunk stores."""
    part = item.local
    for axis, (at, size, held) in enumerate(zip(chunk.offsets, chunk.sizes, item.box.offsets, strict=True)):
        part = part.narrow(axis, at - held, size)
    return part


def _view(raw: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    data = raw[chunk.at : chunk.at + chunk.nbytes]
    return data.view(getattr(torch, chunk.dtype)).view(chunk.sizes)
