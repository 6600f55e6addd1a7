"""Changing the generation in place: the process stays, its collectives are broken, its script's main function runs again.

    def main() -> None:
        run = regrow.attach()
        ...

    regrow.in_place(main)

One thread waits for the agent's word. When it comes, it shuts the sockets of all process groups down and frees whom gloo
forgets (`gloo`), for nothing else frees a thread that gloo holds in a collective; the error unwinds `main`, or the step loop raises
`GenerationChanged` at its next boundary. Then `main` runs again, under the environment of the next generation. A process
that is not there in time (stopped, busy, or user code that swallowed the change) is killed and forked anew by its agent.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from regrow import wire
from regrow.agent import became
from regrow.agent.worker import gasp, gloo
from regrow.agent.worker.environment import WorkerEnvironment
from regrow.agent.worker.groups import forget_meshes, uses_gpu
from regrow.agent.worker.link import AgentLink
from regrow.errors import RegrowError

_log = logging.getLogger("regrow.worker")

ORDER_SECONDS = 10.0
"""How long a worker that lost a peer waits for the order to change over before it ends with its error, as without us."""
_AGAIN_SECONDS = 0.03
"""At this distance, until the script has come out of its step, sockets are shut down again (it may have opened new ones), and
threads that gloo forgot are let go."""
_RECONNECT_SECONDS = 0.2
_VICTIM_SECONDS = 0.3
_LOST_PEER = re.compile(r"gloo|nccl|connection|broken pipe|socket|timed? ?out|peer|read error|store", re.IGNORECASE)
_COLLECTIVE = re.compile(r"\bgloo\b|\bnccl|connection (closed|reset) by peer", re.IGNORECASE)
_PLACE = ("RANK", "WORLD_SIZE", "REGROW_MESH")
"""While these stay, process groups have the names that they had in the generation before."""
T = TypeVar("T")


class GenerationChanged(BaseException):
    """This generation is over. A BaseException, so that `except Exception` in user code does not swallow it.

    Attributes:
        generation: the generation that ended.
    """

    def __init__(self, generation: int, reason: str = "") -> None:
        super().__init__(f"generation {generation} is over{': ' if reason else ''}{reason}")
        self.generation = generation


class Watcher:
    """Waits for the order to join another generation, in a thread of its own, and breaks what the process is blocked in."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        self._path = environment.socket
        self._hello = _hello(environment)
        self._order: wire.Regroup | None = None
        self._asked = False
        self._arrived = threading.Event()
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._watch, name="regrow-regroup", daemon=True)
        self._waiters = gloo.Waiters()
        self.num_broken = 0
        """Connections that were shut down, over the life of the process."""

    def start(self) -> None:
        """Begin to wait."""
        self._thread.start()

    def joined(self, environment: WorkerEnvironment) -> None:
        """The process is in another generation now: wait for the end of that one."""
        with self._changed:
            self._hello = _hello(environment)
            self._asked = False
            self._arrived.clear()
            self._say(self._hello)

    def check(self) -> None:
        """Called at each step boundary.

        Raises:
            GenerationChanged: the order has come.
        """
        if self._order is not None:
            raise GenerationChanged(self._hello.generation, f"generation {self._order.generation} follows")

    def take(self, limit_seconds: float) -> wire.Regroup | None:
        """The order, when it is there within the limit; from then on no socket is touched until `joined`."""
        with self._changed:
            self._changed.wait_for(lambda: self._order is not None or self._asked, limit_seconds)
            if self._order is None and self._asked and gasp.now():
                self._changed.wait(gasp.WAIT_SECONDS)  # to be killed
            order, self._order = self._order, None
            if order is not None:
                self._arrived.set()
                self._say(wire.WorkerWatch(**_name(order), pid=os.getpid(), changing=True))
            return order

    def tell(self, phase: str, seconds: float, step: int) -> None:
        """Say something to the agent on this connection."""
        with self._changed:
            hello = self._hello
            self._say(wire.WorkerPhase(generation=hello.generation, rank=hello.rank, phase=phase, seconds=seconds, step=step))

    def tell_loss(self) -> None:
        """A peer is gone. Without it nobody hears: this process goes on, and a host that lost power says nothing."""
        with self._changed:
            hello = self._hello
            self._say(wire.WorkerPhase(generation=hello.generation, rank=hello.rank, phase=wire.LOST_PEER_PHASE))

    def _say(self, message: wire.WorkerWatch | wire.WorkerPhase) -> None:
        """To the agent, when it is there. Called with the lock."""
        if self._connection is not None:
            with contextlib.suppress(OSError):  # away: the thread says hello when it has a new connection
                self._connection.sendall(wire.encode(message))

    def _watch(self) -> None:
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(self._path)
                with self._changed:
                    self._connection = connection
                    connection.sendall(wire.encode(self._hello))
                with connection.makefile("rb") as lines:
                    for line in lines:
                        self._ordered(line)
            except OSError:
                pass  # the agent is away: training goes on, and the next one is told that we are here
            finally:
                with self._changed:
                    self._connection = None
                connection.close()
            time.sleep(_RECONNECT_SECONDS)

    def _ordered(self, line: bytes) -> None:
        try:
            order = wire.decode(line, wire.ToWorker)
        except msgspec.MsgspecError as error:
            _log.warning("order not understood error=%s", error)
            return
        if isinstance(order, wire.Gasp) and order.generation == self._hello.generation:
            self._gasp()
        if not isinstance(order, wire.Regroup) or order.generation <= self._hello.generation:
            return
        with self._changed:
            self._order = order
            self._changed.notify_all()
        self._waiters.forget()
        while self._break(order.generation):
            self._arrived.wait(_AGAIN_SECONDS)

    def _gasp(self) -> None:
        with self._changed:
            self._asked = True
            self._changed.notify_all()
        gasp.ask_main(self._waiters)

    def _break(self, generation: int) -> bool:
        """Break what holds the script; False: it has come out (or is in `generation` already, where this thread was late)."""
        with self._changed:
            if self._arrived.is_set() or self._hello.generation >= generation:
                return False
            self.num_broken += gloo.shut_down()
            freed = self._waiters.free()
        if freed:
            _log.warning("in place: %d threads freed that gloo would have left waiting", freed)
        return True


_watcher: Watcher | None = None
_leave: Callable[[], None] | None = None
_inside = False
_hook: Callable[..., Any] = sys.excepthook
"""What was there before the first generation."""
_hold: Callable[[], Any] | None = None
_held: Any = None
_given: list[Callable[[], None]] = []


def possible() -> bool:
    """Does this process change its generation in place?"""
    return _inside


def hold_by(hold: Callable[[], Any], still: Callable[[Any], bool] = lambda _: False) -> None:
    """How to get at the state of the last completed step when the generation ends, and whether it is what it was."""
    global _hold  # noqa: PLW0603
    _hold = hold
    gasp.hold_by(_newest, still)


def _newest() -> Any:
    """What was put aside when a step broke, else what there is."""
    return _held if _held is not None else _hold() if _hold is not None else None


def give_back_by(close: Callable[[], None]) -> None:
    """What to call when this process goes on in another generation: the writer's connection and arenas are this one's."""
    if _inside:
        _given.append(close)


def take_held() -> Any:
    """What the generation before left in memory, once; None: nothing, or it was not whole."""
    global _held
    held, _held = _held, None
    return held


def in_place(body: Callable[[], T]) -> T:
    """Run `body` again in this process whenever the generation changes; returns what it returns.

    It has to do everything from `regrow.attach()` on: the mesh may be another one. What it keeps outside of itself (modules,
    data that was read, caches) stays. With `--no-in-place`, with GPUs unless `--in-place` asks for it, and without a supervisor,
    this is a plain call.
    """
    global _inside  # noqa: PLW0603
    global _hook  # noqa: PLW0603
    _hook = sys.excepthook
    if not _wanted():
        return body()
    _inside = True
    gc.freeze()  # the collection between two generations then walks what the script made, not all of torch
    while True:
        try:
            return body()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            order = _order_after(error)
            if order is None:
                raise
            _log.info("in place: generation %d follows after %s: %s", order.generation, type(error).__name__, str(error).split("\n", 1)[0])
            _forget_frames(error)
        _change_over(order)


def _wanted() -> bool:
    """Where nobody asked for it ("auto") it is for CPUs: with GPUs it was never run, and for a moment two states are in memory."""
    asked = os.environ.get("REGROW_IN_PLACE", "")
    return bool(os.environ.get("REGROW_SOCKET")) and (asked == "1" or (asked == "auto" and not uses_gpu()))


def watch(environment: WorkerEnvironment, leave: Callable[[], None]) -> Callable[[], None]:
    """Called by `attach` when the process has joined a generation. `leave` takes the run apart.

    Returns:
        What each step boundary has to call.
    """
    global _watcher, _leave  # noqa: PLW0603
    if not _inside and not gasp.wanted(environment):
        return _nothing
    _leave = leave
    if gasp.wanted(environment):
        gasp.begin(environment, lambda phase, seconds, step: _watcher.tell(phase, seconds, step) if _watcher is not None else None)
    if _watcher is None:
        _watcher = Watcher(environment)
        _watcher.start()
    else:
        _watcher.joined(environment)
    return _watcher.check


def _order_after(error: BaseException) -> wire.Regroup | None:
    """The order that explains this error; one that says that a peer is gone is given time to be explained.

    The leader takes a moment to decide: what can be done before the order is done meanwhile.
    """
    if _watcher is None:
        return None
    if not lost_peer(error):
        order = _watcher.take(0.0)
        if order is not None:
            _keep_state()
            _empty_frames(error)
        return order
    _watcher.tell_loss()
    gloo.shut_down()  # peers that wait for us know it at once, as those do that waited for who is gone
    _keep_state()
    _empty_frames(error)
    return _watcher.take(ORDER_SECONDS)


def lost_peer(error: BaseException) -> bool:
    """Does this error, or what it was raised from, say that a peer is gone or that the generation is over?"""
    return any(
        isinstance(cause, GenerationChanged) or (isinstance(cause, RuntimeError | OSError) and bool(_LOST_PEER.search(str(cause))))
        for cause in _chain(error)
    )


def await_the_end(error: BaseException, environment: WorkerEnvironment, link: AgentLink) -> None:
    """Of a process that does not change over and lost a peer: it is about to be killed and started anew, and the time that its own
    end takes (tracebacks, the interpreter's collections: 40 ms of CPU a worker) would be missing there. So it tells, and waits a moment.
    """
    if _inside or not environment.supervised or not is_broken_collective(error):
        return
    lost = wire.WorkerPhase(generation=environment.generation, rank=environment.rank, phase=wire.LOST_PEER_PHASE)
    link.send(lost)
    link.drain(_VICTIM_SECONDS)
    gloo.shut_down()  # peers that wait for us know it at once
    gasp.now()
    sys.stderr.write(f"regrow: rank {environment.rank} lost a peer: {str(error).splitlines()[0]}\n")
    time.sleep(_VICTIM_SECONDS)


def is_broken_collective(error: BaseException) -> bool:
    """Does this error come out of a collective that lost a peer? Narrower than `lost_peer`: words of a file's own trouble are none."""
    return any(isinstance(cause, RuntimeError) and bool(_COLLECTIVE.search(str(cause))) for cause in _chain(error))


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from: a pipeline wraps what its stage died of."""
    found: list[BaseException] = []
    seen: BaseException | None = error
    while seen is not None and seen not in found:
        found.append(seen)
        seen = seen.__cause__ or seen.__context__
    return found


def _keep_state() -> None:
    global _held, _hold  # noqa: PLW0603
    _held = _hold() if _hold is not None else None
    _hold = None


def _empty_frames(error: BaseException) -> None:
    """Let go of the model, the groups and whatever else the script's frames hold. The traceback still says where it was."""
    for cause in _chain(error):
        traceback.clear_frames(cause.__traceback__)


def _forget_frames(error: BaseException) -> None:
    for cause in _chain(error):
        cause.__traceback__ = None


def _change_over(order: wire.Regroup) -> None:
    global _leave  # noqa: PLW0603
    for close in _given:
        with contextlib.suppress(RegrowError, OSError):  # the writer is away: there is nothing to give back
            close()
    _given.clear()
    gasp.end()
    if _leave is not None:
        _leave()
        _leave = None
    sys.excepthook = _hook  # ours and torch's, put on top of each other in each generation, hold all that the generation had
    if any(os.environ.get(name) != order.env.get(name) for name in _PLACE):
        forget_meshes()
    gc.collect()
    os.environ.clear()
    os.environ.update(order.env)
    became.now()
    sys.stdout.flush()
    sys.stderr.flush()
    output = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def _hello(environment: WorkerEnvironment) -> wire.WorkerWatch:
    return wire.WorkerWatch(
        job=environment.job,
        generation=environment.generation,
        rank=environment.rank,
        pid=os.getpid(),
        in_place=_inside,
        gasps=gasp.wanted(environment),
    )


def _name(order: wire.Regroup) -> dict[str, Any]:
    """Job, generation and rank that an order leads to."""
    return {"job": order.env["REGROW_JOB"], "generation": order.generation, "rank": int(order.env["RANK"])}


def _nothing() -> None:
    """No generation follows."""
