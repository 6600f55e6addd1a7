"""The fast copy of a snapshot: non-temporal stores by a few lines of C, compiled at first use; without a compiler torch copies."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from regrow.ckpt import native
from regrow.errors import OperationalError

SOURCE = Path(__file__).with_name("stream_copy.c")
OFF_VARIABLE = "REGROW_NO_STREAM_COPY"
"""Set to 1: torch copies."""
log = logging.getLogger("regrow.ckpt.streaming")

Table = npt.NDArray[np.uint64]


def table(parts: Sequence[tuple[int, int, int]]) -> Table:
    """(target address, source address, bytes) of each piece, as `copier` takes it."""
    return np.array(parts, dtype=np.uint64).reshape(-1, 3)


@functools.cache
def copier(*, plain: bool = False) -> Callable[[Table], None] | None:
    """Copies a table's pieces; None when there is no compiler, or `REGROW_NO_STREAM_COPY=1`. Lets other threads run meanwhile.

    `plain`: with the stores that every processor of this kind has, instead of the widest that this one has.
    """
    if os.environ.get(OFF_VARIABLE) == "1":
        return None
    try:
        function = native.load(SOURCE).regrow_stream_copy
    except (OSError, OperationalError) as error:
        log.info("snapshots are copied by torch: %s", error)
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = None
    return lambda parts: function(parts.ctypes.data, len(parts), plain)
