"""What each kind of fault does to the world."""

from __future__ import annotations

from collections.abc import Callable

from regrow import wire
from regrow.supervisor.core import events as e
from regrow.supervisor.sim.faults import DISTURBING, Fault
from regrow.supervisor.sim.nodes import Node
from regrow.supervisor.sim.world import World

_CUDA = 'Traceback (most recent call last):\n  File "train.py", line 40, in step\nRuntimeError: CUDA error: an uncorrectable error was encountered'
_NOTICE_SECONDS = 120.0
_KEEPALIVE_SECONDS = 10.0
"""A leader whose term is over learns of it with its next keepalive, at the latest."""
_POOL_SECONDS = 5.0
"""A fixed world: the requeued job has another node; the wait for it is in its cold start."""


class Injector:
    """Breaks things on schedule."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._number = 0
        self._terms = 1
        self._effects: dict[str, Callable[[Fault, Node], None]] = {
            "gpu": self._gpu,
            "host": self._host,
            "program": self._program,
            "network": self._network,
            "hang": self._hang,
            "leave": self._leave,
            "sdc": self._sdc,
            "agent": self._agent,
            "leader": self._leader,
            "pause": self._pause,
            "store": self._store,
            "storage": self._storage,
            "silence": self._silence,
            "damage": self._damage,
            "killed": self._killed,
            "sick": self._sick,
        }

    def schedule(self, faults: tuple[Fault, ...]) -> None:
        """Everything at its time."""
        for fault in faults:
            self._world.loop.at(fault.at, lambda fault=fault: self.happen(fault))

    def happen(self, fault: Fault) -> None:
        """Now, whatever its own instant says."""
        world = self._world
        self._number += 1
        world.num_faults += 1
        world.after = f"{fault.kind} {fault.how}".strip()
        if fault.kind in DISTURBING and world.training:
            world.accounts.cause = fault.category or fault.kind
        names = list(world.nodes)
        nodes = [world.nodes[names[index]] for index in fault.nodes] or [next(iter(world.nodes.values()))]
        if fault.kind in ("leader", "pause", "store", "storage", "damage"):
            nodes = nodes[:1]
        for node in nodes:
            self._effects[fault.kind](fault, node)

    def _seconds(self, fault: Fault) -> float:
        if fault.seconds is not None:
            return fault.seconds
        return self._world.draw(fault.repair) if fault.repair else 0.0

    def _repaired(self, fault: Fault, node: Node, *, host: bool) -> None:
        """The node is back after its repair; another one at once where the scheduler has a pool."""
        replaced = fault.repair == "replace"
        seconds = self._seconds(fault)
        if not self._world.setup.strategy.elastic:
            self._world.borrow(seconds)
            seconds, replaced = _POOL_SECONDS, True
        back = self._world.life.host_back if host else self._world.life.restart_host
        boot = node.boot

        def done() -> None:
            if node.boot == boot and (host or node.up):
                back(node, replaced=replaced)

        self._world.loop.after(seconds, done)

    # --- what a training run sees

    def _gpu(self, fault: Fault, node: Node) -> None:
        """A GPU is lost: its worker ends, the health monitor says why, the host is drained and repaired."""
        world = self._world
        if not node.up:
            return
        action = "replace" if fault.repair == "replace" else "reset"
        verdict = wire.HealthVerdict(
            state="unhealthy",
            action=action,
            reason=f"XID 79 ({fault.component})",
            device_uuids=node.devices(),
            incident=f"x{self._number}",
        )
        boot = node.boot

        def told() -> None:
            if node.boot == boot:
                node.health = verdict
                world.tell(node, lambda at: e.NodeHealth(at=at, node=node.name, verdict=verdict))

        run = world.life.current(node)
        if run is not None:
            world.life.break_run(run)
            world.loop.after(world.draw("exit_report"), lambda: world.life.worker_exit(node, exit_code=1, error=_CUDA))
            world.life.peers_fail(run, "peer_error")
        world.loop.after(world.draw("verdict"), told)
        self._repaired(fault, node, host=False)

    def _host(self, fault: Fault, node: Node) -> None:
        if node.up:
            self._world.life.host_down(node)
            self._repaired(fault, node, host=True)

    def _program(self, fault: Fault, node: Node) -> None:
        """A worker raises: another place in the program each time."""
        world = self._world
        run = world.life.current(node)
        if run is None:
            return
        place = self._number
        error = f'Traceback (most recent call last):\n  File "train.py", line {place}, in step\nRuntimeError: {fault.component} {place}'
        world.life.break_run(run)
        world.loop.after(world.draw("exit_report"), lambda: world.life.worker_exit(node, exit_code=1, error=error))
        world.life.peers_fail(run, "peer_error")

    def _network(self, fault: Fault, node: Node) -> None:
        """The node is cut from its peers and from the leader; it lives on."""
        world = self._world
        if not node.up or node.name in world.cut:
            return
        run = world.life.current(node)
        world.cut.add(node.name)
        world.falls_silent(node)
        if run is not None:
            world.life.break_run(run)
            world.life.peers_fail(run, "peer_error")
        if fault.repair == "replace":
            self._repaired(fault, node, host=True)
        else:
            world.loop.after(self._seconds(fault), lambda: world.heard_again(node))

    def _hang(self, fault: Fault, node: Node) -> None:
        run = self._world.life.current(node)
        if run is None:
            return
        rank = next((worker.rank for worker in self._world.store.members.get(node.name, ())), 0)
        named = fault.how != "alike" if fault.how else self._world.rng.random() < 0.5
        run.halted = fault.how == "stopped"
        self._world.life.break_run(run, stuck=rank if named else -1)

    def _leave(self, fault: Fault, node: Node) -> None:
        """Maintenance with a notice: the agent says so and waits to be released."""
        world = self._world
        if not node.up or node.leaving:
            return
        node.leaving = fault.component or "maintenance"
        boot = node.boot
        world.tell(node, lambda at: e.NodeLeaving(at=at, node=node.name, reason=node.leaving, notice_seconds=_NOTICE_SECONDS))

        def gone() -> None:
            if node.boot == boot:
                world.life.leaves(node)

        def back() -> None:
            if node.boot == boot:
                gone()
                world.life.host_back(node, replaced=False)

        world.loop.after(_NOTICE_SECONDS, gone)
        seconds = self._seconds(fault)
        if not world.setup.strategy.elastic:
            world.borrow(seconds)
            seconds = _POOL_SECONDS
        world.loop.after(_NOTICE_SECONDS + seconds, back)

    def _sdc(self, fault: Fault, node: Node) -> None:
        """Bits flip: nothing is seen until digests are compared. Then the GPU is to be replaced."""
        world = self._world
        run = world.life.current(node)
        if run is None or run.state != "training":
            return
        run.diverged_at = run.completed(world.now) + 1 if run.diverged_at is None else run.diverged_at
        world.loop.after(world.draw("sdc_seen"), lambda: world.life.sdc_seen(run, node))
        self._repaired(fault, node, host=False)

    # --- what a recorded run saw besides

    def _killed(self, fault: Fault, node: Node) -> None:
        """All processes of a node are killed at once; the host lives and starts them again."""
        if node.up:
            self._world.life.processes_end(node, "closed by the agent")
            self._repaired(fault, node, host=True)

    def _sick(self, fault: Fault, node: Node) -> None:
        """The health monitor condemns a part while the workers still run: the node is drained."""
        if node.up:
            node.health = wire.HealthVerdict(
                state="unhealthy", action="reset", reason=fault.component, device_uuids=node.devices(), incident=f"x{self._number}"
            )
            verdict = node.health
            self._world.tell(node, lambda at: e.NodeHealth(at=at, node=node.name, verdict=verdict))

    # --- the world around it

    def _agent(self, fault: Fault, node: Node) -> None:
        world = self._world
        if not (node.up and node.agent):
            return
        node.agent = False
        world.disconnect(node, "agent ended")
        boot = node.boot

        def back() -> None:
            if node.boot == boot and node.up:
                node.agent = True
                node.incarnation += 1
                world.greet(node)

        world.loop.after(self._seconds(fault), back)

    def _leader(self, fault: Fault, _node: Node) -> None:
        """The leading process dies; a standby takes over when its key has gone."""
        world = self._world
        world.leader.end()
        self._terms += 1
        name = f"s{self._terms}"
        world.loop.after(max(0.5, self._seconds(fault)), lambda: world.takeover(name))

    def _pause(self, fault: Fault, _node: Node) -> None:
        """The leading process stands still for longer than its term, and goes on after another one leads."""
        world = self._world
        old = world.leader
        if old.paused or not old.alive:
            return
        old.paused = True
        self._terms += 1
        name = f"s{self._terms}"
        lease = world.draw("takeover")
        world.loop.after(lease, lambda: world.takeover(name))
        back = lease + self._seconds(fault)
        world.loop.after(back, old.resume)
        world.loop.after(back + world.rng.uniform(0.5, _KEEPALIVE_SECONDS), lambda: world.retire(old))

    def _store(self, fault: Fault, _node: Node) -> None:
        world = self._world
        if not world.store.up:
            return
        world.life.settle()
        world.store.up = False
        leader = world.leader
        world.loop.after(
            1.0, lambda: leader.post(e.StoreChanged(at=world.now, up=False, reason="no answer")) if not world.store.up else None
        )

        def back() -> None:
            world.orders.store_back()
            world.leader.post(e.StoreChanged(at=world.now, up=True))

        world.loop.after(self._seconds(fault), back)

    def _storage(self, fault: Fault, _node: Node) -> None:
        self._world.life.settle()
        self._world.outages.append((self._world.now, self._world.now + self._seconds(fault)))

    def _silence(self, fault: Fault, node: Node) -> None:
        """The management network is cut; training goes on."""
        world = self._world
        if not node.up or node.name in world.cut:
            return
        world.cut.add(node.name)
        world.falls_silent(node)
        world.loop.after(self._seconds(fault), lambda: world.heard_again(node))

    def _damage(self, _fault: Fault, _node: Node) -> None:
        """Bytes of the newest checkpoint rot."""
        store = self._world.store
        if len(store.checkpoints) > 1:
            store.damaged.add(max(store.checkpoints))
