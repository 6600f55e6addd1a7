"""Bytes around raw tensor data that make it what `torch.save` writes, so that `torch.load` reads it where it lies.

The archive is a stored (uncompressed) zip: description, version, byte order, then the raw data, which starts at a
multiple of 64 bytes of the file that the archive lies in, then the directory of the zip.
"""

from __future__ import annotations

import math
import struct
import zlib

from regrow.ckpt import pickles
from regrow.ckpt.pickles import Call, Name, Persistent

ALIGNMENT = 64
"""Raw tensor data starts at a multiple of this many bytes in its file."""

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""Bytes of one element by torch's name of the type."""

_STORAGES = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}


def tensor_bytes(dtype: str, sizes: tuple[int, ...]) -> int:
    """Bytes of a dense tensor."""
    return ITEM_BYTES[dtype] * math.prod(sizes)


def wrap(dtype: str, sizes: tuple[int, ...], start: int) -> tuple[bytes, bytes]:
    """The bytes before and after the raw data of a row-major tensor whose archive starts at file offset `start`.

    The data then starts at ``start + len(before)``, a multiple of `ALIGNMENT`.
    """
    entries = [(b"archive/data.pkl", _description(dtype, sizes)), (b"archive/version", b"3\n"), (b"archive/byteorder", b"little")]
    before = bytearray()
    directory = bytearray()
    for name, content in entries:
        directory += _directory_entry(name, zlib.crc32(content), len(content), len(before))
        before += _local_header(name, zlib.crc32(content), len(content), b"") + content
    name = b"archive/data/0"
    nbytes = tensor_bytes(dtype, sizes)
    directory += _directory_entry(name, 0, nbytes, len(before))
    padding = -(start + len(before) + 30 + len(name) + 4) % ALIGNMENT
    before += _local_header(name, 0, nbytes, b"FB" + struct.pack("<H", padding) + b"Z" * padding)
    where = len(before) + nbytes
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 4, 4, len(directory), where, 0)
    return bytes(before), bytes(directory + end)


def _local_header(name: bytes, crc: int, size: int, extra: bytes) -> bytes:
    return struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 20, 0, 0, 0, 0, crc, size, size, len(name), len(extra)) + name + extra


def _directory_entry(name: bytes, crc: int, size: int, offset: int) -> bytes:
    fields = (b"PK\x01\x02", 20, 20, 0, 0, 0, 0, crc, size, size, len(name), 0, 0, 0, 0, 0, offset)
    return struct.pack("<4sHHHHHHIIIHHHHHII", *fields) + name


def _description(dtype: str, sizes: tuple[int, ...]) -> bytes:
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= max(size, 1)
    no_hooks = Call(Name("collections", "OrderedDict"), ())
    if dtype in _STORAGES:
        storage = Persistent(("storage", Name("torch", _STORAGES[dtype]), "0", "cpu", math.prod(sizes)))
        return pickles.dumps(Call(Name("torch._utils", "_rebuild_tensor_v2"), (storage, 0, sizes, tuple(strides), False, no_hooks)))
    storage = Persistent(("storage", Name("torch.storage", "UntypedStorage"), "0", "cpu", tensor_bytes(dtype, sizes)))
    arguments = (storage, 0, sizes, tuple(strides), False, no_hooks, Name("torch", dtype))
    return pickles.dumps(Call(Name("torch._utils", "_rebuild_tensor_v3"), arguments))
