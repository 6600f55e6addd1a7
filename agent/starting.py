"""How the shim makes its children: by fork where that is safe, else by exec of a fresh interpreter."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from regrow.agent import child, cold, parked, preload, protocol
from regrow.agent.roster import start_time


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A generation that was started (or, with `error`, as much of it as was)."""

    state: protocol.GenerationState
    group: int
    error: str = ""


class Starter:
    """Makes worker and store processes."""

    def __init__(self) -> None:
        self.opening: dict[int, protocol.StoreState] = {}
        """Store children that have not said yet that they serve, by pid."""
        self.parking = parked.Parking()

    @property
    def children(self) -> frozenset[int]:
        """Pids that are in no generation and serve no store yet."""
        return self.parking.pids | frozenset(self.opening)

    def start(
        self, request: protocol.StartWorkers | protocol.ReplaceWorkers, problems: tuple[str, ...], *, without: frozenset[int] = frozenset()
    ) -> Started:
        """Start the workers of a request except the ranks `without`; the first one leads their process group. Raises
        `child.Forked` in children.

        With `problems`, or an environment that a running interpreter cannot take over, the start is cold.
        """
        began = time.monotonic()
        asked = request.method if isinstance(request, protocol.StartWorkers) else "warm"
        reason = cold_reason(request.workers, problems) if asked == "warm" else ""
        method = "cold" if reason else asked
        group = 0
        workers: list[protocol.WorkerState] = []
        error = ""
        for worker in request.workers:
            if worker.rank in without:
                continue
            try:
                pid = self._fork(worker, group) if method == "warm" else self._exec(worker, group)
            except OSError as problem:
                error = f"rank {worker.rank} cannot be started: {problem}"
                break
            group = group or pid
            _join_group(pid, group)
            workers.append(
                protocol.WorkerState(
                    rank=worker.rank,
                    local_rank=worker.local_rank,
                    pid=pid,
                    start_time=start_time(pid),
                    log=worker.log,
                    method=method,
                )
            )
        state = protocol.GenerationState(
            job=request.job,
            epoch=request.epoch if isinstance(request, protocol.StartWorkers) else 0,
            generation=request.generation,
            workers=tuple(workers),
            method=method,
            method_reason=reason,
            seconds=time.monotonic() - began,
        )
        if method == "warm" and isinstance(request, protocol.StartWorkers):
            self.parking.started(len(request.workers))
        return Started(state=state, group=group, error=error)

    def _fork(self, worker: protocol.WorkerStart, group: int) -> int:
        ready = self.parking.hand_over(worker, group)
        if ready:
            return ready
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            raise child.Forked(child.Task(parent=parent, group=group, worker=worker))
        return pid

    def _exec(self, worker: protocol.WorkerStart, group: int) -> int:
        interpreter = ["-m", worker.argv[0]] if worker.module else [worker.argv[0]]
        command = [sys.executable, "-P", "-S", cold.__file__, "worker", str(os.getpid()), str(worker.nice), worker.cwd]
        with Path(worker.log).open("ab") as log:
            process = subprocess.Popen(
                [*command, "--", "-u", *interpreter, *worker.argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=worker.env,
                process_group=group,
            )
        process.returncode = 0  # reaped by the shim's own loop, not by this object
        return process.pid

    def open_store(self, host: str, *, safe: bool) -> int:
        """Start a child that serves a TCPStore on a free port of `host`. Returns a descriptor that yields one byte when it does."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, 0))
            listener.listen(4096)
        except OSError:
            listener.close()
            raise
        ready, done = os.pipe2(os.O_CLOEXEC)
        shown = f"[{host}]" if ":" in host else host
        address = f"{shown}:{listener.getsockname()[1]}"
        parent = os.getpid()
        pid = os.fork() if safe else self._exec_store(listener.fileno(), done)
        if pid == 0:
            raise child.Forked(child.Task(parent=parent, group=0, listener=listener.detach(), ready=done))
        listener.close()
        os.close(done)
        self.opening[pid] = protocol.StoreState(address=address, pid=pid)
        return ready

    def store_opened(self) -> protocol.StoreState:
        """The store whose descriptor became readable."""
        _, store = self.opening.popitem()
        return store

    def _exec_store(self, listener: int, done: int) -> int:
        command = [sys.executable, "-P", cold.__file__, "store", str(os.getpid()), str(listener), str(done)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(listener, done), process_group=0)
        process.returncode = 0
        return process.pid


def with_kept(
    state: protocol.GenerationState, request: protocol.StartWorkers, kept: dict[int, protocol.WorkerState]
) -> protocol.GenerationState:
    """The generation with the workers that go on in it, in the order of the request."""
    if not kept:
        return state
    places = {worker.rank: worker for worker in request.workers}
    made = {worker.rank: worker for worker in state.workers}
    made |= {
        rank: msgspec.structs.replace(
            worker, rank=rank, local_rank=places[rank].local_rank, log=places[rank].log, method="in_place", torn_down=False
        )
        for rank, worker in kept.items()
    }
    workers = tuple(made[rank] for rank in places if rank in made)
    return msgspec.structs.replace(state, workers=workers, method="in_place")


def cold_reason(workers: tuple[protocol.WorkerStart, ...], problems: tuple[str, ...]) -> str:
    """Why a warm start is not possible; empty when it is."""
    if problems:
        return "unsafe to fork: " + "; ".join(problems)
    own = preload.fixed_environment(dict(os.environ))
    for worker in workers:
        asked = preload.fixed_environment(worker.env)
        different = sorted(name for name in asked if asked[name] != own.get(name))
        if different:
            return f"{', '.join(different)} can only be set when an interpreter starts"
    return ""


def _join_group(pid: int, group: int) -> None:
    """From the parent's side as well, so that the group is right whoever comes first."""
    try:
        os.setpgid(pid, group)
    except (PermissionError, ProcessLookupError):
        return  # it has called exec already, and had joined before that
