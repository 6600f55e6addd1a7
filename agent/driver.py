"""The agent daemon: feeds the node machine with what happens and does what it asks for. One per node, asyncio, no torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from regrow import wire
from regrow.agent import chaos, core, fences, layout
from regrow.agent import machine as m
from regrow.agent.beat import BeatConnection
from regrow.agent.checkpoints import Checkpoints
from regrow.agent.config import AgentSettings, hardware_id
from regrow.agent.dispatch import Dispatcher
from regrow.agent.health.boot import boot_id
from regrow.agent.health.burnin_result import FAULT_VARIABLE
from regrow.agent.launcher import Launcher, ShimDown, ShimNews, ShimOptions, ShimUp
from regrow.agent.metrics import AgentMetrics
from regrow.agent.nodeview import NodeView
from regrow.agent.pairs import Pairs
from regrow.agent.protocol import StoreChanged, WorkerEnded
from regrow.agent.reach import Reach
from regrow.agent.registry import Keys, Registry
from regrow.agent.sockets import WorkerSocket
from regrow.agent.watch import HealthSource, NoHealth
from regrow.agent.workers import ExitReader
from regrow.errors import OperationalError
from regrow.ids import new_incarnation
from regrow.store.base import Store

_log = logging.getLogger("regrow.agent")

_ADOPT_SECONDS = 5.0
_REGISTER_SECONDS = 3.0
CRASHED = 70
"""Exit code after a bug: shim, workers and writer go on, the next agent takes them over."""
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Agent:
    """One node. `run` returns the exit code. Built by `build`, which wires the parts."""

    def __init__(
        self,
        settings: AgentSettings,
        store: Store,
        health: HealthSource,
        fences_found: m.Fences,
        *,
        on_serving: Callable[[str], None],
        on_leaving: Callable[[], None],
    ) -> None:
        self.settings = settings
        self._on_serving = on_serving
        self._on_leaving = on_leaving
        self.paths = layout.NodePaths(settings.state)
        self.health = health
        self.state = m.NodeState(
            node=settings.node,
            fences=fences_found,
            alone_since=time.monotonic(),
            slots=settings.slots,
            kill_limit_seconds=settings.kill_seconds,
            static_seconds=settings.static_seconds,
        )
        self.keys = Keys(settings.cluster)
        self.beat = BeatConnection(self, tls=settings.tls("client"))
        self.registry = Registry(store, self.keys, ttl_seconds=settings.node_ttl_seconds, on_leader=self.beat.set_leader)
        self.launcher = Launcher(_shim_options(settings), self._shim_news)
        self.socket = WorkerSocket(self.paths.agent_socket, on_line=self._said, on_inject=self._inject)
        self.pairs = Pairs(
            settings.node,
            store,
            self.keys,
            address=lambda: self.checkpoints.peer_address,
            tls=settings.tls("client"),
            spoil=os.environ.get(FAULT_VARIABLE) == "pairs",
        )
        self.checkpoints = Checkpoints(settings, self.paths, store, self.keys, report=self.beat.send, pair=self.pairs.serve)
        self.exits = ExitReader(self.paths, self.socket, self._exited, health.kernel_lines)
        self.dispatcher = Dispatcher(self)
        self.metrics = AgentMetrics(self)
        self.reach = Reach(settings.address, self.beat.send)
        self.view = NodeView(self, incarnation=new_incarnation(), hardware_id=hardware_id(settings), boot_id=boot_id())
        self.checkpoints.buddies.on_change = self.registry.record_changed
        self._busy = False
        self._status: wire.StatusRecord | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._quit: asyncio.Future[m.Quit] = asyncio.get_running_loop().create_future()
        self._first_contact = asyncio.Event()
        self._welcomed = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []

    # --- life ----------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until released, told to leave, or unable to go on. Returns the exit code."""
        loop = asyncio.get_running_loop()
        await self.checkpoints.start(preferred_port=layout.earlier_peer_port(self.paths))
        await self.socket.start()
        await self.metrics.start()
        self._write_facts()
        for number in LEAVE_SIGNALS:
            loop.add_signal_handler(number, self._asked_to_leave, number)
        self._spawn("shim", self.launcher.run())
        self._spawn("socket", self.socket.keep_bound())
        self._spawn("effects", self.dispatcher.run())
        self._spawn("orders", self.dispatcher.run_shim_orders())
        self._spawn("exits", self.exits.run())
        self._spawn("checkpoints", self.checkpoints.run())
        await asyncio.gather(self._await_shim(), self.health.prepare(self.pairs))
        self._spawn("health", self.health.run(self._health_changed))
        self._spawn("leader", self.registry.follow_leader())
        self._spawn("beat", self.beat.run())
        self._spawn("register", self._register())
        self._spawn("status", self.registry.keep_status(self.view.applied_step))
        self._spawn("metrics", self.metrics.run())
        self._on_serving(f"agent of {self.settings.node}")
        try:
            order = await self._quit
        finally:
            self._on_leaving()
            for number in LEAVE_SIGNALS:
                loop.remove_signal_handler(number)
        _log.info("leaving code=%d reason=%s", order.code, order.reason)
        await self._shut_down(keep_workers=order.code == CRASHED)
        return order.code

    def cut(self) -> None:
        """The launcher is gone: stop everything of this node at once."""
        self.launcher.kill_shim()
        self.checkpoints.stop_writer()
        os._exit(1)

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"regrow-{name}")
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or self._quit.done():
            return
        error = task.exception()
        _log.critical("%s ended: this is a bug", task.get_name(), exc_info=error)
        self._quit.set_result(m.Quit(code=CRASHED, reason=f"{task.get_name()} ended: {error}"))

    async def _await_shim(self) -> None:
        """An older agent's shim answers at once and says what runs; a new one is not waited for."""
        waits = [asyncio.create_task(event.wait()) for event in (self._first_contact, self.launcher.spawned)]
        _, pending = await asyncio.wait(waits, timeout=_ADOPT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()

    async def _register(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REGISTER_SECONDS):
                await self._welcomed.wait()
        await self.registry.keep_registered(self.view.record)

    async def _shut_down(self, *, keep_workers: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self.reach.close()
        await self.beat.flush(1.0)
        await self.launcher.close(stop_shim=not keep_workers)
        await self.checkpoints.close(stop_writer=not keep_workers)
        await self.registry.deregister()
        await self.socket.close()
        await self.metrics.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _write_facts(self) -> None:
        facts = {
            "node": self.settings.node,
            "pid": os.getpid(),
            "incarnation": self.view.incarnation,
            "peer": self.checkpoints.peer_address,
            "metrics": self.metrics.address,
        }
        path = self.paths.facts
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(facts))
        fresh.replace(path)

    # --- the machine ---------------------------------------------------------------------------------------------

    def feed(self, event: m.Event) -> None:
        """One turn of the node machine."""
        now = time.monotonic()
        self.state, effects = core.react(self.state, event, now)
        for effect in effects:
            if isinstance(effect, m.Quit):
                self._schedule_quit(effect)
            else:
                self.dispatcher.put(effect)
        self._note_changes()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = core.wake_at(self.state)
        if at is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, at - now) + 0.001, lambda: self.feed(m.Tick()))

    def _note_changes(self) -> None:
        status = self.view.status()
        if status is not None and status != self._status:
            self._status = status
            self.registry.set_status(status)
        busy = self.state.current is not None and bool(self.state.current.live)
        if busy != self._busy:
            self._busy = busy
            self.health.note_busy(busy)

    def _schedule_quit(self, order: m.Quit) -> None:
        """After what was decided before it was done: the leader hears why."""

        def finish() -> None:
            if not self._quit.done():
                self._quit.set_result(order)

        self.dispatcher.after_all(finish, limit_seconds=2.0)

    # --- beat connection -----------------------------------------------------------------------------------------

    def hello(self) -> wire.Hello:
        """What this node is and runs, now."""
        return self.view.hello()

    def beat_message(self, seq: int) -> wire.Beat:
        """Progress, now."""
        return self.view.beat(seq)

    def welcomed(self, welcome: wire.Welcome) -> bool:
        """Take a leader, unless its term is over."""
        if welcome.epoch < self.state.fences.epoch:
            _log.warning("leader %s has epoch %d, this node has seen %d", welcome.leader, welcome.epoch, self.state.fences.epoch)
            return False
        _log.info("welcomed by %s epoch=%d", welcome.leader, welcome.epoch)
        self._welcomed.set()
        self.feed(m.Connected(welcome.epoch))
        return True

    def ordered(self, message: Any) -> None:
        """An order of the leader."""
        if isinstance(message, wire.Unknown):
            _log.warning("order of unknown kind %s", message.kind)
        elif isinstance(message, wire.ClearHealth):
            _log.info("%d conditions are cleared by %s", self.health.clear(by=message.by), message.by)
        elif isinstance(message, wire.ProbePeers):
            self.reach.ask(message)
        elif isinstance(message, wire.Action | wire.CollectStacks | wire.Acknowledge):
            if not isinstance(message, wire.Acknowledge):
                self.beat.tell_progress()
            self.feed(m.Ordered(message))

    def disconnected(self) -> None:
        """The workers go on."""
        if not self._quit.done():
            _log.warning("beat connection lost: workers go on")
        self.feed(m.Disconnected())

    def refused(self, refusal: wire.Refused) -> None:
        """Not taken: try again, or end with the leader's reason."""
        _log.error("refused by the leader: %s", refusal.reason)
        if not refusal.retry and not self._quit.done():
            self._quit.set_result(m.Quit(code=1, reason=f"refused by the leader: {refusal.reason}"))

    # --- shim and workers ----------------------------------------------------------------------------------------

    def _shim_news(self, news: ShimNews) -> None:
        match news:
            case ShimUp():
                self._shim_up(news)
            case ShimDown():
                _log.error("%s", news.reason)
                self.view.forget_stores()
                for state in news.generations:
                    self.exits.lost(state, news.reason)
            case WorkerEnded():
                self.exits.ended(news.job, news.generation, (news.worker,))
            case StoreChanged():
                self.view.note_store(news.store, ended=news.ended)
                self.beat.beat_soon()

    def _shim_up(self, news: ShimUp) -> None:
        self.view.set_stores(news.ready.stores)
        for state in news.ready.generations:
            known = self.state.current
            if known is None or (known.job, known.generation) != (state.job, state.generation):
                order = layout.read_order(self.paths, state.job, state.generation)
                if order is None or self._is_older(state.job, state.generation):
                    self.dispatcher.put(m.Kill(job=state.job, generation=state.generation, signal=signal.SIGKILL))
                    continue
                pids = {worker.rank: worker.pid for worker in state.workers if worker.status is None}
                _log.info("adopting job=%s generation=%d workers=%d", state.job, state.generation, len(pids))
                self.feed(m.Adopted(order=order, pids=pids))
                self.dispatcher.adopted(order)
            self.exits.ended(state.job, state.generation, tuple(worker for worker in state.workers if worker.status is not None))
        self._first_contact.set()
        self.beat.beat_soon()

    def _is_older(self, job: str, generation: int) -> bool:
        return generation < self.state.fences.highest(job)

    def _exited(self, event: m.Exited) -> None:
        self.beat.tell_progress()
        self.feed(event)
        local = self.state.current
        judged = local.exits if local is not None and local.generation == event.generation else {}
        for told in event.exits:
            found = judged.get(told.rank, told)
            _log.info(
                "exit job=%s generation=%d rank=%d pid=%d code=%d signal=%d torn_down=%s declared_end=%s",
                *(event.job, event.generation, found.rank, found.pid, found.exit_code, found.signal, found.torn_down, found.declared_end),
            )
        self.beat.beat_soon()

    def _said(self, message: Any) -> None:
        self.metrics.workers.said(message)
        self.feed(m.Said(message))

    async def _inject(self, request: chaos.Inject) -> chaos.Injected:
        local = self.state.current
        live = local.live if local is not None else frozenset[int]()
        targets = chaos.Targets(
            generation=local.generation if local is not None else 0,
            pids={rank: pid for rank, pid in (local.pids if local is not None else {}).items() if rank in live},
            shim=self.launcher.ready.pid if self.launcher.ready is not None else 0,
            writer=self.checkpoints.writer_pid,
        )
        _log.warning("inject kind=%s rank=%d", request.kind, request.rank)
        return chaos.perform(request, targets, now=time.monotonic(), tell=self.socket.tell)

    # --- the outside ---------------------------------------------------------------------------------------------

    def _health_changed(self, verdict: wire.HealthVerdict) -> None:
        _log.info("health state=%s action=%s reason=%s", verdict.state, verdict.action, verdict.reason)
        self.beat.send(wire.HealthChanged(verdict=verdict))

    def _asked_to_leave(self, number: int) -> None:
        name = signal.Signals(number).name
        _log.info("signal=%s: this node leaves", name)
        self.feed(m.LeaveAsked(reason=f"{name} to the agent of {self.settings.node}", notice_seconds=self.settings.notice_seconds))


def _shim_options(settings: AgentSettings) -> ShimOptions:
    return ShimOptions(
        state=settings.state,
        host=settings.address,
        orphan_seconds=settings.orphan_seconds,
        preload=settings.preloads(),
        imports=settings.warm,
        park=settings.slots,
    )


def build(
    settings: AgentSettings,
    store: Store,
    health: HealthSource | None = None,
    *,
    on_serving: Callable[[str], None] = lambda _status: None,
    on_leaving: Callable[[], None] = lambda: None,
) -> Agent:
    """The composition root. Call it inside the running loop, with the state folder's lock held.

    Raises:
        OperationalError: a process of this node cannot be killed, or its fences are damaged.
    """
    paths = layout.NodePaths(settings.state)
    found = fences.load(paths.fences)
    if fences.still_unusable(found):
        raise OperationalError(found.unusable, where=f"node {settings.node}", hint="reboot this host")
    if found.unusable:
        found = fences.save(paths.fences, fences.usable_again(found))
    return Agent(settings, store, health or NoHealth(), found, on_serving=on_serving, on_leaving=on_leaving)
