"""Arenas in huge pages: what the kernel says that a mapping has, and that everything works without them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.ckpt import hugepages

MIB = 1 << 20
SCRIPT = """
import errno, os, re, sys
from pathlib import Path
from regrow.ckpt import hugepages
handle = hugepages.open_memory()
memory = hugepages.allocate(handle, int(sys.argv[1]))
memory[0:3], memory[-3:] = b"abc", b"xyz"
found = re.findall(r"ShmemPmdMapped: +(\\d+) kB", Path("/proc/self/smaps").read_text())
print(sum(map(int, found)), os.readlink(f"/proc/self/fd/{handle}"), os.fstat(handle).st_blocks * 512)
"""


def look(num_bytes: int, **environment: str) -> tuple[int, str, int]:
    """(bytes in huge pages, what the descriptor is, bytes allocated) of an arena's memory in a process of its own."""
    command = [sys.executable, "-c", SCRIPT, str(num_bytes)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True, timeout=60)
    huge, *name, allocated = done.stdout.split()
    return int(huge) * 1024, " ".join(name), int(allocated)


def test_an_arena_lies_in_huge_pages_where_the_process_may_mount():
    if os.geteuid() != 0 or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("needs CAP_SYS_ADMIN and a kernel with huge pages; without them the memfd of the next test is used")
    huge, name, allocated = look(9 * MIB)
    assert huge == 8 * MIB, "four huge pages; the last MiB is small ones or part of a fifth"
    assert name.startswith("/regrow-arena-"), "a file without a name on a tmpfs that is mounted nowhere"
    assert name.endswith("(deleted)")
    assert allocated >= 9 * MIB, "all pages are there before the first save"
    assert not re.search("regrow-arena", Path("/proc/self/mountinfo").read_text())


def test_without_them_it_is_a_memfd():
    huge, name, allocated = look(5 * MIB + 4096, REGROW_NO_HUGE_PAGES="1")
    assert (huge, allocated) == (0, 5 * MIB + 4096)
    assert name.startswith("/memfd:regrow-arena")


def test_a_short_arena_has_small_pages():
    assert look(64 << 10)[0] == 0


def test_no_memory_is_an_error_and_not_a_signal():
    handle = hugepages.open_memory()
    try:
        with pytest.raises(OSError, match=r"Cannot allocate|No space|too large|Invalid"):
            hugepages.allocate(handle, 1 << 62)
    finally:
        os.close(handle)
