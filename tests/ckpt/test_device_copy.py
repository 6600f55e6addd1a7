"""The copy from a device, as far as a machine without one allows: what is asked of the CUDA runtime, in which order, and the bytes.

`benchmarks/gpu.sh` runs the same copy on a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from regrow.ckpt import snapshot
from regrow.ckpt.flatten import Item
from regrow.ckpt.layout import Box, lay_out


class OnDevice(torch.Tensor):
    """A tensor that says that it lies on a device. Its bytes are here."""

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


class Runtime:
    """Stands for the CUDA runtime and writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pinned: set[int] = set()
        self.refuses = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - its name
        assert num_bytes % mmap.PAGESIZE == 0
        assert address not in self.pinned, "registered twice"
        self.calls.append(f"pin flags={flags}")
        if self.refuses:
            return 2
        self.pinned.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - its name
        self.pinned.remove(address)
        return 0

    def Stream(self) -> Runtime:  # noqa: N802 - its name
        return self

    def wait_stream(self, other: object) -> None:
        assert other == "training's stream"
        self.calls.append("wait for training's stream")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    @contextlib.contextmanager
    def stream(self, which: object) -> Iterator[None]:
        assert which is self
        self.calls.append("on its own stream")
        yield
        self.calls.append("leave it")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    fake = Runtime()
    monkeypatch.setattr(torch.cuda, "Stream", fake.Stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "training's stream")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    copy = torch.Tensor.copy_

    def noted(self: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        if isinstance(source, OnDevice):
            fake.calls.append(f"copy non_blocking={non_blocking}")
        return copy(self, source.as_subclass(torch.Tensor))

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    return fake


def two_arenas(value: torch.Tensor) -> tuple[snapshot.Snapshotter, list[mmap.mmap], Any]:
    box = Box("w", "float32", tuple(value.shape), (0, 0), tuple(value.shape))
    image = lay_out([box])
    arenas = [mmap.mmap(-1, image.plan.file_bytes) for _ in range(2)]
    made = snapshot.Snapshotter(image, arenas)
    made.bind({"w": Item(box, value)}, late={"w"})
    return made, arenas, image.plan.chunks[0]


def test_one_copy_over_a_stream_of_its_own_into_pinned_memory(runtime: Runtime) -> None:
    """Behind the work that writes the tensors, not waiting for each, and all there when `copy` returns: late or not."""
    value = torch.arange(64.0).reshape(8, 8)
    made, arenas, chunk = two_arenas(value.as_subclass(OnDevice))
    assert runtime.calls == ["pin flags=1"] * 2
    runtime.calls.clear()
    assert made.copy(1) is None, "what is on a device is copied at once"
    copied = ["on its own stream", "copy non_blocking=True", "leave it"]
    assert runtime.calls == ["wait for training's stream", *copied, "synchronize"]
    assert arenas[1][chunk.at : chunk.at + chunk.nbytes] == value.numpy().tobytes()
    assert not any(arenas[0][chunk.at : chunk.at + chunk.nbytes])


def test_arenas_are_given_back_to_the_runtime_when_the_writer_is_lost(runtime: Runtime) -> None:
    made, arenas, _ = two_arenas(torch.ones(8, 8).as_subclass(OnDevice))
    made.bind({"w": Item(Box("w", "float32", (8, 8), (0, 0), (8, 8)), torch.zeros(8, 8).as_subclass(OnDevice))})
    assert len(runtime.pinned) == 2
    del made
    gc.collect()
    assert runtime.pinned == set()
    for arena in arenas:
        arena.close()


def test_memory_that_cannot_be_pinned_is_used_as_it_is(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    runtime.refuses = True
    value = torch.full((8, 8), 3.0)
    made, arenas, chunk = two_arenas(value.as_subclass(OnDevice))
    made.copy(0)
    assert arenas[0][chunk.at : chunk.at + chunk.nbytes] == value.numpy().tobytes()
    assert "not pinned" in caplog.text
