"""A file system that passes everything on to a folder and fails as it is told: ``python ckpt_fuse.py MOUNT FOLDER CONTROL``.

CONTROL is a file with one word: ok, eio-write, eio-fsync, eio-read, erofs, enospc, hang (writes wait until the word changes), slow.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import mfusepy as fuse

_ERRORS = {"eio-write": errno.EIO, "eio-fsync": errno.EIO, "eio-read": errno.EIO, "erofs": errno.EROFS, "enospc": errno.ENOSPC}
_SLOW_SECONDS = 0.02
_STATS = ("st_gid", "st_mode", "st_nlink", "st_size", "st_uid")
_TIMES = ("st_atime", "st_ctime", "st_mtime")


class Faulty(fuse.Operations):
    """Paths are those of the mount."""

    use_ns = True

    def __init__(self, folder: str, control: str) -> None:
        self._folder = folder
        self._control = Path(control)

    def _real(self, path: str) -> Path:
        return Path(self._folder + path)

    def _pass(self, *words: str) -> None:
        word = self._control.read_text().strip()
        if word in words and word in _ERRORS:
            raise fuse.FuseOSError(_ERRORS[word])
        while "hang" in words and self._control.read_text().strip() == "hang":
            time.sleep(0.02)  # storage that hangs: a caller in the kernel
        if "hang" in words and word == "slow":
            time.sleep(_SLOW_SECONDS)

    def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
        found = os.lstat(self._real(path))
        return {key: getattr(found, key) for key in _STATS} | {key: getattr(found, f"{key}_ns") for key in _TIMES}

    def readdir(self, path: str, fh: Any) -> list[str]:
        self._pass("eio-read")
        return [".", "..", *(one.name for one in self._real(path).iterdir())]

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._pass("erofs")
        return os.open(self._real(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._real(path), flags & ~os.O_DIRECT)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._pass("eio-read")
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._pass("eio-write", "erofs", "enospc", "hang")
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: Any = None) -> None:
        os.truncate(self._real(path), length)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._pass("eio-fsync")
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._pass("eio-fsync")
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def mkdir(self, path: str, mode: int) -> None:
        self._pass("erofs")
        self._real(path).mkdir(mode)

    def rmdir(self, path: str) -> None:
        self._real(path).rmdir()

    def unlink(self, path: str) -> None:
        self._pass("erofs")
        self._real(path).unlink()

    def rename(self, old: str, new: str) -> None:
        self._pass("erofs")
        self._real(old).rename(self._real(new))

    def utimens(self, path: str, times: Any = None) -> None:
        os.utime(self._real(path), ns=times)

    def chmod(self, path: str, mode: int) -> None:
        self._real(path).chmod(mode)


if __name__ == "__main__":
    mount, folder, control = sys.argv[1:4]
    fuse.FUSE(Faulty(folder, control), mount, foreground=True, nothreads=False)
