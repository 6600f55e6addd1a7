"""The training state through a real checkpoint writer: saved by the step loop, restored by the next generation."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.worker.conftest import FakeAgent, World, wait_for

from regrow import wire
from regrow.agent.worker import environment
from regrow.agent.worker.binding import BoundState, check_folder
from regrow.agent.worker.environment import Defaults
from regrow.ckpt import catalog
from regrow.ckpt.commit import Collector, write_record
from regrow.ckpt.protocol import Acknowledged, ControllerHello, ToController
from regrow.errors import ConfigurationError, OperationalError

OFTEN = 0.05
NEVER = 3000.0


class Writer:
    """A writer process, and the committing agent's half in a thread."""

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "w.sock")
        self._log = (folder / "writer.log").open("ab")
        command = [sys.executable, "-m", "regrow.ckpt.writer", "--socket", self.socket, "--state", str(folder / "w")]
        self.process = subprocess.Popen(command, stderr=self._log)
        wait_for(lambda: Path(self.socket).exists(), "the writer listens")
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._collectors: dict[int, Collector] = {}
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def commit(self, spec: wire.GenerationSpec) -> None:
        self._collectors[spec.generation] = Collector(spec)
        if not self._thread.is_alive():
            self._connection.connect(self.socket)
            self._connection.sendall(wire.encode(ControllerHello(node="a")))
            self._thread.start()

    def close(self) -> None:
        self._connection.close() if not self._thread.is_alive() else self._connection.shutdown(socket.SHUT_RDWR)
        self.process.terminate()
        self.process.wait(20)
        if self._thread.is_alive():
            self._thread.join(20)
        self._connection.close()
        self._log.close()

    def _follow(self) -> None:
        try:
            with self._connection.makefile("rb") as stream:
                for line in stream:
                    self._heard(wire.decode(line, ToController))
        except (BrokenPipeError, ConnectionResetError):
            return  # the writer was killed: before it heard our last word, or before we heard all of its own

    def _heard(self, message: Any) -> None:
        if not isinstance(message, wire.ShardsDurable | wire.ShardsFailed):
            return
        collected = self._collectors[message.generation].add(message)
        if collected.pending is not None:
            write_record(collected.pending, written_at=time.time())
        acknowledged = Acknowledged(job=message.job, generation=message.generation, step=message.step)
        self._connection.sendall(wire.encode(acknowledged))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(tmp_path)
    yield made
    made.close()


def start(world: World, writer: Writer, *, interval: float, generation: int = 1, **settings: Any) -> None:
    folder = world.folder / "ckpt"
    policy = wire.CheckpointPolicy(path=str(folder), min_interval_seconds=min(interval, 1.0), max_interval_seconds=max(interval, 1.0))
    if interval == NEVER:
        policy = wire.CheckpointPolicy(path=str(folder), min_interval_seconds=NEVER)
    env = {"REGROW_WRITER": writer.socket, "REGROW_CHECKPOINT": str(folder), **settings.pop("env", {})}
    world.start("drawn.py", generation=generation, env=env, policy=policy, commit=writer.commit, **settings)


def newest(world: World) -> wire.RestorePoint:
    entry = wait_for(lambda: catalog.newest_restorable(world.folder / "ckpt"), "a committed checkpoint")
    return entry.restore_point()


def test_every_rank_gets_its_own_streams_back(world: World, writer: Writer, agent: FakeAgent) -> None:
    """Case G05 on TP2 x PP2: each generator of each rank goes on as if nothing had happened; learning rates bit for bit.

    Ranks exchange words at most a second apart (five steps), so the save that is asked for after step 3 is at step 14 at the latest.
    """
    start(world, writer, interval=NEVER, mesh="dp=1,tp=2,pp=2", env={"STEPS": "16", "SAVE_AT": "3", "STEP_SECONDS": "0.2"})
    twin = world.wait()
    draws = [tuple(entry["draws"][index] for entry in result["log"]) for result in twin for index in range(4)]
    assert len(set(draws)) == 16, "no two streams are alike"
    entries = wait_for(
        lambda: [one for one in catalog.scan(world.folder / "ckpt") if one.state == "restorable" and one.step < 16], "a save before the end"
    )
    point = entries[0].restore_point()
    assert 3 < point.step < 16
    start(world, writer, interval=NEVER, generation=2, mesh="dp=1,tp=2,pp=2", restore=point, env={"STEPS": "16"})
    again = world.wait(generation=2)
    for before, after in zip(twin, again, strict=True):
        assert after["restored"] == point.step
        assert after["log"] == before["log"][point.step :]


def test_the_end_is_durable(world: World, writer: Writer) -> None:
    """The last step is saved whatever the interval says, and the loop ends when it is on storage."""
    start(world, writer, interval=NEVER, world_size=2, env={"STEPS": "5"})
    assert [result["stopped"] for result in world.wait()] == [False, False]
    assert newest(world).step == 5
    assert newest(world).samples == 60


def test_stop_order_saves_and_ends(world: World, writer: Writer, agent: FakeAgent) -> None:
    start(world, writer, interval=NEVER, world_size=3, env={"STEPS": "1000000"})
    wait_for(lambda: len(agent.steps(1)) >= 4, "steps")
    agent.send(1, stop_after_save=True)
    results = world.wait()
    assert {result["stopped"] for result in results} == {True}
    assert newest(world).step == results[0]["log"][-1]["step"] < 1_000_000


def test_damaged_checkpoint_ends_with_75(world: World, writer: Writer, agent: FakeAgent) -> None:
    """The agent hears which step and why; the code tells the launcher that it is not the program's fault."""
    start(world, writer, interval=NEVER, world_size=2, env={"STEPS": "3"})
    world.wait()
    point = newest(world)
    for shard in (world.folder / "ckpt" / point.directory).glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        for place in range(0, len(data), 64):
            data[place] ^= 1
        shard.write_bytes(data)
    gone = f"{writer.socket}.gone"  # the writer that saved it would lend the right bytes from its arenas
    start(world, writer, interval=NEVER, generation=2, world_size=2, restore=point, env={"STEPS": "6", "REGROW_WRITER": gone})
    assert 75 in world.codes()
    told = agent.of(wire.RestoreFailed)
    assert told
    assert told[0].step == 3
    assert "Damaged" in told[0].problem


GLOO = RuntimeError("[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6540")


def _from_gloo() -> Exception:
    """What a part of ours says when a collective below it broke."""
    error = OperationalError("the layout of the checkpoint was not told")
    error.__cause__ = GLOO
    return error


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (GLOO, False),
        (_from_gloo(), False),
        (RuntimeError("PytorchStreamReader: read error"), True),
        (OSError(5, "Input/output error"), True),
    ],
    ids=["collective", "cause", "content", "disk"],
)
def test_a_peer_that_dies_while_all_restore_says_nothing_of_the_checkpoint(error: Exception, refused: bool) -> None:
    """It would be set aside as damaged, and after a few such faults none were left."""
    told: list[Any] = []

    def send(message: Any, *, keep: bool) -> None:
        assert keep
        told.append(message)

    link = SimpleNamespace(send=send, drain=lambda _: None)
    spec = SimpleNamespace(restore=wire.RestorePoint(step=3, directory="d"), in_place=False, gasp=0)
    run = SimpleNamespace(environment=SimpleNamespace(supervised=True, generation=2, rank=0, spec=spec, world_size=2), supervised=True)

    def restore(_: wire.RestorePoint) -> int:
        raise error

    parts: list[Any] = [run, SimpleNamespace(phase=lambda _: None), link, SimpleNamespace(restore=restore)]
    state = BoundState(*parts)
    with pytest.raises(SystemExit if refused else type(error)):
        state.restore()
    assert [type(message) for message in told] == [wire.RestoreFailed] * refused


def test_a_full_disk_stops_a_job_that_begins_and_not_one_that_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that starts again while the folder cannot be written trains on; its saves fail and are counted."""
    begins = environment.read({"REGROW_CHECKPOINT": "/proc/regrow"}, Defaults())
    with pytest.raises(ConfigurationError, match="cannot be written"):
        check_folder(begins)
    for given in ({"restore": wire.RestorePoint(directory="step", step=2)}, {"in_place": True}, {"gasp": 3}):  # memory may have the state
        caplog.clear()
        check_folder(msgspec.structs.replace(begins, supervised=True, spec=msgspec.structs.replace(begins.spec, **given)))
        assert "training goes on, saves will fail: /proc/regrow: the checkpoint folder cannot be written" in caplog.text, given


def test_writer_that_dies_costs_a_save_not_a_step(world: World, writer: Writer, agent: FakeAgent) -> None:
    start(world, writer, interval=OFTEN, world_size=1, env={"STEPS": "400"})
    wait_for(lambda: len(agent.steps(0)) >= 3, "steps")
    writer.process.kill()
    writer.process.wait(20)
    code = world.codes()[0]
    assert agent.steps(0)[-1] == 400
    assert code == 1, "the end could not be made durable, and that is said"
    assert "did not become durable" in world.log(0)


def test_standalone_resumes_from_its_folder(world: World, tmp_path: Path) -> None:
    """`python drawn.py` twice: the second goes on where the first ended."""
    restored = []
    for steps in ("4", "9"):
        env = {"STEPS": steps, "FOLDER": str(tmp_path / "ckpt"), "OUTPUT": str(tmp_path / "out.json")}
        code = world.alone("drawn.py", env).wait()
        assert code == 0, (tmp_path / "alone.out").read_text()
        result = json.loads((tmp_path / "out.json").read_text())
        restored.append((result["restored"], result["log"][-1]["step"]))
    assert restored == [(0, 4), (4, 9)]
