"""A turn at 2,048 nodes: CPU time of this process, so that a busy machine does not matter."""

from __future__ import annotations

import statistics
import time

from world import LOST_PEER, STARTED, World, hello, spec

from regrow import wire
from regrow.ids import MeshShape
from regrow.supervisor.core import events as e
from regrow.supervisor.core.turn import turn

NODES = [f"n{index:04d}" for index in range(2048)]


def test_turns_at_2048_nodes() -> None:
    world = World(answer=False)
    devices = {name: tuple(wire.Device(uuid=f"GPU-{name}-{index}") for index in range(8)) for name in NODES}

    def go(*events: e.Event) -> float:
        began = time.process_time()
        world.view = turn(world.view, events, world.policy, world.now).view
        return time.process_time() - began

    go(*(e.NodeJoined(at=world.now, hello=hello(name, slots=8, devices=devices[name])) for name in NODES))
    job = spec(nproc_per_node=8, max_nodes=2048, min_nodes=1024, mesh=MeshShape(dp=128, tp=8, pp=16), global_batch=4096)
    formed = go(e.JobLoaded(at=world.now, spec=job, submitted=True))
    go(e.GenerationRecorded(at=world.now, job="j", generation=1))
    go(*(world.phase_event(name, phase, job="j", generation=1) for name in NODES for phase in STARTED))
    times = []
    for step in range(1, 60):
        world.now += 1.0
        times.append(go(e.StepsCompleted(at=world.now, job="j", generation=1, step=step, step_seconds=1.0)))
    assert statistics.median(times) <= 0.001
    found = wire.WorkerExit(rank=0, local_rank=0, pid=1, exit_code=1, error=LOST_PEER)
    lost = [e.NodeDisconnected(at=world.now, node=name) for name in NODES[10:110]]
    go(*lost, e.WorkersExited(at=world.now, node=NODES[0], job="j", generation=1, exits=(found,)))
    world.now += 0.1
    decided = go(e.Tick(at=world.now))
    assert world.generation.number == 2
    assert len(world.generation.spec.nodes) <= 1948
    assert formed < 0.5
    assert decided < 0.5
