"""Leaders, stores and networks that fail; healthy training must not notice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from scene import form
from stub_agent import StubAgent, eventually

from regrow import wire
from regrow.store.memory import MemoryStore
from regrow.supervisor import loading
from regrow.supervisor.core import rates
from regrow.supervisor.core.records import LearnedRecord

if TYPE_CHECKING:
    from conftest import Cluster


def starts(agent: StubAgent) -> int:
    return sum(1 for message in agent.received if isinstance(message, wire.StartGeneration))


async def test_standby_takes_over_without_touching_workers(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    await cluster.step(2)
    first = cluster.leader
    assert first is not None
    async with asyncio.timeout(20), first.store.watch_prefix("/regrow/test/jobs/train/learned") as kept:
        async for batch in kept:
            if [*(batch.snapshot or ()), *batch.events]:
                break
    second = await cluster.supervisor()
    first.stop()
    await eventually(lambda: second.term is not None and second.term.ready, "the standby leads")
    taken = cluster.job()
    assert taken.generation.first_step_at is None
    patient = msgspec.structs.replace(cluster.policy, hang_first_step_seconds=500.0)
    assert rates.hang_limit(taken, patient) == patient.hang_floor_seconds, "the leader before this one saw its first step"
    assert rates.hang_limit(msgspec.structs.replace(taken, learned=LearnedRecord()), patient) == 500.0
    for name in ("n0", "n1"):
        await eventually(lambda name=name: second.term.view.nodes.get(name), f"{name} is back")
    await cluster.step(3)
    await cluster.step(4)
    assert [starts(agent) for agent in cluster.agents.values()] == [1, 1]
    assert second.term is not None
    assert second.term.view.epoch == 2
    told = [(entry.epoch, entry.generation, entry.data["kind"]) for entry in second.journal.since(0) if entry.kind == "decided"]
    assert told == [(1, 0, "job_loaded"), (1, 1, "record_generation")], (
        "it has a disk of its own, and what the first one decided from the store"
    )
    assert cluster.job().generation.number == 1
    assert not cluster.job().incidents
    cluster.agents["n0"].exit(0, signal=9)
    await cluster.generation(2, num_nodes=2)
    assert cluster.agents["n0"].order.epoch == 2


async def test_a_supervisor_that_is_stopped_while_it_takes_over_ends(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    load = loading.load

    async def loaded_and_stopped(*arguments: Any) -> loading.Loaded:
        found = await load(*arguments)
        cluster.supervisors[0].stop()
        return found

    monkeypatch.setattr(loading, "load", loaded_and_stopped)
    await cluster.supervisor()
    async with asyncio.timeout(20):
        await asyncio.gather(*cluster.tasks)


async def test_store_outage_costs_no_worker(cluster: Cluster, store: MemoryStore) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    leader = cluster.leader
    assert leader is not None
    leader.store.faults.unavailable = True  # type: ignore[union-attr]
    await eventually(lambda: leader.term is None, "steps down by its own clock")
    assert all(agent.live for agent in cluster.agents.values())
    leader.store.faults.unavailable = False  # type: ignore[union-attr]
    await eventually(lambda: cluster.leader, "leads again")
    await eventually(lambda: len(cluster.leader.term.view.nodes) == 2, "all register again")
    await cluster.step(2)
    assert [starts(agent) for agent in cluster.agents.values()] == [1, 1]


async def test_commands_hold_over_a_change_of_leader(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    first = cluster.leader
    assert first is not None
    from regrow.supervisor.core import events as e

    await first.store.put(first.keys.job("train", "command"), b'{"command":"pause","by":"me"}')  # type: ignore[union-attr]
    first.post(e.CommandGiven(at=first.now(), job="train", command="pause"))
    await eventually(lambda: any(isinstance(m, wire.RequestSave) and m.stop_after for m in cluster.agents["n0"].received), "asked to save")
    cluster.agents["n0"].committed(1)
    for agent in cluster.agents.values():
        agent.exit_all(exit_code=0)
    await eventually(lambda: cluster.job().paused, "paused")
    second = await cluster.supervisor()
    first.stop()
    await eventually(lambda: second.term is not None and second.term.ready and len(second.term.view.nodes) == 2, "the standby leads")
    await asyncio.sleep(0.3)
    assert cluster.job().generation is None or cluster.job().generation.stage == "ended"
    second.post(e.CommandGiven(at=second.now(), job="train", command="run"))
    await eventually(lambda: cluster.agents["n0"].generation == 2, "goes on")
    assert cluster.agents["n0"].order.spec.restore is None or cluster.agents["n0"].order.spec.restore.step == 1


async def test_management_network_cut_while_training_is_healthy(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1", "n2")
    await cluster.step(1)
    cluster.agents["n2"].mute()
    await eventually(lambda: cluster.leader.term.view.nodes["n2"].silent_since is not None, "suspect")
    for step in range(2, 30):
        for name in ("n0", "n1"):
            cluster.agents[name].complete(step)
        await asyncio.sleep(0.05)
    assert cluster.job().generation.number == 1
    assert cluster.job().frontier == 29
    cluster.agents["n2"].step = 29
    cluster.agents["n2"].unmute()
    await eventually(lambda: cluster.leader.term.view.nodes["n2"].silent_since is None, "heard again")
    await cluster.step(30)
    assert not cluster.job().incidents


async def test_silence_and_no_progress_is_a_loss(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1", "n2")
    await cluster.step(1)
    cluster.agents["n2"].mute()
    await cluster.generation(2, num_nodes=2)
    assert cluster.job().incidents[-1].node == "n2"


async def test_all_silent_at_once_is_our_own_fault(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    for agent in cluster.agents.values():
        agent.mute()
    await eventually(lambda: all(node.silent_since for node in cluster.leader.term.view.nodes.values()), "all suspect")
    await asyncio.sleep(1.0)
    for agent in cluster.agents.values():
        agent.unmute()
    await eventually(lambda: not any(node.silent_since for node in cluster.leader.term.view.nodes.values()), "all heard")
    await cluster.step(2)
    assert cluster.job().generation.number == 1


async def test_duplicate_name_is_refused(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1")
    twin = StubAgent("n0", cluster.address)
    twin.incarnation = "n0-99"
    twin.start()
    try:
        await eventually(lambda: twin.refused, "refused")
        assert "in use by another agent" in twin.refused[0]
        assert cluster.leader.term.view.nodes["n0"].incarnation == "n0-1"
    finally:
        await twin.die()


async def test_wrong_cluster_is_refused_for_good(cluster: Cluster) -> None:
    leader = await cluster.supervisor()
    await cluster.leading()
    reader, writer = await asyncio.open_connection("127.0.0.1", leader.beats.port)
    hello = StubAgent("n0", cluster.address).hello()
    import msgspec

    writer.write(wire.encode(msgspec.structs.replace(hello, cluster="other")))
    answer = wire.decode(await reader.readline(), wire.ToAgent)
    assert isinstance(answer, wire.Refused)
    assert not answer.retry
    writer.close()


async def test_garbage_on_the_beat_port_harms_nobody(cluster: Cluster) -> None:
    await form(cluster, "n0")
    leader = cluster.leader
    assert leader is not None
    for data in (b"GET / HTTP/1.0\r\n\r\n", b"\x00" * 1000 + b"\n", b'{"type":"hello"}\n', b'{"type":"beat","seq":1}\n'):
        reader, writer = await asyncio.open_connection("127.0.0.1", leader.beats.port)
        writer.write(data)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 10)
        writer.close()
    await cluster.step(1)


async def test_agent_that_saw_a_higher_epoch_raises_ours(cluster: Cluster) -> None:
    await form(cluster, "n0")
    late = cluster.agents["n9"] = StubAgent("n9", cluster.address)
    late.highest_epoch = 50
    late.start()
    await asyncio.wait_for(late.welcomed.wait(), 20)
    assert late.highest_epoch == 51
    await eventually(lambda: "n0" in cluster.leader.term.view.nodes, "the others come back")
    await cluster.step(1)
    assert starts(cluster.agents["n0"]) == 1


async def test_journal_goes_on_with_its_numbers(cluster: Cluster) -> None:
    await form(cluster, "n0")
    first = cluster.leader
    assert first is not None
    await eventually(lambda: first.journal.since(0), "entries")
    last = first.journal.since(0)[-1].id
    from regrow.supervisor.journal import Journal

    path = cluster.tmp_path / "s0" / "journal.sqlite"
    await cluster.close()
    cluster.agents.clear()
    cluster.supervisors.clear()
    cluster.tasks.clear()
    again = Journal(path)
    again.open()
    entry = again.write(epoch=9, at=first.now(), kind="test")
    again.close()
    assert entry.id > last
    kinds = [item.kind for item in again.since(0)]
    assert "record_generation" in kinds
