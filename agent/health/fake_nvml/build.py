"""Compiles the fake library at first use, with the machine's C compiler or the one in the ziglang package."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from regrow.errors import OperationalError

SOURCE = Path(__file__).with_name("fake_nvml.c")
NAME = "libnvidia-ml.so.1"
_FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Wno-missing-field-initializers", f"-Wl,-soname,{NAME}", "-pthread")
_COMPILE_SECONDS = 120


def compiler() -> tuple[str, ...] | None:
    """Command of a C compiler: $CC, cc, gcc, clang, else ziglang's; None when there is none."""
    named = os.environ.get("CC", "").split()
    if named and shutil.which(named[0]):
        return tuple(named)
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return (found,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc")
    return None


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
    folder = (cache or _cache_folder()) / key
    target = folder / NAME
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(target, hidden)
    return target


def _cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "regrow" / "fake_nvml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.gettempdir()) / f"regrow-{os.getuid()}" / "fake_nvml"


def _compile(target: Path, hidden: list[str]) -> None:
    command = compiler()
    if command is None:
        raise OperationalError("there is no C compiler", where="fake NVML", hint="install gcc (apt install gcc), or pip install ziglang")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / NAME
        arguments = [*command, *_FLAGS, str(SOURCE), "-o", str(made)]
        if hidden:
            script = Path(folder) / "hidden.map"
            script.write_text("{ local: " + " ".join(f"{name};" for name in hidden) + " };\n", encoding="utf-8")
            arguments.append(f"-Wl,--version-script={script}")
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
        if done.returncode:
            raise OperationalError(f"{command[0]} failed: {done.stderr[-600:]}", where="fake NVML", hint="set CC to a working C compiler")
        made.replace(target)
