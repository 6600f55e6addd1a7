"""Compiles the fake library at first use, with the machine's C compiler or the one in the ziglang package."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from regrow.compiling import cache_folder, compile_library

SOURCE = Path(__file__).with_name("fake_nvml.c")
NAME = "libnvidia-ml.so.1"
_FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Wno-missing-field-initializers", f"-Wl,-soname,{NAME}", "-pthread")


def library(*, missing: Iterable[str] = (), cache: Path | None = None) -> Path:
    """Path of the compiled library; compiled when it is not in the cache yet.

    Args:
        missing: names of functions that the library must not have, as in a driver that is older than them.
        cache: folder for the result; default: regrow/fake_nvml in the user's cache folder.

    Raises:
        OperationalError: no compiler, or the compiler failed.
    """
    hidden = sorted(set(missing))
    key = hashlib.sha256(SOURCE.read_bytes() + repr((_FLAGS, hidden)).encode()).hexdigest()[:16]
    folder = (cache or cache_folder("fake_nvml")) / key
    target = folder / NAME
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = "{ local: " + " ".join(f"{name};" for name in hidden) + " };\n"
        script = (("-Wl,--version-script={}", "hidden.map", text),) if hidden else ()
        compile_library(SOURCE, target, _FLAGS, "fake NVML", script)
    return target
