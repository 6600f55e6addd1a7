"""The machine around the GPUs: memory, disk, file handles, zombies, clock. Read without privileges; None: not readable."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from regrow.agent.health.findings import Finding
from regrow.agent.health.policy import HostPolicy

_STA_UNSYNC = 0x0040
_STA_NANO = 0x2000
_TIMEX_BYTES = 208


class HostSample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the host."""

    memory_total_bytes: int
    memory_available_bytes: int
    cpu_ratio: float
    """Busy share of all CPUs since the look before."""
    disk_total_bytes: int = 0
    disk_free_bytes: int = 0
    """Of the file system that holds the agent's state folder."""
    state_writable: bool = True
    file_handles: int | None = None
    file_handles_max: int | None = None
    zombies: int | None = None
    clock_synchronised: bool | None = None
    clock_offset_seconds: float | None = None


def read_host(state_dir: Path, *, with_processes: bool = False) -> HostSample:
    """Look at the host. Counting zombies walks all processes, so only `with_processes`."""
    memory = psutil.virtual_memory()
    total = free = 0
    writable = True
    try:
        disk = psutil.disk_usage(str(state_dir))
        total, free = disk.total, disk.free
        writable = not os.statvfs(state_dir).f_flag & os.ST_RDONLY
    except OSError:
        writable = False
    handles, most = _file_handles()
    synchronised, offset = clock_state()
    return HostSample(
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        cpu_ratio=psutil.cpu_percent() / 100,
        disk_total_bytes=total,
        disk_free_bytes=free,
        state_writable=writable,
        file_handles=handles,
        file_handles_max=most,
        zombies=_zombies() if with_processes else None,
        clock_synchronised=synchronised,
        clock_offset_seconds=offset,
    )


def findings(sample: HostSample, policy: HostPolicy) -> Iterator[Finding]:
    """What of it speaks against the node. A clock that nobody disciplines is told by `regrow doctor`, not held against it here."""
    if sample.memory_available_bytes < policy.memory_available_share * sample.memory_total_bytes:
        yield _watch("host_memory", "almost no memory available")
    if sample.disk_total_bytes and sample.disk_free_bytes < policy.disk_free_share * sample.disk_total_bytes:
        yield _watch("disk_full", "the state folder's file system is almost full")
    if not sample.state_writable:
        yield Finding(kind="fs_error", action="reboot", reason="the state folder's file system is read-only or gone")
    if (
        sample.file_handles is not None
        and sample.file_handles_max
        and sample.file_handles > policy.file_handles_share * sample.file_handles_max
    ):
        yield _watch("host_fd_limit", "file handles of the host almost used up")
    if sample.zombies is not None and sample.zombies > policy.zombies:
        yield _watch("host_zombies", "many zombie processes")
    if sample.clock_offset_seconds is not None and abs(sample.clock_offset_seconds) > policy.clock_offset_seconds:
        yield _watch("host_clock", "the clock is off by more than a second")


def _watch(kind: str, reason: str) -> Finding:
    return Finding(kind=kind, action="watch", state="degraded", reason=reason)


def _file_handles() -> tuple[int | None, int | None]:
    try:
        words = Path("/proc/sys/fs/file-nr").read_text(encoding="ascii").split()
        return int(words[0]) - int(words[1]), int(words[2])
    except (OSError, ValueError, IndexError):
        return None, None


def _zombies() -> int:
    return sum(1 for one in psutil.process_iter(["status"]) if one.info["status"] == psutil.STATUS_ZOMBIE)


def clock_state() -> tuple[bool | None, float | None]:
    """(synchronised, offset in seconds) by the kernel's clock discipline, adjtimex(2); None where it cannot be asked."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes = 0: read only
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        return None, None
    if state < 0:
        return None, None
    long = ctypes.sizeof(ctypes.c_long)
    offset = ctypes.c_long.from_buffer(buffer, long).value
    status = ctypes.c_int.from_buffer(buffer, 5 * long).value
    if status & _STA_UNSYNC:
        return False, None
    return True, offset / (1e9 if status & _STA_NANO else 1e6)
