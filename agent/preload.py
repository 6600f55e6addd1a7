"""What a shim imports before it forks, and the check that forking is safe afterwards.

A process may be forked safely while it has one thread and has started neither CUDA, gloo, grpc nor a tensor operation
(measured: a child deadlocked after its parent had run a two-thread matmul). numpy's BLAS and OpenMP start threads when
they are imported unless they are told to use one: `limit_threads` must run before the first import.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

DEFAULT_MODULES = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch._dynamo",
    "torch.optim",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.utils.checkpoint",
)
"""The first AdamW(...) of a process imports dynamo and sympy: a worker without them is not warm."""

OPTIONAL_MODULES = (
    "numpy.ma",
    "torch.distributed._composable.replicate_with_fsdp",
    "regrow.agent.worker.session",
    "regrow.ckpt.state",
    "regrow.parallel.apply",
    "safetensors.torch",
)
"""Preloaded where they exist; their absence is no problem."""

FIXED_PREFIXES = ("LD_", "MALLOC_", "GLIBC_", "MKL_", "KMP_", "GOMP_", "PYTHON", "TORCH_LOGS", "TORCHDYNAMO_", "TORCHINDUCTOR_")
FIXED_NAMES = ("PYTORCH_JIT", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "ATEN_CPU_CAPABILITY")
RESTORABLE = (*THREAD_VARIABLES, "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")
"""These begin like fixed ones, but a warm child can still take them over."""


_FIXED_TORCH_SEED = 67280421310721
"""Where older versions of torch start in every process. Newer ones draw a seed when they are imported."""
_drawn_seed: int | None = None


class Check(msgspec.Struct, frozen=True):
    """Whether forking is safe now."""

    safe: bool
    problems: tuple[str, ...] = ()


def limit_threads() -> None:
    """One thread for every numeric library that is imported from now on."""
    for name in THREAD_VARIABLES:
        os.environ[name] = "1"


def load(modules: Iterable[str], optional: Iterable[str] = ()) -> tuple[tuple[str, ...], tuple[str, ...], float]:
    """Import modules, then move all objects out of the garbage collector's sight, so that children share their pages.

    Returns:
        names that were imported, problems (one line each), seconds it took.
    """
    started = time.monotonic()
    done: list[str] = []
    problems: list[str] = []
    for name, required in [*((name, True) for name in modules), *((name, False) for name in optional)]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if required:
                problems.append(f"{name}: {error}")
        except Exception as error:  # noqa: BLE001  # any failure of a foreign module means a cold start, not a dead shim
            problems.append(f"{name}: {type(error).__name__}: {error}")
        else:
            done.append(name)
            _note_seed()
    gc.collect()
    gc.freeze()
    return tuple(done), tuple(problems), time.monotonic() - started


def _note_seed() -> None:
    global _drawn_seed  # noqa: PLW0603
    torch = sys.modules.get("torch")
    if torch is not None and _drawn_seed is None:
        _drawn_seed = torch.initial_seed()


def draws_seeds() -> bool:
    """Would torch have another seed in another process: it draws one, and no module that was imported here has set one."""
    return _drawn_seed not in (None, _FIXED_TORCH_SEED) and sys.modules["torch"].initial_seed() == _drawn_seed


def check() -> Check:
    """Look at this process: one thread, no device file open, no CUDA context, no grpc."""
    problems: list[str] = []
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads != 1:
        problems.append(f"{num_threads} threads")
    problems.extend(f"{target} is open" for target in _open_files() if target.startswith("/dev/nvidia"))
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        problems.append("CUDA is initialised")
    if "grpc" in sys.modules:
        problems.append("grpc is loaded")
    return Check(safe=not problems, problems=tuple(problems))


def _open_files() -> list[str]:
    found: list[str] = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except OSError:
            continue
    return found


def fixed_environment(environ: dict[str, str]) -> dict[str, str]:
    """The variables of `environ` that only act when an interpreter starts or a library is imported."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(FIXED_PREFIXES) or name in FIXED_NAMES) and name not in RESTORABLE
    }


def resident_bytes() -> int:
    """Proportional memory of this process (PSS), bytes; 0 where the kernel does not tell."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
