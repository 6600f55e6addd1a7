"""The life of a process that the shim forked: become a clean interpreter, then run the user's script as `__main__`.

What a worker sees is what `torchrun` would have given it: argv, `__main__`, environment, default signal handlers, no
descriptors but the standard three, a fresh random state, a process group of its generation.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import gc
import importlib
import io
import json
import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
import types
from pathlib import Path

from regrow.agent import became, fuse, preload
from regrow.agent.protocol import WorkerStart

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
EXIT_NO_START = 78
"""Exit code of a worker whose surroundings could not be made (no such folder, no such script)."""


class Task:
    """What a forked child is to do."""

    def __init__(
        self, *, parent: int, group: int, worker: WorkerStart | None = None, listener: int = -1, ready: int = -1, parked: int = -1
    ) -> None:
        self.parent = parent
        self.group = group
        self.worker = worker
        self.parked = parked
        """Descriptor on which a worker that stands ready gets its orders."""
        self.listener = listener
        self.ready = ready


class Forked(BaseException):  # not an error: control flow that leaves the parent's loop behind
    """Raised in the child right after the fork, so that it leaves all frames of the shim's loop."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task


def run(task: Task) -> int:
    """Do the child's work. Called at the top of the stack; user exceptions and exits end the interpreter as usual."""
    _tie_to_parent(task)
    _reset_signals()
    if task.worker is None and task.parked < 0:
        return _serve_store(task)
    worker = task.worker or _await_orders(task.parked)
    if worker is None:
        return 0
    became.now()
    _close_descriptors(keep=())
    _open_standard_streams(worker.log)
    try:
        _set_surroundings(worker)
    except OSError as error:
        sys.stderr.write(f"regrow: rank {worker.rank} cannot start: {error}\n")
        return EXIT_NO_START
    _name_process(f"rank{worker.rank}")
    _restore_threads(worker.env)
    _reseed()
    gc.enable()  # what the shim froze stays so: one look at it would copy 80 MB of shared pages, 0.2 CPU-seconds a worker
    return _run_user_code(worker)


def _await_orders(line: int) -> WorkerStart | None:
    from regrow.agent import parked  # it makes tasks for this module

    _close_descriptors(keep=(line,))
    _name_process("regrow-parked")
    return parked.stand_ready(line)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent died (the setting is not inherited by fork)."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# --- becoming a clean process ------------------------------------------------------------------------------------


def _tie_to_parent(task: Task) -> None:
    """Die with the shim: the kernel sends SIGKILL when the forking thread's process ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != task.parent:
        os._exit(137)
    os.setpgid(0, task.group)


def _reset_signals() -> None:
    """As an interpreter has them at its start."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) is not signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _close_descriptors(keep: tuple[int, ...]) -> None:
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208  # the listing's own descriptor is among the names
        number = int(entry)
        if number > 2 and number not in keep:
            try:
                os.close(number)
            except OSError:
                continue


def _open_standard_streams(log: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _set_surroundings(worker: WorkerStart) -> None:
    os.environ.clear()
    os.environ.update(worker.env)
    os.chdir(worker.cwd)
    if worker.nice:
        os.setpriority(os.PRIO_PROCESS, 0, worker.nice)
    script = worker.argv[0]
    if not worker.module and not Path(script).exists():
        raise FileNotFoundError(2, "no such script", script)
    sys.argv = list(worker.argv)
    first = str(Path.cwd()) if worker.module else str(Path(script).resolve().parent)
    extra = [entry for entry in worker.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [first, *extra, *(entry for entry in sys.path if entry not in extra)]
    importlib.invalidate_caches()
    if worker.env.get("PYTHONFAULTHANDLER"):
        import faulthandler

        faulthandler.enable()


def _name_process(name: str) -> None:
    _libc.prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]), 0, 0, 0)


def _restore_threads(env: dict[str, str]) -> None:
    """Give the numeric libraries the number of threads that the user's environment asks for."""
    wanted = env.get("OMP_NUM_THREADS", "")
    number = int(wanted) if wanted.isdigit() and int(wanted) > 0 else len(os.sched_getaffinity(0))
    torch = sys.modules.get("torch")
    if torch is not None and number != 1:
        torch.set_num_threads(number)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and env.get("TORCH_DISTRIBUTED_DEBUG"):
        distributed.set_debug_level_from_env()
    blas = env.get("OPENBLAS_NUM_THREADS", wanted)
    if blas != "1" and "numpy" in sys.modules:
        _set_openblas_threads(int(blas) if blas.isdigit() and int(blas) > 0 else number)


def _set_openblas_threads(number: int) -> None:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        libraries = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for path in libraries:
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            function = getattr(library, name, None)
            if function is not None:
                function(ctypes.c_int(number))
                break


def _reseed() -> None:
    """Fresh processes do not share random numbers. Where torch starts from a fixed seed, or a module has set one, that is kept."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    if preload.draws_seeds():
        sys.modules["torch"].default_generator.seed()


# --- running the script ------------------------------------------------------------------------------------------


def _run_user_code(worker: WorkerStart) -> int:
    failure: BaseException | None = None
    light_fuse = fuse.laid(worker.env.get(fuse.VARIABLE, ""))
    try:
        if worker.module:
            sys.modules["__main__"] = types.ModuleType("__main__")
            runpy.run_module(worker.argv[0], run_name="__main__", alter_sys=True)
        else:
            _run_script(worker.argv[0])
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  # reported as an interpreter does, without our own frames
        failure = error
    if failure is None:
        return 0
    _make_room_for_words()
    pause = getattr(sys.modules.get("regrow.agent.worker.failure"), "before_the_end", None)
    if pause is not None:
        pause(failure)
    light_fuse()
    trace = _user_frames(failure.__traceback__)
    _write_error_file(worker.env.get("TORCHELASTIC_ERROR_FILE", ""), failure, trace)
    with contextlib.suppress(OSError, ValueError):  # where it cannot be written the error file has the traceback
        sys.excepthook(type(failure), failure.with_traceback(trace), trace)
    return 1


def _make_room_for_words() -> None:
    """What is told of a failure needs a descriptor and a stderr, and the failure may be that there are none: standard input gives its
    descriptor where no other is left, and what a script has closed is open again, to nowhere."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        os.closerange(0, 1)
    for number in (1, 2):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)


def _run_script(script: str) -> None:
    if not Path(script).is_file():
        runpy.run_path(script, run_name="__main__")
        return
    with io.open_code(str(Path(script).resolve())) as file:
        source = file.read()
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=script, __cached__=None, __builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = module
    code = compile(source, script, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102  # this is what a launcher of scripts does


def _user_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the first frame that is the user's."""
    ours = (__file__, runpy.__file__ or "", "<frozen runpy>")
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in ours:
        rest = rest.tb_next
    return rest


def _write_error_file(path: str, error: BaseException, trace: types.TracebackType | None) -> None:
    """In the format of torch elastic's @record; one that @record wrote before is left as it is."""
    if not path or Path(path).exists():
        return
    text = "".join(traceback.format_exception(type(error), error, trace))
    stamp = str(int(time.time()))
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"py_callstack": text, "timestamp": stamp}}
    try:
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    except OSError as problem:
        sys.stderr.write(f"regrow: error file {path}: {problem}\n")


# --- the store child ---------------------------------------------------------------------------------------------


def _serve_store(task: Task) -> int:
    """Serve a TCPStore on the listening socket that the shim bound, until killed."""
    _close_descriptors(keep=(task.listener, task.ready))
    _name_process("regrow-store")
    serve_store(task.listener, task.ready)
    return 0


def serve_store(listener: int, ready: int) -> None:
    """Serve a TCPStore on the bound and listening descriptor, say so with one byte on `ready`, and never return."""
    distributed = importlib.import_module("torch.distributed")
    with socket.socket(fileno=os.dup(listener)) as bound:
        host, port = bound.getsockname()[:2]
    limit = dt.timedelta(seconds=60)
    store = distributed.TCPStore(host, port, None, True, timeout=limit, wait_for_workers=False, master_listen_fd=listener)
    os.write(ready, b"1")
    os.close(ready)
    while store:
        time.sleep(3600)
