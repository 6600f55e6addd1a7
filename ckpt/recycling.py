"""Files of removed checkpoints are written over by the writer that made them: their blocks are allocated already.

Only files that this very process has written to the end and closed, that have no other name, and that lie in the trash of their
folder: no record names them, and nobody else has them open for writing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

TRASH = ".regrow-trash-"
"""Directories whose names begin like this are checkpoints that have been removed."""
MAX_KNOWN = 4096


class Recycler:
    """Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: dict[tuple[int, int], None] = {}
        self.num_recycled = 0

    def wrote(self, path: Path) -> None:
        """A file is complete and closed."""
        with contextlib.suppress(OSError), self._lock:
            found = path.stat()
            self._own[found.st_dev, found.st_ino] = None
            while len(self._own) > MAX_KNOWN:
                del self._own[next(iter(self._own))]

    def take(self, folder: Path, path: Path, size_bytes: int) -> bool:
        """Give `path` (which must not exist) to a file of this size out of the trash of `folder`; False when there is none.

        Whoever empties the trash may be faster: then there is none.
        """
        with contextlib.suppress(OSError), self._lock, os.scandir(folder) as items:
            for trash in sorted(item.path for item in items if item.name.startswith(TRASH)):
                if self._move(Path(trash) / path.name, path, size_bytes):
                    self.num_recycled += 1
                    return True
        return False

    def free(self, folder: Path) -> int:
        """Remove what could be recycled: there is no space. Returns how many files went."""
        count = 0
        with contextlib.suppress(OSError), self._lock:
            for path in folder.glob(f"{TRASH}*/*"):
                found = path.lstat()
                if (found.st_dev, found.st_ino) in self._own:
                    path.unlink()
                    count += 1
        return count

    def _move(self, old: Path, path: Path, size_bytes: int) -> bool:
        try:
            found = old.lstat()
            key = (found.st_dev, found.st_ino)
            if key not in self._own or found.st_size != size_bytes or found.st_nlink != 1:
                return False
            path.hardlink_to(old)  # unlike a rename it never replaces anything
        except OSError:
            return False
        del self._own[key]
        try:
            old.unlink()
            if path.lstat().st_nlink == 1:
                return True
        except OSError:
            pass
        path.unlink(missing_ok=True)
        return False
