"""The pre-flight child: `python -m regrow.agent.health.burnin --disk DIR --memory-bytes N --matrix N`.

Disposable like the probe child: memory that hangs, a disk that hangs or a GPU that crashes take this process and nothing
else. One JSON line per finished check, so that what was done before a hang is known. Torch is used for GPUs alone, when
it is installed and sees one; numpy does the rest.

REGROW_PREFLIGHT_FAULT (chaos): memory, matmul or disk flips one bit where that check must see it; hang hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from regrow.agent.health.burnin_result import FAULT_VARIABLE, CheckResult

_DISK_BYTES = 4 << 20
_PATTERNS = (0x0000000000000000, 0xFFFFFFFFFFFFFFFF, 0x5555555555555555, 0xAAAAAAAAAAAAAAAA)
_ROWS, _COLUMNS = 7, 5


def main(arguments: list[str] | None = None) -> int:
    """Run all checks; 0 when each passed."""
    parser = argparse.ArgumentParser(prog="regrow-burnin")
    parser.add_argument("--disk", type=Path, required=True)
    parser.add_argument("--memory-bytes", type=int, default=64 << 20)
    parser.add_argument("--matrix", type=int, default=384)
    chosen = parser.parse_args(arguments)
    if os.environ.get(FAULT_VARIABLE) == "hang":
        time.sleep(86400)
    bad = False
    for name, check in _checks(chosen):
        result = _timed(name, check)
        bad = bad or not result.ok
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.flush()
    return 1 if bad else 0


def _checks(chosen: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "memory", lambda: check_memory(chosen.memory_bytes)
    yield "matmul", lambda: check_matmul(chosen.matrix)
    yield "disk", lambda: check_disk(chosen.disk)
    for device in range(_num_gpus()):
        yield f"gpu{device}", lambda device=device: check_gpu(device, chosen.matrix)


def _timed(name: str, check: Callable[[], str]) -> CheckResult:
    began = time.monotonic()
    try:
        problem = check()
    except (OSError, MemoryError, RuntimeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    return CheckResult(name=name, ok=not problem, seconds=time.monotonic() - began, detail=problem[:400])


def check_memory(num_bytes: int) -> str:
    """Write patterns and an address-dependent one over `num_bytes`, read them back. Returns the problem, or nothing."""
    words = np.empty(max(num_bytes // 8, 1), dtype=np.uint64)
    own = np.arange(words.size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for pattern in _PATTERNS:
        np.bitwise_xor(own, np.uint64(pattern), out=words)
        _spoil("memory", words)
        wrong = np.flatnonzero(words ^ own ^ np.uint64(pattern))
        if wrong.size:
            return f"{wrong.size} words differ, the first at byte {int(wrong[0]) * 8}"
    return ""


def known_product(n: int) -> tuple[Any, Any, Any]:
    """Integer matrices a, b (n x n) and their exact product, from sums over residues instead of a multiplication.

    a[i,k] = (i + k) mod 7 - 3 and b[k,j] = (3k + j) mod 5 - 2; so c[i,j] depends on (i mod 7, j mod 5) alone. All values
    fit float32 exactly (|c| <= 6n), and TF32 or bfloat16 inputs too.
    """
    index = np.arange(n)
    a = (index[:, None] + index[None, :]) % _ROWS - 3
    b = (3 * index[:, None] + index[None, :]) % _COLUMNS - 2
    small = np.zeros((_ROWS, _COLUMNS), dtype=np.int64)
    for i in range(_ROWS):
        for j in range(_COLUMNS):
            small[i, j] = int((((i + index) % _ROWS - 3) * ((3 * index + j) % _COLUMNS - 2)).sum())
    return a, b, small[np.ix_(index % _ROWS, index % _COLUMNS)]


def check_matmul(n: int) -> str:
    """Multiply in float32 and float64 and compare with the exact answer, bit for bit."""
    a, b, expected = known_product(n)
    for kind in (np.float32, np.float64):
        product = a.astype(kind) @ b.astype(kind)
        _spoil("matmul", product)
        wrong = int(np.count_nonzero(product != expected))
        if wrong:
            return f"{wrong} of {n * n} elements of a {np.dtype(kind).name} product are wrong"
    return ""


def check_disk(folder: Path) -> str:
    """Write, sync, read back, compare."""
    data = bytearray(hashlib.shake_128(b"regrow").digest(_DISK_BYTES))
    digest = hashlib.sha256(data).digest()
    path = folder / f".preflight-{os.getpid()}"
    try:
        _spoil("disk", np.frombuffer(data, dtype=np.uint8))
        with path.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        return "" if hashlib.sha256(path.read_bytes()).digest() == digest else "what was read back differs from what was written"
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _num_gpus() -> int:
    if importlib.util.find_spec("torch") is None or not Path("/proc/driver/nvidia").exists():
        return 0
    torch: Any = importlib.import_module("torch")
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def check_gpu(device: int, n: int) -> str:
    """The known product on one GPU in float32, TF32 and bfloat16, and a pattern over 1 GiB of its memory."""
    torch: Any = importlib.import_module("torch")
    a, b, expected = (torch.tensor(one.tolist(), dtype=torch.float32, device=f"cuda:{device}") for one in known_product(n))
    for tf32 in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        if not torch.equal(a @ b, expected):
            return f"a float32 product is wrong (tf32 {tf32})"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if not torch.equal(a.bfloat16() @ b.bfloat16(), expected.bfloat16()):  # sums are exact in float32, then rounded once
        return "a bfloat16 product is wrong"
    words = torch.arange(1 << 27, dtype=torch.int64, device=f"cuda:{device}")
    for pattern in (0, -1, 0x5555555555555555):
        if not torch.equal((words ^ pattern) ^ pattern, words):
            return "GPU memory does not hold a pattern"
    torch.cuda.synchronize(device)
    return ""


def _spoil(name: str, array: Any) -> None:
    """Chaos: flip the lowest bit of one element of the check that is asked for."""
    if os.environ.get(FAULT_VARIABLE) == name:
        raw = array.reshape(-1).view(np.uint8)
        raw[raw.size // 2] ^= 1


if __name__ == "__main__":
    sys.exit(main())
