"""2,048 nodes: the document that the real builder makes of a generated view, in a real browser."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from stub_agent import eventually
from web_stage import Screen

from regrow import wire
from regrow.ids import MeshShape
from regrow.supervisor.core.view import Effort, GenerationView, JobView, Member, NodeView, View
from regrow.supervisor.http_server import ApiServer
from regrow.supervisor.journal import Journal
from regrow.supervisor.stats.story import Story
from regrow.supervisor.web.feed import Feed, build, difference
from regrow.supervisor.web.page import Page

NODES = 2_048
SPARES = 48
MESH = MeshShape(dp=125, pp=16, tp=8)


def view(at: float) -> View:
    names = [f"n{index:04d}" for index in range(NODES)]
    nodes = {
        name: NodeView(
            name=name,
            incarnation="i",
            address="10.0.0.1",
            peer_address="10.0.0.1:1",
            slots=8,
            joined_at=at,
            devices=tuple(wire.Device(uuid=f"GPU-{name}-{slot}", index=slot) for slot in range(8)),
            health=wire.HealthVerdict(state="healthy"),
        )
        for name in names
    }
    used = names[: NODES - SPARES]
    members = {
        name: Member(
            node=name,
            group_rank=index,
            workers=tuple(wire.WorkerAssignment(rank=8 * index + slot, local_rank=slot, device_uuid="") for slot in range(8)),
        )
        for index, name in enumerate(used)
    }
    spec = wire.GenerationSpec(job="big", epoch=1, generation=1, mesh=MESH, world_size=MESH.world_size, nodes=tuple(used))
    generation = GenerationView(spec=spec, members=members, stage="running", created_at=at, completed_step=1, first_step_at=at)
    job = JobView(
        spec=wire.JobSpec(job="big", argv=("train.py",)), submitted_at=at, effort=Effort(since=at, reserved_at=at), generation=generation
    )
    return View(epoch=1, term_at=at, nodes=nodes, jobs={"big": job})


class Changing:
    """A view that changes: each call of `spoil` silences other nodes."""

    def __init__(self) -> None:
        self.view = view(time.time())
        self.round = 0

    def look(self) -> tuple[View, float]:
        return self.view, time.time()

    def spoil(self, num: int) -> None:
        self.round += 1
        nodes = dict(self.view.nodes)
        for index in range(num):
            name = f"n{(self.round * num + index) % NODES:04d}"
            silent = None if nodes[name].silent_since is not None else time.time()
            nodes[name] = msgspec.structs.replace(nodes[name], silent_since=silent)
        self.view = msgspec.structs.replace(self.view, nodes=nodes)


def test_a_build_is_cheap_and_a_change_small() -> None:
    changing = Changing()
    before = build(changing.view, 1.0, Story(), name="s")
    begin = time.thread_time()
    changing.spoil(1)
    after = build(changing.view, 1.0, Story(), name="s")
    change = difference(before, after)
    spent = time.thread_time() - begin
    assert len(change["nodes"]) == 1
    assert len(json.dumps(change)) < 1_000
    assert spent < 0.2, f"{spent:.3f} s of CPU: more than a build may cost five times a second"


@pytest.mark.slow
async def test_thousands_of_nodes_stay_smooth(screen: Screen) -> None:
    changing, journal = Changing(), Journal(None)
    page = Page(Feed(journal, changing.look, "s0"))
    routes = [Route("/", page.index), Route("/page/{name}", page.asset), Route("/v1/page", page.follow)]
    server = ApiServer(Starlette(routes=routes))
    await server.start("127.0.0.1", 0)
    try:
        await screen.open(f"127.0.0.1:{server.port}")
        await screen.until("(count) => document.querySelectorAll('#grid .cell').length === count", NODES)
        assert f"{SPARES} spare" in await screen.text("#legend")
        assert await screen.page.locator("#mesh .replica").count() == MESH.dp
        await screen.page.evaluate(
            """() => { window.tasks = []; new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map((e) => e.duration)))
            .observe({entryTypes: ['longtask']}); }"""
        )
        for _ in range(10):
            changing.spoil(40)
            journal.write(epoch=1, at=time.time(), kind="node_silent", node="n0001", text="silent")
            await asyncio.sleep(0.25)
        suspects = sum(node.silent_since is not None for node in changing.view.nodes.values())
        await screen.until("(count) => document.querySelectorAll('#grid .cell[data-state=suspect]').length === count", suspects)
        tasks = await screen.page.evaluate("window.tasks")
        assert max(tasks, default=0) < 500, tasks
        await screen.page.fill("#node-filter", "n0007")
        await screen.until("() => [...document.querySelectorAll('#grid .cell')].filter((cell) => !cell.hidden).length === 1")
        await screen.page.click("#legend [data-only=suspect]")
        await screen.until(
            "(count) => [...document.querySelectorAll('#grid .cell')].filter((cell) => !cell.hidden).length === count", suspects
        )
        assert await screen.page.get_attribute("#legend [data-only=suspect]", "aria-pressed") == "true"
        assert await screen.page.evaluate("document.activeElement.dataset.only") == "suspect"
        await screen.page.click("#legend [data-only=suspect]")
        await screen.until(
            "(count) => [...document.querySelectorAll('#grid .cell')].filter((cell) => !cell.hidden).length === count", NODES
        )
        assert screen.errors == []
    finally:
        journal.close()
        await server.stop()
    await eventually(lambda: not [task for task in asyncio.all_tasks() if task.get_name() == "supervisor-page"], "the builder ended")


def test_difference_names_what_is_gone() -> None:
    old: dict[str, Any] = {"at": 1, "epoch": 1, "nodes": {"a": [1], "b": [2]}, "jobs": {"x": {"step": 1, "loss": 2.0}, "y": {"step": 1}}}
    new: dict[str, Any] = {"at": 2, "epoch": 1, "nodes": {"a": [3]}, "jobs": {"x": {"step": 2, "loss": 2.0}}}
    assert difference(old, new) == {"nodes": {"a": [3], "b": None}, "jobs": {"y": None, "x": {"step": 2}}}
    assert difference(new, new) == {}
