"""The page in a real browser: what it shows, how fast it follows, its orders, and who can use it."""

from __future__ import annotations

import asyncio
import time
from importlib import resources
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from scene import form
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from stub_agent import eventually
from web_stage import Screen

from regrow import telemetry, wire
from regrow.supervisor.auth import Guard, Tokens, digest
from regrow.supervisor.http_server import ApiServer

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.async_api import Browser

PHASES = ("fenced", "stopped", "started", "rendezvous", "restored")


async def recovered(cluster: Any) -> None:
    """Four nodes train, save, lose one, and go on beyond the frontier."""
    await form(cluster, "n0", "n1", "n2", "n3")
    for step in (1, 2, 3, 4):
        await cluster.step(step, loss=5.0 - step / 10, seconds=0.2)
    cluster.members()[0].committed(2)
    await eventually(lambda: 2 in cluster.job().checkpoints, "committed")
    await cluster.agents["n2"].die()
    await cluster.generation(2)
    for agent in cluster.members():
        for phase in PHASES:
            agent.phase(phase)
    for step in (3, 4, 5):
        await cluster.step(step, loss=4.0, seconds=0.2)


async def axe(screen: Screen) -> list[str]:
    """Violations that axe finds, with where."""
    script = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
    await screen.page.evaluate(script)
    found = await screen.page.evaluate(
        "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']})"
    )
    return [f"{item['id']}: {node['target']} {node['failureSummary']}" for item in found["violations"] for node in item["nodes"]]


async def test_content(cluster: Any, screen: Screen) -> None:
    await recovered(cluster)
    await screen.open(cluster.leader.http_address)
    assert await screen.text("#job-title") == "Job train: running"
    assert "3 member" in await screen.text("#legend")
    assert "1 gone" in await screen.text("#legend")
    await screen.page.click("#grid .cell[data-node=n1]")
    await screen.page.wait_for_selector("#detail h3")
    detail = await screen.text("#detail")
    assert "GPU-n1-0" in detail
    assert "train rank 2" in detail
    mesh = await screen.text("#mesh")
    assert mesh.count("dp ") == 6
    assert "2 n1" in mesh
    generations = await screen.text("#timeline")
    assert "g1" in generations
    assert "dp=6,tp=1,pp=1 on 3 nodes" in generations
    incident = await screen.page.text_content("#incidents details")
    assert incident is not None
    assert "node lost" in incident
    assert "recovered in" in incident
    assert "Why: generation 2 of train" in incident
    assert "ladder: shrink" in incident
    assert "n2" in incident
    assert "rendezvous" in incident
    assert "2 steps computed again" in incident
    checkpoints = await screen.text("#checkpoints")
    assert "step-2-g1" in checkpoints
    assert await screen.page.get_attribute("#chart-loss svg", "aria-label") == "loss: 4 at step 5"
    assert await screen.page.get_attribute("#chart-rate svg", "aria-label") == "steps per second: 5 at step 5"
    assert "record_generation" in await screen.text("#log")
    await cluster.step(6, loss=4.0, seconds=1e-6)
    await screen.until("() => document.querySelector('#chart-loss svg').getAttribute('aria-label') === 'loss: 4 at step 6'")
    ticks = await screen.page.evaluate("[...document.querySelectorAll('#chart-rate text')].map((text) => parseFloat(text.textContent))")
    assert max(tick for tick in ticks if tick == tick) < 10, "one step time that cannot be does not stretch the scale"
    assert screen.errors == []
    own = f"http://{cluster.leader.http_address}/"
    assert [url for url in screen.requests if not url.startswith((own, "data:"))] == []


async def test_a_change_is_seen_within_a_second(cluster: Any, screen: Screen) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    await screen.open(cluster.leader.http_address)
    delays: list[float] = []
    for step in range(2, 7):
        await cluster.step(step, loss=2.0)
        begin = time.monotonic()
        await screen.until("(step) => document.querySelector('#job-facts dd').textContent === String(step)", step)
        delays.append(time.monotonic() - begin)
    assert sorted(delays)[len(delays) // 2] < 1.0, delays
    await cluster.agents["n1"].die()
    await screen.until("() => document.querySelector('#grid [data-node=n1]').dataset.state === 'gone'")
    assert await screen.text("#grid [data-node=n1]") == "×"
    assert screen.errors == []


async def test_a_stream_that_broke_is_taken_up_again(cluster: Any, screen: Screen) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    await screen.open(cluster.leader.http_address)
    feed = next(task for task in asyncio.all_tasks() if task.get_name() == "supervisor-page")
    feed.cancel()
    await asyncio.gather(feed, return_exceptions=True)
    await cluster.step(2)
    await screen.until("() => document.querySelector('#job-facts dd').textContent === '2'")
    assert await screen.text("#link") == "live"


async def test_orders_of_a_node_and_a_job(cluster: Any, screen: Screen) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    await screen.open(cluster.leader.http_address)
    await screen.page.focus("#grid .cell[data-node=n0]")
    await screen.page.keyboard.press("ArrowRight")
    await screen.page.keyboard.press("Enter")
    await screen.page.click("#detail [data-order=cordon]")
    await eventually(lambda: "n1" in cluster.leader.term.view.cordoned, "cordoned")
    await screen.until("() => document.querySelector('#notice').textContent === 'cordon n1: ordered'")
    await screen.page.click("#detail [data-order=uncordon]")
    await eventually(lambda: not cluster.leader.term.view.cordoned, "not cordoned")
    await screen.page.click("#job-buttons button:text-is('save-and-stop')")
    await screen.page.click("#confirm-dialog button[value=no]")
    await screen.page.click("#job-buttons button:text-is('pause')")
    await screen.page.click("#confirm-dialog button[value=yes]")
    await eventually(lambda: cluster.job().command == "pause", "paused")
    assert screen.errors == []


async def test_a_quarantine_is_shown_and_cleared_and_the_job_saved_and_stopped(cluster: Any, screen: Screen) -> None:
    """A bit flips on n2; the table's `clear` ends the quarantine; the job's own buttons give the other orders."""
    await form(cluster, "n0", "n1", "n2", "n3")
    equal = dict.fromkeys(range(8), "00")
    for step in (1, 2, 3):
        await cluster.step(step, digests=equal)
    cluster.members()[0].committed(3)
    await eventually(lambda: 3 in cluster.job().checkpoints and cluster.job().checkpoints[3].evidence, "verified")
    await screen.open(cluster.leader.http_address)
    for agent in cluster.members():
        agent.complete(4, digests=equal | {5: "0f"})
    await screen.until("() => document.querySelector('#grid [data-node=n2]').dataset.state === 'quarantined'")
    assert "GPU-n2-1" in await screen.text("#quarantine")
    await screen.page.click("#quarantine [aria-label='clear n2']")
    await eventually(lambda: cluster.leader.term.view.quarantine["GPU-n2-1"].state == "probation", "cleared")
    await screen.until("() => document.querySelector('#notice').textContent === 'clear n2: ordered'")
    await screen.until("() => document.querySelector('#grid [data-node=n2]').dataset.state !== 'quarantined'")
    await cluster.generation(2, num_nodes=3)
    await screen.page.click("#job-buttons button:text-is('save-and-stop')")
    await screen.page.click("#confirm-dialog button[value=yes]")
    await eventually(lambda: cluster.job().command == "save-and-stop", "the order has come")
    assert screen.errors == []


async def test_a_node_shows_what_its_gpus_read_now(cluster: Any, screen: Screen) -> None:
    """Asked of the agent's own metrics; why there is nothing is said."""
    await form(cluster, "n0", "n1")
    shown = telemetry.Page()
    for name, value in (
        ("temperature_celsius", 61),
        ("slowdown_celsius", 90),
        ("memory_used_bytes", 2**35),
        ("memory_bytes", 2**36),
        ("busy_ratio", 0.97),
    ):
        shown.put(f"regrow_agent_gpu_{name}", value, "n1", "GPU-n1-0")
    served = Starlette(routes=[Route("/metrics", lambda _: Response(shown.text()))])
    agent = ApiServer(served)
    await agent.start("127.0.0.1", 0)
    try:
        record = wire.NodeRecord(
            node="n1", incarnation="i", address="a", peer_address="p", slots=2, metrics_address=f"127.0.0.1:{agent.port}"
        )
        await cluster.leader.store.put(f"{cluster.leader.keys.nodes}n1", msgspec.json.encode(record))
        await screen.open(cluster.leader.http_address)
        await screen.page.click("#grid .cell[data-node=n1]")
        await screen.until(
            "() => /61 °C \\(slows down at 90\\), 32.0 of 64.0 GiB, 97 % busy/.test(document.querySelector('#detail').textContent)"
        )
        await screen.page.click("#grid .cell[data-node=n0]")
        await screen.until(
            "() => /No readings: its agent is not connected to the store/.test(document.querySelector('#detail').textContent)"
        )
    finally:
        await agent.stop()
    async with httpx.AsyncClient(trust_env=False, base_url=f"http://{cluster.leader.http_address}") as client:
        gone = (await client.get("/v1/nodes/n1", params={"readings": 1})).json()["readings"]
        assert gone["gpus"] == {}
        assert "do not answer" in gone["problem"]
        assert "readings" not in (await client.get("/v1/nodes/n1")).json(), "a list of nodes asks nobody"
    assert screen.errors == []


async def test_orders_need_a_token(cluster: Any, screen: Screen, tmp_path: Path) -> None:
    await form(cluster, "n0", "n1")
    await cluster.step(1)
    file = tmp_path / "tokens"
    file.write_text(f"anna view {digest('look')}\nolaf operate {digest('do')}\n")
    file.chmod(0o600)
    server = cluster.leader.api
    inner = server._app
    while isinstance(inner, Guard):
        inner = inner._app
    server._server.config.loaded_app = Guard(inner, Tokens(file), lambda *_: None, time.monotonic)
    address = cluster.leader.http_address
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.post(f"http://{address}/v1/nodes/n1/cordon")).status_code == 401
        assert (await client.get(f"http://{address}/v1/page")).status_code == 401
        assert (await client.get(f"http://{address}/")).status_code == 200
    await screen.page.goto(f"http://{address}/")
    await screen.page.wait_for_selector("#token-dialog[open]")
    await screen.page.fill("#token-value", "guess")
    await screen.page.keyboard.press("Enter")
    await screen.until(
        "() => document.querySelector('#token-dialog').open && /not accepted/.test(document.querySelector('#token-why').textContent)"
    )
    await screen.page.fill("#token-value", "look")
    await screen.page.keyboard.press("Enter")
    await screen.page.wait_for_selector("#link[data-state=on]")
    await screen.page.click("#grid .cell[data-node=n1]")
    await screen.page.click("#detail [data-order=cordon]")
    await screen.page.wait_for_selector("#token-dialog[open]")
    assert "role view" in await screen.text("#token-why")
    assert "n1" not in cluster.leader.term.view.cordoned
    await screen.page.fill("#token-value", "do")
    await screen.page.click("#token-dialog button[value=use]")
    await eventually(lambda: "n1" in cluster.leader.term.view.cordoned, "cordoned")
    kept = await screen.page.evaluate("[Object.keys(localStorage).length, sessionStorage.getItem('regrow-token'), document.cookie]")
    assert kept == [0, "do", ""]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 360)])
async def test_anybody_can_use_it(cluster: Any, browser: Browser, scheme: Any, width: int) -> None:
    await recovered(cluster)
    context = await browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce")
    screen = Screen(await context.new_page())
    await screen.open(cluster.leader.http_address)
    await screen.page.click("#grid .cell[data-node=n2]")
    await screen.page.wait_for_selector("#detail h3")
    await screen.page.click("#incidents summary")
    assert await axe(screen) == []
    assert await screen.page.evaluate("document.documentElement.scrollWidth") <= width
    await screen.page.click("#token-open")
    assert await axe(screen) == []
    letters = await screen.page.evaluate("[...document.querySelectorAll('#grid .cell')].map((c) => c.textContent)")
    assert letters == ["M", "M", "×", "M"]
    await context.close()


async def test_unknown_file_and_cached_file(cluster: Any) -> None:
    await cluster.supervisor()
    leader = await cluster.leading()
    async with httpx.AsyncClient(trust_env=False, base_url=f"http://{leader.http_address}") as client:
        assert (await client.get("/page/../service.py")).status_code == 404
        assert (await client.get("/page/feed.py")).status_code == 404
        first = await client.get("/page/page.js")
        assert first.headers["content-type"].startswith("text/javascript")
        again = await client.get("/page/page.js", headers={"if-none-match": first.headers["etag"]})
        assert again.status_code == 304
