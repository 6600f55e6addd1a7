"""Random state of one rank: the one way to take it and to put it back, and its form in a checkpoint."""

from __future__ import annotations

import functools
import logging
import random
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
import xxhash

from regrow.ckpt import peek, plain

_log = logging.getLogger("regrow.ckpt")

_Numpy = tuple[str, bytes, int, int, float]

_python = peek.PythonStream()


class Streams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """States of the global generators of a process at one moment. None: there was none, or it is left alone."""

    python: peek.PythonState | None = None
    torch: bytes
    numpy: _Numpy | None = None
    cuda: bytes | None = None

    @property
    def torch_state(self) -> torch.Tensor:
        """Of torch's generator on the CPU."""
        return _tensor_of(self.torch)

    @property
    def cuda_state(self) -> torch.Tensor | None:
        """Of the device's generator."""
        return None if self.cuda is None else _tensor_of(self.cuda)


def now(device: torch.device | None = None) -> Streams:
    """As they are; `device`: whose generator is meant, None: the current one's, where there is one."""
    return Streams(
        python=_python.state(),
        torch=torch.get_rng_state().numpy().tobytes(),
        numpy=_numpy_now(),
        cuda=torch.cuda.get_rng_state(device or "cuda").numpy().tobytes() if torch.cuda.is_initialized() else None,
    )


def _numpy_now() -> _Numpy | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    found = numpy.random.get_state(legacy=False)  # half of the time that the older form takes
    if found["bit_generator"] != "MT19937":
        _warn_of_generator(found["bit_generator"])
        return None
    words = found["state"]
    return found["bit_generator"], words["key"].tobytes(), int(words["pos"]), int(found["has_gauss"]), float(found["gauss"])


@functools.cache
def _warn_of_generator(name: str) -> None:
    _log.warning("numpy.random draws from %s, which is not kept: pass a generator of your own in extra= where its place matters", name)


def put_back(streams: Streams, device: torch.device | None = None) -> None:
    """Let the generators of this process go on from there."""
    if streams.python is not None:
        random.setstate(streams.python)
    torch.set_rng_state(streams.torch_state)
    if streams.numpy is not None and "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        name, keys, *rest = streams.numpy
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
    state = streams.cuda_state
    if state is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state, device or "cuda")


def capture(generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """State of Python's, NumPy's (when loaded), torch's CPU and device generators and of `generators`, plain."""
    found = now()
    state: dict[str, Any] = {"python": plain.encode(found.python, "rng.python"), "torch": _encoded(found.torch_state)}
    if found.numpy is not None:
        name, keys, *rest = found.numpy
        array = sys.modules["numpy"].frombuffer(keys, dtype="uint32")
        state["numpy"] = plain.encode((name, array, *rest), "rng.numpy")
    if found.cuda_state is not None:
        state["cuda"] = _encoded(found.cuda_state)
    state["named"] = {name: _encoded(generator.get_state()) for name, generator in generators.items()}
    return state


def restore(state: Mapping[str, Any], generators: Mapping[str, torch.Generator]) -> None:
    """Put every generator where it was."""
    numpy: _Numpy | None = None
    if "numpy" in state:
        name, keys, *rest = plain.decode(state["numpy"])
        numpy = (name, keys.tobytes(), *rest)
    cuda = _bytes_of(plain.decode(state["cuda"])) if "cuda" in state else None
    torch_state = _bytes_of(plain.decode(state["torch"]))
    put_back(Streams(python=plain.decode(state["python"]), torch=torch_state, numpy=numpy, cuda=cuda))
    for name, generator in generators.items():
        if name in state["named"]:
            generator.set_state(plain.decode(state["named"][name]))


def derive(state: Mapping[str, Any], *, step: int, rank: int, world_size: int, generators: Mapping[str, torch.Generator]) -> None:
    """Seed every generator for another mesh, where no rank continues a saved stream.

    The rule: seed = xxh3_64("regrow-rng/<name>/<step>/<world size>/<rank>") with, as its seed, xxh3_64 of rank 0's
    saved torch state. The same checkpoint on the same new mesh gives the same streams, and no two ranks share one.
    """
    base = xxhash.xxh3_64_intdigest(state["torch"]["$tensor"][2].encode())

    def seed(name: str, bits: int) -> int:
        return xxhash.xxh3_64_intdigest(f"regrow-rng/{name}/{step}/{world_size}/{rank}".encode(), seed=base) % (1 << bits)

    random.seed(seed("python", 63))
    torch.manual_seed(seed("torch", 63))  # CPU and every CUDA device
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed("numpy", 32))
    for name, generator in generators.items():
        generator.manual_seed(seed(f"named.{name}", 63))


def _encoded(value: torch.Tensor) -> Any:
    return plain.encode(value, "rng")


def _bytes_of(value: torch.Tensor) -> bytes:
    return value.numpy().tobytes()


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
