"""Carrying out what the node machine asks for, in order: fences are on disk before anything after them happens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from regrow import wire
from regrow.agent import fences, layout, stacks
from regrow.agent import machine as m
from regrow.agent.protocol import ReplaceWorkers, StartWorkers, WorkerStart
from regrow.agent.roster import process_state
from regrow.errors import OperationalError

if TYPE_CHECKING:
    from regrow.agent.driver import Agent

_log = logging.getLogger("regrow.agent")

_EVIDENCE_SECONDS = 2.0
"""A recovery waits no longer than this for the stacks of a rank that is about to be killed."""

_STOP_LOOKS = 200
"""One a millisecond, until a process that was sent SIGSTOP stands; one that waits for a disk may not."""
_READ_TURNS = 4
"""Of the event loop, until what lies in a socket has been read and taken note of: it is seen, given to its reader, decoded."""

_ShimOrder = m.Kill | m.Launch | m.Replace | m.Forget


class Dispatcher:
    """Two queues: what is quick (fences, messages), and what the shim does (kill, start), which may take seconds."""

    def __init__(self, agent: Agent, environ: Mapping[str, str] | None = None) -> None:
        self._agent = agent
        self._environ = dict(os.environ if environ is None else environ)
        self._effects: asyncio.Queue[m.Effect | Callable[[], None]] = asyncio.Queue()
        self._shim_orders: asyncio.Queue[_ShimOrder] = asyncio.Queue()
        self._unfenced = ""
        self._background: set[asyncio.Task[None]] = set()

    def put(self, effect: m.Effect) -> None:
        """Do this after everything that was put before."""
        self._effects.put_nowait(effect)

    def after_all(self, action: Callable[[], None], *, limit_seconds: float) -> None:
        """Call `action` when all effects so far are done, at the latest after the limit."""
        self._effects.put_nowait(action)
        asyncio.get_running_loop().call_later(limit_seconds, action)

    def adopted(self, order: wire.StartGeneration) -> None:
        """A generation that an earlier agent started is ours: commit for it when we are the one."""
        self._agent.checkpoints.begin(order.spec, order.job_spec.checkpoint)

    async def run(self) -> None:
        """Carry out effects until cancelled."""
        while True:
            effect = await self._effects.get()
            match effect:
                case m.Persist():
                    await self._persist(effect.fences)
                case m.Send():
                    self._agent.beat.send(effect.message)
                case m.ToWorkers():
                    self._agent.socket.tell(effect.generation, effect.control, effect.ranks)
                case m.AskGasp():
                    self._ask_gasp(effect)
                case m.DumpStacks():
                    self._start_background(effect)
                case m.Kill() | m.Launch() | m.Replace() | m.Forget():
                    self._shim_orders.put_nowait(effect)
                case m.Quit():
                    pass
                case _:
                    effect()

    async def run_shim_orders(self) -> None:
        """Carry out what the shim has to do, one after the other, until cancelled."""
        while True:
            order = await self._shim_orders.get()
            try:
                match order:
                    case m.Kill():
                        self._agent.health.note_kill()
                        pids = await self._agent.launcher.stop(order.job, order.generation, order.signal)
                        _log.info("signal=%d job=%s generation<=%d pids=%s", order.signal, order.job, order.generation, list(pids))
                    case m.Forget():
                        await self._agent.launcher.forget(order.job, order.generation)
                    case m.Launch():
                        await self._launch(order)
                    case m.Replace():
                        await self._replace(order)
            except OperationalError as error:
                _log.error("shim: %s", error.what)

    def _ask_gasp(self, effect: m.AskGasp) -> None:
        """A process that is stopped, or has no connection, is not waited for."""
        for rank, pid in effect.pids.items():
            if process_state(pid) in ("T", "t") or not self._agent.socket.ask_gasp(effect.generation, rank):
                self._agent.feed(m.Said(wire.WorkerPhase(generation=effect.generation, rank=rank, phase=wire.GASPED_PHASE)))

    async def _persist(self, found: m.Fences) -> None:
        """A disk that takes no fences takes no workers either: what is ordered meanwhile is refused."""
        try:
            await asyncio.to_thread(fences.save, self._agent.paths.fences, found)
            self._unfenced = ""
        except OSError as error:
            self._unfenced = f"fences cannot be written to {self._agent.paths.fences}: {error.strerror}"
            _log.error("%s", self._unfenced)

    async def _launch(self, launch: m.Launch) -> None:
        order = launch.order
        agent, spec, job = self._agent, order.spec, order.job_spec
        began = time.monotonic()
        launch = _without_stopped(launch)
        try:
            if self._unfenced:
                raise OperationalError(self._unfenced, where="--state", hint="free space, or repair the disk")
            await asyncio.to_thread(layout.prepare, agent.paths, order)
            agent.exits.begin(spec.job, spec.generation)
            agent.checkpoints.begin(spec, job.checkpoint)
            if job.preload and job.start_method == "warm":
                problem = await agent.launcher.preload(job.preload)
                if problem:
                    _log.warning("preload: %s", problem)
            workers = layout.worker_starts(agent.paths, order, agent.settings.node, self._environ)
            self._regroup(launch, workers)
            state = await agent.launcher.start(
                StartWorkers(
                    id=0,
                    job=spec.job,
                    epoch=order.epoch,
                    generation=spec.generation,
                    workers=workers,
                    method=job.start_method,
                    keep=launch.pids,
                    store=order.master_address,
                )
            )
        except OperationalError as error:
            _log.error("start of generation %d failed: %s", spec.generation, error)
            agent.feed(m.StartFailed(job=spec.job, generation=spec.generation, reason=error.what))
            return
        if state.method_reason:
            _log.warning("cold start: %s", state.method_reason)
        detail: dict[str, object] = {"method": state.method, "start_seconds": time.monotonic() - began, "fork_seconds": state.seconds}
        if state.method_reason:
            detail["method_reason"] = state.method_reason
        pids = {worker.rank: worker.pid for worker in state.workers}
        _log.info("started job=%s generation=%d method=%s pids=%s", spec.job, spec.generation, state.method, sorted(pids.values()))
        agent.feed(m.Started(job=spec.job, generation=spec.generation, pids=pids, detail=detail))

    def _regroup(self, launch: m.Launch, workers: tuple[WorkerStart, ...]) -> None:
        """Survivors change over while the missing ones are forked."""
        for worker in workers:
            if worker.rank in launch.kept:
                order = wire.Regroup(generation=launch.order.spec.generation, env=worker.env, log=worker.log)
                told = self._agent.socket.regroup(launch.before, launch.kept[worker.rank], order)
                _log.info("regroup rank=%d was=%d pid=%d told=%s", worker.rank, launch.kept[worker.rank], launch.pids[worker.rank], told)

    async def _replace(self, replace: m.Replace) -> None:
        """A worker that does not answer may be anywhere, in user code that swallowed the change too: it is killed."""
        agent, order = self._agent, replace.order
        spec = order.spec
        starts = layout.worker_starts(agent.paths, order, agent.settings.node, self._environ)
        await asyncio.gather(*(self._explain(replace, rank) for rank in sorted(replace.ranks)))
        moved = await self._moved(replace)
        stuck = replace.ranks - moved.keys()
        if moved:
            _log.info("in place: ranks %s of generation %d came out of their step after all", sorted(moved), spec.generation)
            agent.feed(m.Moved(job=spec.job, generation=spec.generation, ranks=moved))
        if not stuck:
            return
        late = tuple(start for start in starts if start.rank in stuck)
        _log.warning("in place: ranks %s of generation %d did not change over in time: forked anew", sorted(stuck), spec.generation)
        try:
            state = await agent.launcher.replace(ReplaceWorkers(id=0, job=spec.job, generation=spec.generation, workers=late))
        except OperationalError as error:
            agent.feed(m.StartFailed(job=spec.job, generation=spec.generation, reason=error.what))
            return
        pids = {worker.rank: worker.pid for worker in state.workers}
        agent.feed(m.Started(job=spec.job, generation=spec.generation, pids=pids, detail={"method": "in_place", "replaced": len(late)}))

    async def _moved(self, replace: m.Replace) -> dict[int, int]:
        """{rank: rank before} of those that are on their way by now: the signal that asked for a stack ends a system call, and whoever was
        held in one joins the new generation in the next milliseconds. Killed there, it would take its peers' connections with it. So all
        are stopped first; what they had said by then is read, and who moved goes on.
        """
        stopped: dict[int, int] = {}
        for rank in sorted(replace.ranks & self._live(replace)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(replace.pids[rank], signal.SIGSTOP)
                stopped[rank] = replace.pids[rank]
        came: frozenset[int] = frozenset()
        killed: frozenset[int] = frozenset()
        try:
            for _ in range(_STOP_LOOKS):
                if not any(process_state(pid) in ("R", "S") for pid in stopped.values()):
                    break
                await asyncio.sleep(0.001)
            for _ in range(_READ_TURNS):
                await asyncio.sleep(0)
            local = self._agent.state.current
            if local is not None and self._live(replace):
                came = replace.ranks & (local.attached | (local.changing - replace.changing))
                killed = replace.ranks - came
        finally:
            for rank in stopped.keys() - killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stopped[rank], signal.SIGCONT)
        return {rank: replace.kept[rank] for rank in came}

    def _live(self, replace: m.Replace) -> frozenset[int]:
        """Ranks of the generation that may run; none when another one is current by now: the pids may be anybody's."""
        local, spec = self._agent.state.current, replace.order.spec
        if local is None or (local.job, local.generation) != (spec.job, spec.generation):
            return frozenset()
        return local.live

    async def _explain(self, replace: m.Replace, rank: int) -> None:
        """Keep the stacks of a rank that is about to be killed, and say where it is."""
        spec, old = replace.order.spec, replace.kept[rank]
        text = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EVIDENCE_SECONDS):
                text = await stacks.collect(replace.pids[rank], self._agent.paths.stacks(spec.job, replace.before, old))
        place = next(
            (line.strip() for line in text.splitlines() if line.lstrip().startswith("File ")), "no stack was written: stopped, or gone"
        )
        _log.warning("in place: rank %d (pid %d) is stuck at %s", rank, replace.pids[rank], place)
        self._agent.beat.send(wire.Output(job=spec.job, generation=spec.generation, rank=rank, kind="stacks", text=text))

    def _start_background(self, effect: m.DumpStacks) -> None:
        for rank, pid in effect.pids.items():
            task = asyncio.create_task(self._dump(effect, rank, pid))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _dump(self, effect: m.DumpStacks, rank: int, pid: int) -> None:
        text = await stacks.collect(pid, self._agent.paths.stacks(effect.job, effect.generation, rank))
        message = wire.Output(job=effect.job, generation=effect.generation, rank=rank, kind="stacks", text=text)
        self._agent.beat.send(msgspec.structs.replace(message))


def _without_stopped(launch: m.Launch) -> m.Launch:
    """A process that is stopped (SIGSTOP, a debugger) cannot come along: nobody waits until it does not."""
    moving = {rank: pid for rank, pid in launch.pids.items() if process_state(pid) not in ("T", "t")}
    if len(moving) < len(launch.pids):
        _log.warning("in place: ranks %s are stopped: forked anew", sorted(launch.pids.keys() - moving.keys()))
    return m.Launch(launch.order, launch.before, {rank: old for rank, old in launch.kept.items() if rank in moving}, moving)
