"""Saving and restoring in one process: everything that training depends on, bit for bit, in every phase of a schedule."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_small import Small
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from regrow.ckpt import catalog
from regrow.ckpt.assemble import Checkpoint, export
from regrow.ckpt.dcp_reader import RegrowReader
from regrow.ckpt.manifest import DamagedCheckpointError
from regrow.errors import ConfigurationError, OperationalError


def newest(folder: Path) -> catalog.CatalogEntry:
    entry = catalog.newest_restorable(folder)
    assert entry is not None
    return entry


@pytest.mark.parametrize("at", [1, 3, 5, 11])
def test_resumed_run_is_the_twin(tmp_path, at):
    """G03: resume at step 1, mid warm-up, at the boundary, in decay; losses, rates, random draws and state equal the twin's."""
    twin = Small(tmp_path / "twin")
    twin.train(14)
    first = Small(tmp_path / "run")
    first.train(at)
    first.save(at)
    again = Small(tmp_path / "run", 2, newest(tmp_path / "run").restore_point(), seed=99)
    assert again.state.restore() == at
    assert again.state.samples == at * 4
    again.train(14 - at)
    assert again.trace == twin.trace[at:]
    for name, value in twin.tensors().items():
        assert torch.equal(value, again.tensors()[name]), name
    assert again.scheduler.state_dict() == twin.scheduler.state_dict()


@pytest.mark.parametrize("forgotten", ["optimizer", "scheduler", "random"])
def test_twin_check_can_fail(tmp_path, forgotten):
    """Negative controls of the test above."""
    twin = Small(tmp_path / "twin")
    twin.train(8)
    first = Small(tmp_path / "run")
    first.train(4)
    first.save(4)
    again = Small(tmp_path / "run", 2, newest(tmp_path / "run").restore_point(), seed=99, check_first_step=False)
    before = {name: value.clone() for name, value in again.tensors().items()}
    fresh = again.scheduler.state_dict()
    again.state.restore()
    if forgotten == "optimizer":
        del before
        for parameter in again.model.parameters():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                if key in again.optimizer.state[parameter]:
                    again.optimizer.state[parameter][key].zero_()
    elif forgotten == "scheduler":
        again.scheduler.load_state_dict(fresh)
    else:
        torch.manual_seed(5)
    again.train(4)
    assert again.trace != twin.trace[4:]


def test_everything_else_that_is_state(tmp_path):
    """Frozen and 0-d and empty and non-contiguous tensors, several types, shared weights, averaged weights, plain objects."""

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(4, 6)
            self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
            self.tied = torch.nn.Linear(4, 6, bias=False)
            self.tied.weight = self.a.weight
            self.register_buffer("zero_dim", torch.tensor(3.5))
            self.register_buffer("empty", torch.zeros(0, 4))
            self.register_buffer("slanted", torch.randn(5, 7).t())
            self.register_buffer("brain", torch.randn(3).bfloat16())
            self.register_buffer("eight", torch.tensor([1, 2, 3], dtype=torch.int8))
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("hidden", torch.ones(2), persistent=False)
            self.counter = {"calls": 0}

        def get_extra_state(self):
            return self.counter

        def set_extra_state(self, state):
            self.counter = state

    class Position:
        def __init__(self) -> None:
            self.state = {"epoch": 2, ("odd", 1): [1.5, float("inf")], "blob": b"\0\xff", "big": 1 << 80, "when": {3, 1}}

        def state_dict(self):
            return dict(self.state)

        def load_state_dict(self, state):
            self.state = state

    def make():
        model = Odd()
        average = torch.optim.swa_utils.AveragedModel(model)
        position, scaler = Position(), Position()
        generator = torch.Generator()
        return model, {"extra": {"ema": average, "scaler": scaler}, "data": position, "generators": {"mask": generator}}, generator

    model, more, generator = make()
    generator.manual_seed(7)
    model.counter = {"calls": 3}
    more["data"].state["epoch"] = 5
    more["extra"]["ema"].module.a.weight.data.add_(1)
    run = Small(tmp_path, model=model, optimizer=None, scheduler=None, **more)
    run.save(1)
    expected = torch.rand(3, generator=generator)
    other, others, second = make()
    wanted = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    again = Small(tmp_path, 2, newest(tmp_path).restore_point(), model=other, optimizer=None, scheduler=None, **others)
    again.state.restore()
    for name, value in wanted.items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert other.tied.weight is other.a.weight
    assert other.counter == {"calls": 3}
    assert others["data"].state == more["data"].state
    assert torch.equal(others["extra"]["ema"].module.a.weight, more["extra"]["ema"].module.a.weight)
    assert torch.equal(torch.rand(3, generator=second), expected)


def test_dcp_and_safetensors_read_the_same_bytes(tmp_path):
    run = Small(tmp_path)
    run.train(3)
    run.save(3)
    entry = newest(tmp_path)
    wanted = run.tensors()
    loaded = {name: torch.zeros_like(value) for name, value in wanted.items()}
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.load(loaded, checkpoint_id=entry.directory)
    ours = {name: torch.zeros_like(value) for name, value in wanted.items()}
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.load(ours, storage_reader=RegrowReader(entry.directory))
    assert all(torch.equal(value, ours[name]) for name, value in wanted.items())
    stored = load_file(f"{entry.directory}/rank-00000.safetensors")
    for name, value in wanted.items():
        assert torch.equal(value, loaded[name]), name
        assert torch.equal(value, stored[name]), name
    with Checkpoint(Path(entry.directory)) as checkpoint:
        export(checkpoint, tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == run.model.state_dict().keys()
    assert all(torch.equal(exported[name], value) for name, value in run.model.state_dict().items())


def test_the_reader_for_other_programs_verifies_and_unpickles_nothing(tmp_path):
    run = Small(tmp_path)
    run.train(1)
    run.save(1)
    directory = Path(newest(tmp_path).directory)
    (directory / ".metadata").unlink()
    wanted = {"model.0.weight": torch.zeros(16, 8)}
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.load(wanted, storage_reader=RegrowReader(directory))
    assert torch.equal(wanted["model.0.weight"], run.model[0].weight)
    with Checkpoint(directory) as checkpoint:
        file, chunk = checkpoint.source.tensors["model.0.weight"][0]
    data = bytearray((directory / file).read_bytes())
    data[chunk.at + 5] ^= 4
    (directory / file).write_bytes(data)
    with pytest.warns(UserWarning, match="torch.distributed is"), pytest.raises(CheckpointException, match=r"model\.0\.weight: block 0"):
        dcp.load(wanted, storage_reader=RegrowReader(directory))


def test_names_that_differ_are_listed(tmp_path):
    run = Small(tmp_path)
    run.train(1)
    run.save(1)
    other = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 3))
    again = Small(tmp_path, 2, newest(tmp_path).restore_point(), model=other, optimizer=None, scheduler=None)
    with pytest.raises(OperationalError, match=r"missing in the checkpoint: model\.1\.bias.*not in the state: model\.2"):
        again.state.restore()
    wider = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.Dropout(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))
    sized = Small(
        tmp_path,
        3,
        newest(tmp_path).restore_point(),
        model=wider,
        optimizer=torch.optim.AdamW([*wider[0].parameters(), *wider[3].parameters()]),
        scheduler=[],
        accept=["learning_rate", "optimizer.weight_decay"],
    )
    with pytest.raises(OperationalError, match=r"model\.0\.(weight|bias) is float32\[16"):
        sized.state.restore()


def test_state_that_is_not_data_is_refused_by_name(tmp_path):
    class Bad:
        def state_dict(self):
            return {"deep": [{"hook": object()}]}

    with pytest.raises(ConfigurationError, match=r"data\.deep\[0\]\.hook is a builtins\.object"):
        Small(tmp_path, data=Bad()).state.save(1, 4)


def test_planted_pickle_is_refused_by_name(tmp_path):
    """A manifest or record replaced by a pickle that would run code: named, not run."""
    run = Small(tmp_path)
    run.train(1)
    run.save(1)
    entry = newest(tmp_path)

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    for name in ("node-alone.json", "record.json"):
        (Path(entry.directory) / name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(DamagedCheckpointError, match=f"(?s){name}.*pickle: refused"):
            Small(tmp_path, 2, entry.restore_point()).state.restore()
    assert not (tmp_path / "ran").exists()
    with pytest.raises(OperationalError, match="expected and none can be restored"):
        catalog.decide_restore(tmp_path)


def test_restore_takes_exactly_the_decided_checkpoint(tmp_path):
    run = Small(tmp_path)
    run.train(1)
    run.save(1)
    point = newest(tmp_path).restore_point()
    with pytest.raises(DamagedCheckpointError, match="not the checkpoint that was decided on"):
        Small(tmp_path, 2).state.restore(type(point)(step=1, directory=point.directory, record_digest="0" * 32))


def test_optimizers_of_other_kinds(tmp_path):
    """Momentum SGD, amsgrad, tensor learning rates, and Python values in the state."""

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["calls"] = self.state[parameter].get("calls", 0) + 1

    def makers(model):
        return [
            lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            lambda: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), amsgrad=True, foreach=False),
            lambda: Counting(model.parameters(), lr=0.1, momentum=0.9),
            lambda: torch.optim.Adagrad(model.parameters(), lr=0.1),
        ]

    for number in range(4):
        folder = tmp_path / str(number)
        torch.manual_seed(3)
        model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        run = Small(folder, model=model, optimizer=(one := makers(model)[number]()), scheduler=None)
        for _ in range(2):
            model(torch.randn(2, 3)).sum().backward()
            one.step()
        run.save(2)
        again = Small(folder, 2, newest(folder).restore_point(), model=other, optimizer=(two := makers(other)[number]()), scheduler=None)
        before = [value.clone() for value in other.parameters()]
        assert again.state.restore() == 2
        assert not any(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
        assert one.param_groups[0]["lr"] == two.param_groups[0]["lr"]
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, its)
            assert one.state[mine].keys() == two.state[its].keys()
            for key, value in one.state[mine].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(two.state[its][key])), key
