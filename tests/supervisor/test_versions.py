"""A rolling upgrade: agents of the version before and of the one after beside ours, under one leader, on real connections."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, get_args

import pytest
from older import OldProtocol, Side
from stub_agent import StubAgent, eventually

from regrow import wire

if TYPE_CHECKING:
    from conftest import Cluster

OLD = OldProtocol()


def as_before(agent: StubAgent) -> None:
    """This agent speaks 0.1.0."""
    agent.written = functools.partial(OLD.translate, side="from_agent")
    agent.understood = functools.partial(OLD.translate, side="to_agent")


def as_after(agent: StubAgent) -> None:
    """This agent sends fields that nobody knows yet and a higher number; messages of kinds unknown here, too."""

    def newer(line: bytes) -> bytes:
        message: dict[str, Any] = json.loads(line) | {"colour": {"of": ["tomorrow"]}}
        if "version" in message:
            message["version"] = wire.PROTOCOL_VERSION + 1
        unknown = b'{"type":"paint","colour":"red"}\n' if message["type"] != "hello" else b""
        return json.dumps(message).encode() + b"\n" + unknown

    agent.written = newer


@pytest.mark.parametrize("change", [as_before, as_after])
async def test_agents_of_another_version_work_beside_ours(cluster: Cluster, change: Any) -> None:
    """They train, hang, are asked for evidence, leave: whichever they do not know of what they are asked is not waited for."""
    await cluster.supervisor()
    await cluster.leading()
    other = cluster.agents["n1"] = StubAgent("n1", cluster.address)
    change(other)
    other.start()
    await cluster.start("n0", "n2")
    await cluster.submit(hang_seconds=0.8, max_nodes=3, mesh=None)
    await cluster.generation(1, num_nodes=3)
    for step in (1, 2):
        await cluster.step(step)
    cluster.members()[0].committed(2)
    await cluster.generation(2, num_nodes=3)
    assert cluster.job().incidents[-1].kind == "hang"
    asked = [type(message) for message in other.received]
    assert wire.CollectStacks in asked
    assert (wire.ProbePeers in asked) == (change is as_after), "0.1.0 does not know the question"
    second = await cluster.supervisor()
    assert cluster.leader is not None
    cluster.leader.stop()
    await eventually(lambda: second.term is not None and second.term.ready and len(second.term.view.nodes) == 3, "another leads")
    await cluster.step(3)
    other.send(wire.Leaving(reason="upgrade"))
    await eventually(lambda: any(isinstance(m, wire.RequestSave) for m in cluster.agents["n0"].received), "asked to save")
    await cluster.step(4)
    cluster.members()[0].committed(4)
    await eventually(lambda: len(cluster.members()) == 2 and other not in cluster.members(), "the rest goes on")
    await eventually(lambda: other.released, "and it may leave")


@pytest.mark.parametrize("side", ["from_agent", "to_agent"])
def test_nothing_that_the_version_before_knew_is_gone(side: Side) -> None:
    ours = wire.FromAgent if side == "from_agent" else wire.ToAgent
    assert OLD.tags(side) <= {str(kind.__struct_config__.tag) for kind in get_args(ours)}


def test_what_the_version_before_needs_is_looked_for() -> None:
    line = wire.encode(wire.Leaving(reason="x"))
    assert json.loads(OLD.translate(line, "from_agent")) == {"type": "leaving", "reason": "x"}
    with pytest.raises(AssertionError, match="reason"):
        OLD.translate(b'{"type":"leaving"}\n', "from_agent")
    beat = wire.Beat(seq=1, cpu_seconds={0: 1.0}, memory_ratio=0.5)
    assert json.loads(OLD.translate(wire.encode(beat), "from_agent")) == {"type": "beat", "seq": 1}


def test_an_order_of_a_newer_supervisor_is_passed_over() -> None:
    line = b'{"type":"paint_node","epoch":1,"seq":2,"colour":"red"}\n'
    assert isinstance(wire.decode(line, wire.ToAgent), wire.Unknown)
    assert isinstance(wire.decode(wire.encode(wire.ClearHealth(epoch=1, seq=1)), wire.ToAgent), wire.ClearHealth)
