"""A leader, a store and agents for tests of the daemon."""

from __future__ import annotations

from pathlib import Path

from tests.agent.harness import until
from tests.agent.leader import AgentProcess, StubLeader, fresh_cluster

from regrow import wire
from regrow.store.base import Store

SLEEP = "import os, sys, time\nprint('up', os.environ['RANK'], flush=True)\ntime.sleep(600)\n"


class Scene:
    """A leader and what the tests start under it."""

    def __init__(self, folder: Path, url: str, store: Store) -> None:
        self.folder = folder
        self.url = url
        self.cluster = fresh_cluster()
        self.leader = StubLeader(store, self.cluster)
        self.agents: list[AgentProcess] = []

    async def agent(self, *flags: str, node: str = "n0") -> AgentProcess:
        """Start an agent and wait for its greeting and for its shim."""
        made = AgentProcess(self.folder / node, self.url, self.cluster, *flags, node=node)
        self.agents.append(made)
        after = len(self.leader.said)
        await made.start()
        await self.leader.next(wire.Hello, node=node, after=after)
        return made

    def script(self, text: str) -> str:
        """A training script."""
        path = self.folder / "train.py"
        path.write_text(text, encoding="utf-8")
        return str(path)

    def output(self, generation: int, rank: int, node: str = "n0") -> str:
        """What a rank has printed."""
        path = self.folder / node / "jobs" / "toy" / f"g{generation}" / f"rank{rank}.out"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    async def up(self, generation: int, ranks: int = 2) -> None:
        """Wait until all ranks have said that they are up."""
        await until(lambda: all("up" in self.output(generation, rank) for rank in range(ranks)))


def pids_of(agent: AgentProcess, generation: int) -> list[int]:
    """Pids that the agent's log names for a generation."""
    for line in agent.log().splitlines():
        if f"generation={generation} " in line and "pids=[" in line and "started" in line:
            return [int(pid) for pid in line.split("pids=[")[1].rstrip("]").split(",")]
    return []
