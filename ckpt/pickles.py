"""Writes the few pickle opcodes that other programs' readers expect, without importing what they name.

`torch.load` and `torch.distributed.checkpoint.load` read pickled descriptions. We write them, so that those programs
can read our files, and never read one ourselves: nothing in this package unpickles.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec


class Name(msgspec.Struct, frozen=True):
    """A class or function of another program, by module and name."""

    module: str
    name: str


class Call(msgspec.Struct, frozen=True):
    """The result of calling `function` with positional arguments."""

    function: Name
    arguments: tuple[Any, ...]


class Instance(msgspec.Struct, frozen=True):
    """An object made without its constructor and given `state` (a dict, or what its __setstate__ takes)."""

    kind: Name
    state: Any


class Persistent(msgspec.Struct, frozen=True):
    """A persistent id (torch.save refers to storages that way)."""

    identity: tuple[Any, ...]


def dumps(value: Any) -> bytes:
    """Pickle (protocol 2) of plain data and the marker classes above.

    Raises:
        TypeError: a value of a type that is not written.
    """
    out = bytearray(b"\x80\x02")
    _write(value, out)
    out += b"."
    return bytes(out)


def _write(value: Any, out: bytearray) -> None:
    if value is None:
        out += b"N"
    elif isinstance(value, bool):
        out += b"\x88" if value else b"\x89"
    elif isinstance(value, int):
        _write_int(value, out)
    elif isinstance(value, str):
        data = value.encode()
        out += b"X" + struct.pack("<I", len(data)) + data
    elif isinstance(value, tuple):
        _write_tuple(value, out)
    elif isinstance(value, list):
        out += b"]("
        for item in value:
            _write(item, out)
        out += b"e"
    elif isinstance(value, dict):
        out += b"}("
        for key, item in value.items():
            _write(key, out)
            _write(item, out)
        out += b"u"
    else:
        _write_marker(value, out)


def _write_int(value: int, out: bytearray) -> None:
    if 0 <= value < 1 << 8:
        out += b"K" + bytes((value,))
    elif -(1 << 31) <= value < 1 << 31:
        out += b"J" + struct.pack("<i", value)
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += b"\x8a" + bytes((len(data),)) + data


def _write_tuple(value: tuple[Any, ...], out: bytearray) -> None:
    if not value:
        out += b")"
        return
    out += b"("
    for item in value:
        _write(item, out)
    out += b"t"


def _write_marker(value: Any, out: bytearray) -> None:
    if isinstance(value, Name):
        out += b"c" + value.module.encode() + b"\n" + value.name.encode() + b"\n"
    elif isinstance(value, Call):
        _write(value.function, out)
        _write(value.arguments, out)
        out += b"R"
    elif isinstance(value, Instance):
        _write(value.kind, out)
        out += b")\x81"
        _write(value.state, out)
        out += b"b"
    elif isinstance(value, Persistent):
        _write(value.identity, out)
        out += b"Q"
    else:
        raise TypeError(f"{type(value).__name__} is not written to other programs' pickles")
