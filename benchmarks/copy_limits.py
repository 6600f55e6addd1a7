"""What copying memory costs on this machine: CPU-seconds for a GB of our copy, of memmove, of reading alone and of storing alone.

    .venv/bin/python benchmarks/copy_limits.py [--megabytes 256] --json

Sources in pages of 4 KiB and of 2 MiB, targets in pages of 2 MiB, best of `--repeats` passes of one process. A snapshot cannot take less
than reading what it copies, whatever the order of its loads and stores.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from regrow.ckpt import streaming
from regrow.ckpt.fastread import address_of
from regrow.compiling import compile_library

SOURCE = """
#include <immintrin.h>
#include <stddef.h>
__attribute__((target("avx512f"))) long long read_only(const char *from, size_t bytes)
{
    __m512i found = _mm512_setzero_si512();
    for (size_t at = 0; at + 64 <= bytes; at += 64)
        found = _mm512_or_si512(found, _mm512_loadu_si512(from + at));
    return _mm512_reduce_or_epi64(found);
}
__attribute__((target("avx512f"))) void store_only(char *to, size_t bytes)
{
    for (size_t at = 0; at + 64 <= bytes; at += 64)
        _mm512_stream_si512((void *)(to + at), _mm512_set1_epi64(5));
    _mm_sfence();
}
"""
_FLAGS = ("-shared", "-fPIC", "-O2")


def pages(num_bytes: int, *, huge: bool) -> mmap.mmap:
    """Private memory with random content."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    np.frombuffer(memory, np.uint64)[:] = np.random.default_rng(1).integers(0, 1 << 63, num_bytes // 8, dtype=np.uint64)
    return memory


def best(work: Callable[[], object], num_bytes: int, repeats: int) -> float:
    """CPU-seconds for a GB in the fastest pass."""
    found: list[float] = []
    for _ in range(repeats):
        started = time.thread_time()
        work()
        found.append((time.thread_time() - started) / num_bytes * 1e9)
    return round(min(found), 4)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    if "avx512f" not in Path("/proc/cpuinfo").read_text(encoding="ascii"):
        parser.error("this processor has no AVX-512, and the passes that only read and only store are written with it")
    num_bytes = options.megabytes << 20
    copier = streaming.copier()
    if copier is None:
        raise SystemExit("the fast copy cannot be compiled here")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "limits.c"
        source.write_text(SOURCE)
        compile_library(source, Path(folder) / "limits.so", _FLAGS, "limits")
        library = ctypes.CDLL(str(Path(folder) / "limits.so"))
    library.read_only.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.store_only.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    target = address_of(kept := pages(num_bytes, huge=True))
    figures: dict[str, float] = {"store_only": best(lambda: library.store_only(target, num_bytes), num_bytes, options.repeats)}
    for name, huge in (("small_pages", False), ("huge_pages", True)):
        memory = pages(num_bytes, huge=huge)
        live = address_of(memory)
        parts = streaming.table([(target, live, num_bytes)])
        works: dict[str, Callable[[], object]] = {
            "copy": lambda parts=parts: copier(parts),
            "memmove": lambda live=live: ctypes.memmove(target, live, num_bytes),
            "read_only": lambda live=live: library.read_only(live, num_bytes),
        }
        figures |= {f"{what}_from_{name}": best(work, num_bytes, options.repeats) for what, work in works.items()}
    del kept
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "megabytes": options.megabytes}
    if options.json:
        print(json.dumps({"figures": figures, "limits": {}, "samples": {}, "machine": machine}))
        return
    for name, seconds in figures.items():
        print(f"{name:<28} {seconds:.4f} CPU-seconds for a GB")


if __name__ == "__main__":
    main()
