"""Any order of any events: the core stays total, its invariants hold, and with the faults off it converges."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from world import LOST_PEER, PROGRAM, World, hello, spec

from regrow import wire
from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e

NODES = ("a", "b", "c")
node = st.sampled_from(NODES)
rank = st.integers(0, 6)
text = st.sampled_from(["", LOST_PEER, PROGRAM])
op = st.one_of(
    st.tuples(st.just("join"), node, st.integers(1, 3), st.booleans()),
    st.tuples(st.just("lose"), node),
    st.tuples(st.just("silent"), node),
    st.tuples(st.just("heard"), node),
    st.tuples(st.just("lease"), node),
    st.tuples(st.just("spare"), node, st.booleans()),
    st.tuples(st.just("health"), node, st.sampled_from(["healthy", "unhealthy"]), st.sampled_from(["none", "reset", "watch"])),
    st.tuples(st.just("leave"), node),
    st.tuples(st.just("order"), node, st.sampled_from(["cordon", "uncordon", "drain", "clear"])),
    st.tuples(st.just("command"), st.sampled_from(["run", "pause"])),
    st.tuples(st.just("phase"), node, st.sampled_from(["started", "rendezvous", "restored", "stopped"]), st.integers(-1, 0)),
    st.tuples(st.just("exit"), rank, st.sampled_from([0, 1, 75]), st.sampled_from([0, 9]), text, st.booleans(), st.integers(-1, 0)),
    st.tuples(st.just("step"), st.integers(1, 3), st.integers(-1, 0)),
    st.tuples(st.just("digests"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("rest"), rank),
    st.tuples(st.just("nan"), rank, st.integers(0, 1)),
    st.tuples(st.just("stall"), st.integers(-1, 0)),
    st.tuples(st.just("resume"), st.integers(-1, 0)),
    st.tuples(st.just("refuse_restore"), node, st.integers(-1, 0)),
    st.tuples(st.just("refuse_start"), node, st.booleans(), st.integers(-1, 0)),
    st.tuples(st.just("checkpoint"), st.sampled_from(["committed", "failed", "snapshot"]), st.integers(-2, 1), st.integers(-1, 0)),
    st.tuples(st.just("gone"), st.integers(0, 4)),
    st.tuples(st.just("store"), st.booleans()),
    st.tuples(st.just("record"), st.booleans()),
    st.tuples(st.just("automation"), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from([0.01, 0.3, 3.0, 100.0, 4000.0])),
)


def event_of(world: World, kind: str, args: tuple[Any, ...]) -> e.Event | None:  # noqa: C901  # a table
    """The event of an operation; generation numbers are relative to the current one, so late events are in it."""
    now = world.now
    job = world.job
    current = job.generation
    number = current.number if current is not None else 0

    def of(offset: int) -> dict[str, Any]:
        return {"at": now, "job": "j", "generation": number + offset}

    match kind:
        case "join":
            running = wire.RunningGeneration(job="j", epoch=1, generation=number) if args[2] and number else None
            return e.NodeJoined(
                at=now, hello=hello(args[0], incarnation=f"{args[0]}-{args[1]}", highest_generation=number, running=running)
            )
        case "lose":
            return e.NodeDisconnected(at=now, node=args[0])
        case "silent":
            return e.NodeSilent(at=now, node=args[0], last_heard_at=now - 2)
        case "heard":
            return e.NodeHeard(at=now, node=args[0])
        case "lease":
            return e.LeaseExpired(at=now, node=args[0])
        case "spare":
            return e.SpareStoreChanged(at=now, node=args[0], address=f"{args[0]}:1" if args[1] else "")
        case "health":
            verdict = wire.HealthVerdict(state=args[1], action=args[2], reason="r", device_uuids=(f"GPU-{args[0]}-0",))
            return e.NodeHealth(at=now, node=args[0], verdict=verdict)
        case "leave":
            return e.NodeLeaving(at=now, node=args[0], reason="SIGTERM", notice_seconds=20)
        case "order":
            return e.NodeCommandGiven(at=now, node=args[0], command=args[1])
        case "command":
            return e.CommandGiven(at=now, job="j", command=args[0])
        case "phase":
            return e.MemberPhase(node=args[0], phase=args[1], **of(args[2]))
        case "exit":
            found = wire.WorkerExit(
                rank=args[0],
                local_rank=0,
                pid=1,
                exit_code=args[1],
                signal=args[2],
                error=args[3],
                declared_end=args[4],
                last_step=job.frontier,
            )
            where = current.node_of(args[0]) if current is not None else "a"
            return e.WorkersExited(node=where, exits=(found,), **of(args[5]))
        case "step":
            done = current.completed_step if current is not None and current.completed_step is not None else 0
            return e.StepsCompleted(step=done + args[0], num_steps=args[0], step_seconds=1.0, **of(args[1]))
        case "digests":
            world_size = current.spec.world_size if current is not None else 1
            values = dict.fromkeys(range(world_size), "00") | ({args[0]: "ff"} if args[1] and args[0] < world_size else {})
            return e.DigestsReported(step=job.frontier, digests=values, **of(0))
        case "rest":
            return e.AtRestMismatch(rank=args[0], step=job.frontier, tensor="w", **of(0))
        case "nan":
            return e.NonFiniteSeen(step=job.frontier + args[1], ranks={args[0]: "w"}, **of(0))
        case "stall":
            return e.ProgressStalled(since=now - 9, limit_seconds=8, **of(args[0]))
        case "resume":
            return e.ProgressResumed(**of(args[0]))
        case "refuse_restore":
            step = current.spec.restore.step if current is not None and current.spec.restore is not None else 0
            return e.RestoreWasRefused(node=args[0], rank=0, step=step, problem="damaged", **of(args[1]))
        case "refuse_start":
            return e.StartWasRefused(node=args[0], reason="no", node_unusable=args[1], **of(args[2]))
        case "checkpoint":
            step = max(0, job.frontier + args[1])
            return e.CheckpointMoved(step=step, state=args[0], directory=f"/ckpt/{step}-{number}", **of(args[2]))
        case "gone":
            return e.CheckpointGone(at=now, job="j", step=args[0])
        case "store":
            return e.StoreChanged(at=now, up=args[0])
        case "record":
            if args[0]:
                return e.GenerationRecorded(**of(0))
            return e.ActionFailed(at=now, seq=1, kind="record_generation", job="j", generation=number, reason="timeout")
        case "automation":
            return e.AutomationSwitched(at=now, on=args[0])
        case _:
            return None


def play(world: World, operations: list[tuple[Any, ...]]) -> None:
    for kind, *args in operations:
        if kind == "wait":
            world.wait(args[0])
            continue
        world.now += 0.01
        made = event_of(world, kind, tuple(args))
        if made is not None:
            world.tell(made)


def safe(world: World) -> None:
    """Never two generations of one number, numbers only rise, nothing starts before its record."""
    records = [action for action in world.actions if isinstance(action, a.RecordGeneration)]
    numbers = [record.spec.generation for record in records]
    assert numbers == sorted(set(numbers))
    for record in records:
        assert record.spec.mesh.world_size == record.spec.world_size
        assert sum(record.spec.micro_batches) == 48
        assert len(record.spec.nodes) >= 1


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answer=st.booleans(), operations=st.lists(op, max_size=40))
def test_any_order_of_events(answer: bool, operations: list[tuple[Any, ...]]) -> None:
    world = World(answer=answer)
    world.tell(e.JobLoaded(at=world.now, spec=spec(max_nodes=3, max_restarts=1000), submitted=True))
    world.join(*NODES)
    play(world, operations)
    safe(world)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=st.lists(op, max_size=30))
def test_with_the_faults_off_it_converges(operations: list[tuple[Any, ...]]) -> None:
    """Either the job ended with a reason, or it trains on all three nodes again."""
    world = World()
    world.tell(e.JobLoaded(at=world.now, spec=spec(max_nodes=3, max_restarts=1000), submitted=True))
    world.join(*NODES)
    play(world, operations)
    world.tell(e.StoreChanged(at=world.now, up=True), e.AutomationSwitched(at=world.now, on=True))
    world.tell(e.CommandGiven(at=world.now, job="j", command="run"))
    for name in NODES:
        world.tell(
            e.NodeCommandGiven(at=world.now, node=name, command="uncordon"), e.NodeCommandGiven(at=world.now, node=name, command="clear")
        )
        world.tell(
            e.NodeJoined(
                at=world.now, hello=hello(name, incarnation=f"{name}-9", highest_generation=world.job.highest_generation, boot_id="b9")
            )
        )
    for _ in range(200):
        if world.job.outcome is not None:
            assert world.job.outcome.reason
            return
        world.wait(100.0)
        current = world.job.generation
        if current is None or current.stage not in ("starting", "running"):
            if current is not None and current.stage == "recording":
                world.tell(e.GenerationRecorded(at=world.now, job="j", generation=current.number))
            continue
        restored = current.spec.restore.step if current.spec.restore is not None else 0
        done = current.completed_step if current.completed_step is not None else restored
        world.step(done + 1)
        world.commit(done + 1)
        if len(current.spec.nodes) == 3 and current.first_step_at is not None:
            return
    raise AssertionError(f"no convergence: {world.reason}")
