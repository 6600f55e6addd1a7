"""Random generators of one rank as plain data: one record per global rank and generator, no pickle.

The record is JSON: numbers, strings, lists. Bytes are base64, integers over 64 bits are hexadecimal strings.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from regrow.errors import OperationalError

VERSION = 1

Generators = Mapping[str, torch.Generator | np.random.Generator | random.Random]
"""Generators of the script's own, by name."""


def capture(named: Generators | None = None) -> dict[str, Any]:
    """State of Python's, NumPy's and torch's global generators, of this rank's GPU, and of the named ones."""
    record: dict[str, Any] = {
        "version": VERSION,
        "python": _python_state(random.getstate()),
        "numpy": _numpy_state(np.random.get_state(legacy=False)),
        "torch": _bytes(torch.get_rng_state()),
        "named": {name: _capture_one(generator) for name, generator in (named or {}).items()},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        record["cuda"] = _bytes(torch.cuda.get_rng_state())
    return record


def restore(record: Mapping[str, Any], named: Generators | None = None) -> None:
    """Set the generators to a record of `capture`.

    Raises:
        OperationalError: a record of another version, or without one of the `named` generators.
    """
    if record.get("version") != VERSION:
        raise OperationalError(
            f"random generator record of version {record.get('version')}", where="checkpoint", hint="use the Regrow that wrote it"
        )
    missing = sorted(set(named or {}) - set(record["named"]))
    if missing:
        raise OperationalError(
            f"no saved state of the generators {', '.join(missing)}",
            where="checkpoint",
            hint="pass the generators that the saving run passed",
        )
    random.setstate(_python_tuple(record["python"]))
    np.random.set_state(_numpy_dict(record["numpy"]))
    torch.set_rng_state(_tensor(record["torch"]))
    if "cuda" in record and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(record["cuda"]))
    for name, generator in (named or {}).items():
        _restore_one(generator, record["named"][name])


def _capture_one(generator: torch.Generator | np.random.Generator | random.Random) -> Any:
    if isinstance(generator, torch.Generator):
        return _bytes(generator.get_state())
    if isinstance(generator, np.random.Generator):
        return _numpy_state(generator.bit_generator.state)
    return _python_state(generator.getstate())


def _restore_one(generator: torch.Generator | np.random.Generator | random.Random, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _numpy_dict(state)
    else:
        generator.setstate(_python_tuple(state))


def _python_state(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "words": list(words), "gauss": gauss}


def _python_tuple(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return (state["version"], tuple(state["words"]), state["gauss"])


def _numpy_state(value: Any) -> Any:
    """A bit generator's state dictionary with arrays as {"dtype", "base64"} and wide integers as {"hex"}."""
    if isinstance(value, Mapping):
        return {str(key): _numpy_state(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "base64": base64.b64encode(value.tobytes()).decode()}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and value.bit_length() > 53:
        return {"hex": f"{value:x}"}
    return value


def _numpy_dict(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "base64" in value:
        return np.frombuffer(base64.b64decode(value["base64"]), dtype=value["dtype"]).copy()
    if "hex" in value:
        return int(value["hex"], 16)
    return {key: _numpy_dict(entry) for key, entry in value.items()}


def _bytes(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
