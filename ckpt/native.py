"""C sources of the checkpoint engine, compiled at first use into a folder of this user's alone."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path

from regrow.compiling import cache_folder, compile_library
from regrow.errors import OperationalError

_FLAGS = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra")


def load(source: Path) -> ctypes.CDLL:
    """The compiled library of a C file.

    Raises:
        OperationalError: no compiler, it failed, or others can write the cache folder.
        OSError: the library cannot be loaded here.
    """
    key = hashlib.sha256(source.read_bytes() + repr(_FLAGS).encode()).hexdigest()[:16]
    folder = cache_folder(source.stem) / key
    folder.mkdir(parents=True, exist_ok=True)
    for one in (folder, folder.parent):
        found = one.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise OperationalError("others can write it", where=str(one), hint="set XDG_CACHE_HOME to a folder of your own")
    target = folder / f"{source.stem}.so"
    if not target.exists():
        try:
            compile_library(source, target, _FLAGS, source.stem)
        except subprocess.SubprocessError as error:
            raise OperationalError(f"the compiler did not end: {error}", where=source.stem) from error
    return ctypes.CDLL(str(target))
