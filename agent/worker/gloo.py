"""Breaking the collectives of this process from another of its threads.

Two steps. First the sockets: gloo sees the end of each connection and lets most of its waiters go. Not all: when a pair of
gloo closes, it tells the buffers that are *posted*, and forgets the one that it is in the middle of receiving into and those
that wait in its queue to be sent (`Pair::signalException` of gloo/transport/tcp, its loops over `tx_` and the absence of
`rx_`). Whoever waits for one of those waits for the group's time-out. So, for a thread that still waits after that: it sleeps
in the kernel on a word inside its `UnboundBuffer`; the kernel says which word, and the buffer gets the exception that
gloo owed it. See docs/adr/0012-free-gloo-waiters.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import socket
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

_log = logging.getLogger("regrow.worker")

_TIMEVAL = struct.Struct("ll")
_WORD = struct.Struct("=Q")
_FUTEX = {"x86_64": "202", "aarch64": "98"}
"""Number of the system call that a thread in `pthread_cond_clockwait` is in."""
_BUFFER_BYTES = 1024
"""More than a buffer of gloo is long: its start is looked for so far in front of the word that is waited on."""
_BUFFER = "_ZTVN4gloo9transport3tcp13UnboundBufferE"
_SIGNAL = "_ZN4gloo9transport3tcp13UnboundBuffer15signalExceptionENSt15__exception_ptr13exception_ptrE"


class Waiter(NamedTuple):
    """A thread that sleeps inside a gloo buffer."""

    thread: int
    buffer: int
    """Address of the buffer."""


def shut_down() -> int:
    """Shut down the connections of gloo in this process, and abort NCCL's communicators. Returns how many connections.

    gloo's sockets are told from others by their receive time-out, which it sets to that of the group and which Python's
    sockets and the store's client leave at 0.
    """
    count = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            if not str(Path(f"/proc/self/fd/{name}").readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                    continue
                if not any(_TIMEVAL.unpack(copy.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.size))):
                    continue
                copy.shutdown(socket.SHUT_RDWR)
                count += 1
        except OSError:
            continue  # closed meanwhile, or not connected
    _abort_nccl()
    return count


def _abort_nccl() -> None:
    """Never run on a GPU so far. An abort frees kernels that wait for a peer; gloo needs none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    from torch.distributed import distributed_c10d as c10d

    for group in list(c10d._world.pg_map):  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        with contextlib.suppress(RuntimeError, AttributeError):
            group._get_backend(torch.device("cuda")).abort()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


class Waiters:
    """Threads that gloo forgot. `free` lets those go that were seen in two calls in a row: gloo had its time."""

    def __init__(self) -> None:
        self._gloo = _Gloo.find()
        self._before: frozenset[Waiter] = frozenset()
        self.num_freed = 0

    def seen(self) -> int:
        """Threads that sleep inside a gloo buffer now, whether gloo forgot them or not."""
        return len(self._gloo.waiters()) if self._gloo is not None else 0

    def forget(self) -> None:
        """Who was seen before: another generation ends."""
        self._before = frozenset()

    def free(self) -> int:
        """Call it again every few milliseconds once the sockets are shut down. Returns how many threads were let go now."""
        if self._gloo is None:
            return 0
        now = self._gloo.waiters()
        freed = 0
        for waiter in now & self._before:
            if waiter in self._gloo.waiters():  # still: nobody else woke it meanwhile
                self._gloo.signal(waiter.buffer, "the generation is over: gloo connection closed")
                freed += 1
        self._before = now
        self.num_freed += freed
        return freed


class _Gloo:
    """What of gloo and the C++ runtime is needed, by its symbols."""

    def __init__(self, torch: ctypes.CDLL, runtime: ctypes.CDLL, futex: str) -> None:
        self._futex = futex
        self._vtable = _WORD.pack(_address(torch, _BUFFER) + 16)  # behind offset and type info, as objects point to it
        self._signal = _function(torch, _SIGNAL, None, 2)
        self._allocate = runtime["__cxa_allocate_exception"]
        self._allocate.restype, self._allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        self._initialise = _function(runtime, "__cxa_init_primary_exception", ctypes.c_void_p, 3)
        self._construct = runtime["_ZNSt13runtime_errorC1EPKc"]
        self._construct.restype, self._construct.argtypes = None, [ctypes.c_void_p, ctypes.c_char_p]
        self._refer = _function(runtime, "_ZNSt15__exception_ptr13exception_ptrC1EPv", None, 2)
        self._type = _address(runtime, "_ZTISt13runtime_error")
        self._destroy = ctypes.cast(runtime["_ZNSt13runtime_errorD1Ev"], ctypes.c_void_p).value

    @classmethod
    def find(cls) -> _Gloo | None:
        """None where something is not as it is known to be: then the process is forked anew instead."""
        torch = sys.modules.get("torch")
        futex = _FUTEX.get(platform.machine())
        if torch is None or futex is None:
            return None
        try:
            library = ctypes.CDLL(str(Path(str(torch.__file__)).parent / "lib" / "libtorch_cpu.so"))
            return cls(library, ctypes.CDLL("libstdc++.so.6"), futex)
        except (OSError, AttributeError, ValueError) as error:
            _log.info("in place: threads that gloo forgets cannot be freed: %s", error)
            return None

    def waiters(self) -> frozenset[Waiter]:
        """Threads that sleep on a word inside a gloo buffer."""
        found: list[Waiter] = []
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
                try:
                    call = Path(f"/proc/self/task/{thread}/syscall").read_text(encoding="ascii").split()
                    if call[0] != self._futex:
                        continue
                    buffer = self._start_of_buffer(memory, int(call[1], 16))
                except (OSError, ValueError, IndexError):
                    continue  # it ended, or runs
                if buffer:
                    found.append(Waiter(int(thread), buffer))
        return frozenset(found)

    def _start_of_buffer(self, memory: Any, word: int) -> int:
        """The nearest pointer to the buffers' table of functions in front of the word; 0: the word is not in a buffer."""
        begin = (word & ~7) - _BUFFER_BYTES
        data = os.pread(memory.fileno(), _BUFFER_BYTES, begin)
        at = data.rfind(self._vtable)
        return begin + at if at >= 0 and at % 8 == 0 else 0

    def signal(self, buffer: int, text: str) -> None:
        """What gloo does for a buffer whose connection closed: its waiters throw."""
        error = self._allocate(2 * ctypes.sizeof(ctypes.c_void_p))  # a std::runtime_error
        self._initialise(error, self._type, self._destroy)
        self._construct(error, text.encode())
        pointer = ctypes.c_void_p()  # a std::exception_ptr, moved into the buffer
        self._refer(ctypes.addressof(pointer), error)
        self._signal(buffer, ctypes.addressof(pointer))


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, name))


def _function(library: ctypes.CDLL, name: str, result: Any, num_pointers: int) -> Any:
    function = library[name]
    function.restype, function.argtypes = result, [ctypes.c_void_p] * num_pointers
    return function
