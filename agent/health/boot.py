"""The kernel's boot id: what tells a reboot apart from everything else."""

from __future__ import annotations

from pathlib import Path

_PATH = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """The kernel's boot id; empty where it cannot be read."""
    try:
        return _PATH.read_text(encoding="ascii").strip()
    except OSError:
        return ""
