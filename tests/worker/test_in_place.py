"""What survivors hold in memory, and what frees a process that is blocked in a collective."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.worker.conftest import World
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from regrow import wire
from regrow.agent.worker import groups, regroup
from regrow.agent.worker.live import LiveState, Offer, choose
from regrow.agent.worker.unseen import Marks
from regrow.ckpt.exchange import alone
from regrow.ids import MeshShape

SPEC = wire.GenerationSpec(job="toy", epoch=1, generation=2, mesh=MeshShape(), world_size=1, nodes=("n0",), in_place=True)


def offer(step: int, has: str = "a", needs: str = "a", **changes: Any) -> Offer:
    """What a rank says."""
    return Offer(step=step, samples=step * 8, has=has, needs=needs, **changes)


@pytest.mark.parametrize(
    ("offers", "oldest", "step", "givers"),
    [
        ([offer(5), offer(5)], 3, 5, {}),
        ([offer(5), Offer(needs="a"), offer(5)], 3, 5, {1: 0}),  # a replaced replica gets it from a peer
        ([offer(6), offer(5)], 3, 6, {1: 0}),  # some had applied the last step, some had not
        ([offer(6, "a", "a"), offer(5, "b", "b"), offer(5, "a", "a")], 3, 5, {0: 2}),  # the newest that is whole
        ([offer(5, "a", "b"), offer(5, "b", "a")], 3, 5, {0: 1, 1: 0}),  # ranks moved
    ],
)
def test_the_newest_step_that_is_whole(offers: list[Offer], oldest: int, step: int, givers: dict[int, int]) -> None:
    source = choose(offers, oldest)
    assert source is not None
    assert (source.step, source.samples, source.givers) == (step, step * 8, givers)


@pytest.mark.parametrize(
    ("offers", "oldest"),
    [
        ([Offer(needs="a"), offer(5, "b", "b")], 3),  # a shard died with its only holder
        ([offer(6, "a", "a"), offer(5, "b", "b")], 3),  # no step at which both are there
        ([offer(5), offer(5)], 6),  # the disk is newer
        ([offer(5), offer(5, able=False)], 3),  # a loader with a state of its own
        ([Offer(needs="a"), Offer(needs="a")], 0),  # nobody holds anything
    ],
)
def test_otherwise_the_disk(offers: list[Offer], oldest: int) -> None:
    assert choose(offers, oldest) is None


class Training:
    """A model with batch statistics, its optimizer, schedule and live state."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.live = LiveState(self.model, self.optimizer, self.schedule, None, able=True)

    def backward(self) -> None:
        """The first half of a step; it moves the batch statistics."""
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 4)).square().mean().backward()

    def step(self, number: int) -> None:
        """A whole step with its boundary."""
        self.backward()
        self.live.updating()
        self.optimizer.step()
        self.schedule.step()
        self.live.resting(number, number * 16)

    def values(self) -> dict[str, torch.Tensor]:
        """Everything that trains."""
        state = {f"{index}.{key}": value for index, entry in enumerate(self.optimizer.state.values()) for key, value in entry.items()}
        return {**self.model.state_dict(), **state}


def test_a_state_at_rest_goes_over_whole() -> None:
    old = Training(1)
    old.step(1)
    old.step(2)
    draw = torch.get_rng_state()
    torch.rand(3)  # the broken step had drawn
    held = old.live.hold()
    assert held is not None
    new = Training(2)
    source = new.live.take_up(held, SPEC, 0, alone, None)
    assert source is not None
    assert (source.step, source.samples) == (2, 32)
    expected, found = old.values(), new.values()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert new.schedule.last_epoch == 2
    assert new.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert torch.equal(torch.get_rng_state(), draw), "the streams of the completed step"


def test_what_is_held_does_not_hold_the_model() -> None:
    """What hangs on parameters leads to the model and its process groups: those would live, threads and sockets, for two generations."""
    old = Training(1)
    old.step(1)
    first: Any = next(old.model.parameters())
    first.whose = old.model
    gone, held = weakref.ref(old.model), old.live.hold()
    assert held is not None
    del old, first
    gc.collect()
    assert gone() is None
    assert held.tensors["model.0.weight"].shape == (8, 4)


def _on_a_part_of_a_mesh(groups_before: int) -> list[int]:
    """The shape of a product that DTensor gathers over one axis of a mesh, whose groups are named by how many came before them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        for _ in range(groups_before):
            dist.new_group([0, 1])
        axis = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
        rows = DTensor.from_local(torch.ones(2, 4), axis, [Shard(0)])
        product: Any = DTensor.from_local(torch.ones(4, 4), axis, [Replicate()]) @ rows.t()
        return list(product.full_tensor().shape)
    finally:
        dist.destroy_process_group()


def test_a_process_that_moves_in_the_mesh_forgets_the_groups_of_the_one_before() -> None:
    """Grown back from six ranks to eight, survivors met their first mesh again in another place: torch took it for the old one."""
    assert _on_a_part_of_a_mesh(3) == [4, 4]
    with pytest.raises(RuntimeError, match="Could not resolve the process group"):
        _on_a_part_of_a_mesh(0)
    groups.forget_meshes()
    assert _on_a_part_of_a_mesh(0) == [4, 4]


def _half_an_update(training: Training) -> None:
    training.model.eval()  # no batch statistics move
    training.backward()
    training.live.updating()


def _unannounced(training: Training) -> None:
    with torch.no_grad():
        training.model[0].weight.add_(1.0)


def _uncounted(training: Training) -> None:
    training.model[1].running_mean.data.add_(1.0)  # a forward pass that moves a codebook does so


def _uncounted_parameter(training: Training) -> None:
    training.model[0].weight.detach().numpy()[...] *= 0.5


@pytest.mark.parametrize(
    "harm",
    [Training.backward, _half_an_update, _unannounced, _uncounted, _uncounted_parameter],
    ids=["statistics", "update", "write", "data", "numpy"],
)
def test_a_torn_state_is_not_held(harm: Any) -> None:
    training = Training(1)
    assert training.live.hold() is None, "no step is complete"
    training.step(1)
    training.model.eval()
    assert training.live.hold() is not None
    training.model.train()
    harm(training)
    assert training.live.hold() is None


_IMAGES = torch.zeros(8, 3, 3, 3).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (torch.zeros(()), True),
        (torch.zeros(40_000, dtype=torch.bfloat16), True),
        (torch.nn.Parameter(torch.zeros(400, 100)), True),
        (torch.nn.Parameter(_IMAGES), True),
        (torch.zeros(4, 4)[:, :2], False),  # others' elements lie between its own
        (torch.zeros(0), False),
    ],
    ids=["scalar", "buffer", "parameter", "channels last", "columns", "empty"],
)
def test_an_uncounted_write_to_a_whole_tensor_is_seen(value: torch.Tensor, seen: bool) -> None:
    marks = Marks([value])
    before, versions = marks.take(), value._version
    assert marks.take() == before
    value.data.add_(1)
    assert value._version == versions
    assert (marks.take() != before) == seen


def test_blocked_collectives_are_freed_and_other_connections_live(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("scripts") / "blocked.py")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    peer = subprocess.Popen([*command, "1", str(port)], stdin=subprocess.PIPE, env=env, cwd=tmp_path)
    try:
        done = subprocess.run([*command, "0", str(port)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    finally:
        peer.kill()
        peer.communicate()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["broken"] >= 1
    assert found["lost_peer"], found["error"]
    assert found["heard"] == ["there", "there", "value"]


@pytest.mark.parametrize(
    ("asked", "gpu", "possible"),
    [("auto", False, True), ("auto", True, False), ("1", True, True), ("1", False, True), ("", False, False)],
)
def test_on_cpus_unless_it_is_switched_off_with_gpus_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, gpu: bool, possible: bool
) -> None:
    monkeypatch.setattr(regroup, "_inside", False)
    monkeypatch.setattr(regroup, "uses_gpu", lambda: gpu)
    monkeypatch.setenv("REGROW_SOCKET", "/nobody")
    monkeypatch.setenv("REGROW_IN_PLACE", asked)
    assert regroup.in_place(regroup.possible) == possible
    gc.unfreeze()


def test_a_wrapped_loss_of_a_peer_is_one_and_a_plain_error_is_none() -> None:
    outer = RuntimeError("[Stage 0] failed to run forward")
    outer.__cause__ = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert regroup.lost_peer(outer)
    assert not regroup.lost_peer(ValueError("connection"))
    assert not regroup.lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize(
    ("text", "supervised", "inside", "told"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer", True, False, True),
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer", True, True, False),
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer", False, False, False),
        ("could not restore from the store", True, False, False),
    ],
    ids=["victim", "changed over", "alone", "error"],
)
def test_a_victim_tells_and_waits_to_be_killed(
    monkeypatch: pytest.MonkeyPatch, text: str, supervised: bool, inside: bool, told: bool
) -> None:
    monkeypatch.setattr(regroup, "_inside", inside)
    sent: list[Any] = []
    link: Any = SimpleNamespace(send=sent.append, drain=lambda _: True)
    environment: Any = SimpleNamespace(supervised=supervised, generation=2, rank=1)
    began = time.monotonic()
    regroup.await_the_end(RuntimeError(text), environment, link)
    assert (time.monotonic() - began >= 0.3) == told
    assert sent == [wire.WorkerPhase(generation=2, rank=1, phase=wire.LOST_PEER_PHASE)] * told


def test_a_thread_that_gloo_forgets_is_freed(tmp_path: Path) -> None:
    """A send that waits in the queue of its pair is not told when the connection ends: gloo alone would let it wait for the
    group's time-out."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("scripts") / "forgotten.py")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    peer = subprocess.Popen([*command, "1", str(port)], env=env, cwd=tmp_path)
    try:
        done = subprocess.run([*command, "0", str(port)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    finally:
        peer.kill()
        peer.wait()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["broken"] >= 1
    assert not found["by_gloo"], "gloo has learnt to free it: Waiters is not needed any more"
    assert found["freed"] == 1
    assert found["lost_peer"], "the script takes it for the loss of a peer"


def test_a_state_goes_over_to_another_mesh(world: World) -> None:
    """Shards by rows with a replica each, one holder dead, become shards by columns: to the bit, from memory."""
    found = world.start("reshaped.py", world_size=4).wait()
    assert [one["step"] for one in found] == [1] * 4
    assert all(one["names"] == 12 and one["different"] == [] for one in found), found
    assert all((one["samples"], one["rate"], one["epoch"]) == (12, 0.05, 1) for one in found)
    assert len({one["draw"] for one in found}) == 4, "streams of their own"


def test_a_part_that_nobody_holds_means_the_disk(world: World) -> None:
    found = world.start("reshaped.py", world_size=4, env={"LOST": "pair"}).wait()
    assert [one["step"] for one in found] == [None] * 4
