"""A leader for tests: accepts agents, keeps what they say, gives orders. The real protocol, no decisions."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tests.agent.harness import LIMIT

from regrow import wire
from regrow.ids import MeshShape
from regrow.processes import MARK
from regrow.store.base import Store

T = TypeVar("T")


class StubLeader:
    """One term of a leader."""

    def __init__(self, store: Store, cluster: str, epoch: int = 1) -> None:
        self.store = store
        self.cluster = cluster
        self.epoch = epoch
        self.said: list[tuple[str, Any]] = []
        self.accept = True
        self.beat_seconds = 0.1
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._changed = asyncio.Condition()
        self._seq = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Listen and say so in the store."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        record = wire.LeaderRecord(supervisor="s0", epoch=self.epoch, beat_address=f"127.0.0.1:{port}", http_address="127.0.0.1:1")
        await self.store.put(f"/regrow/{self.cluster}/leader", msgspec.json.encode(record))

    async def stop(self) -> None:
        """Close the port and all connections."""
        assert self._server is not None
        self._server.close()
        self.drop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop(self) -> None:
        """Close all connections."""
        for writer in self._writers.values():
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        node = ""
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                message = wire.decode(line, wire.FromAgent)
                if isinstance(message, wire.Hello):
                    node = message.node
                    if not self.accept:
                        writer.write(wire.encode(wire.Refused(reason="name is taken", retry=False)))
                        await self._note(node, message)
                        return
                    self._writers[node] = writer
                    writer.write(wire.encode(wire.Welcome(epoch=self.epoch, leader="s0", beat_seconds=self.beat_seconds)))
                await self._note(node, message)
        except OSError:
            pass
        finally:
            writer.close()
        await self._note(node, None)

    async def _note(self, node: str, message: Any) -> None:
        async with self._changed:
            self.said.append((node, message))
            self._changed.notify_all()

    async def next(self, kind: type[T], match: Callable[[T], bool] = lambda _: True, *, node: str = "n0", after: int = 0) -> T:
        """The first message of a kind that matches, among those after position `after`."""
        async with asyncio.timeout(LIMIT), self._changed:
            while True:
                for name, message in self.said[after:]:
                    if name == node and isinstance(message, kind) and match(message):
                        return message
                await self._changed.wait()

    def all(self, kind: type[T], node: str = "n0") -> list[T]:
        """Every message of a kind."""
        return [message for name, message in self.said if name == node and isinstance(message, kind)]

    async def phase(self, generation: int, phase: str, *, node: str = "n0", after: int = 0) -> wire.GenerationPhase:
        """Wait for a phase of a generation."""
        return await self.next(
            wire.GenerationPhase, lambda said: (said.generation, said.phase) == (generation, phase), node=node, after=after
        )

    def order(self, message: Any, node: str = "n0") -> None:
        """Send an order."""
        self._writers[node].write(wire.encode(message))

    def start_generation(
        self, generation: int, script: str, *, ranks: int = 2, node: str = "n0", epoch: int = 0, master: str = "127.0.0.1:1", **job: Any
    ) -> wire.StartGeneration:
        """Order a generation of job `toy` whose only member is `node`."""
        epoch = epoch or self.epoch
        spec = wire.GenerationSpec(
            job="toy", epoch=epoch, generation=generation, mesh=MeshShape(dp=ranks), world_size=ranks, nodes=(node,),
            committing_node=job.pop("committing_node", ""),
        )  # fmt: skip
        message = wire.StartGeneration(
            epoch=epoch,
            seq=next(self._seq),
            spec=spec,
            job_spec=wire.JobSpec(job="toy", argv=(script,), nproc_per_node=ranks, **job),
            workers=tuple(wire.WorkerAssignment(rank=rank, local_rank=rank) for rank in range(ranks)),
            group_rank=0,
            master_address=master,
        )
        self.order(message, node)
        return message

    def stop_generation(self, generation: int, *, grace: float = 0.0, epoch: int = 0, node: str = "n0") -> None:
        """Order the end of a generation."""
        order = wire.StopGeneration(epoch=epoch or self.epoch, seq=next(self._seq), job="toy", generation=generation, grace_seconds=grace)
        self.order(order, node)


class AgentProcess:
    """`regrow agent` as a child process."""

    def __init__(self, state: Path, store_url: str, cluster: str, *flags: str, node: str = "n0") -> None:
        self.state = state
        self.node = node
        self.command = [sys.executable, "-m", "regrow", "agent", "--node", node, "--cluster", cluster, "--store", store_url]
        self.command += ["--state", str(state), "--no-warm", "--slots", "2", "--orphan-seconds", "20", "--health-seconds", "0", *flags]
        self.process: asyncio.subprocess.Process | None = None
        self.pass_fds: tuple[int, ...] = ()

    async def start(self) -> None:
        """Start it."""
        environment = {**os.environ, MARK: str(self.state), "PYTHONUNBUFFERED": "1"}
        self.state.mkdir(exist_ok=True)
        with (self.state.parent / f"{self.state.name}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command, env=environment, stdout=log, stderr=log, pass_fds=self.pass_fds
            )

    @property
    def pid(self) -> int:
        """Pid of the agent."""
        assert self.process is not None
        return self.process.pid

    async def wait(self) -> int:
        """Exit code."""
        assert self.process is not None
        async with asyncio.timeout(LIMIT):
            return await self.process.wait()

    async def kill(self) -> None:
        """SIGKILL, and reap."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    def log(self) -> str:
        """What it has logged."""
        return (self.state.parent / f"{self.state.name}.log").read_text(encoding="utf-8")

    async def admin(self, **request: Any) -> dict[str, Any]:
        """One line on S/agent.sock, one line back."""
        reader, writer = await asyncio.open_unix_connection(str(self.state / "agent.sock"))
        writer.write(msgspec.json.encode({"type": "inject", **request}) + b"\n")
        answer = msgspec.json.decode(await reader.readline())
        writer.close()
        return answer


def fresh_cluster() -> str:
    """A cluster name of one's own in a shared store."""
    return f"c{uuid.uuid4().hex[:8]}"
