"""Random state of one rank, generator by generator, as data."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from regrow.ckpt import plain


def capture(generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """State of Python's, NumPy's (when loaded), torch's CPU and device generators and of `generators`, plain."""
    state: dict[str, Any] = {"python": plain.encode(random.getstate(), "rng.python"), "torch": _tensor(torch.get_rng_state())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = plain.encode(numpy.random.get_state(), "rng.numpy")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _tensor(torch.cuda.get_rng_state())
    state["named"] = {name: _tensor(generator.get_state()) for name, generator in generators.items()}
    return state


def restore(state: Mapping[str, Any], generators: Mapping[str, torch.Generator]) -> None:
    """Put every generator where it was."""
    random.setstate(plain.decode(state["python"]))
    torch.set_rng_state(plain.decode(state["torch"]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(plain.decode(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(plain.decode(state["cuda"]))
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


def _tensor(value: torch.Tensor) -> Any:
    return plain.encode(value, "rng")
