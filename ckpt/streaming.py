"""The fast copy of a snapshot: non-temporal stores by a few lines of C, compiled at first use; without a compiler torch copies."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from regrow.compiling import cache_folder, compile_library
from regrow.errors import OperationalError

SOURCE = Path(__file__).with_name("stream_copy.c")
OFF_VARIABLE = "REGROW_NO_STREAM_COPY"
"""Set to 1: torch copies."""
_FLAGS = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra")
log = logging.getLogger("regrow.ckpt.streaming")

Table = npt.NDArray[np.uint64]


def table(parts: Sequence[tuple[int, int, int]]) -> Table:
    """(target address, source address, bytes) of each piece, as `copier` takes it."""
    return np.array(parts, dtype=np.uint64).reshape(-1, 3)


@functools.cache
def copier() -> Callable[[Table], None] | None:
    """Copies a table's pieces; None when there is no compiler, or `REGROW_NO_STREAM_COPY=1`. Lets other threads run meanwhile."""
    if os.environ.get(OFF_VARIABLE) == "1":
        return None
    try:
        function = ctypes.CDLL(str(_library())).regrow_stream_copy
    except (OSError, OperationalError, subprocess.SubprocessError) as error:
        log.info("snapshots are copied by torch: %s", error)
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return lambda parts: function(parts.ctypes.data, len(parts))


def _library() -> Path:
    """The compiled library.

    Raises:
        OperationalError: no compiler, or the cache folder is not ours alone.
    """
    key = hashlib.sha256(SOURCE.read_bytes() + repr(_FLAGS).encode()).hexdigest()[:16]
    folder = cache_folder("stream_copy") / key
    folder.mkdir(parents=True, exist_ok=True)
    for one in (folder, folder.parent):
        found = one.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise OperationalError("others can write it", where=str(one), hint="set XDG_CACHE_HOME to a folder of your own")
    target = folder / "stream_copy.so"
    if not target.exists():
        compile_library(SOURCE, target, _FLAGS, "stream copy")
    return target
