"""What surrounds a cluster and can be hurt without asking it: storage, the kernel log, processes that are paused."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from regrow.ckpt.manifest import RECORD_NAME
from regrow.errors import OperationalError

_NOISE = (
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.124.06",
    "python[77]: segfault at 0 ip 0000000000000000 sp 00007ffd error 14 in python3.11",
    "NVRM: Xid (PCI:0000:fe:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    "mce: CPU supports 20 MCE banks",
)
"""Benign, the program's own, of a GPU that no node has, benign."""


class Surroundings:
    """Of one run. Everything that is hurt can be made whole by `heal`."""

    def __init__(self, root: Path) -> None:
        self.kernel_log = root / "kern.log"
        self._checkpoints = root / "checkpoints"
        self._away = root / "checkpoints.away"
        self._paused: list[int] = []

    def prepare(self) -> None:
        """Make what must be there before the cluster starts."""
        self.kernel_log.parent.mkdir(parents=True, exist_ok=True)
        self.kernel_log.touch()

    def say_in_kernel_log(self, kind: str, xid: int, bus: str) -> None:
        """Append what a driver would write; all nodes read the same log, the address says whose GPU it is."""
        lines = (
            _NOISE
            if kind == "kernel_noise"
            else (f"NVRM: Xid (PCI:{bus.partition('.')[0].lower()}): {xid}, pid='<unknown>', name=<unknown>",)
        )
        with self.kernel_log.open("a", encoding="utf-8") as file:
            file.writelines(f"[{number + 100}.000001] {line}\n" for number, line in enumerate(lines))

    def num_checkpoints(self) -> int:
        """Checkpoints on storage: a folder without a record is still being written."""
        return len(self._complete())

    def _complete(self) -> list[Path]:
        """Folders of checkpoints, the newest last."""
        return sorted(one for one in self._checkpoints.glob("step-*") if (one / RECORD_NAME).is_file())

    def flip_newest_checkpoint(self) -> Path:
        """Flip one bit in the middle of the largest file of the newest checkpoint.

        Raises:
            OperationalError: there is no checkpoint.
        """
        folders = self._complete()
        files = [one for one in (folders[-1].rglob("*") if folders else ()) if one.is_file()]
        if not files:
            raise OperationalError("there is no checkpoint to damage", where=str(self._checkpoints))
        victim = max(files, key=lambda one: (one.stat().st_size, one.name))
        place = victim.stat().st_size // 2
        with victim.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes((byte ^ 1,)))
        return victim

    def hide_storage(self) -> None:
        """A file stands where the checkpoint folder was: as with a mount that went away, every path below fails."""
        self._checkpoints.rename(self._away)
        self._checkpoints.touch()

    def pause(self, pid: int) -> None:
        """SIGSTOP until `heal`."""
        os.kill(pid, signal.SIGSTOP)
        self._paused.append(pid)

    def heal(self) -> None:
        """Undo what lasts. Safe to call twice."""
        if self._away.exists():
            if self._checkpoints.is_file():
                self._checkpoints.unlink()
            self._away.rename(self._checkpoints)
        for pid in self._paused:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._paused.clear()
