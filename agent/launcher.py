"""The agent's side of the shim: keeps one running, talks to it, and tells what becomes of workers.

The shim outlives the agent, so a launcher first looks for one that serves the state folder and takes it over. When the
shim dies, its workers died with it (the kernel saw to it): their exits are reported as such and a new shim is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from regrow.agent import protocol
from regrow.agent.roster import process_state, start_time
from regrow.errors import OperationalError
from regrow.processes import LIFELINE, lifeline_fd

_log = logging.getLogger("regrow.agent.launcher")

SOCKET_NAME = "shim.sock"
_REPLY_SECONDS = 5.0
_START_SECONDS = 180.0
"""A start waits for the shim's imports, which take seconds on an idle machine and a minute on a loaded one."""


class ShimOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a shim."""

    state: Path
    host: str = "127.0.0.1"
    orphan_seconds: float = 30.0
    preload: tuple[str, ...] = ()
    imports: bool = True
    """False: workers import everything themselves (warm start is off, memory is saved)."""
    spare_store: bool = True
    park: int = 0
    """Workers that stand ready before any was started: a node that joins or takes another's place needs them at once."""


class ShimUp(msgspec.Struct, frozen=True):
    """A shim answers; this is its whole state."""

    ready: protocol.Ready
    adopted: bool
    """True when it was running before this launcher."""


class ShimDown(msgspec.Struct, frozen=True):
    """The shim is gone, and these live workers with it."""

    generations: tuple[protocol.GenerationState, ...]
    reason: str


ShimNews = ShimUp | ShimDown | protocol.WorkerEnded | protocol.StoreChanged


class Launcher:
    """Keeps a shim running. `run` is its life; requests wait until a shim is there."""

    def __init__(self, options: ShimOptions, report: Callable[[ShimNews], None]) -> None:
        self._options = options
        self._report = report
        self._writer: asyncio.StreamWriter | None = None
        self._up = asyncio.Event()
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[protocol.Reply]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._generations: dict[tuple[str, int], protocol.GenerationState] = {}
        self._ready: protocol.Ready | None = None
        self._closing = False
        self._spawning: asyncio.Future[subprocess.Popen[bytes]] | None = None
        self.spawned = asyncio.Event()
        """Set once this launcher had to start a shim itself."""

    @property
    def ready(self) -> protocol.Ready | None:
        """The shim's state when it last came up; None before that."""
        return self._ready

    async def run(self) -> None:
        """Keep a shim connected until cancelled or closed."""
        pause = 0.05
        while not self._closing:
            self._settle()
            adopted = await self._ensure_process()
            try:
                reader, writer = await asyncio.open_unix_connection(self._socket, limit=64 * 1024 * 1024)
            except OSError:
                await asyncio.sleep(pause)
                pause = min(1.0, pause * 1.5)
                continue
            pause = 0.05
            self._writer = writer
            try:
                await self._listen(reader, adopted=adopted)
            finally:
                self._disconnected()
                writer.close()

    async def start(self, request: protocol.StartWorkers) -> protocol.GenerationState:
        """Start workers. The request's id is set here.

        Raises:
            OperationalError: the shim refused, failed, or did not answer.
        """
        reply = await self._ask(request, _START_SECONDS)
        if reply.generation is None:
            raise OperationalError("the shim did not start the workers", where=self._options.state.name)
        self._generations[(request.job, request.generation)] = reply.generation
        return reply.generation

    async def replace(self, request: protocol.ReplaceWorkers) -> protocol.GenerationState:
        """Kill and fork anew some ranks of a generation. The request's id is set here.

        Raises:
            OperationalError: the shim refused, failed, or did not answer.
        """
        reply = await self._ask(request, _START_SECONDS)
        assert reply.generation is not None
        self._generations[(request.job, request.generation)] = reply.generation
        return reply.generation

    async def stop(self, job: str, generation: int, number: int = signal.SIGKILL) -> tuple[int, ...]:
        """Signal this and older generations of the job. Returns pids that were alive. A shim that does not answer is killed."""
        if self._is_fresh():
            return ()
        try:
            reply = await self._ask(protocol.StopWorkers(id=0, job=job, generation=generation, signal=number), _REPLY_SECONDS)
        except OperationalError:
            self.kill_shim()
            raise
        return reply.pids

    async def forget(self, job: str, generation: int) -> None:
        """Drop ended generations from the shim's book."""
        if self._is_fresh():
            return
        await self._ask(protocol.ForgetGeneration(id=0, job=job, generation=generation), _REPLY_SECONDS)
        for key in [key for key in self._generations if key[0] == job and key[1] <= generation]:
            if all(worker.status is not None for worker in self._generations[key].workers):
                del self._generations[key]

    def _is_fresh(self) -> bool:
        """True while a shim of our own is importing: it has no workers and no book yet, so nothing is waited for."""
        return self._ready is None and self._process is not None and self._process.poll() is None

    async def state(self) -> protocol.Ready:
        """The shim's whole state now."""
        reply = await self._ask(protocol.ListWorkers(id=0), _REPLY_SECONDS)
        assert reply.state is not None
        return reply.state

    async def open_store(self, job: str, generation: int) -> protocol.StoreState:
        """Give the spare store to a generation."""
        reply = await self._ask(protocol.OpenStore(id=0, job=job, generation=generation), _START_SECONDS)
        assert reply.store is not None
        return reply.store

    async def preload(self, modules: tuple[str, ...]) -> str:
        """Import modules in the shim; returns what went wrong, or nothing."""
        try:
            await self._ask(protocol.Preload(id=0, modules=modules), _START_SECONDS)
        except OperationalError as error:
            return error.what
        return ""

    async def close(self, *, stop_shim: bool) -> None:
        """Leave the shim; with `stop_shim` tell it to end its workers and exit."""
        self._closing = True
        if self._spawning is not None:
            self._process = await self._spawning
        if stop_shim and self._up.is_set():
            with contextlib.suppress(OperationalError):
                await self._ask(protocol.ExitShim(id=0), 2.0)
        elif stop_shim and self._process is not None:
            self._process.kill()  # it was importing, or does not answer: no worker is lost that should live
        if self._writer is not None:
            self._writer.close()
        if stop_shim and self._process is not None:
            await asyncio.to_thread(_wait_or_kill, self._process, 5.0)

    def kill_shim(self) -> None:
        """SIGKILL the shim: all its workers and stores die with it."""
        if self._ready is not None and start_time(self._ready.pid) == self._ready.start_time:
            os.kill(self._ready.pid, signal.SIGKILL)

    # --- the process ---------------------------------------------------------------------------------------------

    @property
    def _socket(self) -> str:
        return str(self._options.state / SOCKET_NAME)

    async def _ensure_process(self) -> bool:
        """Start a shim unless one holds the folder's lock. True when one was there already."""
        if self._process is not None and self._process.poll() is None:
            return False
        self._settle()
        if _is_locked(self._options.state / "shim.lock"):
            return True
        self._spawning = asyncio.ensure_future(asyncio.to_thread(self._spawn))
        self._process = await asyncio.shield(self._spawning)
        self._spawning = None
        self.spawned.set()
        return False

    def _spawn(self) -> subprocess.Popen[bytes]:
        options = self._options
        command = [sys.executable, "-m", "regrow.agent.shim", "--socket", self._socket, "--state", str(options.state)]
        command += ["--host", options.host, "--orphan", str(options.orphan_seconds)]
        for name in options.preload:
            command += ["--preload", name]
        command += [] if options.imports else ["--no-imports"]
        command += [] if options.spare_store else ["--no-store"]
        command += ["--park", str(options.park)] if options.park and options.imports else []
        lifeline = lifeline_fd()
        environment = {name: value for name, value in os.environ.items() if name != LIFELINE or lifeline is not None}
        with (options.state / "shim.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=options.state,
                env=environment,
                start_new_session=True,
                pass_fds=() if lifeline is None else (lifeline,),
            )
        _log.info("shim started pid=%d", process.pid)
        return process

    # --- the conversation ----------------------------------------------------------------------------------------

    async def _ask(self, request: protocol.ShimRequest, limit_seconds: float) -> protocol.Reply:
        self._next_id += 1
        number = self._next_id
        deadline = time.monotonic() + limit_seconds
        try:
            async with asyncio.timeout(limit_seconds):
                await self._up.wait()
        except TimeoutError as error:
            raise OperationalError(f"no shim came up within {limit_seconds:g} s", where=self._socket, hint="see shim.log") from error
        writer = self._writer
        assert writer is not None
        answer: asyncio.Future[protocol.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            writer.write(protocol.encode(msgspec.structs.replace(request, id=number)))
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                reply = await answer
        except (TimeoutError, ConnectionError) as error:
            raise OperationalError(
                f"the shim did not answer within {limit_seconds:g} s", where=self._socket, hint="see shim.log"
            ) from error
        finally:
            self._waiting.pop(number, None)
        if reply.error:
            raise OperationalError(reply.error, where="shim")
        return reply

    async def _listen(self, reader: asyncio.StreamReader, *, adopted: bool) -> None:
        while True:
            try:
                line = await reader.readline()
            except (OSError, ValueError):
                return
            if not line.endswith(b"\n"):
                return
            message = protocol.decode(line, protocol.ShimEvent)
            match message:
                case protocol.Ready():
                    self._came_up(message, adopted=adopted)
                case protocol.Reply():
                    waiter = self._waiting.get(message.id)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(message)
                case protocol.WorkerEnded():
                    self._note_end(message)
                    self._report(message)
                case protocol.StoreChanged():
                    self._report(message)
                case _:
                    _log.warning("shim said something unknown: %s", message)

    def _came_up(self, ready: protocol.Ready, *, adopted: bool) -> None:
        self._ready = ready
        self._generations = {(state.job, state.generation): state for state in ready.generations}
        self._up.set()
        _log.info(
            "shim pid=%d adopted=%s safe=%s import_seconds=%.2f memory_mb=%.0f %s",
            ready.pid,
            adopted,
            ready.safe,
            ready.import_seconds,
            ready.resident_bytes / 1e6,
            "; ".join(ready.problems),
        )
        self._report(ShimUp(ready, adopted))

    def _note_end(self, message: protocol.WorkerEnded) -> None:
        key = (message.job, message.generation)
        state = self._generations.get(key)
        if state is not None:
            workers = tuple(message.worker if worker.rank == message.worker.rank else worker for worker in state.workers)
            self._generations[key] = msgspec.structs.replace(state, workers=workers)

    def _disconnected(self) -> None:
        self._up.clear()
        self._writer = None
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(ConnectionError("the shim closed the connection"))
        self._settle()

    def _settle(self) -> None:
        """Report a shim that died. One that only closed the connection is connected to again, with nothing lost."""
        ready = self._ready
        if self._closing or ready is None or self._up.is_set() or _is_running(ready.pid, ready.start_time):
            return
        self._ready = None
        gone = tuple(self._generations.values())
        for state in gone:
            _sweep(state)
        self._generations = {}
        self._report(ShimDown(gone, f"the shim (pid {ready.pid}) is gone"))


def _is_running(pid: int, started: int) -> bool:
    return start_time(pid) == started and process_state(pid) not in ("", "Z", "X")


def _sweep(state: protocol.GenerationState) -> None:
    """SIGKILL what is left of a generation whose shim died: the kernel has killed the workers, not their own children."""
    for worker in state.workers:
        if worker.status is None and start_time(worker.pid) == worker.start_time:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(os.getpgid(worker.pid), signal.SIGKILL)


def _is_locked(path: Path) -> bool:
    """True when a living shim holds the folder."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _wait_or_kill(process: subprocess.Popen[bytes], limit_seconds: float) -> None:
    try:
        process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
