"""What a worker leaves behind when it is killed: with a real writer process, whole or not at all."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tests.ckpt.conftest import WriterProcess

from regrow import wire
from regrow.agent.worker import bequest
from regrow.agent.worker.live import Held, LiveState
from regrow.ckpt.bequests import Bequests
from regrow.ckpt.channel import ServerChannel, WorkerChannel
from regrow.ckpt.protocol import Bequeath, Ready, Rejected
from regrow.ids import MeshShape

POINT = wire.RestorePoint(step=1, directory="/c/step-1", generation=1)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[WriterProcess]:
    process = WriterProcess(tmp_path, "w")
    process.start()
    yield process
    process.kill()


def place(writer: WriterProcess, generation: int, point: wire.RestorePoint | None = POINT, slot: int = 0, since: int = 1) -> bequest.Place:
    spec = wire.GenerationSpec(
        job="toy", epoch=1, generation=generation, mesh=MeshShape(dp=2), world_size=2, nodes=("n0",), restore=point, gasp=since
    )
    return bequest.Place(writer=writer.socket, slot=slot, spec=spec)


class Worker:
    """A model after its third step."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)
        self.live = LiveState(self.model, self.optimizer, None, None, able=True)
        self.model(torch.randn(16, 4)).square().mean().backward()
        self.optimizer.step()
        self.live.resting(3, 24)

    def held(self) -> Held:
        held = self.live.hold()
        assert held is not None
        return held


def test_the_successor_has_what_was_left(writer: WriterProcess) -> None:
    worker = Worker()
    held = worker.held()
    assert bequest.leave(held, place(writer, 1), lambda: worker.live.still(held))
    found = bequest.inherit(place(writer, 2))
    assert found is not None
    assert (found.step, found.samples, found.shard, found.groups, found.values) == (3, 24, held.shard, held.groups, held.values)
    assert (found.boxes, found.streams) == (held.boxes, held.streams)
    assert found.tensors.keys() == held.tensors.keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in held.tensors.items())
    assert bequest.inherit(place(writer, 2, slot=1)) is None, "of another place of the node"
    bequest.inherited(place(writer, 2))
    assert bequest.inherit(place(writer, 2)) is None


def test_a_state_that_is_written_to_while_it_is_copied_is_void(writer: WriterProcess) -> None:
    worker = Worker()
    held = worker.held()

    def still() -> bool:
        worker.model(torch.randn(16, 4))  # moves batch statistics
        return worker.live.still(held)

    assert not bequest.leave(held, place(writer, 1), still)
    assert bequest.inherit(place(writer, 2)) is None


def test_a_state_in_the_middle_of_an_update_is_void() -> None:
    worker = Worker()
    held = worker.held()
    worker.live.updating()
    assert not worker.live.still(held)


def test_memory_that_changed_since_it_was_left_is_not_taken(writer: WriterProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    fill: Callable[..., str] = vars(bequest)["_fill"]

    def flipped(memory: mmap.mmap, *args: object) -> str:
        digest = fill(memory, *args)
        memory[5] ^= 1
        return digest

    monkeypatch.setattr(bequest, "_fill", flipped)
    assert bequest.leave(Worker().held(), place(writer, 1), lambda: True)
    assert bequest.inherit(place(writer, 2)) is None


def test_a_worker_that_is_killed_while_it_copies_leaves_nothing_and_takes_nothing_away(writer: WriterProcess) -> None:
    worker = Worker()
    held = worker.held()
    assert bequest.leave(held, place(writer, 1), lambda: True)
    channel = WorkerChannel(writer.socket)
    channel.send(Bequeath(job="toy", generation=2, slot=0, num_bytes=1 << 20))
    channel.close()
    found = bequest.inherit(place(writer, 3))
    assert found is not None, "a restart that failed before its first step goes on from the same state"
    assert found.step == 3


@pytest.mark.parametrize(
    ("generation", "point"),
    [
        (1, POINT),  # its own generation again
        (2, wire.RestorePoint(step=2, directory="/other", generation=7)),  # another line of descent
        (2, wire.RestorePoint(step=4, directory="/c/step-4", generation=1)),  # the disk is newer
        (2, None),  # a fresh start was asked for
    ],
)
def test_what_does_not_continue_the_leaders_choice_is_not_taken(
    writer: WriterProcess, generation: int, point: wire.RestorePoint | None
) -> None:
    assert bequest.leave(Worker().held(), place(writer, 1), lambda: True)
    assert bequest.inherit(place(writer, generation, point)) is None
    assert bequest.inherit(place(writer, 3, since=2)) is None, "a generation in between went back on purpose"
    assert bequest.inherit(place(writer, 2)) is not None


@pytest.mark.parametrize(("spare", "answer"), [(149, Rejected), (150, Ready)])
async def test_memory_that_the_node_cannot_spare_is_refused(spare: int, answer: type[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.ckpt.bequests.spare_memory", lambda: spare)
    channel, bequests = Mock(spec=ServerChannel), Bequests()
    await bequests.hear(channel, Bequeath(job="toy", generation=1, slot=0, num_bytes=100))
    (call,) = channel.send.call_args_list
    assert type(call.args[0]) is answer
    bequests.close()


async def test_memory_of_a_worker_that_did_not_come_to_its_end_is_given_back() -> None:
    channel, bequests = Mock(spec=ServerChannel), Bequests()
    await bequests.hear(channel, Bequeath(job="toy", generation=1, slot=0, num_bytes=100))
    _, (handle,) = channel.send.call_args.args
    assert os.fstat(handle).st_size
    bequests.gone(channel)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_without_a_writer_nothing_is_left_and_nobody_fails(tmp_path: Path) -> None:
    spec = wire.GenerationSpec(job="toy", epoch=1, generation=1, mesh=MeshShape(), world_size=1, nodes=("n0",))
    nowhere = bequest.Place(writer=str(tmp_path / "none.sock"), slot=0, spec=spec)
    assert not bequest.leave(Worker().held(), nowhere, lambda: True)
    assert bequest.inherit(nowhere) is None
    bequest.inherited(nowhere)


BUSY = """
import os, threading
from regrow.agent.worker import environment, gasp, gloo
told = []
gasp.begin(environment.read(), lambda *said: told.append(said))
gasp.hold_by(lambda: told.append(threading.current_thread() is threading.main_thread()), lambda _: False)
asks = threading.Thread(target=gasp.ask_main, args=(gloo.Waiters(),))
asks.start()
while not gasp.is_done():
    pass  # user code that is in no collective
print(told, flush=True)
os._exit(0)
"""


def test_the_main_thread_does_it_between_two_lines_of_whatever_it_is_doing() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[True, ('gasped', 0.0, -1)]"
