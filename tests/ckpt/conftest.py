"""Real parts for checkpoint tests: writer processes, a committing agent's half, and ranks in forked processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from regrow.ckpt import catalog
from regrow.ckpt.client import WriterControl
from regrow.ckpt.commit import Collected, Collector, write_record
from regrow.ckpt.retention import Retention, prune
from regrow.ids import MeshShape
from regrow.wire import GenerationSpec, RestorePoint, ShardsDurable, ShardsFailed

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "support"))  # ckpt_small, ckpt_synthetic: --import-mode=importlib finds no siblings
DEADLINE_SECONDS = 90.0


class WriterProcess:
    """A `regrow.ckpt.writer` of its own."""

    def __init__(self, folder: Path, name: str, faults: str = "", lifeline: int | None = None) -> None:
        self.socket = str(folder / f"{name}.sock")
        self.state = folder / name
        self.faults = faults
        self._lifeline = lifeline
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "REGROW_CKPT_FAULTS": self.faults}
        passed = () if self._lifeline is None else (self._lifeline,)
        if self._lifeline is not None:
            environment["REGROW_LIFELINE"] = str(self._lifeline)
        Path(self.socket).unlink(missing_ok=True)
        command = [sys.executable, "-m", "regrow.ckpt.writer", "--socket", self.socket, "--state", str(self.state)]
        with open(f"{self.socket}.log", "ab") as log:
            self.process = subprocess.Popen(command, env=environment, stderr=log, pass_fds=passed)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not Path(self.socket).exists():
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(20)
        return self.process.returncode


class Committer:
    """The committing agent's half: hears all writers, collects, writes records."""

    def __init__(self, spec: GenerationSpec, keep: int = 0) -> None:
        """With `keep`, older checkpoints go after each commit and their files are recycled."""
        self.collector = Collector(spec)
        self._keep = keep
        self._generation = spec.generation
        self.outcomes: defaultdict[str, asyncio.Queue[Collected]] = defaultdict(asyncio.Queue)
        self.messages: list[ShardsDurable | ShardsFailed] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._controls: list[WriterControl] = []

    async def connect(self, writers: list[WriterProcess]) -> None:
        for writer in writers:
            control = await WriterControl.connect(writer.socket, "n")
            self._controls.append(control)
            self._tasks.append(asyncio.create_task(self._follow(control)))

    async def _follow(self, control: WriterControl) -> None:
        async for message in control.messages():
            if isinstance(message, ShardsDurable | ShardsFailed):
                self.messages.append(message)
                outcome = self.collector.add(message)
                if outcome.pending is not None:
                    await asyncio.to_thread(write_record, outcome.pending, written_at=time.time())
                    if self._keep:
                        folder = Path(outcome.pending.directory).parent
                        policy = Retention(keep_last=self._keep)
                        await asyncio.to_thread(prune, folder, policy, generation=self._generation, recycle=True)
                await control.acknowledge(message)
                self.outcomes[outcome.kind].put_nowait(outcome)

    async def until(self, kind: str) -> Collected:
        return await asyncio.wait_for(self.outcomes[kind].get(), DEADLINE_SECONDS)

    async def close(self) -> None:
        for control in self._controls:
            await control.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Ranks:
    """The process that forks ranks (tests/ckpt/mesh_run.py)."""

    def __init__(self, folder: Path, writers: list[WriterProcess]) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self._writers = writers
        self._process: asyncio.subprocess.Process | None = None
        self.generation = 0

    async def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, str(HERE / "mesh_run.py"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    async def phase(
        self, mesh: str, *, restore: RestorePoint | None = None, committer: Committer | None = None, **more: Any
    ) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        phase = {
            "mesh": mesh,
            "generation": self.generation,
            "folder": str(self.checkpoints),
            "writers": [writer.socket for writer in self._writers],
            "store": str(self.folder / f"store-{self.generation}"),
            "seed": 100 + self.generation,
            "reference_seed": 101,
            "restore": json.loads(json.dumps({f: getattr(restore, f) for f in restore.__struct_fields__})) if restore else None,
            **more,
        }
        self._process.stdin.write(json.dumps(phase).encode() + b"\n")
        async with asyncio.timeout(DEADLINE_SECONDS):
            line = await self._process.stdout.readline()
        return json.loads(line)

    def next_spec(self, mesh: str, restore: RestorePoint | None = None) -> GenerationSpec:
        self.generation += 1
        shape = MeshShape.parse(mesh)
        return GenerationSpec(
            job="mesh", epoch=1, generation=self.generation, mesh=shape, world_size=shape.world_size, nodes=("n0", "n1"), restore=restore
        )

    def newest(self) -> catalog.CatalogEntry:
        entry = catalog.newest_restorable(self.checkpoints)
        assert entry is not None
        return entry

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a short name: Unix socket paths end at 108 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="rgc"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest_asyncio.fixture
async def writers(short_path: Path) -> AsyncIterator[list[WriterProcess]]:
    """Two nodes' writers."""
    made = [WriterProcess(short_path, f"w{number}") for number in range(2)]
    for writer in made:
        await asyncio.to_thread(writer.start)
    yield made
    for writer in made:
        assert writer.kill(signal.SIGTERM) == 0


@pytest_asyncio.fixture
async def make_writer(short_path: Path) -> AsyncIterator[Any]:
    """Makes writers with faults."""
    made: list[WriterProcess] = []

    async def make(faults: str = "", lifeline: int | None = None) -> WriterProcess:
        writer = WriterProcess(short_path, f"w{len(made)}", faults, lifeline)
        made.append(writer)
        await asyncio.to_thread(writer.start)
        return writer

    yield make
    for writer in made:
        writer.kill()


@pytest.fixture
def make_producer(tmp_path: Path) -> Iterator[Any]:
    """Makes torch-free producers, on two ranks of one node unless told otherwise."""
    from ckpt_producer import Producer

    made: list[Any] = []

    def make(writer: WriterProcess, folder: Path = tmp_path, *, connect: bool = True, **options: Any) -> Any:
        producer = Producer(writer.socket, folder, **{"local_ranks": (0, 1), **options})
        made.append(producer)
        if connect:
            producer.connect()
        return producer

    yield make
    for producer in made:
        producer.sink.close()


@pytest_asyncio.fixture
async def ranks(short_path: Path, writers: list[WriterProcess]) -> AsyncIterator[Ranks]:
    """Ranks on two nodes."""
    made = Ranks(short_path, writers)
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def make_committer() -> AsyncIterator[Any]:
    """Makes committing agents, one a generation."""
    made: list[Committer] = []

    async def make(spec: GenerationSpec, writers: list[WriterProcess], keep: int = 0) -> Committer:
        committer = Committer(spec, keep)
        await committer.connect(writers)
        made.append(committer)
        return committer

    yield make
    for committer in made:
        await committer.close()
