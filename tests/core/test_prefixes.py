"""Every interrupted prefix of every multi-step plan: the leader dies after its k-th effect, another one takes over.

What survives is what the store and the agents hold. Safety: never two generations of one number, members of two generations
never both current, no commit from an old one. Then it must converge, without touching workers more often than needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from world import LOST_PEER, STARTED, World, hello, spec

from regrow import wire
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core.records import LedgerRecord, QuarantineRecord


class DiedError(Exception):
    """The leader is gone."""


class Reality:
    """The store and the agents: all that outlives a leader. Applies effects in order; the leader dies after `budget` of them."""

    def __init__(self, nodes: tuple[str, ...], **changes: Any) -> None:
        self.spec = spec(**changes)
        self.nodes = dict.fromkeys(nodes, True)
        self.running: dict[str, int] = {}
        self.seen = dict.fromkeys(nodes, 0)
        self.generation: wire.GenerationSpec | None = None
        self.members: dict[str, tuple[wire.WorkerAssignment, ...]] = {}
        self.ledger = LedgerRecord()
        self.command = "run"
        self.checkpoints: dict[int, wire.CheckpointRecord] = {}
        self.quarantine: dict[str, QuarantineRecord] = {}
        self.health: dict[str, wire.HealthVerdict] = {}
        self.step = 0
        self.flipped = 0
        """Generation in which rank 2 holds a flipped bit."""
        self.epoch = 0
        self.used_stores: set[str] = set()
        self.stores = dict.fromkeys(nodes, 1)
        self.num_effects = 0
        self.budget: int | None = None
        self.world = self.lead()

    # --- leaders

    def lead(self) -> World:
        """A new leader: loads the store; agents tell what they run."""
        self.epoch += 1
        world = World(answer=False)
        if getattr(self, "world", None) is not None:
            world.now = self.world.now + 1.0
        self.world = world
        over = bool(self.ledger.state)
        self.tell(
            e.LeaderStarted(at=world.now, epoch=self.epoch),
            e.QuarantineLoaded(at=world.now, records=tuple(self.quarantine.values())),
            e.JobLoaded(
                at=world.now,
                spec=self.spec,
                generation=None if over else self.generation,
                members={} if over else self.members,
                ledger=self.ledger,
                command=self.command,
                checkpoints=tuple(self.checkpoints.values()),
                highest_generation=self.generation.generation if self.generation is not None else 0,
            ),
        )
        for name in [name for name, alive in self.nodes.items() if alive]:
            self.greet(name)
        return world

    def greet(self, name: str) -> None:
        running = None
        if self.running.get(name):
            running = wire.RunningGeneration(job="j", epoch=1, generation=self.running[name], workers=self.workers_of(name))
        changes: dict[str, Any] = {"health": self.health[name]} if name in self.health else {}
        self.tell(
            e.NodeJoined(
                at=self.world.now,
                hello=hello(
                    name, highest_generation=self.seen[name], running=running, spare_store=f"{name}:{self.stores[name]}", **changes
                ),
            )
        )

    def workers_of(self, name: str) -> tuple[wire.WorkerAssignment, ...]:
        return self.members.get(name, ()) if self.generation is not None and self.running[name] == self.generation.generation else ()

    # --- one turn and its effects

    def tell(self, *events: e.Event) -> None:
        decision = self.world.tell(*events)
        back: list[e.Event] = []
        for action in decision.actions:
            if self.budget is not None and self.num_effects >= self.budget:
                raise DiedError
            self.num_effects += 1
            back += self.apply(action)
        for event in back:
            self.tell(event)

    def apply(self, action: a.Action) -> list[e.Event]:
        world = self.world
        if isinstance(action, a.RecordGeneration):
            number = action.spec.generation
            assert self.generation is None or number > self.generation.generation, "a number was used twice"
            self.generation, self.members, self.ledger = action.spec, action.members, action.ledger
            self.step = action.spec.restore.step if action.spec.restore else 0
            for step in action.damaged:
                self.checkpoints.pop(step, None)
            return [e.GenerationRecorded(at=world.now, job="j", generation=number)]
        if isinstance(action, a.StartMember):
            return self.start(action)
        if isinstance(action, a.StopWorkers):
            if self.running.get(action.node, 0) <= action.generation:
                self.running.pop(action.node, None)
            self.seen[action.node] = max(self.seen[action.node], action.generation)
            return [world.phase_event(action.node, "stopped", job="j", generation=action.generation)]
        if isinstance(action, a.SetQuarantine):
            self.quarantine[action.record.key] = action.record
        if isinstance(action, a.ParkJob | a.EndJob | a.SaveLedger):
            self.ledger = action.ledger
        return []

    def start(self, action: a.StartMember) -> list[e.Event]:
        name, number = action.node, action.generation
        assert self.generation is not None
        assert number == self.generation.generation, "only a recorded generation may be started"
        assert self.nodes[name], "an order to a dead node"
        owner = action.master_address.partition(":")[0]
        if action.master_address not in self.used_stores:
            self.used_stores.add(action.master_address)
            self.stores[owner] += 1
        if number <= self.seen[name]:
            return [e.StartWasRefused(at=self.world.now, node=name, job="j", generation=number, reason="fenced", fenced=True)]
        self.seen[name] = number
        self.running[name] = number
        told: list[e.Event] = [self.world.phase_event(name, phase, job="j", generation=number) for phase in STARTED]
        return [*told, e.SpareStoreChanged(at=self.world.now, node=owner, address=f"{owner}:{self.stores[owner]}")]

    # --- training

    def train(self, steps: int, *, commit: bool = True) -> None:
        for _ in range(steps):
            self.world.now += 1.0
            current = self.generation
            assert current is not None
            if any(self.running.get(name) != current.generation or not self.nodes[name] for name in current.nodes):
                self.tell(e.Tick(at=self.world.now))
                continue
            self.step += 1
            self.tell(
                e.StepsCompleted(at=self.world.now, job="j", generation=current.generation, step=self.step, step_seconds=1.0),
                e.DigestsReported(
                    at=self.world.now,
                    job="j",
                    generation=current.generation,
                    step=self.step,
                    digests=self.digests(current),
                ),
            )
            if commit:
                self.commit()

    def digests(self, current: wire.GenerationSpec) -> dict[int, str]:
        return dict.fromkeys(range(current.world_size), "0") | ({2: "f"} if self.flipped == current.generation else {})

    def commit(self) -> None:
        current = self.generation
        assert current is not None
        record = wire.CheckpointRecord(
            step=self.step,
            generation=current.generation,
            epoch=current.epoch,
            directory=f"/c/{self.step}-{current.generation}",
            record_digest="d",
        )
        self.checkpoints[self.step] = record
        self.tell(
            e.CheckpointMoved(
                at=self.world.now, job="j", generation=current.generation, step=self.step, state="committed", directory=record.directory
            )
        )

    def wait(self, seconds: float) -> None:
        end = self.world.now + seconds
        while self.world.wake_at is not None and self.world.wake_at <= end:
            self.world.now = max(self.world.now, self.world.wake_at)
            self.tell(e.Tick(at=self.world.now))
        self.world.now = end

    def exit_of_peers(self, dead: str) -> None:
        """Survivors of a node loss fail in their collectives."""
        current = self.generation
        assert current is not None
        for name in current.nodes:
            if name == dead or not self.nodes[name] or self.running.get(name) != current.generation:
                continue
            for worker in self.members[name]:
                found = wire.WorkerExit(rank=worker.rank, local_rank=0, pid=1, exit_code=1, error=LOST_PEER, last_step=self.step)
                self.tell(e.WorkersExited(at=self.world.now, node=name, job="j", generation=current.generation, exits=(found,)))
            self.running.pop(name, None)


def lose_node(reality: Reality) -> None:
    reality.nodes["b"] = False
    reality.running.pop("b", None)
    reality.tell(e.NodeDisconnected(at=reality.world.now, node="b"))
    reality.exit_of_peers("b")
    reality.wait(1.0)


def drain(reality: Reality) -> None:
    verdict = wire.HealthVerdict(state="unhealthy", action="reboot", reason="XID 79", device_uuids=("GPU-b-0",))
    reality.health["b"] = verdict
    reality.tell(e.NodeHealth(at=reality.world.now, node="b", verdict=verdict))
    reality.train(2)


def flip_bit(reality: Reality) -> None:
    current = reality.generation
    assert current is not None
    reality.flipped = current.generation
    reality.train(1)
    reality.wait(1.0)


def grow(reality: Reality) -> None:
    reality.nodes["d"], reality.seen["d"], reality.stores["d"] = True, 0, 1
    reality.greet("d")
    reality.train(32, commit=False)
    reality.commit()


def kill_worker(reality: Reality) -> None:
    current = reality.generation
    assert current is not None
    found = wire.WorkerExit(rank=0, local_rank=0, pid=1, signal=9, last_step=reality.step)
    reality.tell(e.WorkersExited(at=reality.world.now, node="a", job="j", generation=current.generation, exits=(found,)))
    for name in current.nodes:
        reality.running.pop(name, None)
    reality.wait(1.0)


def stop(reality: Reality) -> None:
    reality.command = "stop"
    reality.tell(e.CommandGiven(at=reality.world.now, job="j", command="stop"))
    reality.wait(1.0)


def pause(reality: Reality) -> None:
    reality.command = "pause"
    reality.tell(e.CommandGiven(at=reality.world.now, job="j", command="pause"))
    reality.train(1)
    current = reality.generation
    assert current is not None
    for name in current.nodes:
        for worker in reality.members[name]:
            found = wire.WorkerExit(rank=worker.rank, local_rank=0, pid=1, exit_code=0, last_step=reality.step)
            reality.tell(e.WorkersExited(at=reality.world.now, node=name, job="j", generation=current.generation, exits=(found,)))
        reality.running.pop(name, None)
    reality.wait(1.0)


PLANS: dict[str, tuple[Callable[[Reality], None], tuple[str, ...]]] = {
    "start": (lambda _reality: None, ("a", "b", "c")),
    "lose_node": (lose_node, ("a", "c")),
    "kill_worker": (kill_worker, ("a", "b", "c")),
    "drain": (drain, ("a", "c")),
    "flip_bit": (flip_bit, ("a", "c")),
    "grow": (grow, ("a", "b", "c", "d")),
    "stop": (stop, ()),
    "pause": (pause, ()),
}


def prepared(name: str) -> Reality:
    reality = Reality(("a", "b", "c"), max_nodes=4 if name == "grow" else 3)
    reality.wait(5.0)
    if name != "start":
        reality.train(4)
    return reality


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("prefix", range(12))
def test_leader_dies_after_each_effect(name: str, prefix: int) -> None:
    operation, expected = PLANS[name]
    reality = Reality(("a", "b", "c"), max_nodes=3) if name == "start" else prepared(name)
    reality.budget = reality.num_effects + prefix
    try:
        if name == "start":
            reality.wait(5.0)
        operation(reality)
    except DiedError:
        reality.budget = None
    reality.budget = None
    committed = max(reality.checkpoints, default=0)
    reality.lead()
    reality.wait(100.0)
    for _ in range(6):
        if reality.generation is not None and not reality.ledger.state and reality.command == "run":
            reality.train(20)
            reality.wait(5.0)
    assert_converged(reality, expected, committed)


def assert_converged(reality: Reality, expected: tuple[str, ...], committed: int) -> None:
    job = reality.world.job
    if reality.command == "stop":
        assert job.outcome is not None
        assert job.outcome.state == "stopped"
        assert not reality.running
        return
    if reality.command == "pause":
        assert job.paused
        assert not reality.running
        return
    assert job.outcome is None, job.outcome
    current = reality.generation
    assert current is not None
    assert set(current.nodes) == set(expected)
    assert reality.running == dict.fromkeys(current.nodes, current.generation)
    assert reality.step > committed
    if (
        current.generation > 1
        and current.restore is not None
        and not any(charge.cause for charge in reality.ledger.charges if "sdc" in charge.text)
    ):
        assert current.restore.step >= 0
    assert len({charge.incident for charge in reality.ledger.charges}) == len(reality.ledger.charges)
    assert len(reality.ledger.charges) <= 1


def test_these_prefixes_cover_every_effect() -> None:
    """No plan has more effects than the prefixes that are tried."""
    for name, (operation, _) in PLANS.items():
        reality = Reality(("a", "b", "c"), max_nodes=3) if name == "start" else prepared(name)
        before = 0 if name == "start" else reality.num_effects
        if name == "start":
            reality.wait(5.0)
        operation(reality)
        used = reality.num_effects - before
        assert 0 < used < 12, (name, used)
