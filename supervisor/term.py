"""One term of a leader: events in, turns, effects out. Everything here dies with the term; the store and the agents remain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from regrow import wire
from regrow.store.base import Comparison, Store, StoreError
from regrow.supervisor import describe
from regrow.supervisor.beat_server import Connection
from regrow.supervisor.config import SupervisorConfig
from regrow.supervisor.core import events as e
from regrow.supervisor.core.invariants import check
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.turn import turn
from regrow.supervisor.core.view import View
from regrow.supervisor.detector import Silence, Stall, look_seconds, next_look
from regrow.supervisor.effects import Effects, Incidents
from regrow.supervisor.journal import Journal
from regrow.supervisor.keys import Keys
from regrow.supervisor.learned import Learned
from regrow.supervisor.linger import Linger
from regrow.supervisor.steps import Steps
from regrow.supervisor.watches import Watches

log = logging.getLogger("regrow.supervisor")

_LEAST_SLEEP_SECONDS = 0.001


class Term:
    """The asyncio driver of the decision core, and the receiver of what agents say."""

    def __init__(
        self,
        *,
        config: SupervisorConfig,
        policy: Policy,
        store: Store,
        keys: Keys,
        journal: Journal,
        comparison: Comparison | None,
        epoch: int,
        name: str,
        now: Callable[[], float],
        on_turn: Callable[[Term, float, tuple[e.Event, ...]], None],
        raise_epoch: Callable[[int], None],
    ) -> None:
        self.view = View()
        self.connections: dict[str, Connection] = {}
        self.ready = False
        """True once everything was loaded."""
        self.ended = asyncio.Event()
        self.hellos: dict[str, wire.Hello] = {}
        """What each connected agent said first."""
        self.hello_came = asyncio.Event()
        self._met: set[str] = set()
        """Nodes that have our epoch from us: one that has it otherwise has it from another leader, of a store that is gone."""
        self.reason = ""
        self.last_reason = ""
        """Reason of the last decision."""
        self._config = config
        self._policy = policy
        self._store = store
        self._keys = keys
        self._journal = journal
        self._epoch = epoch
        self._name = name
        self.now = self._now = now
        self._on_turn = on_turn
        self._raise_epoch = raise_epoch
        self._queue: list[e.Event] = []
        self._wake = asyncio.Event()
        self._silence = Silence(silence_seconds=config.silence_seconds, look_seconds=look_seconds(config.silence_seconds))
        self._stalls: dict[str, Stall] = {}
        self._lingers: dict[str, Linger] = {}
        self._steps: dict[str, Steps] = {}
        self._spare: dict[str, str] = {}
        self._acknowledge: list[e.WorkersExited] = []
        self._told: dict[str, tuple[str, float, int, bool, str]] = {}
        self._closed = False
        self._learned = Learned(policy, lambda job, record: self.effects.write(keys.job(job, "learned"), msgspec.json.encode(record)))
        self.effects = Effects(store, keys, comparison=comparison, connections=self.connections, post=self.post, now=now, lost=self.end)

    def end(self, reason: str) -> None:
        """The term is over."""
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()
            self._wake.set()

    def post(self, *events: e.Event) -> None:
        """Events for the next turn."""
        self._queue.extend(events)
        self._wake.set()

    async def run(self, begin: tuple[e.Event, ...]) -> None:
        """Turns, until the term ends. `begin`: what was loaded."""
        self.effects.start()
        watching = Watches(self._store, self._keys, self.effects, look=lambda: self.view, post=self.post, now=self._now)
        watches = [asyncio.create_task(watching.nodes()), asyncio.create_task(watching.checkpoints())]
        for event in begin:
            if isinstance(event, e.JobLoaded):
                self._learned.loaded(event.spec.job, event.learned, self._now())
            if isinstance(event, e.JobLoaded) and event.incidents:
                self._told[event.spec.job] = event.incidents[-1].mark  # as the store has them: not written again
        self.post(e.LeaderStarted(at=self._now(), epoch=self._epoch, supervisor=self._name), *begin)
        wake_at: float | None = None
        look_at = self._now()
        self.ready = True
        try:
            while not self.ended.is_set():
                now = self._now()
                if now >= look_at:
                    look_at = self._look(now)
                due = wake_at is not None and now >= wake_at
                if self._queue or due:
                    wake_at = self._turn()
                until = look_at if wake_at is None else min(look_at, wake_at)
                if not self._queue:
                    self._wake.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(max(_LEAST_SLEEP_SECONDS, until - self._now())):
                            await self._wake.wait()
        finally:
            self._closed = True
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            for connection in list(self.connections.values()):
                connection.close()

    # --- turns

    def _turn(self) -> float | None:
        events, self._queue = tuple(self._queue), []
        now = self._now()
        before = self.view.next_seq
        result = turn(self.view, events, self._policy, now)
        self.view = result.view
        took = self._now() - now
        for event in events:
            describe.journal_event(self._journal, self._epoch, event)
        if result.decision.reason and result.decision.reason != self.last_reason:
            log.info("decision: %s", result.decision.reason)
            self.last_reason = result.decision.reason
        for index, (seq, action) in enumerate(result.actions):
            describe.journal_action(self._journal, self._epoch, seq, now, action, result.decision.reason if index == 0 else "")
        self._follow_generations(now)
        self._keep_incidents()
        self._learned.keep(self.view.jobs, now)
        for seq, action in result.actions:
            self.effects.dispatch(seq, action, self.view)
        for exited in self._acknowledge:
            connection = self.connections.get(exited.node)
            if connection is not None:
                ranks = tuple(found.rank for found in exited.exits)
                connection.send(wire.Acknowledge(job=exited.job, generation=exited.generation, ranks=ranks))
        self._acknowledge = []
        if self.view.next_seq != before:
            for broken in check(self.view):
                log.error("INVARIANT broken: %s", broken)
        self._on_turn(self, took, events)
        return result.decision.wake_at

    def _follow_generations(self, now: float) -> None:
        """Detector state lives and dies with its generation."""
        for name, job in self.view.jobs.items():
            generation = job.generation
            if generation is None or generation.stage in ("recording", "ended"):
                if generation is None or generation.stage == "ended":
                    self._stalls.pop(name, None)
                    self._lingers.pop(name, None)
                    self._steps.pop(name, None)
                continue
            known = self._steps.get(name)
            if known is not None and known.generation == generation.number:
                continue
            ranks = {node: tuple(worker.rank for worker in member.workers) for node, member in generation.members.items()}
            self._steps[name] = Steps(name, generation.number, ranks, generation.spec.mesh)
            self._stalls[name] = Stall(job=name, generation=generation.number, changed_at=now)
            self._lingers[name] = Linger(name, generation.number)
            for node in ranks:
                if node not in self.connections:
                    self._steps[name].heard(node, now, reachable=False)

    def _keep_incidents(self) -> None:
        """Write a job's incidents when one opened, went over to another generation or closed: the next leader tells of them too."""
        for name, job in self.view.jobs.items():
            if not job.incidents:
                continue
            mark = job.incidents[-1].mark
            if self._told.get(name) != mark:
                self._told[name] = mark
                self.effects.write(self._keys.job(name, "incidents"), msgspec.json.encode(Incidents(items=job.incidents)))

    def _look(self, now: float) -> float:
        for event in self._silence.look(now):
            self._reachable(event.node, now, reachable=False)
            self.post(event)
        for name, stall in self._stalls.items():
            job = self.view.jobs.get(name)
            if job is None or job.generation is None or job.generation.number != stall.generation:
                continue
            found = stall.look(now, self._learned.limit(job, stall))
            if found is None and self._policy.end_linger_seconds:
                found = self._lingers[name].look(job.generation, stall.ranks, now, self._policy.end_linger_seconds)
            if found is None and job.spec.hang_idle_seconds and not stall.ever:
                found = self._lingers[name].idle(job.generation, now, job.spec.hang_idle_seconds)
            if found is not None:
                self.post(found)
        return next_look(
            now, look_seconds(self._config.silence_seconds), (self._silence.due_at, *(stall.due_at for stall in self._stalls.values()))
        )

    def _reachable(self, node: str, now: float, *, reachable: bool) -> None:
        for steps in self._steps.values():
            self.post(*steps.heard(node, now, reachable=reachable))

    # --- agents

    @property
    def leads(self) -> bool:
        """Are agents welcome?"""
        return self.ready and not self._closed and not self.ended.is_set()

    def greeted(self, hello: wire.Hello, connection: Connection) -> wire.Welcome | wire.Refused:
        """An agent wants in."""
        now = self._now()
        if not self.leads:
            return wire.Refused(reason="this supervisor does not lead now", leading=False)
        if hello.cluster != self._config.cluster:
            return wire.Refused(reason=f"this is cluster {self._config.cluster!r}, not {hello.cluster!r}", retry=False)
        epoch = max(self._epoch, self.view.epoch)
        if hello.highest_epoch > epoch or (hello.highest_epoch == epoch and hello.node not in self._met):
            self._raise_epoch(hello.highest_epoch)
            return wire.Refused(reason=f"epoch {hello.highest_epoch} was seen, ours is {epoch}: taking a higher one")
        other = self.connections.get(hello.node)
        if other is not None and other.incarnation != hello.incarnation and not self._silence.is_silent(hello.node):
            return wire.Refused(
                reason=f"node name {hello.node!r} is in use by another agent (incarnation {other.incarnation[:8]}): give this one a name of its own"
            )
        self._met.add(hello.node)
        self.connections[hello.node] = connection
        if other is not None:
            other.abort()
        self._silence.connected(hello.node, now)
        self._spare[hello.node] = hello.spare_store
        self._reachable(hello.node, now, reachable=True)
        self.hellos[hello.node] = hello
        self.hello_came.set()
        self.post(e.NodeJoined(at=now, hello=hello))
        running = hello.running
        if running is not None and running.exits:
            self._exits(e.WorkersExited(at=now, node=hello.node, job=running.job, generation=running.generation, exits=running.exits))
        return wire.Welcome(epoch=epoch, leader=self._name, beat_seconds=self._config.beat_seconds)

    def closed(self, connection: Connection, reason: str) -> None:
        """A connection is gone."""
        if self.connections.get(connection.node) is not connection or self._closed:
            return
        now = self._now()
        del self.connections[connection.node]
        self.hellos.pop(connection.node, None)
        self._silence.disconnected(connection.node)
        self._reachable(connection.node, now, reachable=False)
        self.post(e.NodeDisconnected(at=now, node=connection.node, reason=reason))

    def said(self, connection: Connection, message: Any) -> None:
        """A line of an agent."""
        node = connection.node
        if self.connections.get(node) is not connection or self._closed:
            return
        now = self._now()
        heard = self._silence.heard(node, now)
        if heard is not None:
            self._reachable(node, now, reachable=True)
            self.post(heard)
        match message:
            case wire.Beat():
                self._beat(node, message, now)
            case wire.NodeSteps():
                self._node_steps(node, message, now)
            case wire.WorkersExited():
                self._exits(e.WorkersExited(at=now, node=node, job=message.job, generation=message.generation, exits=message.exits))
            case wire.Hello():
                log.warning("node=%s greeted twice on one connection", node)
            case wire.Unknown():
                log.info("node=%s sent a message of an unknown type %r", node, message.kind)
            case _:
                if isinstance(message, wire.CheckpointChanged) and message.state == "snapshot":
                    self._learned.times(message.job).took("save", message.stall_seconds)
                self.post(describe.event_of(node, message, now))

    def _exits(self, event: e.WorkersExited) -> None:
        self._acknowledge.append(event)
        self.post(event)

    def _beat(self, node: str, beat: wire.Beat, now: float) -> None:
        if beat.spare_store != self._spare.get(node, ""):
            self._spare[node] = beat.spare_store
            self.post(e.SpareStoreChanged(at=now, node=node, address=beat.spare_store))
        for name, linger in self._lingers.items():
            if beat.cpu_seconds and linger.generation == beat.generation and self._is_member(name, node):
                self.post_if(linger.used(beat.cpu_seconds, now))
        if not beat.progress:
            return
        for name, stall in self._stalls.items():
            if stall.generation != beat.generation or not self._is_member(name, node):
                continue
            self._learned.times(name).words(beat.generation, beat.progress, now)
            resumed = stall.words(beat.progress, now)
            if resumed is not None:
                self.post(resumed)
            self.post_if(self._steps[name].words(node, beat.progress, now))

    def _node_steps(self, node: str, message: wire.NodeSteps, now: float) -> None:
        steps = self._steps.get(message.job)
        if steps is None or steps.generation != message.generation:
            return
        resumed = self._stalls[message.job].moved(now)
        if resumed is not None:
            self.post(resumed)
        self.post_if(steps.reported(node, message, now))

    def post_if(self, events: list[e.Event]) -> None:
        """Wake the driver only when there is something."""
        if events:
            self.post(*events)

    def _is_member(self, job: str, node: str) -> bool:
        view = self.view.jobs.get(job)
        return view is not None and view.generation is not None and node in view.generation.members


async def raise_epoch(store: Store, keys: Keys, comparison: Comparison | None, at_least: int) -> int:
    """Take the next epoch: above the stored one and above `at_least`. Written under the leader's comparison.

    Raises:
        StoreError: the store did not take it, or this term is over.
    """
    from regrow.store.base import Put, mod_revision, version

    while True:
        item = await store.get(keys.epoch)
        stored = int(item.value) if item is not None else 0
        epoch = max(stored, at_least) + 1
        same = mod_revision(keys.epoch) == item.mod_revision if item is not None else version(keys.epoch) == 0
        compare = [same, *([comparison] if comparison else [])]
        result = await store.transaction(compare, [Put(keys.epoch, str(epoch).encode())])
        if result.succeeded:
            return epoch
        current = await store.get(keys.epoch)
        if (current.mod_revision if current else 0) == (item.mod_revision if item else 0):
            raise StoreError("this leader's term is over", where=keys.epoch)
