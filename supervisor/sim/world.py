"""The world around the decision core: nodes, network, store, storage, training. Everything that a leader's orders reach."""

from __future__ import annotations

import random
from collections.abc import Callable

from regrow import wire
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.records import LedgerRecord
from regrow.supervisor.core.turn import Turn, turn
from regrow.supervisor.sim.accounts import Accounts
from regrow.supervisor.sim.checkers import Checkers
from regrow.supervisor.sim.journal import Journal
from regrow.supervisor.sim.leader import Leader, TurnFunction
from regrow.supervisor.sim.loop import Loop
from regrow.supervisor.sim.models import JOB, Workload
from regrow.supervisor.sim.nodes import Node
from regrow.supervisor.sim.setup import Setup
from regrow.supervisor.sim.store import SimStore
from regrow.supervisor.sim.training import Run

LOST_PEER = "RuntimeError: NCCL error: ncclRemoteError: peer closed"
_RECORD_SECONDS = 4.0
_STACKS_SECONDS = 0.3


class World:
    """One simulated cluster. Ground truth; the leader knows what its edge tells it."""

    def __init__(self, setup: Setup, workload: Workload, seed: str, *, policy: Policy | None = None, decide: TurnFunction = turn) -> None:
        self.setup = setup
        self.workload = workload
        self.loop = Loop()
        self.rng = random.Random(f"{seed}/delays")
        self.checkers = Checkers()
        self.store = SimStore(self.checkers)
        self.accounts = Accounts(workload.full_seconds)
        self.journal = Journal(short=setup.lean)
        self.nodes = {node.name: node for node in (Node(index, setup.places) for index in range(setup.reserved))}
        self.cut: set[str] = set()
        """Nodes that no leader hears and that hear none."""
        self.storage_up = True
        self.run: Run | None = None
        """The generation that is recorded in the store."""
        self.unsettled: list[Run] = []
        """Runs whose saves may still be committed."""
        self.num_faults = 0
        self.num_generations = 0
        self.num_pages = 0
        self.ended = ""
        self.parked = False
        self._policy = policy or policy_of(setup)
        self._decide = decide
        self._writes: list[tuple[Leader, Callable[[], None]]] = []
        self.leader = self._new_leader("s1")
        self.leader.post(e.LeaderStarted(at=0.0, epoch=self.leader.epoch, supervisor="s1"))
        self.leader.post(e.JobLoaded(at=0.0, spec=workload.spec, submitted=True))
        for node in self.nodes.values():
            self.greet(node)

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.loop.now

    def draw(self, name: str) -> float:
        """One draw of a delay."""
        return self.setup.constants.named(name).sample(self.rng, self.setup.nodes)

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

    def takeover(self, name: str) -> None:
        """A standby wins the election: it loads what the store has, and agents come to it."""
        if not self.store.up:
            self.loop.after(1.0, lambda: self.takeover(name))
            return
        self.settle()
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
        if self.run is not None:
            self.watch_progress(self.run)
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
        node.epoch = max(node.epoch, leader.epoch)
        leader.connected.add(node.name)
        leader.silent.discard(node.name)
        node.outbox = []
        spec = self.checkers.specs.get(node.running)
        workers = self.store.members.get(node.name, ()) if spec is not None and self.run is not None and self.run.number == node.running else ()
        leader.post(e.NodeJoined(at=self.now, hello=node.hello(workers)))
        if node.running and node.exits:
            leader.post(e.WorkersExited(at=self.now, node=node.name, job=JOB, generation=node.running, exits=node.exits))
        leader.post(
            *(e.MemberPhase(at=self.now, node=node.name, job=JOB, generation=node.running, phase=phase) for phase in node.told if node.running)
        )
        if node.leaving:
            leader.post(e.NodeLeaving(at=self.now, node=node.name, reason=node.leaving))

    def tell(self, node: Node, make: Callable[[float], e.Event]) -> None:
        """A line of an agent. While its network is cut the line waits; without an agent or a connection it is lost."""
        if not (node.up and node.agent):
            return
        if node.name in self.cut:
            node.outbox.append(make)
        elif node.name in self.leader.connected:
            self.leader.post(make(self.now))

    def disconnect(self, node: Node, reason: str) -> None:
        """The connection closed: the agent process is gone."""
        for leader in (self.leader,):
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
                leader.post(e.LeaseExpired(at=self.now, node=node.name))

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
            assert callable(make)
            self.leader.post(make(self.now))

    # --- effects of actions

    def dispatch(self, leader: Leader, result: Turn) -> None:
        """Carry out what a turn decided, as effects.Effects does."""
        starts: list[a.StartMember] = []
        stops: list[a.StopWorkers] = []
        for seq, action in result.actions:
            match action:
                case a.RecordGeneration():
                    self._decided(leader)
                    self.loop.after(self.draw("record"), lambda seq=seq, action=action: self._record(leader, seq, action))
                case a.StartMember():
                    starts.append(action)
                case a.StopWorkers():
                    stops.append(action)
                case a.AskSave():
                    self._order(lambda action=action: self._ask_save(action))
                case a.TellRate():
                    self._order(lambda action=action: self._tell_rate(action))
                case a.AskStacks():
                    self.loop.after(_STACKS_SECONDS, lambda action=action: self._stacks(action))
                case a.ReleaseNode():
                    node = self.nodes[action.node]
                    self._order(lambda node=node: self.leaves(node))
                case a.SetQuarantine():
                    self._write(leader, lambda action=action: self.store.quarantine.__setitem__(action.record.key, action.record))
                case a.SetCheckpoint():
                    self._write(leader, lambda action=action: self.store.amend(action))
                case a.ParkJob() | a.EndJob():
                    self._stands(leader, action)
                case a.SaveLedger():
                    self._write(leader, lambda action=action: self._set_ledger(action.ledger))
                case a.Page():
                    self.num_pages += 1
                case a.EndBoundary():
                    pass
        if starts:
            self._order(lambda: self._start(leader, starts))
        if stops:
            self._order(lambda: self._stop(leader, stops))

    def _order(self, call: Callable[[], None]) -> None:
        self.loop.after(self.draw("message"), call)

    def _write(self, leader: Leader, call: Callable[[], None]) -> None:
        """A write under the leader's own comparison; it waits for the store."""
        if not self.store.up:
            self._writes.append((leader, call))
        elif leader.epoch == self.store.epoch:
            call()
        else:
            leader.end()

    def store_back(self) -> None:
        """The store answers again: what waited is written, checkpoints are committed."""
        self.store.up = True
        waiting, self._writes = self._writes, []
        for leader, call in waiting:
            self._write(leader, call)
        self.settle()

    def _set_ledger(self, ledger: LedgerRecord) -> None:
        self.store.ledger = ledger

    def _decided(self, leader: Leader) -> None:
        """Time until here was detection and decision, when nothing trained."""
        run = self.run
        if run is None or run.state not in ("training",):
            if self.parked or run is None:
                self.accounts.lose("waiting", self.now)
            else:
                incidents = leader.view.jobs[JOB].incidents
                detected = incidents[-1].detected_at if incidents and not incidents[-1].closed else self.now
                self.accounts.lose("detect", min(self.now, detected))
                self.accounts.lose("decide", self.now)
        self.parked = False

    def _stands(self, leader: Leader, action: a.ParkJob | a.EndJob) -> None:
        if leader is self.leader:
            self._decided(leader)
            self.parked = True
            if isinstance(action, a.EndJob):
                self.ended = action.reason
        self._write(leader, lambda: self._set_ledger(action.ledger))

    def _record(self, leader: Leader, seq: int, action: a.RecordGeneration) -> None:
        spec = action.spec

        def failed(reason: str, *, fenced: bool) -> e.ActionFailed:
            return e.ActionFailed(
                at=self.now, seq=seq, kind="record_generation", job=JOB, generation=spec.generation, reason=reason, fenced=fenced
            )

        if not leader.alive:
            return
        if not self.store.up:
            self.loop.after(_RECORD_SECONDS, lambda: leader.post(failed("the store does not answer", fenced=False)))
            return
        self.settle()
        if not self.store.record(self.now, leader.epoch, leader.known_revision, action):
            leader.post(failed("this term is over", fenced=True))
            leader.end()
            return
        self.checkers.restore_point(self.now, spec, self.store.checkpoints.values(), self.store.unusable)
        leader.known_revision = self.store.revision
        self.num_generations += 1
        if self.run is None or self.run.state != "training":
            self.accounts.lose("fence", self.now)
        self._old_run = self.run
        self.run = Run(self, spec, self.store.revision)
        leader.post(e.GenerationRecorded(at=self.now, job=JOB, generation=spec.generation))

    def _start(self, leader: Leader, starts: list[a.StartMember]) -> None:
        """Orders to start reach their nodes."""
        number, epoch = starts[0].generation, leader.epoch
        obeyed: list[str] = []
        self.settle()
        for order in starts:
            node = self.nodes[order.node]
            if not (node.up and node.agent) or node.name in self.cut or node.name not in leader.connected:
                continue
            refusal = self.agent_refuses(node, epoch, number)
            if refusal:
                leader.post(e.StartWasRefused(at=self.now, node=node.name, job=JOB, generation=number, reason=refusal, fenced=True))
                continue
            self.checkers.obeyed(self.now, node.name, epoch, number, "start")
            self.kill(node)
            node.epoch, node.generation, node.running = max(node.epoch, epoch), number, number
            node.exits, node.told = (), ()
            obeyed.append(node.name)
        master = starts[0].master_address
        if obeyed and self.run is not None and self.run.number == number:
            self.checkers.rendezvous_store(self.now, master, number)
            self.run.joined(obeyed)

    def agent_refuses(self, node: Node, epoch: int, generation: int) -> str:
        """The agent's fence. A seam of its own so that a test can take it away."""
        return node.refuses(epoch, generation)

    def kill(self, node: Node) -> None:
        """An agent kills the workers that it has; the run that they belong to is over."""
        if not node.running:
            return
        for run in {id(run): run for run in (*self.unsettled, self.run) if run is not None}.values():
            if run.number == node.running and run.state in ("training", "starting", "ordered"):
                run.stop("broken" if run is self.run else "over")
                if run is self.run:
                    self.watch_progress(run)

    def _stop(self, leader: Leader, stops: list[a.StopWorkers]) -> None:
        for order in stops:
            node = self.nodes[order.node]
            if not (node.up and node.agent) or node.name in self.cut or leader.epoch < node.epoch:
                continue
            self.checkers.obeyed(self.now, node.name, leader.epoch, order.generation, "stop")
            node.epoch = max(node.epoch, leader.epoch)
            node.stopped = max(node.stopped, order.generation)
            if node.running and node.running <= order.generation:
                self.kill(node)
                node.running, node.exits, node.told = 0, (), ()
            self.tell(
                node,
                lambda at, node=node, order=order: e.MemberPhase(
                    at=at, node=node.name, job=JOB, generation=order.generation, phase="stopped"
                ),
            )
