"""State that is not big tensors, as JSON data: nothing that is read back can run code.

JSON's own types stand for themselves. Everything else is an object with one key that starts with "$":
tuples, dicts whose keys are not strings, bytes, sets, non-finite floats, big integers, NumPy and torch values.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Mapping
from typing import Any, cast

from regrow.errors import ConfigurationError, OperationalError

_INT_LIMIT = 1 << 63


def encode(value: Any, where: str) -> Any:
    """Plain data of `value`.

    Args:
        value: State dicts of schedulers, loaders, generators …
        where: Its name, for the error.

    Raises:
        ConfigurationError: something that is not data, with its path and type.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value) if -_INT_LIMIT <= value < _INT_LIMIT else {"$int": str(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(cast("list[Any]", value))]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{where}[{index}]") for index, item in enumerate(cast("tuple[Any, ...]", value))]}
    if isinstance(value, set | frozenset):
        items = sorted(cast("set[Any]", value), key=repr)
        return {"$set": [encode(item, where) for item in items]}
    if isinstance(value, Mapping):
        return _encode_mapping(cast("Mapping[Any, Any]", value), where)
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    return _encode_array(value, where)


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    return {"$dict": [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}


def _encode_array(value: Any, where: str) -> Any:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
        name = str(value.dtype).removeprefix("torch.")
        return {"$tensor": [name, list(value.shape), base64.b64encode(data).decode()]}
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc":
        array = numpy.ascontiguousarray(value)
        kind = "$array" if isinstance(value, numpy.ndarray) else "$scalar"
        return {kind: [array.dtype.str, list(value.shape), base64.b64encode(array.tobytes()).decode()]}
    raise ConfigurationError(
        f"state {where} is a {type(value).__module__}.{type(value).__qualname__}, which is not plain data",
        where="train_state",
        hint="give it state_dict() and load_state_dict() with numbers, strings, lists, dicts and tensors",
    )


def decode(value: Any) -> Any:
    """The inverse of `encode`.

    Raises:
        OperationalError: a tag that this version does not know.
    """
    if isinstance(value, list):
        return [decode(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    if len(fields) != 1 or not next(iter(fields)).startswith("$"):
        return {key: decode(item) for key, item in fields.items()}
    tag, content = next(iter(fields.items()))
    if tag == "$int":
        return int(content)
    if tag == "$float":
        return float(content)
    if tag in ("$tuple", "$set"):
        items = [decode(item) for item in content]
        return tuple(items) if tag == "$tuple" else set(items)
    if tag == "$dict":
        return {decode(key): decode(item) for key, item in content}
    if tag == "$bytes":
        return base64.b64decode(content)
    return _decode_array(tag, content)


def _decode_array(tag: str, content: list[Any]) -> Any:
    if tag == "$tensor":
        import torch

        dtype, shape, data = content
        raw = bytearray(base64.b64decode(data))
        kind = getattr(torch, dtype)
        return torch.frombuffer(raw, dtype=torch.uint8).view(kind).reshape(shape) if raw else torch.empty(shape, dtype=kind)
    if tag in ("$array", "$scalar"):
        import numpy as np

        dtype, shape, data = content
        array = np.frombuffer(bytearray(base64.b64decode(data)), dtype=np.dtype(dtype)).reshape(shape)
        return array if tag == "$array" else array[()]
    raise OperationalError(f"plain state has the tag {tag!r}, which this version does not know", hint="upgrade regrow")
