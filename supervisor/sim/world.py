"""The world around the decision core: nodes, network, store, storage, training. Everything that a leader's orders reach."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from regrow.supervisor.core import events as e
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.turn import turn
from regrow.supervisor.sim.accounts import Accounts
from regrow.supervisor.sim.checkers import Checkers
from regrow.supervisor.sim.journal import Journal
from regrow.supervisor.sim.leader import Leader, TurnFunction
from regrow.supervisor.sim.life import Life
from regrow.supervisor.sim.loop import Loop
from regrow.supervisor.sim.models import JOB, Workload
from regrow.supervisor.sim.nodes import Node
from regrow.supervisor.sim.orders import Orders
from regrow.supervisor.sim.setup import Setup
from regrow.supervisor.sim.store import SimStore
from regrow.supervisor.sim.training import Run


class World:
    """One simulated cluster. Ground truth; the leader knows what its edge tells it."""

    def __init__(self, setup: Setup, workload: Workload, seed: str, *, policy: Policy | None = None, decide: TurnFunction = turn) -> None:
        self.setup = setup
        self.workload = workload
        self.loop = Loop()
        self.rng = random.Random(f"{seed}/delays")  # noqa: S311  # a simulation is to be repeated
        self.checkers = Checkers()
        self.store = SimStore(self.checkers)
        self.accounts = Accounts(workload.full_seconds)
        self.journal = Journal(short=setup.lean)
        self.nodes = {
            node.name: node for node in (Node(index, setup.places, named_devices=not setup.lean) for index in range(setup.reserved))
        }
        self.cut: set[str] = set()
        """Nodes that no leader hears and that hear none."""
        self.outages: list[tuple[float, float]] = []
        """[from, to) in which storage takes no writes."""
        self.run: Run | None = None
        """The generation that is recorded in the store."""
        self.live: list[Run] = []
        """Runs that start or train. Two for a moment: the new one is recorded, the old one not yet stopped."""
        self.unsettled: list[Run] = []
        """Runs whose saves may still be committed."""
        self.num_faults = 0
        self.after = ""
        """The newest fault: its kind, and of a hang how."""
        self.num_generations = 0
        self.num_pages = 0
        self.borrowed_seconds = 0.0
        """Node-seconds of the pool that a fixed world takes replacements from: from a fault to the end of its repair."""
        self.num_poisoned = 0
        """Restores of a checkpoint whose state had diverged before anybody knew: replicas agree again, nobody can see it."""
        self.ended = ""
        self.parked = False
        self._policy = policy or policy_of(setup)
        self._decide = decide
        self.life = Life(self)
        self.orders = Orders(self)
        self._former: list[Leader] = []
        """Leaders of earlier terms that may still live, without knowing better."""
        self.leader = self._new_leader("s1")
        self.leader.post(e.LeaderStarted(at=0.0, epoch=self.leader.epoch, supervisor="s1"))
        self.leader.post(e.JobLoaded(at=0.0, spec=workload.spec, submitted=True))
        for node in self.nodes.values():
            self.greet(node)

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.loop.now

    @property
    def training(self) -> bool:
        """Does any generation complete steps now?"""
        return any(run.state == "training" for run in self.live)

    def in_outage(self, at: float) -> bool:
        """Does storage refuse writes at that instant?"""
        return any(start <= at < end for start, end in self.outages)

    def borrow(self, seconds: float) -> None:
        """A node of the pool stands in for so long, at most to the horizon."""
        self.borrowed_seconds += max(0.0, min(seconds, self.setup.seconds - self.now))

    def draw(self, name: str) -> float:
        """One draw of a delay."""
        return self.setup.constants.named(name).sample(self.rng, self.setup.nodes, self.after)

    def phase_seconds(self, phase: str) -> float:
        """Duration of a phase of a start, drawn."""
        if phase == "start" and not self.setup.strategy.elastic:
            return self.draw("start_cold") + self.draw("requeue")
        return self.draw(phase)

    def phase_seconds_at(self, phase: str) -> float:
        """Median duration of a phase."""
        return self.setup.constants.named(phase).at(self.setup.nodes)

    # --- leaders

    def _new_leader(self, name: str) -> Leader:
        return Leader(self, name, self.store.new_term(), self._policy, self._decide)

    def retire(self, leader: Leader) -> None:
        """Its term is over; a standby follows where none has yet."""
        leader.end()
        if leader is self.leader:
            self.loop.after(1.0, lambda: self.takeover(f"{leader.name}b"))

    def takeover(self, name: str) -> None:
        """A standby wins the election: it loads what the store has, and agents come to it."""
        if self.leader.alive and not self.leader.paused:
            return
        if not self.store.up:
            self.loop.after(1.0, lambda: self.takeover(name))
            return
        self.life.settle()
        self._former = [*(old for old in self._former if old.alive), self.leader]
        leader = self.leader = self._new_leader(name)
        now, store = self.now, self.store
        loaded = e.JobLoaded(
            at=now,
            spec=self.workload.spec,
            generation=store.generation,
            members=store.members,
            ledger=store.ledger,
            checkpoints=tuple(record for _, record in sorted(store.checkpoints.items())),
        )
        leader.post(e.LeaderStarted(at=now, epoch=leader.epoch, supervisor=name))
        leader.post(e.QuarantineLoaded(at=now, records=tuple(store.quarantine[key] for key in sorted(store.quarantine))), loaded)
        self.loop.after(0.1, lambda: leader.watch_progress(self.run, since=now) if self.run is not None else None)
        for node in self.nodes.values():
            if node.up and node.agent:
                self.loop.after(self.rng.uniform(0.1, 1.5), lambda node=node: self.greet(node))

    # --- the network

    def greet(self, node: Node) -> None:
        """An agent connects to the leader of the day, tells what it runs, and what the leader may have missed."""
        leader = self.leader
        if not (node.up and node.agent) or node.name in self.cut or not leader.alive:
            return
        if node.name in leader.connected and node.name not in leader.silent:
            joined = leader.view.nodes.get(node.name)
            if joined is None or joined.incarnation == f"{node.name}-{node.incarnation}":
                return
            self.loop.after(0.5, lambda: self.greet(node))
            return
        for old in self._former:
            if node.name in old.connected:
                old.connected.discard(node.name)
                old.post(e.NodeDisconnected(at=self.now, node=node.name, reason="it went to another leader"))
        node.epoch = max(node.epoch, leader.epoch)
        leader.connected.add(node.name)
        leader.silent.discard(node.name)
        node.outbox = []
        spec = self.checkers.specs.get(node.running)
        workers = (
            self.store.members.get(node.name, ()) if spec is not None and self.run is not None and self.run.number == node.running else ()
        )
        leader.post(e.NodeJoined(at=self.now, hello=node.hello(workers)))
        if node.running and node.exits:
            leader.post(e.WorkersExited(at=self.now, node=node.name, job=JOB, generation=node.running, exits=node.exits))
        leader.post(
            *(
                e.MemberPhase(at=self.now, node=node.name, job=JOB, generation=node.running, phase=phase)
                for phase in node.told
                if node.running
            )
        )
        if node.leaving:
            leader.post(e.NodeLeaving(at=self.now, node=node.name, reason=node.leaving))

    def tell(self, node: Node, make: Callable[[float], e.Event], *, late: bool = False) -> None:
        """A line of an agent. While its network is cut the line waits; without an agent or a connection it is lost.

        Args:
            node: who tells.
            make: the event, given its instant.
            late: in large clusters it is told with the next turn: it says only that all goes well.
        """
        if not (node.up and node.agent):
            return
        if node.name in self.cut:
            node.outbox.append(make)
        elif node.name in self.leader.connected:
            (self.leader.note if late and self.setup.lean else self.leader.post)(make(self.now))

    def disconnect(self, node: Node, reason: str) -> None:
        """The connection closed: the agent process is gone."""
        for leader in (self.leader, *self._former):
            if node.name in leader.connected:
                leader.connected.discard(node.name)
                leader.silent.discard(node.name)
                leader.post(e.NodeDisconnected(at=self.now, node=node.name, reason=reason))

    def falls_silent(self, node: Node) -> None:
        """From now on nothing is heard of it."""
        since, leader, incarnation = self.now, self.leader, node.incarnation

        def look() -> None:
            there = node.up and node.agent and node.name not in self.cut and node.incarnation == incarnation
            if not there and node.name in leader.connected and node.name not in leader.silent:
                leader.silent.add(node.name)
                leader.post(e.NodeSilent(at=self.now, node=node.name, last_heard_at=since))

        def expire() -> None:
            if node.name in leader.silent and self.store.up:
                (leader.note if self.setup.lean else leader.post)(e.LeaseExpired(at=self.now, node=node.name))

        self.loop.after(self.draw("silence"), look)
        self.loop.after(self.draw("lease"), expire)

    def heard_again(self, node: Node) -> None:
        """Its network is back, and what it wanted to tell arrives."""
        self.cut.discard(node.name)
        if not (node.up and node.agent):
            return
        if node.name not in self.leader.connected:
            self.greet(node)
            return
        if node.name in self.leader.silent:
            self.leader.silent.discard(node.name)
            self.leader.post(e.NodeHeard(at=self.now, node=node.name))
        waiting, node.outbox = node.outbox, []
        for make in waiting:
            self.leader.post(make(self.now))


def policy_of(setup: Setup) -> Policy:
    """The production policy; a cold start of a fixed world, and one member that speaks for thousands, need longer deadlines."""
    policy = Policy()
    if not setup.strategy.elastic:
        return msgspec.structs.replace(policy, phase_seconds=3600.0, start_seconds=7200.0, hang_first_step_seconds=3600.0)
    if setup.lean:
        return msgspec.structs.replace(policy, phase_seconds=policy.start_seconds)
    return policy
