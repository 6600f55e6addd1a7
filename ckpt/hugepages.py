"""Shared memory in huge pages: a snapshot into pages of 4 KiB spends about a third of its time on finding them.

Whether a memfd gets huge pages is a setting of the whole host (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`, mostly "never").
A tmpfs has a setting of its own, so the files are made on one that is mounted nowhere and that nobody else sees; that needs
CAP_SYS_ADMIN. Without it: a memfd, whose pages are huge where the host's setting is "advise" or more.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import uuid

from regrow.errors import OperationalError

OFF_VARIABLE = "REGROW_NO_HUGE_PAGES"
"""Set to 1: memfds in small pages."""
HUGE_BYTES = 2 << 20
"""Smaller files get small pages."""
_NAME = "regrow-arena"
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, since Linux 5.14; Python has no name for it
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # the same on all architectures, since Linux 5.2
_CLOEXEC, _SET_STRING, _CREATE = 1, 1, 6
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
log = logging.getLogger("regrow.ckpt.arenas")


def open_memory() -> int:
    """A new empty file in memory, without a name. The caller closes it.

    Raises:
        OSError: no memory.
    """
    mount = _own_mount() if _is_wanted() else None
    if mount is None:
        return os.memfd_create(_NAME, os.MFD_CLOEXEC)
    name = f"{_NAME}-{uuid.uuid4().hex[:12]}"
    handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=mount)
    os.unlink(name, dir_fd=mount)
    return handle


def allocate(handle: int, num_bytes: int) -> mmap.mmap:
    """Give a file of `open_memory` its size and all its pages, huge ones where that is possible, and map it.

    Raises:
        OSError: no memory.
    """
    os.ftruncate(handle, num_bytes)
    memory = mmap.mmap(handle, num_bytes)
    try:
        if num_bytes >= HUGE_BYTES and _is_wanted():
            with contextlib.suppress(OSError):  # an older kernel, or no memory: what is missing is made below, or is an error there
                memory.madvise(mmap.MADV_HUGEPAGE)
                memory.madvise(_POPULATE_WRITE)
        os.posix_fallocate(handle, 0, num_bytes)
    except BaseException:
        memory.close()
        raise
    return memory


def _is_wanted() -> bool:
    return os.environ.get(OFF_VARIABLE) != "1"


@functools.cache
def _own_mount() -> int | None:
    """The root of a tmpfs that is mounted nowhere; None where this process may not make one. Lives as long as the process."""
    try:
        context = _call(_FSOPEN, b"tmpfs", _CLOEXEC)
        try:
            for key, value in ((b"huge", b"advise"), (b"size", b"0"), (b"mode", b"0700")):  # size 0: as much as there is, as memfds
                _call(_FSCONFIG, context, _SET_STRING, key, value, 0)
            _call(_FSCONFIG, context, _CREATE, None, None, 0)
            return _call(_FSMOUNT, context, _CLOEXEC, _NOSUID | _NODEV | _NOEXEC)
        finally:
            os.close(context)
    except (OSError, OperationalError) as error:
        log.info("arenas are memfds, in huge pages only where the host says so: %s", error)
        return None


def _call(number: int, *arguments: int | bytes | None) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "syscall"):
        raise OperationalError("the C library has no syscall()")
    words = [ctypes.c_long(one) if isinstance(one, int) else ctypes.c_char_p(one) for one in (number, *arguments)]
    result = int(library.syscall(*words))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
