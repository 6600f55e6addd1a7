"""The kernel log as lines: /dev/kmsg, or a file that something appends to (tests, chaos, a log shipper)."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

import msgspec

_RECORD = re.compile(r"^(\d+),(\d+),(\d+),[^;]*;(.*)$", re.DOTALL)
_STAMP = re.compile(r"^\s*(?:<(\d+)>)?\[\s*(\d+\.\d+)\]\s?(.*)$")
_MAX_RECORD = 8192
_MAX_BATCH = 1000


class KernelLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `stamp`: the kernel's own seconds since boot, None when the line does not carry it."""

    text: str
    stamp: float | None = None
    level: int | None = None
    sequence: int | None = None


def parse(raw: str) -> KernelLine:
    """A record of /dev/kmsg, a line of dmesg, or any other line (then all of it is text). Never raises."""
    line = raw.rstrip("\n")
    record = _RECORD.match(line)
    if record is not None:
        text = record.group(4).split("\n", 1)[0]
        return KernelLine(text=text, stamp=int(record.group(3)) / 1e6, level=int(record.group(1)) & 7, sequence=int(record.group(2)))
    stamped = _STAMP.match(line)
    if stamped is not None:
        level = stamped.group(1)
        return KernelLine(text=stamped.group(3), stamp=float(stamped.group(2)), level=int(level) & 7 if level else None)
    return KernelLine(text=line)


class KernelLog:
    """Reads what is new. Starts at the end of what exists; a file that appears later is read from its start.

    An unreadable log (no permission, no such file) gives no lines: `problem` says why.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._device = False
        self._ended = False
        self._inode = 0
        self._rest = b""
        self._first = True
        self.problem = ""

    def poll(self) -> list[KernelLine]:
        """Lines since the last call, without waiting."""
        if not self._open():
            return []
        lines = self._records() if self._device else self._appended()
        return [parse(line) for line in lines]

    @property
    def device(self) -> int | None:
        """The descriptor of a device that says when there is more to read; None for a file, before the first `poll`, and for a device that
        has an end or cannot be read: it would say so without a pause."""
        return self._fd if self._device and not self._ended and not self.problem else None

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> bool:
        first, self._first = self._first, False
        if self._fd is not None and not self._device and self._rotated():
            self.close()
        if self._fd is not None:
            return True
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self.problem = f"{self._path}: {error.strerror}"
            return False
        info = os.fstat(self._fd)
        self._device = stat.S_ISCHR(info.st_mode)
        self._inode = info.st_ino
        self._rest = b""
        if first:
            with contextlib.suppress(OSError):  # a device that keeps nothing has no end to go to
                os.lseek(self._fd, 0, os.SEEK_END)
        self.problem = ""
        return True

    def _rotated(self) -> bool:
        assert self._fd is not None
        try:
            info = self._path.stat()
        except OSError:
            return False
        return info.st_ino != self._inode or info.st_size < os.lseek(self._fd, 0, os.SEEK_CUR)

    def _records(self) -> list[str]:
        assert self._fd is not None
        lines: list[str] = []
        while len(lines) < _MAX_BATCH:
            try:
                record = os.read(self._fd, _MAX_RECORD)
                self._ended = not record
                if not record:
                    break
                lines.append(record.decode(errors="replace"))
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten before we read them: go on with the oldest that is left
                continue
            except OSError as error:
                self.problem = f"{self._path}: {error.strerror}"
                break
        return lines

    def _appended(self) -> list[str]:
        assert self._fd is not None
        data = self._rest + os.read(self._fd, 1 << 20)
        *whole, self._rest = data.split(b"\n")
        return [line.decode(errors="replace") for line in whole]
