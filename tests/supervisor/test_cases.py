"""Cases that broke real systems, by their number (docs/failure-model.md has the table). Stub agents on real TCP; times scaled down, and
as in production (soak)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from scene import form
from stub_agent import eventually

from regrow import wire
from regrow.ids import MeshShape
from regrow.supervisor.core.symptoms import finished_ranks

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [
    pytest.mark.parametrize("cluster", ["scaled", pytest.param("full", marks=[pytest.mark.soak, pytest.mark.timeout(600)])], indirect=True)
]


async def test_a01_a_member_that_goes_away_is_noticed_without_any_error_of_its_peers(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1", "n2")
    await cluster.step(1)
    await cluster.agents["n2"].die()  # the others sit in a collective and say nothing
    await cluster.generation(2, num_nodes=2)
    assert [agent.node for agent in cluster.members()] == ["n0", "n1"]
    await cluster.step(1)


async def test_a03_a_returning_node_never_trains_beside_the_run(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    old = cluster.agents["n1"]
    old.mute()
    await cluster.generation(2, num_nodes=1)
    assert old.live, "it does not know yet: its workers are fenced by the generation, not by their death"
    await cluster.step(1)
    old.unmute()
    await eventually(lambda: not old.live or old.generation > 1, "the old workers are stopped")
    assert any(isinstance(message, wire.StopGeneration | wire.StartGeneration) for message in old.received[2:])
    await cluster.step(2)
    assert cluster.job().generation is not None
    assert cluster.job().generation.number >= 2


async def test_a05_joined_and_gone_before_its_answer(cluster: Cluster) -> None:
    await cluster.supervisor()
    await cluster.leading()
    await cluster.start("n0", "n1", "n2")
    cluster.agents["n2"].answer_starts = False
    await cluster.submit(min_nodes=2, max_nodes=3, mesh=None)
    await eventually(
        lambda: any(isinstance(message, wire.StartGeneration) for message in cluster.agents["n2"].received), "it has a slot, and is silent"
    )
    await cluster.agents["n2"].die()
    await cluster.generation(2, num_nodes=2)
    late = wire.GenerationPhase(job="train", generation=1, phase="restored", step=99)
    cluster.agents["n0"].send(late)
    await cluster.step(1)
    generation = cluster.job().generation
    assert generation is not None
    assert (generation.number, generation.completed_step) == (2, 1)


async def test_a07_the_dead_are_counted_nowhere(cluster: Cluster) -> None:
    await cluster.supervisor()
    leader = await cluster.leading()
    await cluster.start("n0")
    await cluster.submit(min_nodes=2, max_nodes=2, mesh=MeshShape(dp=4))
    await cluster.agents["n0"].die()
    await eventually(lambda: not leader.term.view.nodes["n0"].connected, "its end is seen")  # type: ignore[union-attr]
    await cluster.start("n1", "n2")
    await cluster.generation(1, num_nodes=2)
    assert [agent.node for agent in cluster.members()] == ["n1", "n2"]


async def test_a09_below_the_least_number_it_parks_and_all_go_on_from_one_step(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1", "n2", min_nodes=3, max_nodes=3, mesh=None)
    for step in (1, 2):
        await cluster.step(step)
    cluster.members()[0].committed(2)
    await eventually(lambda: 2 in cluster.job().checkpoints, "the checkpoint is known")
    cluster.agents["n2"].send(wire.Leaving(reason="SIGTERM"))
    await cluster.agents["n2"].die()
    await eventually(lambda: cluster.job().parked, "parked, not spinning")
    number = cluster.job().highest_generation
    await cluster.start("n3")
    await cluster.generation(number + 1, num_nodes=3)
    orders = [agent.order for agent in cluster.members()]
    assert {order.spec.restore.step for order in orders} == {2}, "one decision for all: what they load"
    await cluster.step(3)


@pytest.mark.parametrize("how", ["leaves", "killed"])
async def test_d01_one_agent_less_ends_nothing_for_the_others(cluster: Cluster, how: str) -> None:
    await form(cluster, "n0", "n1", "n2", min_nodes=2)
    await cluster.step(1)
    if how == "leaves":
        cluster.agents["n0"].send(wire.Leaving(reason="SIGTERM to the agent of n0"))
        await eventually(lambda: any(isinstance(m, wire.RequestSave) for m in cluster.agents["n1"].received), "asked to save")
        await cluster.step(2)
        cluster.agents["n0"].committed(2)
    else:
        await cluster.agents["n0"].die()
    await cluster.generation(2, num_nodes=2)
    assert [agent.node for agent in cluster.members()] == ["n1", "n2"]
    assert cluster.job().outcome is None
    await cluster.step(3 if how == "leaves" else 1)


async def test_d05_a_worker_killed_at_the_last_step_is_no_success(cluster: Cluster) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    for rank in cluster.agents["n0"].ranks:
        cluster.agents["n0"].exit(rank, exit_code=0, declared_end=True)
    first, last = cluster.agents["n1"].ranks
    cluster.agents["n1"].exit(first, exit_code=0, declared_end=True)
    cluster.agents["n1"].exit(last, signal=9, oom_killed=True)
    await cluster.generation(2, num_nodes=2)
    assert cluster.job().outcome is None
    assert "out of memory" in cluster.job().incidents[-1].text
    generation = cluster.job().generation
    assert generation is not None
    assert not finished_ranks(generation)


async def test_d11_sixty_four_nodes_meet_again_after_the_first_failure(cluster: Cluster) -> None:
    names = [f"n{index:02}" for index in range(64)]
    await cluster.supervisor()
    await cluster.leading()
    await cluster.start(*names, slots=1)
    await cluster.submit(nproc_per_node=1, min_nodes=32, max_nodes=64, mesh=MeshShape(dp=64), global_batch=64)
    await cluster.generation(1, num_nodes=64)
    await cluster.step(1)
    began = asyncio.get_running_loop().time()
    cluster.agents["n17"].exit(17, exit_code=1, error="RuntimeError: Connection closed by peer [127.0.0.1]:4242")
    await cluster.generation(2, num_nodes=64)
    assert asyncio.get_running_loop().time() - began < 30.0, "nobody waits for collective timeouts: all are stopped at the first failure"
    assert len(cluster.job().ledger.charges) == 1
