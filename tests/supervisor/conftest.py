from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from regrow import wire
from regrow.ids import MeshShape
from regrow.store.base import Store
from regrow.store.memory import MemoryStore
from regrow.supervisor.config import SupervisorConfig
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.core.view import JobView
from regrow.supervisor.service import Supervisor


def _sibling(name: str) -> Any:
    """Import a helper of this folder by its bare name (pytest runs with importlib mode)."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stub_agent = _sibling("stub_agent")
scene = _sibling("scene")
older = _sibling("older")

FAST = Policy(
    victim_seconds=0.5,
    reconnect_seconds=0.6,
    stopped_floor_seconds=0.6,
    join_seconds=0.5,
    takeover_seconds=1.0,
    growth_cooldown_seconds=0.2,
    save_seconds=5.0,
    hang_first_step_seconds=20.0,
    stacks_seconds=0.2,
    reach_seconds=0.5,
    backoff_seconds=0.05,
)


class Cluster:
    """Supervisors and stub agents of one test."""

    def __init__(self, tmp_path: Path, open_store: Callable[[], Store], policy: Policy = FAST, *, full: bool = False) -> None:
        self.full = full
        """With production's time constants."""
        self.tmp_path = tmp_path
        self.policy = policy
        self.agents: dict[str, Any] = {}
        self.supervisors: list[Supervisor] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.open_store = open_store

    async def supervisor(self, *, ttl: float = 2.0, adopt: bool = False, state: str = "") -> Supervisor:
        """`state`: the folder of one that has ended or will; empty: one of its own."""
        config = SupervisorConfig(
            cluster="test",
            store="memory://",
            state=state or str(self.tmp_path / f"s{len(self.supervisors)}"),
            ttl=5.0 if self.full else ttl,
            beat_seconds=0.5 if self.full else 0.1,
            silence_seconds=2.0 if self.full else 0.5,
            name=f"s{len(self.supervisors)}",
            adopt=adopt,
        )
        made = Supervisor(config, self.policy, store=self.open_store())
        self.supervisors.append(made)
        self.tasks.append(asyncio.create_task(made.run()))
        await stub_agent.eventually(lambda: made.api.port or self._died(), "supervisor serves")
        return made

    def _died(self) -> bool:
        for task in self.tasks:
            if task.done() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]
        return False

    @property
    def leader(self) -> Supervisor | None:
        return next((item for item in self.supervisors if item.term is not None and item.term.ready), None)

    async def leading(self) -> Supervisor:
        return await stub_agent.eventually(lambda: self._died() or self.leader, "somebody leads")

    def address(self) -> str | None:
        leader = self.leader
        return leader.beat_address if leader is not None else None

    async def start(self, *names: str, **more: Any) -> None:
        for name in names:
            self.agents[name] = stub_agent.StubAgent(name, self.address, **more)
            self.agents[name].start()
        for name in names:
            await asyncio.wait_for(self.agents[name].welcomed.wait(), 20)

    def job(self, name: str = "train") -> JobView:
        leader = self.leader
        assert leader is not None
        assert leader.term is not None
        return leader.term.view.jobs[name]

    async def submit(self, **changes: Any) -> wire.JobSpec:
        values: dict[str, Any] = {
            "job": "train",
            "argv": ("train.py",),
            "nproc_per_node": 2,
            "min_nodes": 1,
            "max_nodes": 4,
            "mesh": MeshShape(dp=8),
            "global_batch": 48,
            "checkpoint": wire.CheckpointPolicy(path=str(self.tmp_path / "ckpt")),
        }
        spec = wire.JobSpec(**(values | changes))
        leader = await self.leading()
        await leader.submit(spec)
        return spec

    def members(self) -> list[Any]:
        generation = self.job().generation
        assert generation is not None
        return [self.agents[name] for name in generation.spec.nodes]

    async def generation(self, number: int, *, num_nodes: int | None = None) -> None:
        """Until all members run this generation."""

        def there() -> bool:
            self._died()
            leader = self.leader
            if leader is None or leader.term is None or "train" not in leader.term.view.jobs:
                return False
            current = self.job().generation
            if current is None or current.number != number or current.stage not in ("starting", "running"):
                return False
            if num_nodes is not None and len(current.spec.nodes) != num_nodes:
                return False
            return all(self.agents[name].generation == number for name in current.spec.nodes)

        await stub_agent.eventually(there, f"generation {number} on {num_nodes} nodes")

    async def step(self, step: int, **more: Any) -> None:
        """All members complete a step."""
        for agent in self.members():
            agent.complete(step, **more)
        await stub_agent.eventually(
            lambda: self.job().generation is not None and self.job().generation.completed_step == step, f"step {step} completed"
        )

    async def close(self) -> None:
        for agent in self.agents.values():
            await agent.die()
        for item in self.supervisors:
            item.stop()
        results = await asyncio.gather(*self.tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    made = MemoryStore()
    yield made
    await made.close()


@pytest.fixture
async def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    """Time constants scaled down; those of production with the parameter "full"."""
    full = getattr(request, "param", "scaled") == "full"
    if full:
        monkeypatch.setattr(stub_agent.Deadline, "seconds", 240.0)
    made = Cluster(tmp_path, store.connect, Policy() if full else FAST, full=full)
    try:
        yield made
    finally:
        await made.close()
