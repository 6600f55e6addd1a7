"""The wall clock of a node, shifted while it runs: a small library that is loaded into its processes reads the shift from a file."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from regrow.compiling import cache_folder, compile_library

_SOURCE = Path(__file__).with_name("fake_clock.c")
_FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra")


def library() -> Path:
    """Path of the compiled library, made at first use.

    Raises:
        OperationalError: no compiler, or it failed.
    """
    folder = cache_folder("fake_clock") / hashlib.sha256(_SOURCE.read_bytes() + repr(_FLAGS).encode()).hexdigest()[:16]
    target = folder / "libregrowclock.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        compile_library(_SOURCE, target, _FLAGS, "fake clock")
    return target


class FakeClock:
    """The shift of one node."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def environment(self) -> dict[str, str]:
        """For the processes whose wall clock is to be shifted. Makes the file, with no shift."""
        if not self.path.exists():
            self.shift(0.0)
        return {"LD_PRELOAD": str(library()), "REGROW_FAKE_CLOCK": str(self.path)}

    def shift(self, seconds: float) -> None:
        """Shift by so many seconds from now on; 0: the true time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = struct.pack("=q", int(seconds * 1e9))
        if self.path.exists():  # in place: the processes have it mapped
            with self.path.open("r+b") as file:
                file.write(data)
        else:
            self.path.write_bytes(data)
