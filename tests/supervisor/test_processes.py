"""Real supervisor processes on a real etcd: SIGKILL, SIGSTOP, SIGTERM, a dead launcher."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from stub_agent import StubAgent

from regrow import wire
from regrow.ids import MeshShape
from regrow.store.base import Store
from regrow.store.embedded import EmbeddedEtcd
from regrow.store.open import open_store

DEADLINE = 60.0


class Plane:
    """etcd, supervisor processes, stub agents that follow the leader's record."""

    def __init__(self, root: Path, etcd: EmbeddedEtcd, store: Store) -> None:
        self.root = root
        self.etcd = etcd
        self.store = store
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.agents: dict[str, StubAgent] = {}
        self.leader: wire.LeaderRecord | None = None
        self._follower = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async with self.store.watch_prefix("/regrow/test/leader") as watch:
            async for batch in watch:
                for event in batch.events:
                    if event.kind == "put":
                        self.leader = msgspec.json.decode(event.value, type=wire.LeaderRecord)

    async def supervisor(self, name: str, **environment: str) -> None:
        values = {
            "REGROW_SUPERVISOR_BEAT_SECONDS": "0.1",
            "REGROW_POLICY_JOIN_SECONDS": "0.3",
            "REGROW_POLICY_TAKEOVER_SECONDS": "2",
        }
        log = os.open(self.root / f"{name}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self.processes[name] = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "regrow", "supervisor", "--cluster", "test", "--store", self.etcd.url, "--ttl", "2"),
            *("--state", str(self.root / name), "--name", name),
            env={**os.environ, **values, **environment},
            stderr=log,
            pass_fds=(int(environment["REGROW_LIFELINE"]),) if "REGROW_LIFELINE" in environment else (),
        )
        os.close(log)

    def address(self) -> str | None:
        return self.leader.beat_address if self.leader is not None and self.leader.epoch else None

    async def leads(self, name: str, *, above: int = 0) -> wire.LeaderRecord:
        async with asyncio.timeout(DEADLINE):
            while True:
                found = self.leader
                if found is not None and found.epoch > above and found.supervisor.startswith(f"{name}/" if name else ""):
                    return found
                await asyncio.sleep(0.01)

    async def document(self, condition: Any) -> dict[str, Any]:
        """The job's document once a condition holds, from whoever leads."""
        async with asyncio.timeout(DEADLINE), httpx.AsyncClient(trust_env=False) as client:
            while True:
                if self.leader is not None and self.leader.epoch:
                    try:
                        response = await client.get(f"http://{self.leader.http_address}/v1/jobs/train", timeout=2.0)
                    except httpx.HTTPError:
                        response = None
                    if response is not None and response.status_code == 200 and condition(response.json()):
                        return response.json()
                await asyncio.sleep(0.02)

    async def run_job(self, *names: str) -> None:
        for name in names:
            self.agents[name] = StubAgent(name, self.address)
            self.agents[name].start()
        spec = wire.JobSpec(
            job="train",
            argv=("t.py",),
            nproc_per_node=2,
            min_nodes=1,
            max_nodes=len(names),
            mesh=MeshShape(dp=2 * len(names)),
            global_batch=24,
        )
        assert self.leader is not None
        async with httpx.AsyncClient(trust_env=False) as client:
            response = await client.post(f"http://{self.leader.http_address}/v1/jobs", content=msgspec.json.encode(spec))
        assert response.status_code == 201, response.text
        await self.document(lambda document: document["generation"] == 1 and all(agent.generation == 1 for agent in self.agents.values()))

    async def step(self, number: int) -> None:
        """Tell a step until the leader has it: reports of a moment without a leader are the agent's to keep, not the stub's."""

        def done(document: dict[str, Any]) -> bool:
            if document["step"] >= number:
                return True
            for agent in self.agents.values():
                agent.complete(number)
            return False

        await self.document(done)

    async def close(self) -> None:
        self._follower.cancel()
        await asyncio.gather(self._follower, return_exceptions=True)
        for agent in self.agents.values():
            await agent.die()
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    etcd = EmbeddedEtcd(tmp_path / "etcd")
    await etcd.start()
    store = open_store(etcd.url)
    made = Plane(tmp_path, etcd, store)
    try:
        yield made
    finally:
        await made.close()
        await store.close()
        await etcd.stop()


def starts(plane: Plane) -> list[int]:
    return [sum(1 for m in agent.received if isinstance(m, wire.StartGeneration)) for agent in plane.agents.values()]


async def test_killed_and_paused_leaders_are_replaced_without_touching_workers(plane: Plane) -> None:
    await plane.supervisor("s0")
    first = await plane.leads("s0")
    await plane.run_job("n0", "n1")
    await plane.step(1)
    await plane.supervisor("s1")
    await asyncio.to_thread(_wait_for, plane.root / "s1" / "supervisor.json")
    plane.processes["s0"].kill()
    second = await plane.leads("s1", above=first.epoch)
    await plane.step(2)
    assert starts(plane) == [1, 1]

    await plane.supervisor("s2")
    await asyncio.to_thread(_wait_for, plane.root / "s2" / "supervisor.json")
    plane.processes["s1"].send_signal(signal.SIGSTOP)
    third = await plane.leads("s2", above=second.epoch)
    for agent in plane.agents.values():  # as an agent does that sees another leader's address in the store
        await agent.die(workers=False)
        agent.start()
    await plane.step(3)
    plane.processes["s1"].send_signal(signal.SIGCONT)
    await plane.step(4)
    assert starts(plane) == [1, 1]
    item = await plane.store.get("/regrow/test/epoch")
    assert item is not None
    assert int(item.value) == third.epoch
    plane.agents["n0"].exit(0, signal=9)
    document = await plane.document(lambda document: document["generation"] == 2)
    assert document["epoch"] == third.epoch
    assert plane.agents["n1"].highest_epoch == third.epoch


async def test_etcd_restart_costs_no_worker(plane: Plane) -> None:
    await plane.supervisor("s0")
    first = await plane.leads("s0")
    await plane.run_job("n0", "n1")
    await plane.step(1)
    plane.etcd.send_signal(signal.SIGSTOP)
    await asyncio.sleep(3.0)
    plane.etcd.send_signal(signal.SIGCONT)
    await plane.leads("s0", above=first.epoch)
    await plane.step(2)
    assert starts(plane) == [1, 1]
    await plane.etcd.kill()
    await plane.etcd.restart()
    await plane.step(3)
    assert starts(plane) == [1, 1]


async def test_sigterm_resigns_and_leaves_nothing(plane: Plane) -> None:
    await plane.supervisor("s0")
    await plane.leads("s0")
    plane.processes["s0"].terminate()
    assert await asyncio.wait_for(plane.processes["s0"].wait(), DEADLINE) == 0
    assert await plane.store.get("/regrow/test/leader") is None


async def test_supervisor_ends_with_its_launcher(plane: Plane) -> None:
    read, write = os.pipe()
    await plane.supervisor("s0", REGROW_LIFELINE=str(read))
    os.close(read)
    await plane.leads("s0")
    os.close(write)
    began = asyncio.get_running_loop().time()
    await asyncio.wait_for(plane.processes["s0"].wait(), DEADLINE)
    assert asyncio.get_running_loop().time() - began < 10.0


def _wait_for(path: Path) -> dict[str, Any]:
    import time

    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        if path.exists():
            return json.loads(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path} does not appear")


async def test_the_next_leader_tells_of_earlier_incidents(plane: Plane) -> None:
    await plane.supervisor("s0")
    first = await plane.leads("s0")
    await plane.run_job("n0", "n1")
    await plane.step(1)
    plane.agents["n0"].exit(0, signal=9)
    await plane.document(lambda document: document["generation"] == 2)
    await plane.step(1)
    await plane.step(2)
    told = await plane.document(lambda document: [item["closed"] for item in document["incidents"]] == [True])
    key = "/regrow/test/jobs/train/incidents"
    await eventually_stored(plane, key, b'"closed":true')
    await plane.supervisor("s1")
    await asyncio.to_thread(_wait_for, plane.root / "s1" / "supervisor.json")
    plane.processes["s0"].kill()
    await plane.leads("s1", above=first.epoch)
    document = await plane.document(lambda document: document["generation"] == 2)
    assert document["incidents"] == told["incidents"]
    await plane.step(3)
    assert starts(plane) == [2, 2]


async def eventually_stored(plane: Plane, key: str, text: bytes) -> None:
    """Until the key's value holds the text."""
    async with asyncio.timeout(30):
        while (item := await plane.store.get(key)) is None or text not in item.value:  # noqa: ASYNC110  # another process writes it
            await asyncio.sleep(0.02)
