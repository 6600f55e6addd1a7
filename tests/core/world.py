"""A cluster on paper: events in, decisions out, through the production `turn`. No clock, no I/O, no mocks."""

from __future__ import annotations

from typing import Any

import msgspec

from regrow import wire
from regrow.ids import MeshShape
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core.actions import Decision
from regrow.supervisor.core.invariants import check
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.turn import turn
from regrow.supervisor.core.view import GenerationView, JobView, View

POLICY = Policy()
PROGRAM = 'Traceback (most recent call last):\n  File "/x/train.py", line 12, in step\n    raise ValueError("bad")\nValueError: bad'
LOST_PEER = (
    'Traceback (most recent call last):\n  File "/x/train.py", line 9, in step\nRuntimeError: Connection closed by peer [10.0.0.1]:99'
)


def spec(**changes: Any) -> wire.JobSpec:
    values: dict[str, Any] = {
        "job": "j",
        "argv": ("train.py",),
        "nproc_per_node": 2,
        "min_nodes": 1,
        "max_nodes": 4,
        "mesh": MeshShape(dp=8),
        "global_batch": 48,
        "checkpoint": wire.CheckpointPolicy(path="/ckpt"),
    }
    return wire.JobSpec(**(values | changes))


def hello(node: str, **changes: Any) -> wire.Hello:
    values: dict[str, Any] = {
        "cluster": "c",
        "node": node,
        "incarnation": f"{node}-1",
        "address": node,
        "peer_address": f"{node}:7",
        "slots": 2,
        "devices": (wire.Device(uuid=f"GPU-{node}-0"), wire.Device(uuid=f"GPU-{node}-1")),
        "hardware_id": f"hw-{node}",
        "spare_store": f"{node}:99",
        "health": wire.HealthVerdict(state="healthy"),
        "boot_id": "b1",
    }
    return wire.Hello(**(values | changes))


class World:
    """`answer`: stores and agents answer at once, as they do when nothing is broken."""

    def __init__(self, policy: Policy = POLICY, *, answer: bool = True) -> None:
        self.policy = policy
        self.view = View()
        self.now = 1_000.0
        self.answer = answer
        self.all_reached = True
        """Members that are asked say that they reach each other."""
        self.phases = STARTED
        self.log: list[tuple[float, Decision]] = []
        self.actions: list[a.Action] = []
        """All actions since the last `take`."""
        self.wake_at: float | None = None
        self.tell(e.LeaderStarted(at=self.now, epoch=1))

    # --- driving

    def tell(self, *events: e.Event) -> Decision:
        """One turn, and, with `answer`, the turns of what comes back."""
        result = turn(self.view, events, self.policy, self.now)
        self.view = result.view
        self.wake_at = result.decision.wake_at
        assert self.wake_at is None or self.wake_at > self.now, result.decision
        broken = check(self.view)
        assert not broken, broken
        self.log.append((self.now, result.decision))
        self.actions += result.decision.actions
        back = [answer for _, action in result.actions for answer in self._answers(action)]
        if back:
            self.tell(*back)
        return result.decision

    def _answers(self, action: a.Action) -> list[e.Event]:
        if isinstance(action, a.AskReach):
            return [] if not self.all_reached else self._all_reached(action)
        if not self.answer:
            return []
        if isinstance(action, a.RecordGeneration):
            return [e.GenerationRecorded(at=self.now, job=action.job, generation=action.spec.generation)]
        if isinstance(action, a.StartMember):
            passed: list[e.Event] = [
                self.phase_event(action.node, name, job=action.job, generation=action.generation) for name in self.phases
            ]
            if action.master_address.startswith(f"{action.node}:"):
                port = int(action.master_address.rpartition(":")[2]) + 1
                passed.append(e.SpareStoreChanged(at=self.now, node=action.node, address=f"{action.node}:{port}"))
            return passed
        if isinstance(action, a.StopWorkers):
            return [self.phase_event(action.node, "stopped", job=action.job, generation=action.generation)]
        return []

    def _all_reached(self, action: a.AskReach) -> list[e.Event]:
        return [
            e.PeersWereProbed(at=self.now, node=node, job=action.job, generation=action.generation, reached=peers)
            for node, peers in action.peers.items()
        ]

    def phase_event(self, node: str, phase: str, *, job: str, generation: int) -> e.MemberPhase:
        return e.MemberPhase(at=self.now, node=node, job=job, generation=generation, phase=phase)

    def wait(self, seconds: float) -> None:
        """Time passes; the core is woken when it asked for it."""
        end = self.now + seconds
        for _ in range(10_000):
            if self.wake_at is None or self.wake_at > end:
                break
            self.now = max(self.now, self.wake_at)
            self.tell(e.Tick(at=self.now))
        else:
            raise AssertionError("the core asks to be woken for ever")
        self.now = end

    def take(self, kind: type[Any] | None = None) -> list[Any]:
        """Actions since the last call, of one kind if given."""
        found = [action for action in self.actions if kind is None or isinstance(action, kind)]
        self.actions = []
        return found

    @property
    def reason(self) -> str:
        return self.log[-1][1].reason

    # --- a running job

    @property
    def job(self) -> JobView:
        return self.view.jobs["j"]

    @property
    def generation(self) -> GenerationView:
        assert self.job.generation is not None
        return self.job.generation

    def join(self, *names: str, **changes: Any) -> None:
        for name in names:
            self.tell(e.NodeJoined(at=self.now, hello=hello(name, **changes)))

    def submit(self, **changes: Any) -> None:
        self.tell(e.JobLoaded(at=self.now, spec=spec(**changes), submitted=True))

    def step(self, number: int, *, seconds: float = 1.0, after: float = 1.0, **more: Any) -> None:
        self.now += after
        self.tell(e.StepsCompleted(at=self.now, job="j", generation=self.generation.number, step=number, step_seconds=seconds, **more))

    def steps(self, first: int, last: int, **more: Any) -> None:
        for number in range(first, last + 1):
            self.step(number, **more)

    def commit(self, step: int, **more: Any) -> None:
        number = self.generation.number
        self.tell(
            e.CheckpointMoved(
                at=self.now, job="j", generation=number, step=step, state="committed", directory=f"/ckpt/step-{step}-g{number}", **more
            )
        )

    def exit(self, rank: int, **how: Any) -> None:
        node = self.generation.node_of(rank)
        found = wire.WorkerExit(rank=rank, local_rank=0, pid=1, **({"last_step": self.job.frontier} | how))
        self.tell(e.WorkersExited(at=self.now, node=node, job="j", generation=self.generation.number, exits=(found,)))

    def lose(self, node: str) -> None:
        self.tell(e.NodeDisconnected(at=self.now, node=node, reason="closed"))


STARTED = ("fenced", "stopped", "started", "rendezvous", "restored")


def running(
    *nodes: str, policy: Policy = POLICY, steps: int = 3, commit: int | None = 2, knows_regrow: bool = True, **changes: Any
) -> World:
    """A job that trains on these nodes."""
    world = World(policy)
    world.phases = STARTED if knows_regrow else STARTED[:3]
    if changes.get("in_place"):
        world.phases = (*world.phases, wire.IN_PLACE_PHASE)
    world.join(*nodes)
    world.submit(**({"max_nodes": len(nodes)} | changes))
    world.wait(policy.join_seconds + 0.1)
    for number in range(1, steps + 1):
        world.step(number)
        if number == commit:
            world.commit(number)
    world.take()
    return world


def killed_after_six_steps(**changes: Any) -> tuple[World, int]:
    """Two nodes went six steps beyond a checkpoint, lost a worker, and the next generation is there; and that checkpoint's step."""
    world = running("a", "b", **changes)
    start = world.job.frontier
    world.commit(start)
    world.steps(start + 1, start + 6)
    world.exit(0, signal=9)
    world.wait(1)
    return world, start


def plain(value: Any) -> Any:
    """A struct as data."""
    return msgspec.to_builtins(value, str_keys=True)
