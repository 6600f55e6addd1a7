"""The copy: from live tensors into an arena that is the image of this rank's file. One copy, no allocation."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Mapping
from typing import Any

import torch

from regrow.ckpt.flatten import Item
from regrow.ckpt.layout import Image, gaps
from regrow.ckpt.manifest import Chunk

log = logging.getLogger("regrow.ckpt.snapshot")


class Slot:
    """One chunk of the image: its place in each arena and the part of the live tensor that goes there."""

    __slots__ = ("chunk", "places", "source")

    def __init__(self, chunk: Chunk, places: list[torch.Tensor], source: torch.Tensor) -> None:
        self.chunk = chunk
        self.places = places
        self.source = source


class Snapshotter:
    """Arenas of one layout with views into them, made once; a snapshot then only copies."""

    def __init__(self, image: Image, arenas: list[mmap.mmap]) -> None:
        self._image = image
        self._raw = [torch.frombuffer(arena, dtype=torch.uint8, count=image.plan.file_bytes) for arena in arenas]
        for raw in self._raw:
            for start, end in gaps(image.plan):
                raw[start:end] = 0
            for at, data in image.constants:
                raw[at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._places = [[_view(raw, chunk) for raw in self._raw] for chunk in image.plan.chunks]
        self._slots: list[Slot] = []
        self._stream: torch.cuda.Stream | None = None

    def bind(self, items: Mapping[str, Item]) -> None:
        """Say which live tensors the chunks come from. Again when tensor objects were replaced."""
        self._slots = [
            Slot(chunk, places, part_of(items[chunk.name], chunk))
            for chunk, places in zip(self._image.plan.chunks, self._places, strict=True)
            if chunk.nbytes
        ]
        if self._stream is None and any(slot.source.is_cuda for slot in self._slots):
            self._stream = torch.cuda.Stream()
            for raw in self._raw:
                _pin(raw)

    @torch.no_grad()
    def copy(self, arena: int) -> int:
        """Fill an arena from the bound tensors; returns the bytes copied.

        Device tensors go over a stream of their own into pinned memory; the call returns when all bytes are there.
        """
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        copied = 0
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            for slot in self._slots:
                slot.places[arena].copy_(slot.source, non_blocking=slot.source.is_cuda)
                copied += slot.chunk.nbytes
        if stream is not None:
            stream.synchronize()
        return copied


def _pin(raw: torch.Tensor) -> None:
    """Page-lock an arena for the device. Without it copies are right and slower."""
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(raw.data_ptr(), raw.numel(), 0))
    if code != 0:
        log.warning("arena not pinned code=%d bytes=%d", code, raw.numel())


def part_of(item: Item, chunk: Chunk) -> torch.Tensor:
    """The part of the live local tensor that a chunk stores."""
    part = item.local
    for axis, (at, size, held) in enumerate(zip(chunk.offsets, chunk.sizes, item.box.offsets, strict=True)):
        part = part.narrow(axis, at - held, size)
    return part


def _view(raw: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    data = raw[chunk.at : chunk.at + chunk.nbytes]
    return data.view(getattr(torch, chunk.dtype)).view(chunk.sizes)
