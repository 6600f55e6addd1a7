"""Real ranks on gloo: processes that run a small script, a TCPStore of their own, and an agent that is a Unix socket."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from regrow import wire
from regrow.ids import MeshShape
from regrow.parallel.batch import split

LIMIT = 90.0
"""The one generous deadline of a wait, seconds."""

SCRIPTS = Path(__file__).parent / "scripts"


def wait_for(condition: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
    end = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {limit} s: {what}"
        time.sleep(0.01)
    return value


class FakeAgent:
    """Listens where an agent would, keeps every line of every rank, sends orders. Can die and come back."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lines: list[Any] = []
        self._connections: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        Path(self.path).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Close everything, as a killed agent does."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        with self._lock:
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join(10)
        self._threads.clear()

    def send(self, rank: int, **order: Any) -> None:
        wait_for(lambda: rank in self._connections, f"rank {rank} connects")
        self._connections[rank].sendall(wire.encode(wire.Control(**order)))

    def of(self, kind: type, rank: int | None = None) -> list[Any]:
        with self._lock:
            return [line for line in self.lines if isinstance(line, kind) and rank in (None, line.rank)]

    def steps(self, rank: int) -> list[int]:
        return [line.step for line in self.of(wire.StepReport, rank)]

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._spawn(self._read, connection)

    def _read(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            for data in stream:
                message = wire.decode(data, wire.FromWorker)
                with self._lock:
                    self.lines.append(message)
                    if isinstance(message, wire.WorkerHello):
                        self._connections[message.rank] = connection


class Rank:
    """A forked rank; the same few calls as subprocess.Popen."""

    def __init__(self, pid: int, zygote: Zygote) -> None:
        self.pid = pid
        self._zygote = zygote

    def poll(self) -> int | None:
        return self._zygote.ended.get(self.pid)

    def wait(self, limit: float = LIMIT) -> int:
        wait_for(lambda: self.pid in self._zygote.ended, f"rank of pid {self.pid} ends", limit)
        return self._zygote.ended[self.pid]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The process that ranks are forked from, for the whole session."""

    def __init__(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )
        self.ended: dict[int, int] = {}
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self._answers.get(timeout=LIMIT)

    def fork(self, **request: Any) -> Rank:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return Rank(self._answers.get(timeout=LIMIT)["pid"], self)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._thread.join(20)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "code" in message:
                self.ended[message["pid"]] = message["code"]
            else:
                self._answers.put(message)


class World:
    """A generation of ranks that run one script of tests/worker/scripts. `wait` gives what each wrote as JSON."""

    def __init__(self, folder: Path, agent: FakeAgent, zygote: Zygote) -> None:
        self.folder = folder
        self.agent = agent
        self._zygote = zygote
        self.processes: list[Rank] = []
        self._store: Any = None

    def start(
        self,
        script: str,
        *,
        mesh: str = "",
        world_size: int = 1,
        generation: int = 1,
        env: dict[str, str] | None = None,
        restore: wire.RestorePoint | None = None,
        policy: wire.CheckpointPolicy | None = None,
        batch: tuple[int, int] = (12, 2),
        supervised: bool = True,
        commit: Callable[[wire.GenerationSpec], None] | None = None,
    ) -> World:
        import torch.distributed as dist

        shape = MeshShape.parse(mesh) if mesh else MeshShape(dp=world_size)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if shape.world_size > 1 else None
        folder = self.folder / f"g{generation}"
        folder.mkdir(exist_ok=True)
        spec = wire.GenerationSpec(
            job="toy",
            epoch=1,
            generation=generation,
            mesh=shape,
            world_size=shape.world_size,
            nodes=("a",),
            global_batch=batch[0],
            micro_batch=batch[1],
            micro_batches=split(*batch, shape.dp),
            restore=restore,
        )
        job = wire.JobSpec(job="toy", argv=(script,), seed=11, checkpoint=policy or wire.CheckpointPolicy(path=str(self.folder / "ckpt")))
        (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
        (folder / "job.json").write_bytes(msgspec.json.encode(job))
        if commit is not None:
            commit(spec)
        self.processes = [
            self._spawn(script, folder, rank, spec, supervised=supervised, extra=env or {}) for rank in range(shape.world_size)
        ]
        return self

    def _spawn(self, script: str, folder: Path, rank: int, spec: wire.GenerationSpec, *, supervised: bool, extra: dict[str, str]) -> Rank:
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("REGROW_", "TORCHELASTIC_"))},
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(spec.world_size),
            "LOCAL_WORLD_SIZE": str(spec.world_size),
            "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{rank}.json"),
            "OUTPUT": str(folder / f"output-{rank}.json"),
        }
        if self._store is not None:
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        if supervised:
            env |= {
                "REGROW_JOB": "toy",
                "REGROW_NODE": "a",
                "REGROW_GENERATION": str(spec.generation),
                "REGROW_SOCKET": self.agent.path,
                "REGROW_PROGRESS": f"{folder / 'progress'}:{rank}",
                "REGROW_SPEC": str(folder / "spec.json"),
                "REGROW_JOB_SPEC": str(folder / "job.json"),
            }
        return self._zygote.fork(script=str(SCRIPTS / script), env=env | extra, cwd=str(folder), log=str(folder / f"rank{rank}.out"))

    def alone(self, script: str, env: dict[str, str]) -> Rank:
        """A process without agent and launcher, as `python script` makes one."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("REGROW_", "RANK", "WORLD_SIZE", "MASTER_"))}
        rank = self._zygote.fork(
            script=str(SCRIPTS / script),
            env=clean | {"OMP_NUM_THREADS": "1"} | env,
            cwd=str(self.folder),
            log=str(self.folder / "alone.out"),
        )
        self.processes.append(rank)
        return rank

    def codes(self, limit: float = LIMIT) -> list[int]:
        """Exit codes, all within one deadline."""
        end = time.monotonic() + limit
        return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]

    def wait(self, *, generation: int = 1) -> list[Any]:
        """All ranks end with 0; what they wrote, by rank."""
        codes = self.codes()
        assert set(codes) == {0}, "\n".join(f"rank {rank} code {code}: {self.log(rank, generation)}" for rank, code in enumerate(codes))
        return [json.loads((self.folder / f"g{generation}" / f"output-{rank}.json").read_text()) for rank in range(len(codes))]

    def log(self, rank: int, generation: int = 1) -> str:
        return (self.folder / f"g{generation}" / f"rank{rank}.out").read_text()

    def close(self) -> None:
        self._tell()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(20)
        self._store = None

    def _tell(self) -> None:
        """What became of the ranks, for the report of a test that failed: their logs, and the stacks of those that live."""
        living = [process for process in self.processes if process.poll() is None]
        for process in living:
            stack = Path(f"/proc/{process.pid}/wchan")
            sys.stdout.write(f"pid {process.pid} lives, waits in {stack.read_text() if stack.exists() else '?'}\n")
        for path in sorted(self.folder.glob("g*/rank*.out")):
            sys.stdout.write(f"--- {path.parent.name}/{path.name}\n{path.read_text(errors='replace')[-1500:]}\n")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    fake = FakeAgent(str(tmp_path / "a.sock"))
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def world(tmp_path: Path, agent: FakeAgent, zygote: Zygote) -> Iterator[World]:
    made = World(tmp_path, agent, zygote)
    yield made
    made.close()
