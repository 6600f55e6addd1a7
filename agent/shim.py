"""The shim: a small single-threaded process that has torch imported, forks workers, is their parent and reaps them.

``python -m regrow.agent.shim --socket S/shim.sock --state S``. It outlives the agent: with no client for `--orphan`
seconds it stops its workers and exits. When it dies, its workers and stores die with it (PR_SET_PDEATHSIG). It never
loads grpc and never runs a tensor operation; where its self-check fails, workers are started by exec instead.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from regrow.agent import child, preload, protocol, starting
from regrow.agent.lines import LineConnection, wake_by_signals
from regrow.agent.roster import Roster, children_of, is_all_dead, signal_group, start_time
from regrow.processes import lifeline_fd, signal_at_lifeline_end, wake_at_lifeline_end

_HELD_SECONDS = 0.5
"""Between two looks at workers that were killed and whose end nobody told."""


class Shim:
    """The loop. All state is in the roster; every effect is in this process's children."""

    def __init__(self, *, listener: socket.socket, host: str, orphan_seconds: float, with_store: bool) -> None:
        self._listener = listener
        self._host = host
        self._orphan_seconds = orphan_seconds
        self._with_store = with_store
        self._selector = selectors.DefaultSelector()
        self._clients: set[LineConnection] = set()
        self._roster = Roster()
        self._starter = starting.Starter()
        self._alone_since: float | None = None
        self._spare_after = 0.0
        self._leaving = False
        self._preloaded: tuple[str, ...] = ()
        self._import_problems: tuple[str, ...] = ()
        self._import_seconds = 0.0
        self._handlers: dict[type[Any], Callable[[Any], protocol.Reply]] = {
            protocol.StartWorkers: self._start,
            protocol.StopWorkers: self._stop,
            protocol.ReplaceWorkers: self._replace,
            protocol.ForgetGeneration: self._forget,
            protocol.ListWorkers: lambda request: protocol.Reply(id=request.id, state=self._ready()),
            protocol.OpenStore: self._open_store,
            protocol.Preload: self._preload,
            protocol.ExitShim: self._exit,
        }

    def load(self, modules: tuple[str, ...], optional: tuple[str, ...], *, park: int = 0) -> None:
        """Import what workers will need. As many as `park` are to stand ready from the beginning."""
        self._preloaded, self._import_problems, self._import_seconds = preload.load(modules, optional)
        self._starter.parking.started(park)

    def serve(self) -> None:
        """Run until told to exit, orphaned or cut off. Raises `child.Forked` in every child."""
        child.adopt_orphans()
        lifeline = lifeline_fd()
        wake_by_signals(self._selector)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        for number in (signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) is signal.SIG_IGN:  # from nohup: a cold start would hand it on to the worker
                signal.signal(number, signal.SIG_DFL)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if lifeline is not None:
            self._selector.register(lifeline, selectors.EVENT_READ, self._cut)
        self._alone_since = time.monotonic()
        while not self._leaving:
            self._reap()
            self._bury_held()
            self._keep_spare()
            self._starter.parking.keep(safe=preload.check)
            for key, mask in self._selector.select(self._wait_seconds()):
                if isinstance(key.data, LineConnection):
                    self._converse(key.data, mask)
                else:
                    key.data()
            self._check_orphaned()
        self._end_all()

    def abandon(self) -> None:
        """In a child: close our descriptors through their objects, so that none of these closes a number twice later."""
        self._selector.close()
        self._listener.close()
        self._starter.parking.abandon()
        for client in self._clients:
            client.abandon()

    # --- clients -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        client = LineConnection(connection, self._selector)
        self._clients.add(client)
        self._alone_since = None
        client.send(protocol.encode(self._ready()))

    def _converse(self, client: LineConnection, mask: int) -> None:
        lines = client.handle(mask)
        for line in lines:
            self._answer(client, line)
        if client.closed:
            self._clients.discard(client)
            if not self._clients:
                self._alone_since = time.monotonic()

    def _answer(self, client: LineConnection, line: bytes) -> None:
        try:
            request = protocol.decode(line, protocol.ShimRequest)
        except msgspec.MsgspecError as error:
            client.send(protocol.encode(protocol.Reply(id=0, error=f"not a request: {error}")))
            return
        handler = self._handlers.get(type(request))
        if handler is None:
            client.send(protocol.encode(protocol.Reply(id=0, error=f"unknown request {request.kind!r}")))
            return
        try:
            reply = handler(request)
        except OSError as error:
            reply = protocol.Reply(id=request.id, error=f"{type(error).__name__}: {error}")
        client.send(protocol.encode(reply))

    def _tell(self, event: msgspec.Struct) -> None:
        for client in list(self._clients):
            client.send(protocol.encode(event))

    def _ready(self) -> protocol.Ready:
        now = preload.check()
        problems = (*self._import_problems, *now.problems)
        return protocol.Ready(
            pid=os.getpid(),
            start_time=start_time(os.getpid()),
            safe=not problems,
            problems=problems,
            import_seconds=self._import_seconds,
            resident_bytes=preload.resident_bytes(),
            preloaded=self._preloaded,
            fixed_env=preload.fixed_environment(dict(os.environ)),
            generations=self._roster.generations,
            stores=tuple(self._roster.stores.values()),
        )

    # --- requests ------------------------------------------------------------------------------------------------

    def _start(self, request: protocol.StartWorkers) -> protocol.Reply:
        known = self._roster.get(request.job, request.generation)
        if known is None:
            newer = [
                state.generation for state in self._roster.generations if state.job == request.job and state.generation > request.generation
            ]
            if newer:
                return protocol.Reply(
                    id=request.id, error=f"generation {request.generation} is older than {max(newer)}, which was started here"
                )
            kept: dict[int, protocol.WorkerState] = {}
            if request.keep:
                self._reap()
                kept = self._roster.release(request.job, request.keep)
            started = self._starter.start(request, (*self._import_problems, *preload.check().problems), without=frozenset(kept))
            known = starting.with_kept(started.state, request, kept)
            self._roster.add(known, started.group)
            if started.error:
                self._roster.signal(known, signal.SIGKILL)
                return protocol.Reply(id=request.id, error=started.error)
        if request.store:
            self._give_store(request.store, request.job, request.generation)
        return protocol.Reply(id=request.id, generation=known)

    def _stop(self, request: protocol.StopWorkers) -> protocol.Reply:
        self._reap()
        pids: list[int] = []
        for state in self._roster.up_to(request.job, request.generation):
            pids += self._roster.signal(state, request.signal)
        if request.signal == signal.SIGKILL:
            self._end_stores(request.job, request.generation)
        return protocol.Reply(id=request.id, pids=tuple(pids))

    def _replace(self, request: protocol.ReplaceWorkers) -> protocol.Reply:
        known = self._roster.get(request.job, request.generation)
        if known is None:
            return protocol.Reply(id=request.id, error=f"generation {request.generation} does not run here")
        started = self._starter.start(request, (*self._import_problems, *preload.check().problems))
        self._roster.replace(request.job, request.generation, started.state.workers, started.group)
        return protocol.Reply(id=request.id, error=started.error, generation=self._roster.get(request.job, request.generation))

    def _forget(self, request: protocol.ForgetGeneration) -> protocol.Reply:
        self._roster.forget(request.job, request.generation)
        self._end_stores(request.job, request.generation)
        return protocol.Reply(id=request.id)

    def _open_store(self, request: protocol.OpenStore) -> protocol.Reply:
        mine = [store for store in self._roster.stores.values() if (store.job, store.generation) == (request.job, request.generation)]
        spare = mine[0] if mine else self._roster.spare
        if spare is None:
            return protocol.Reply(id=request.id, error="no store stands ready")
        return protocol.Reply(id=request.id, store=self._give_store(spare.address, request.job, request.generation))

    def _preload(self, request: protocol.Preload) -> protocol.Reply:
        names = tuple(name for name in request.modules if name not in self._preloaded)
        if not names:
            return protocol.Reply(id=request.id)
        done, problems, seconds = preload.load((), names)
        self._preloaded += done
        self._starter.parking.clear()
        self._import_seconds += seconds
        return protocol.Reply(id=request.id, error="; ".join(problems), state=self._ready())

    def _exit(self, request: protocol.ExitShim) -> protocol.Reply:
        self._leaving = True
        return protocol.Reply(id=request.id)

    # --- children ------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            self._bury(found.si_pid)

    def _bury(self, pid: int) -> None:
        """Reap one child. The group of a generation is swept while its last zombie still holds the group's number."""
        if self._roster.owner(pid) is not None and self._roster.is_last(pid):
            signal_group(self._roster.group_of(pid), signal.SIGKILL)
        elif pid not in self._roster.stores:
            self._sweep_strays()
        _, status = os.waitpid(pid, 0)
        self._starter.parking.gone(pid)
        if self._roster.owner(pid) is not None:
            state, worker = self._roster.ended(pid, status)
            self._tell(protocol.WorkerEnded(job=state.job, generation=state.generation, worker=worker))
            self._sweep_strays()
        store = self._roster.stores.pop(pid, None)
        if store is not None:
            if not store.generation:
                self._spare_after = time.monotonic() + 1.0
            self._tell(protocol.StoreChanged(store=store, ended=True))

    def _bury_held(self) -> None:
        """Of a worker that we killed and that a debugger is attached to, the kernel tells its end to the debugger first, and to us when
        that has looked or gone. It is dead all the same: this host is not broken."""
        for pid in self._roster.torn_down():
            if is_all_dead(pid) and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if self._roster.is_last(pid):
                    signal_group(self._roster.group_of(pid), signal.SIGKILL)
                state, worker = self._roster.ended(pid, signal.SIGKILL)
                self._tell(protocol.WorkerEnded(job=state.job, generation=state.generation, worker=worker))

    def _sweep_strays(self) -> None:
        """With no worker alive, kill what workers left behind outside their group; as their subreaper we inherit it."""
        if self._roster.alive():
            return
        ours = {*self._roster.stores, *self._starter.children}
        for pid in children_of(os.getpid()):
            if pid not in ours:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _keep_spare(self) -> None:
        if not self._with_store or self._leaving or self._roster.spare is not None or self._starter.opening:
            return
        if time.monotonic() < self._spare_after:
            return
        ready = self._starter.open_store(self._host, safe=preload.check().safe)
        self._selector.register(ready, selectors.EVENT_READ, lambda: self._store_ready(ready))

    def _store_ready(self, ready: int) -> None:
        self._selector.unregister(ready)
        answered = os.read(ready, 1) == b"1"
        os.close(ready)
        store = self._starter.store_opened()
        if not answered:
            self._spare_after = time.monotonic() + 5.0
            return
        self._roster.stores[store.pid] = store
        self._tell(protocol.StoreChanged(store=store))

    def _give_store(self, address: str, job: str, generation: int) -> protocol.StoreState | None:
        store = self._roster.store_at(address)
        if store is None or (store.generation and (store.job, store.generation) != (job, generation)):
            return None
        given = msgspec.structs.replace(store, job=job, generation=generation)
        self._roster.stores[store.pid] = given
        if not store.generation:
            self._tell(protocol.StoreChanged(store=given))
        return given

    def _end_stores(self, job: str, generation: int) -> None:
        for store in self._roster.stores.values():
            if store.generation and store.generation <= generation and (not job or store.job == job):
                os.kill(store.pid, signal.SIGKILL)

    # --- ends ----------------------------------------------------------------------------------------------------

    def _wait_seconds(self) -> float | None:
        now = time.monotonic()
        waits = [self._alone_since + self._orphan_seconds - now] if self._alone_since is not None else []
        waits += [self._spare_after - now] if self._with_store and self._roster.spare is None and not self._starter.opening else []
        waits += [_HELD_SECONDS] if self._roster.torn_down() else []
        waits += self._starter.parking.waits()
        return max(0.0, min(waits)) if waits else None

    def _check_orphaned(self) -> None:
        if self._alone_since is not None and time.monotonic() - self._alone_since >= self._orphan_seconds:
            sys.stderr.write(f"regrow.shim no agent for {self._orphan_seconds:g} s: stopping the workers\n")
            self._leaving = True

    def _cut(self) -> None:
        self._leaving = True

    def _on_signal(self, number: int, _frame: object) -> None:
        sys.stderr.write(f"regrow.shim signal={signal.Signals(number).name}: stopping the workers\n")
        self._leaving = True

    def _end_all(self) -> None:
        for state in self._roster.generations:
            self._roster.signal(state, signal.SIGKILL)
        for pid in [*self._roster.stores, *self._starter.children]:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 1.0
        while self._roster.alive() and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.005)
        for client in list(self._clients):
            client.flush_and_close()


def _watch_lifeline_while_importing() -> Callable[[], None]:
    """End this process by SIGIO when the launcher dies during the imports. Returns what switches that off."""
    own = signal_at_lifeline_end(signal.SIGIO)
    return lambda: None if own is None else os.close(own)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m regrow.agent.shim", description="Fork server of one node.")
    parser.add_argument("--socket", required=True, type=Path, help="Unix socket to serve")
    parser.add_argument("--state", required=True, type=Path, help="state folder of the node; one shim a folder")
    parser.add_argument("--host", default="127.0.0.1", help="address that stores listen on")
    parser.add_argument("--orphan", type=float, default=30.0, metavar="SECONDS", help="life without any client")
    parser.add_argument("--preload", action="append", default=[], metavar="MODULE", help="import this too (repeatable)")
    parser.add_argument("--no-imports", action="store_true", help="import nothing before the forks")
    parser.add_argument("--no-store", action="store_true", help="keep no spare TCPStore")
    parser.add_argument("--park", type=int, default=0, metavar="N", help="workers that stand ready before any was started")
    return parser.parse_args(argv)


def run(argv: list[str] | None = None) -> int:
    """The shim's whole life, or (in a child) that of a worker or store. Returns the exit code."""
    options = _arguments(argv)
    if sys.path and sys.path[0] in ("", str(Path.cwd())):
        del sys.path[0]
    lock = os.open(options.state / "shim.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.stderr.write(f"regrow.shim another shim serves {options.state}\n")
        return 3
    options.socket.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(str(options.socket))
    options.socket.chmod(0o600)
    listener.listen(16)
    task: child.Task | None = None
    shim = Shim(listener=listener, host=options.host, orphan_seconds=options.orphan, with_store=not options.no_store)
    try:
        wake_at_lifeline_end()
        importing_is_over = _watch_lifeline_while_importing()
        wanted = () if options.no_imports else preload.DEFAULT_MODULES
        shim.load(wanted, (*(() if options.no_imports else preload.OPTIONAL_MODULES), *options.preload), park=options.park)
        importing_is_over()
        shim.serve()
    except child.Forked as forked:
        task = forked.task
        shim.abandon()
    if task is None:
        options.socket.unlink(missing_ok=True)
        return 0
    return child.run(task)


if __name__ == "__main__":
    preload.limit_threads()
    sys.exit(run())
