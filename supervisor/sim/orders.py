"""What becomes of actions: the simulated counterpart of effects.Effects and of the agents that obey."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core.records import LedgerRecord
from regrow.supervisor.core.turn import Turn
from regrow.supervisor.sim.leader import Leader
from regrow.supervisor.sim.models import JOB
from regrow.supervisor.sim.nodes import Node
from regrow.supervisor.sim.training import Run

if TYPE_CHECKING:
    from regrow.supervisor.sim.world import World

_RECORD_SECONDS = 4.0


class Orders:
    """Carries out what leaders decide."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._writes: list[tuple[Leader, Callable[[], None]]] = []

    def dispatch(self, leader: Leader, result: Turn) -> None:
        """Carry out what a turn decided, as effects.Effects does."""
        decided = self._world.now
        starts: list[a.StartMember] = []
        stops: list[a.StopWorkers] = []
        for seq, action in result.actions:
            match action:
                case a.RecordGeneration():
                    self._decided(leader)
                    self._world.loop.after(
                        self._world.draw("record"), lambda seq=seq, action=action: self._record(leader, seq, action, decided)
                    )
                case a.StartMember():
                    starts.append(action)
                case a.StopWorkers():
                    stops.append(action)
                case a.SetQuarantine() | a.SetCheckpoint() | a.SaveLedger() | a.ParkJob() | a.EndJob():
                    self._to_store(leader, action)
                case _:
                    self._to_nodes(action)
        for number in dict.fromkeys(action.generation for action in starts):
            same = [action for action in starts if action.generation == number]
            self._order(lambda same=same: self._start(leader, same))
        if stops:
            self._order(lambda: self._stop(leader, stops))

    def _to_nodes(self, action: a.Action) -> None:
        match action:
            case a.AskSave():
                self._order(lambda: self._ask_save(action))
            case a.TellRate():
                self._order(lambda: self._tell_rate(action))
            case a.AskStacks():
                self._world.loop.after(self._world.setup.constants.stacks.median, lambda: self._stacks(action))
            case a.AskReach():
                self._order(lambda: self._reach(action))
            case a.ReleaseNode():
                self._order(lambda: self._world.life.leaves(self._world.nodes[action.node]))
            case a.Page():
                self._world.num_pages += 1
            case _:
                pass

    def _to_store(self, leader: Leader, action: a.SetQuarantine | a.SetCheckpoint | a.SaveLedger | a.ParkJob | a.EndJob) -> None:
        match action:
            case a.SetQuarantine():
                self._write(leader, lambda: self._world.store.quarantine.__setitem__(action.record.key, action.record))
            case a.SetCheckpoint():
                self._write(leader, lambda: self._world.store.amend(action))
            case a.SaveLedger():
                self._write(leader, lambda: self._set_ledger(action.ledger))
            case a.ParkJob() | a.EndJob():
                self._stands(leader, action)
            case _:
                assert_never(action)

    def _order(self, call: Callable[[], None]) -> None:
        self._world.loop.after(self._world.draw("message"), call)

    def _write(self, leader: Leader, call: Callable[[], None]) -> None:
        """A write under the leader's own comparison; it waits for the store."""
        if not leader.alive:
            return
        if not self._world.store.up:
            self._writes.append((leader, call))
        elif leader.epoch == self._world.store.epoch:
            call()
        else:
            leader.end()

    def store_back(self) -> None:
        """The store answers again: what waited is written, checkpoints are committed."""
        self._world.store.come_up(self._world.now)
        waiting, self._writes = self._writes, []
        for leader, call in waiting:
            self._write(leader, call)
        self._world.life.settle()

    def _set_ledger(self, ledger: LedgerRecord) -> None:
        self._world.store.ledger = ledger

    def _decided(self, leader: Leader) -> None:
        """Time until here was detection and decision, when nothing trained."""
        if not self._world.training:
            if self._world.parked or self._world.run is None:
                self._world.accounts.lose("waiting", self._world.now)
            else:
                incidents = leader.view.jobs[JOB].incidents
                detected = incidents[-1].detected_at if incidents and not incidents[-1].closed else self._world.now
                self._world.accounts.lose("detect", min(self._world.now, detected))
                self._world.accounts.lose("decide", self._world.now)
        self._world.parked = False

    def _stands(self, leader: Leader, action: a.ParkJob | a.EndJob) -> None:
        if leader is self._world.leader:
            self._decided(leader)
            self._world.parked = True
            if isinstance(action, a.EndJob):
                self._world.ended = action.reason
        self._write(leader, lambda: self._set_ledger(action.ledger))

    def _record(self, leader: Leader, seq: int, action: a.RecordGeneration, decided: float) -> None:
        spec = action.spec

        def failed(reason: str, *, fenced: bool) -> e.ActionFailed:
            return e.ActionFailed(
                at=self._world.now, seq=seq, kind="record_generation", job=JOB, generation=spec.generation, reason=reason, fenced=fenced
            )

        if not leader.alive:
            return
        if leader.paused:
            leader.stuck.append(lambda: self._record(leader, seq, action, decided))
            return
        if not self._world.store.up:
            self._world.loop.after(_RECORD_SECONDS, lambda: leader.post(failed("the store does not answer", fenced=False)))
            return
        self._world.life.settle()
        if not self._world.store.record(self._world.now, leader.epoch, leader.known_revision, action):
            leader.post(failed("this term is over", fenced=True))
            leader.end()
            return
        self._world.checkers.restore_point(self._world.now, spec, self._world.store.known_at(decided), self._world.store.unusable)
        leader.known_revision = self._world.store.revision
        self._world.num_generations += 1
        if not self._world.training:
            self._world.accounts.lose("fence", self._world.now)
        self._world.run = Run(self._world, spec, self._world.store.revision)
        self._world.live.append(self._world.run)
        leader.post(e.GenerationRecorded(at=self._world.now, job=JOB, generation=spec.generation))

    def _start(self, leader: Leader, starts: list[a.StartMember]) -> None:
        """Orders to start reach their nodes."""
        number, epoch = starts[0].generation, leader.epoch
        obeyed: list[str] = []
        killed: set[int] = set()
        self._world.life.settle()
        nodes, cut, connected, obeys, now = (
            self._world.nodes,
            self._world.cut,
            leader.connected,
            self._world.checkers.obeyed,
            self._world.now,
        )
        for order in starts:
            name = order.node
            node = nodes[name]
            if not (node.up and node.agent) or name in cut or name not in connected:
                continue
            if node.running == number and epoch >= node.epoch:
                self._tell_again(node)
                continue
            refusal = self.agent_refuses(node, epoch, number)
            if refusal:
                leader.post(e.StartWasRefused(at=self._world.now, node=node.name, job=JOB, generation=number, reason=refusal, fenced=True))
                continue
            obeys(now, node.host, epoch, number, "start")
            if node.running not in killed:
                self.kill(node)
                killed.add(node.running)
            node.epoch, node.generation, node.running = max(node.epoch, epoch), number, number
            node.exits, node.told = (), ()
            obeyed.append(name)
        master = starts[0].master_address
        if obeyed and self._world.run is not None and self._world.run.number == number:
            self._world.checkers.rendezvous_store(self._world.now, master, number)
            self._use_store(self._world.nodes[master.partition(":")[0]])
            self._world.run.joined(obeyed)

    def _tell_again(self, node: Node) -> None:
        """An order that was obeyed already: the agent says how far it is."""
        number = node.running
        for phase in node.told:
            self._world.tell(
                node, lambda at, phase=phase: e.MemberPhase(at=at, node=node.name, job=JOB, generation=number, phase=phase), late=True
            )

    def _use_store(self, node: Node) -> None:
        """The TCPStore is in use from now on; the shim has another one soon."""
        node.spare_store += 1
        if not self._world.setup.lean:
            self._world.tell(node, lambda at: e.SpareStoreChanged(at=at, node=node.name, address=""))
            self._world.loop.after(1.0, lambda: self._store_ready(node))
        else:
            self._store_ready(node)

    def _store_ready(self, node: Node) -> None:
        self._world.tell(node, lambda at: e.SpareStoreChanged(at=at, node=node.name, address=node.store_address()), late=True)

    def agent_refuses(self, node: Node, epoch: int, generation: int) -> str:
        """The agent's fence. A seam of its own so that a test can take it away."""
        return node.refuses(epoch, generation)

    def kill(self, node: Node) -> None:
        """An agent kills the workers that it has; the run that they belong to is over."""
        if not node.running:
            return
        for run in [run for run in self._world.live if run.number == node.running]:
            if run is self._world.run:
                self._world.life.break_run(run)
            else:
                run.stop("over")

    def _stop(self, leader: Leader, stops: list[a.StopWorkers]) -> None:
        for order in stops:
            node = self._world.nodes[order.node]
            if not (node.up and node.agent) or node.name in self._world.cut or leader.epoch < node.epoch:
                continue
            self._world.checkers.obeyed(self._world.now, node.host, leader.epoch, order.generation, "stop")
            node.epoch = max(node.epoch, leader.epoch)
            node.stopped = max(node.stopped, order.generation)
            if node.running and node.running <= order.generation:
                self.kill(node)
                node.running, node.exits, node.told = 0, (), ()
            self._world.tell(
                node,
                lambda at, node=node, order=order: e.MemberPhase(
                    at=at, node=node.name, job=JOB, generation=order.generation, phase="stopped"
                ),
            )

    def _ask_save(self, action: a.AskSave) -> None:
        world = self._world
        run = world.run
        if run is None or run.number != action.generation:
            return
        due = run.ask_save()
        if due is not None:
            world.loop.at(due, world.life.settle_and_tell)

    def _tell_rate(self, action: a.TellRate) -> None:
        run = self._world.run
        if run is not None and run.number == action.generation:
            run.new_rate(action.failures_per_second)

    def _reach(self, action: a.AskReach) -> None:
        """Hosts that are up are reached: the simulated data network is not cut for one host alone."""
        world = self._world
        names = [name for name in action.peers if world.nodes[name].up]
        for name in names:
            tried = action.peers[name]
            up = tuple(peer for peer in tried if world.nodes[peer].up)
            down = tuple(peer for peer in tried if not world.nodes[peer].up)
            world.tell(
                world.nodes[name],
                lambda at, name=name, up=up, down=down: e.PeersWereProbed(
                    at=at, node=name, job=JOB, generation=action.generation, reached=up, unreached=down
                ),
                late=name != names[-1],
            )

    def _stacks(self, action: a.AskStacks) -> None:
        """All workers dump their stacks but the one that is stuck."""
        world = self._world
        run = world.run
        if run is None or run.number != action.generation or world.setup.lean:
            return
        for name in run.spec.nodes:
            node = world.nodes[name]
            for worker in world.store.members.get(name, ()):
                if node.running != run.number or worker.rank == run.stuck:
                    continue
                world.tell(
                    node,
                    lambda at, node=node, rank=worker.rank: e.OutputKept(
                        at=at, node=node.name, job=JOB, generation=run.number, rank=rank, kind="stacks", text='File "train.py", line 1'
                    ),
                )
