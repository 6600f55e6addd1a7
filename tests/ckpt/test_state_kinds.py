"""Kinds of training state that are easily forgotten: scaler, averages, quantised optimizer state, state of each rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_small import Small

from regrow.ckpt import catalog, exchange
from regrow.ckpt.assemble import Checkpoint, compare
from regrow.ckpt.perrank import PerRank
from regrow.ckpt.place import Place
from regrow.ckpt.state import TrainState
from regrow.errors import ConfigurationError, OperationalError
from regrow.ids import MeshShape
from regrow.wire import GenerationSpec, RestorePoint


def newest(folder: Path) -> RestorePoint:
    entry = catalog.newest_restorable(folder)
    assert entry is not None
    return entry.restore_point()


class Quantised(torch.Tensor):
    """A block-quantised tensor made of int8 codes, a scale for each block and a table, as 8-bit optimizers keep their state."""

    @staticmethod
    def __new__(cls, codes, scale, table):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale, table):
        self.codes, self.scale, self.table = codes, scale, table

    def __tensor_flatten__(self):
        return ["codes", "scale", "table"], {}

    @classmethod
    def __tensor_unflatten__(cls, inner, _context, _size, _stride):
        return cls(inner["codes"], inner["scale"], inner["table"])

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        if function is torch.ops.aten.detach.default:
            return cls(arguments[0].codes, arguments[0].scale, arguments[0].table)
        raise NotImplementedError(str(function))


class EightBit(torch.optim.Optimizer):
    """Momentum in quantised tensors, a flat fused buffer of absolute maxima, and a Python count."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    codes = torch.zeros_like(parameter, dtype=torch.int8)
                    state["momentum"] = Quantised(codes, torch.zeros(-(-parameter.numel() // 4)), torch.linspace(-1, 1, 7))
                    state["absmax"] = torch.zeros(3, dtype=torch.uint8)
                    state["calls"] = 0
                state["calls"] += 1
                momentum = state["momentum"]
                momentum.codes.add_(torch.randint(-3, 4, parameter.shape, dtype=torch.int8))
                momentum.scale.add_(torch.rand(momentum.scale.shape))
                state["absmax"].add_(1)
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)


def test_quantised_optimizer_state(tmp_path):
    torch.manual_seed(1)
    model, other = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    one, two = EightBit(model.parameters()), EightBit(other.parameters())
    run = Small(tmp_path, model=model, optimizer=one, scheduler=None)
    for _ in range(3):
        model(torch.randn(2, 5)).sum().backward()
        one.step()
    run.save(3)
    again = Small(tmp_path, 2, newest(tmp_path), model=other, optimizer=two, scheduler=None)
    assert again.state.restore() == 3
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        before, after = one.state[mine], two.state[its]
        assert torch.equal(mine, its)
        for part in ("codes", "scale", "table"):
            assert torch.equal(getattr(before["momentum"], part), getattr(after["momentum"], part)), part
        assert before["momentum"].codes.any()
        assert torch.equal(before["absmax"], after["absmax"])
        assert (before["calls"], after["calls"]) == (3, 3)


def test_scaler_and_averages(tmp_path):
    """Gradient scaler with its growth counter, an exponential average with its count, and frozen parameters among several groups."""

    def make(seed: int):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        model[0].weight.requires_grad_(False)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        groups = [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 0.5}]
        optimizer = torch.optim.AdamW(groups, lr=0.1, foreach=False)
        return model, average, scaler, optimizer

    def train(model, average, scaler, optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(model)

    model, average, scaler, optimizer = first = make(1)
    train(*first, 3)
    run = Small(tmp_path, model=model, optimizer=optimizer, scheduler=None, extra={"scaler": scaler, "ema": average})
    run.save(3)
    train(*first, 3)
    second = make(2)
    again = Small(
        tmp_path, 2, newest(tmp_path), model=second[0], optimizer=second[3], scheduler=None, extra={"scaler": second[2], "ema": second[1]}
    )
    again.state.restore()
    assert second[2].get_scale() == 2048.0
    train(*second, 3)
    assert scaler.state_dict() == second[2].state_dict()
    assert scaler.get_scale() == 8192.0
    for name, value in average.state_dict().items():
        assert torch.equal(value, second[1].state_dict()[name]), name
    for name, value in model.state_dict().items():
        assert torch.equal(value, second[0].state_dict()[name]), name


def test_what_is_not_finite_is_never_published(tmp_path):
    """K03: NaN in a parameter or in optimizer state; an infinite mask among the buffers is no fault."""
    run = Small(tmp_path)
    run.model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    run.train(1)
    run.save(1)
    exponent = run.optimizer.state[run.model[0].weight]["exp_avg"]
    for tensor, value, name in ((run.model[3].bias.data, float("nan"), "model.3.bias"), (exponent, float("inf"), "exp_avg")):
        kept = tensor.clone()
        tensor.view(-1)[-1] = value
        assert run.state.save(len(name), 8).outcome == "snapshot"
        assert run.state.save(len(name) + 1, 8).outcome == "snapshot"
        assert name in run.state.counts.last_reason
        assert "NaN or infinity" in run.state.counts.last_reason
        tensor.copy_(kept)
    assert [entry.step for entry in catalog.scan(tmp_path) if entry.state == "restorable"] == [1]
    run.save_again = run.state.save(100, 400)
    assert newest(tmp_path).step == 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn])
def test_not_finite_in_each_type(dtype):
    from regrow.ckpt.finite import is_finite

    good = torch.linspace(-100, 100, 64).to(dtype)
    raw = bytearray(good.view(torch.uint8).numpy().tobytes())
    name = str(dtype).removeprefix("torch.")
    assert is_finite(name, memoryview(raw))
    good[7] = float("nan")
    assert not is_finite(name, memoryview(good.view(torch.uint8).numpy().tobytes()))


@pytest.mark.parametrize("forgotten", ["model", "optimizer", "step"])
def test_a_restore_that_is_undone_is_caught_before_the_first_update(tmp_path, forgotten):
    """G01: the script initialises its model or optimizer again after the restore, or counts its steps anew."""
    run = Small(tmp_path)
    run.train(3)
    run.save(3)
    again = Small(tmp_path, 2, newest(tmp_path))
    again.state.restore()
    if forgotten == "step":
        again.train(1)
        with pytest.raises(ConfigurationError, match=r"step 1 was completed after the restore of step 3: the loop started anew"):
            again.state.save(1, 4)
        return
    if forgotten == "model":
        again.model[0].reset_parameters()
    else:
        again.optimizer.state.clear()
    with pytest.raises(OperationalError, match=rf"{forgotten}\.0\..* changed between the restore of step 3 and the first update"):
        again.train(1)
    again.train(1)  # looked at once


def test_a_change_of_the_learning_rate_needs_a_flag(tmp_path, monkeypatch):
    def made(generation: int, rate: float, point: RestorePoint | None = None, **more: Any) -> Small:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1 if rate == 0.2 else 0.01, foreach=False)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.1)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [4])
        run = Small(tmp_path, generation, point, model=model, optimizer=optimizer, scheduler=scheduler, **more)
        run.model, run.optimizer, run.scheduler = model, optimizer, scheduler
        return run

    def train(run: Small, steps: int) -> list[float]:
        optimizer, scheduler, model = run.optimizer, run.scheduler, run.model
        rates = []
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    run = made(1, 0.1)
    train(run, 2)
    run.save(2)
    point = newest(tmp_path)
    with pytest.raises(ConfigurationError, match=r"learning_rate: 0\.1 in the checkpoint, 0\.2 at this launch \(needs a flag\)") as caught:
        made(2, 0.2, point).state.restore()
    assert "REGROW_ACCEPT=learning_rate,optimizer.weight_decay" in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"optimizer\.weight_decay"):
        made(2, 0.2, point, accept=["learning_rate"]).state.restore()
    monkeypatch.setenv("REGROW_ACCEPT", "optimizer.weight_decay")
    other = made(2, 0.2, point, accept=["learning_rate"])
    other.state.restore()
    assert {one.field: one.accepted for one in other.state.differences} == {"learning_rate": True, "optimizer.weight_decay": True}
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.1
    assert train(other, 8) == pytest.approx([2 * rate for rate in train(run, 8)], rel=1e-12)
    other.save(11)
    entries = [one for one in catalog.scan(tmp_path) if one.state == "restorable"]
    with Checkpoint(Path(entries[1].directory)) as before, Checkpoint(Path(entries[0].directory)) as after:
        fields = {one.field: (one.saved, one.now, one.rule) for one in compare(before, after).fields}
    assert fields["learning_rate"] == (0.1, 0.2, "needs a flag")
    assert fields.keys() == {"learning_rate", "optimizer.weight_decay"}
    monkeypatch.delenv("REGROW_ACCEPT")
    same = made(3, 0.1, point)
    same.state.restore()
    assert same.state.differences == []


class Residual:
    """What only this rank has: error feedback of compressed gradients, of a size of its own."""

    def __init__(self, size: int, value: float) -> None:
        self.values = torch.full((size,), value)
        self.seen = [value]

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.seen = state["values"].clone(), state["seen"]


class World:
    """Ranks as threads that exchange what ranks exchange; state without collectives needs no more."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._sent: dict[int, bytes] = {}

    def exchange(self, rank: int) -> exchange.Exchange:
        def gather(data: bytes) -> list[bytes]:
            self._sent[rank] = data
            self._barrier.wait(60)
            found = [self._sent[one] for one in range(self.size)]
            self._barrier.wait(60)
            return found

        return gather

    def run(self, work: Any) -> list[Any]:
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except (ConfigurationError, OperationalError) as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def merge(states: Any, rank: int, world_size: int) -> dict[str, Any]:
    """All saved residuals in a row, cut anew."""
    whole = torch.cat([state["values"] for state in states])
    return {"values": whole.chunk(world_size)[rank], "seen": [state["seen"][0] for state in states]}


async def test_state_of_each_rank_follows_its_rule(make_writer, make_committer, tmp_path):
    """Uneven private tensors of four ranks: each rank its own on the same mesh, and a rule for growth and shrinkage."""
    import asyncio

    writer = await make_writer()
    generation = 0

    async def phase(mesh: MeshShape, rule: Any, *, restore: RestorePoint | None = None) -> list[Any]:
        nonlocal generation
        generation += 1
        world = World(mesh.world_size)
        spec = GenerationSpec(job="own", epoch=1, generation=generation, mesh=mesh, world_size=world.size, nodes=("n0",), restore=restore)

        def one(rank: int) -> Residual:
            residual = Residual(rank, float(rank + 1)) if restore is None else Residual(1, -1.0)
            place = Place(spec=spec, rank=rank, node="n0", local_ranks=tuple(range(world.size)), folder=str(tmp_path))
            state = TrainState.attach(
                place, writer=writer.socket, exchange=world.exchange(rank), model=torch.nn.Linear(2, 2),
                extra={"residual": PerRank(residual, on_change=rule)},
            )  # fmt: skip
            try:
                if restore is None:
                    assert state.save(1, 8).outcome == "snapshot"
                else:
                    assert state.restore() == 1
            finally:
                state.close()
            return residual

        if restore is not None:
            return await asyncio.to_thread(world.run, one)
        committer = await make_committer(spec, [writer])
        result = await asyncio.to_thread(world.run, one)
        await committer.until("complete")
        return result

    four, two, six = MeshShape(dp=2, tp=2), MeshShape(dp=2), MeshShape(dp=3, tp=2)
    await phase(four, "refuse")
    point = newest(tmp_path)
    same = await phase(four, "refuse", restore=point)
    assert [one.values.tolist() for one in same] == [[], [2.0], [3.0, 3.0], [4.0, 4.0, 4.0]]
    refused = await phase(two, "refuse", restore=point)
    assert all("cannot follow the change of mesh" in str(error) for error in refused)
    assert [one.seen for one in await phase(two, "reset", restore=point)] == [[-1.0], [-1.0]]
    assert [one.values.tolist() for one in await phase(two, "replica", restore=point)] == [[], [3.0, 3.0]]
    grown = await phase(six, merge, restore=point)
    assert torch.cat([one.values for one in grown]).tolist() == [2.0, 3.0, 3.0, 4.0, 4.0, 4.0]
    assert grown[0].seen == [1.0, 2.0, 3.0, 4.0]
