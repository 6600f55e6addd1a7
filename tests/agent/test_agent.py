"""The agent daemon with a real etcd, a real shim and real workers, under a leader that speaks the protocol."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import msgspec
import pytest
from tests.agent.harness import until
from tests.agent.leader import StubLeader
from tests.agent.scene import SLEEP, Scene, pids_of

from regrow import wire
from regrow.agent.roster import process_state, start_time
from regrow.store.base import Store


async def test_workers_get_torchruns_environment_and_their_end_is_told(scene: Scene) -> None:
    await scene.agent()
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
    )
    ours = ("REGROW_MESH", "REGROW_GENERATION", "REGROW_NODE", "OMP_NUM_THREADS")
    script = scene.script(f"import json, os\nprint(json.dumps([os.environ.get(n) for n in {names + ours!r}]))\n")
    scene.leader.start_generation(1, script, master="127.0.0.1:29511", env={"OMP_NUM_THREADS": "1"})
    for phase in ("fenced", "stopped", "started", "finished"):
        await scene.leader.phase(1, phase)
    values = json.loads(scene.output(1, 1))
    assert values == ["1", "1", "2", "2", "0", "127.0.0.1", "29511", "0", "dp=2,tp=1,pp=1", "1", "n0", "1"]
    exits = [found for told in scene.leader.all(wire.WorkersExited) for found in told.exits]
    assert sorted((found.rank, found.exit_code, found.signal, found.declared_end) for found in exits) == [(0, 0, 0, True), (1, 0, 0, True)]


async def test_progress_is_told_before_an_exit_and_before_an_order_is_carried_out(scene: Scene) -> None:
    """Reports of the last half second may be lost with a worker: what it applied counts for the frontier all the same."""
    scene.leader.beat_seconds = 3600.0
    await scene.agent()
    steps = (
        "import sys, time\nfrom regrow.agent.progress import ProgressWriter\nword = ProgressWriter.from_environment()\n"
        "word.publish(phase='step', started_step=8, applied_step=7)\n"
    )
    scene.leader.start_generation(1, scene.script(steps + "sys.exit(3)\n"), ranks=1)
    await scene.leader.next(wire.WorkersExited)
    assert told_before(scene, wire.WorkersExited) == (1, 7)
    ready = scene.folder / "ready"
    scene.leader.start_generation(2, scene.script(steps + f"open({str(ready)!r}, 'w').close()\ntime.sleep(600)\n"), ranks=1)
    await until(ready.exists)
    asked = len(scene.leader.said)
    scene.leader.start_generation(3, scene.script(SLEEP), ranks=1)
    await scene.leader.phase(3, "fenced", after=asked)
    assert told_before(scene, wire.GenerationPhase, after=asked) == (2, 7)


def told_before(scene: Scene, kind: type[Any], after: int = 0) -> tuple[int, int]:
    """(generation, applied step) of the last beat with progress before the first message of a kind."""
    said = [message for _, message in scene.leader.said[after:]]
    first = next(index for index, message in enumerate(said) if isinstance(message, kind))
    beats = [message for message in said[:first] if isinstance(message, wire.Beat) and message.progress]
    return (beats[-1].generation, beats[-1].progress[0].applied_step) if beats else (0, 0)


async def test_an_error_comes_with_its_traceback(scene: Scene) -> None:
    await scene.agent()
    scene.leader.start_generation(1, scene.script("def f():\n    raise ValueError('boom')\nf()\n"), ranks=1)
    told = await scene.leader.next(wire.WorkersExited)
    assert (told.exits[0].exit_code, told.exits[0].declared_end, told.exits[0].torn_down) == (1, False, False)
    assert told.exits[0].error.rstrip().endswith("ValueError: boom")
    assert "in f" in told.exits[0].error


async def test_a_newer_generation_replaces_the_older_and_lower_ones_are_refused(scene: Scene) -> None:
    await scene.agent()
    script = scene.script(SLEEP)
    scene.leader.start_generation(1, script)
    await scene.up(1)
    started = await scene.leader.phase(1, "started")
    assert started.detail["method"] == "warm"
    scene.leader.start_generation(2, script)
    await scene.up(2)
    await scene.leader.phase(2, "started")
    state = scene.folder / "n0"
    old = [pid for pid in pids_of(scene.agents[0], 1) if process_state(pid) not in ("", "Z")]
    assert old == []
    scene.leader.start_generation(1, script)
    refused = await scene.leader.next(wire.StartRefused)
    assert (refused.generation, refused.fenced) == (1, True)
    scene.leader.start_generation(3, script, epoch=0)
    await scene.up(3)
    assert json.loads((state / "agent.json").read_text(encoding="utf-8"))["generations"] == {"toy": 3}
    scene.leader.stop_generation(3)
    await scene.leader.phase(3, "stopped", after=_last(scene, "started", 3))
    scene.leader.start_generation(3, script)
    assert (await scene.leader.next(wire.StartRefused, lambda said: said.generation == 3)).fenced
    assert scene.leader.all(wire.WorkersExited)[-1].exits[0].torn_down


def _last(scene: Scene, phase: str, generation: int) -> int:
    return max(
        index
        for index, (_, said) in enumerate(scene.leader.said)
        if isinstance(said, wire.GenerationPhase) and (said.phase, said.generation) == (phase, generation)
    )


async def test_a_killed_agent_costs_no_worker(scene: Scene) -> None:
    agent = await scene.agent()
    scene.leader.start_generation(1, scene.script(SLEEP))
    await scene.up(1)
    await scene.leader.phase(1, "started")
    await until(lambda: pids_of(agent, 1))
    pids = pids_of(agent, 1)
    born = [start_time(pid) for pid in pids]
    peer = (await scene.leader.next(wire.Hello)).peer_address
    await agent.kill()
    os.kill(pids[1], signal.SIGKILL)  # ends while nobody looks
    await until(lambda: process_state(pids[1]) in ("", "Z"))
    after = len(scene.leader.said)
    again = await scene.agent()
    hello = await scene.leader.next(wire.Hello, after=after)
    assert hello.running is not None
    assert (hello.running.generation, hello.running.spec is not None) == (1, True)
    assert hello.highest_generation == 1
    assert hello.peer_address == peer
    assert start_time(pids[0]) == born[0]
    exits = list(hello.running.exits) or list((await scene.leader.next(wire.WorkersExited, after=after)).exits)
    assert [(found.rank, found.signal) for found in exits] == [(1, 9)]
    scene.leader.order(wire.Acknowledge(job="toy", generation=1, ranks=(1,)))
    scene.leader.order(wire.CollectStacks(job="toy", generation=1))
    await scene.leader.next(wire.Output)  # orders are taken one after the other: the acknowledgement is in
    after = len(scene.leader.said)
    scene.leader.drop()
    hello = await scene.leader.next(wire.Hello, after=after)
    assert hello.running is not None
    assert hello.running.exits == ()
    scene.leader.start_generation(2, scene.script(SLEEP))
    await scene.up(2)
    assert process_state(pids[0]) in ("", "Z")
    assert again.process is not None


async def test_workers_outlive_leader_and_store(scene: Scene, store: Store) -> None:
    agent = await scene.agent()
    scene.leader.start_generation(1, scene.script(SLEEP))
    await scene.up(1)
    await scene.leader.phase(1, "started")
    await scene.leader.stop()
    await store.delete(f"/regrow/{scene.cluster}/leader")
    pids = pids_of(agent, 1)
    os.kill(pids[0], signal.SIGKILL)
    await until(lambda: "exit job=toy" in agent.log())
    scene.leader = StubLeader(store, scene.cluster, epoch=2)
    await scene.leader.start()
    hello = await scene.leader.next(wire.Hello)
    assert hello.running is not None
    assert [found.rank for found in hello.running.exits] == [0]
    assert process_state(pids[1]) not in ("", "Z")
    await until(lambda: json.loads((agent.state / "agent.json").read_text())["epoch"] == 2)


async def test_a_leader_of_an_older_term_is_not_obeyed(scene: Scene, store: Store) -> None:
    agent = await scene.agent()
    await scene.leader.stop()
    scene.leader = StubLeader(store, scene.cluster, epoch=5)
    await scene.leader.start()
    await scene.leader.next(wire.Beat)
    await scene.leader.stop()
    scene.leader = StubLeader(store, scene.cluster, epoch=4)
    await scene.leader.start()
    await scene.leader.next(wire.Hello)
    await until(lambda: "has epoch 4, this node has seen 5" in agent.log())


async def test_a_dead_shim_is_replaced_and_its_workers_are_told_as_lost(scene: Scene) -> None:
    agent = await scene.agent()
    script = scene.script(SLEEP)
    scene.leader.start_generation(1, script)
    await scene.up(1)
    answer = await agent.admin(kind="kill_shim")
    assert answer["done"]
    for rank in (0, 1):
        await scene.leader.next(wire.WorkersExited, lambda said, rank=rank: any(found.rank == rank for found in said.exits))
    exits = {found.rank: found for told in scene.leader.all(wire.WorkersExited) for found in told.exits}
    assert {found.signal for found in exits.values()} == {9}
    assert "shim" in exits[0].error
    scene.leader.start_generation(2, script)
    await scene.up(2)


async def test_a_killed_and_a_stopped_worker(scene: Scene) -> None:
    agent = await scene.agent()
    scene.leader.start_generation(1, scene.script(SLEEP))
    await scene.up(1)
    await scene.leader.phase(1, "started")
    stopped = await agent.admin(kind="stop_worker", rank=0)
    await until(lambda: process_state(stopped["pid"]) == "T")
    scene.leader.order(wire.CollectStacks(job="toy", generation=1))
    text = (await scene.leader.next(wire.Output, lambda said: said.rank == 0)).text
    assert "State: T (stopped by a signal)" in text
    running = (await scene.leader.next(wire.Output, lambda said: said.rank == 1)).text
    assert "State: S (sleeping)" in running
    killed = await agent.admin(kind="kill_worker", rank=1)
    told = await scene.leader.next(wire.WorkersExited)
    assert (told.exits[0].rank, told.exits[0].signal, told.exits[0].pid) == (1, 9, killed["pid"])
    assert not (await agent.admin(kind="kill_worker", rank=1))["done"]
    scene.leader.start_generation(2, scene.script(SLEEP))
    await scene.up(2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_makes_this_node_leave(scene: Scene, number: signal.Signals) -> None:
    agent = await scene.agent()
    scene.leader.start_generation(1, scene.script(SLEEP))
    await scene.up(1)
    os.kill(agent.pid, number)
    leaving = await scene.leader.next(wire.Leaving)
    assert number.name in leaving.reason
    assert leaving.notice_seconds > 0
    pids = pids_of(agent, 1)
    assert process_state(pids[0]) == "S"
    scene.leader.order(wire.ReleaseNode(epoch=1, seq=99))
    assert await agent.wait() == 0
    assert all(process_state(pid) in ("", "Z") for pid in pids)


async def test_an_idle_node_and_one_without_a_leader_leave_by_themselves(scene: Scene) -> None:
    agent = await scene.agent("--notice-seconds", "1")
    os.kill(agent.pid, signal.SIGTERM)
    assert await agent.wait() == 0
    agent = await scene.agent("--notice-seconds", "1")
    scene.leader.start_generation(1, scene.script(SLEEP))
    await scene.up(1)
    await scene.leader.stop()
    os.kill(agent.pid, signal.SIGTERM)
    assert await agent.wait() == 0
    assert all(process_state(pid) in ("", "Z") for pid in pids_of(agent, 1))


async def test_the_node_is_registered_under_a_lease(scene: Scene, store: Store) -> None:
    agent = await scene.agent()
    key = f"/regrow/{scene.cluster}/nodes/n0"
    async with asyncio.timeout(30):
        while (item := await store.get(key)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    record = wire.decode(item.value, wire.NodeRecord)
    assert (record.node, record.slots, item.lease != 0) == ("n0", 2, True)
    assert record.peer_address.startswith("127.0.0.1:")
    os.kill(agent.pid, signal.SIGTERM)
    assert await agent.wait() == 0
    assert await store.get(key) is None


async def test_what_the_node_runs_is_in_the_store(scene: Scene, store: Store) -> None:
    agent = await scene.agent()
    scene.leader.start_generation(1, scene.script(SLEEP))
    await scene.up(1)
    await scene.leader.phase(1, "started")

    async def status(rank: int) -> str:
        item = await store.get(f"/regrow/{scene.cluster}/jobs/toy/status/n0")
        found = msgspec.json.decode(item.value, type=wire.StatusRecord) if item is not None else None
        return found.workers.get(rank, "") if found is not None and found.generation == 1 else ""

    async with asyncio.timeout(60):
        while await status(1) != "running":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await agent.admin(kind="kill_worker", rank=1)
        while await status(1) != "failed":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await status(0) == "running"


async def test_a_name_that_the_leader_refuses_ends_the_agent(scene: Scene) -> None:
    scene.leader.accept = False
    agent = await scene.agent()
    assert await agent.wait() == 1
    assert "refused by the leader: name is taken" in agent.log()


async def test_metrics_are_served_on_loopback(scene: Scene) -> None:
    agent = await scene.agent()
    facts = json.loads((agent.state / "agent-run.json").read_text(encoding="utf-8"))
    host, port = facts["metrics"].rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    assert 'regrow_agent_up{node="n0"} 1.0' in text
    assert "regrow_agent_host_memory_available_bytes" in text
