"""Seven recoveries as text."""

from __future__ import annotations

from transcript import Transcript, compare
from world import LOST_PEER, POLICY, PROGRAM, World

from regrow import wire
from regrow.supervisor.core import events as e
from regrow.supervisor.core.policy import Policy

QUICK = Policy(growth_cooldown_seconds=3.0)


def begin(*nodes: str, steps: int = 3, commit: int | None = 2, **changes: object) -> tuple[World, Transcript]:
    world = World(QUICK)
    text = Transcript(world)
    text.note("start")
    world.join(*nodes)
    world.submit(**({"max_nodes": len(nodes)} | changes))
    for number in range(1, steps + 1):
        world.step(number)
        if number == commit:
            world.commit(number)
    return world, text


def test_node_loss_and_growth() -> None:
    world, text = begin("a", "b", "c", "d")
    text.note("node b dies in the middle of step 4; its peers lose it")
    world.now += 0.4
    world.lose("b")
    world.now += 0.01
    world.exit(0, exit_code=1, error=LOST_PEER)
    world.exit(5, exit_code=1, error=LOST_PEER)
    world.wait(0.5)
    world.steps(3, 5)
    text.note("node b is back; growth at a checkpoint after the cool-down")
    world.join("b", incarnation="b-2", highest_generation=1)
    for number in range(6, 6 + int(QUICK.growth_cooldown_seconds)):
        world.step(number)
    world.commit(world.job.frontier)
    world.step(world.job.frontier + 1)
    compare("node_loss", text.finish())


def test_flipped_bit() -> None:
    world, text = begin("a", "b", "c", steps=0, commit=None)
    equal = dict.fromkeys(range(6), "00")
    for number in range(1, 4):
        world.step(number)
        world.tell(e.DigestsReported(at=world.now, job="j", generation=1, step=number, digests=equal))
        if number == 2:
            world.commit(2)
    text.note("one bit flips in rank 3; step 4 is saved before the vote")
    world.step(4)
    world.commit(4)
    world.tell(e.DigestsReported(at=world.now, job="j", generation=1, step=4, digests=equal | {3: "ff"}))
    world.wait(1)
    world.steps(3, 5)
    compare("flipped_bit", text.finish())


def test_xid() -> None:
    world, text = begin("a", "b", "c")
    text.note("XID 79 on node b, which still trains")
    verdict = wire.HealthVerdict(state="unhealthy", action="reboot", reason="XID 79: GPU has fallen off the bus", device_uuids=("GPU-b-0",))
    world.tell(e.NodeHealth(at=world.now, node="b", verdict=verdict))
    world.step(4)
    world.commit(4)
    world.steps(5, 6)
    compare("xid", text.finish())


def test_hang() -> None:
    world, text = begin("a", "b")
    text.note("rank 3 is stopped; nothing moves")
    world.now += 31
    ranks = tuple(
        wire.RankProgress(rank=rank, started_step=4, applied_step=3, phase="stopped" if rank == 3 else "step", age_seconds=30.5)
        for rank in range(4)
    )
    world.tell(e.ProgressStalled(at=world.now, job="j", generation=1, since=world.now - 30, limit_seconds=30, ranks=ranks))
    world.wait(POLICY.coalesce_seconds + 0.01)
    for rank in range(3):
        stack = f'File "/x/train.py", line {rank + 40}, in all_reduce'
        world.tell(e.OutputKept(at=world.now, node="a", job="j", generation=1, rank=rank, kind="stacks", text=stack))
    world.wait(POLICY.stacks_seconds + 0.1)
    world.steps(3, 4)
    compare("hang", text.finish())


def test_program_error() -> None:
    world, text = begin("a", "b", steps=0, commit=None)
    text.note("the script is wrong")
    world.exit(2, exit_code=1, error=PROGRAM, last_step=-1)
    world.wait(1)
    compare("program_error", text.finish())


def test_preemption() -> None:
    world, text = begin("a", "b", "c", min_nodes=2)
    text.note("node c gets SIGTERM with 120 s of notice")
    world.tell(e.NodeLeaving(at=world.now, node="c", reason="SIGTERM", notice_seconds=120))
    world.step(4)
    world.commit(4)
    world.steps(5, 6)
    text.note("node b gets SIGTERM with 2 s of notice: too short; and then too few nodes are left")
    world.tell(e.NodeLeaving(at=world.now, node="b", reason="SIGTERM", notice_seconds=2))
    world.wait(2.1)
    text.note("node d comes")
    world.join("d")
    world.steps(5, 7)
    compare("preemption", text.finish())


def test_takeover() -> None:
    world, text = begin("a", "b")
    text.note("another leader adopts the generation; node b's agent was dead at that time and comes back with its workers")
    spec, members = world.generation.spec, {name: member.workers for name, member in world.generation.members.items()}
    job = world.job.spec
    other = World()
    more = Transcript(other)
    other.tell(e.LeaderStarted(at=other.now, epoch=2), e.JobLoaded(at=other.now, spec=job, generation=spec, members=members))
    from world import hello

    running = {name: wire.RunningGeneration(job="j", epoch=1, generation=1, workers=members[name], spec=spec) for name in members}
    other.tell(e.NodeJoined(at=other.now, hello=hello("a", highest_generation=1, running=running["a"])))
    other.wait(1.5)
    other.tell(e.NodeJoined(at=other.now, hello=hello("b", incarnation="b-2", highest_generation=1, running=running["b"])))
    other.steps(7, 9)
    compare("takeover", text.finish() + more.finish())
