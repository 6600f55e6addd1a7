"""The parts of the step boundary one by one: exchange period, cadence of saves, the line to the agent, the environment, the watch."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from regrow import wire
from regrow.agent import layout
from regrow.agent.layout import NodePaths
from regrow.agent.worker import environment
from regrow.agent.worker.cadence import Cadence
from regrow.agent.worker.chaos import Faults, flip_bit
from regrow.agent.worker.control import MAX_PERIOD, ControlVector, Words, exchange_period
from regrow.agent.worker.digest import Digester
from regrow.agent.worker.environment import Defaults
from regrow.agent.worker.link import AgentLink
from regrow.agent.worker.ports import Measures
from regrow.agent.worker.steps import StepLoop
from regrow.agent.worker.watch import StateWatch, part_of
from regrow.errors import ConfigurationError, OperationalError
from regrow.ids import MeshShape
from regrow.places import block_text
from regrow.supervisor.core import sdc
from regrow.wire import DigestEvidence

# --- control vector --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_us", "cost_us", "period"),
    [
        (1_000_000, 300, 1),
        (1_000_000, 50_000, 1),  # a lag of one second at most, whatever it costs
        (100_000, 400, 1),
        (100_000, 1_000, 3),
        (10_000, 400, 10),
        (1_000, 400, MAX_PERIOD),
        (0, 0, 1),
        (5_000_000, 10, 1),
    ],
)
def test_exchange_period(step_us: int, cost_us: int, period: int) -> None:
    assert exchange_period(Words(step_us=step_us, cost_us=cost_us)) == period


def test_overhead_is_bounded_where_the_lag_allows() -> None:
    for step_us in (500, 2_000, 20_000, 200_000):
        for cost_us in (50, 200, 800):
            period = exchange_period(Words(step_us=step_us, cost_us=cost_us))
            assert period == MAX_PERIOD or cost_us / (period * step_us) <= 0.004


def test_all_ranks_act_at_the_same_step() -> None:
    """Ranks that measure other step times and hear orders at other moments: same exchanges, same orders, one exchange late."""
    said: list[tuple[int, ...]] = []

    def start(words: tuple[int, ...]) -> Any:
        said.append(words)
        number = (len(said) - 1) // 3
        return lambda: tuple(max(column) for column in zip(*said[3 * number : 3 * number + 3], strict=True))

    ranks = [ControlVector(start) for _ in range(3)]
    orders: list[list[int]] = [[], [], []]
    exchanged: list[list[int]] = [[], [], []]
    for step in range(1, 61):
        due = {vector.due(step) for vector in ranks}
        assert len(due) == 1
        if not due.pop():
            continue
        agreed = [vector.agreed() for vector in ranks]
        for rank, vector in enumerate(ranks):
            exchanged[rank].append(step)
            if agreed[rank].save:
                orders[rank].append(step)
            vector.start(step, Words(save=int(rank == 1 and step >= 20), step_us=20_000 + 7_000 * rank, cost_us=300 + 50 * rank))
    assert orders[0] == orders[1] == orders[2] != []
    assert orders[0][0] > 20
    assert exchanged[0] == exchanged[1] == exchanged[2]
    assert exchanged[0][-1] - exchanged[0][-2] == exchange_period(Words(step_us=34_000, cost_us=400))


def test_one_rank_needs_nobody() -> None:
    vector = ControlVector()
    vector.start(1, Words(save=1))
    assert vector.agreed().save == 1
    assert vector.agreed().save == 0


# --- when to save ----------------------------------------------------------------------------------------------------


def cadence(**policy: Any) -> Cadence:
    spec = wire.GenerationSpec(job="j", epoch=1, generation=1, mesh=MeshShape(), world_size=1, nodes=("a",), failures_per_second=1e-3)
    made = Cadence(wire.CheckpointPolicy(**policy), spec)
    made.started_at(0, 0.0)
    return made


def test_first_save_is_early_then_the_formula() -> None:
    """sqrt(2 x 0.05 s stall x 1000 s between failures) = 10 s = 20 steps of half a second."""
    one = cadence()
    assert not one.due(1, 1)
    one.stepped(0.5)
    assert one.due(1, 1)
    one.saved(2, 0.05)
    one.wrote(0.3)
    assert one.interval().interval_seconds == pytest.approx(10.0)
    assert next(step for step in range(3, 40) if one.due(step, 1)) == 21


def test_bounds_and_orders() -> None:
    one = cadence(min_interval_seconds=30.0)
    one.stepped(0.5)
    one.saved(2, 0.05)
    assert one.interval().steps == 60
    one.ordered(wire.Control(save_interval_seconds=4.0))
    assert one.due(9, 1)
    assert not one.due(8, 1)
    one.ordered(wire.Control(save_interval_seconds=0.0, failures_per_second=1.0))
    assert one.interval().failures_per_second == 1.0
    assert not one.due(20, 1)


# --- the line to the agent -------------------------------------------------------------------------------------------


def listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(1)
    listener.settimeout(20)
    return listener


class Ticking:
    """A clock that moves at each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def phase(name: str) -> wire.WorkerPhase:
    return wire.WorkerPhase(generation=1, rank=0, phase=name)


def test_kept_lines_come_again_after_a_reconnection(tmp_path: Path) -> None:
    hello = wire.WorkerHello(job="j", generation=1, rank=0, pid=1)
    link = AgentLink(str(tmp_path / "s"), hello, monotonic=Ticking())
    link.send(phase("imported"), keep=True)  # nobody listens yet
    link.send(wire.StepReport(generation=1, rank=0, step=1), droppable=True)
    with listen(tmp_path / "s") as listener:
        link.flush()
        with listener.accept()[0] as first:
            first.settimeout(20)
            got = [wire.decode(line, wire.FromWorker) for line in first.recv(65536).splitlines()]
    assert [type(line).__name__ for line in got] == ["WorkerHello", "WorkerPhase", "StepReport"]
    assert link.receive() == []
    assert not link.connected
    link.send(phase("finished"), keep=True)
    with listen(tmp_path / "s") as listener:
        link.flush()
        with listener.accept()[0] as second:
            second.settimeout(20)
            got = [wire.decode(line, wire.FromWorker) for line in second.recv(65536).splitlines()]
            second.sendall(wire.encode(wire.Control(save=True))[:9])
            assert link.receive() == []
            second.sendall(
                wire.encode(wire.Control(save=True))[9:]
                + b'{"type":"later"}\n'
                + b"garbage\n"
                + wire.encode(wire.Control(inject={"kind": "x"}))
            )
            assert [order.save for order in link.receive()] == [True, False]
    assert [line.phase for line in got[1:]] == ["imported", "finished"]
    assert link.connections == 2
    link.close()


def test_reports_of_short_steps_go_out_together_and_nothing_else_waits(tmp_path: Path) -> None:
    """(seconds since the process began, what is said, lines that the agent has by then)"""
    table: list[tuple[float, int | str, int]] = [
        (0.00, 1, 1),  # at first nothing waits: a recovery ends with a report
        (0.01, 2, 2),
        (4.49, 3, 3),
        (4.51, 4, 3),
        (4.90, 5, 3),
        (5.01, 6, 6),
        (5.22, 7, 6),
        (5.33, "save", 8),  # and takes along what waited
        (5.55, 8, 8),
        (5.84, 9, 10),
        (6.40, 10, 11),  # longer steps are told one by one
        (7.00, 11, 12),
    ]
    now = [0.0]
    with listen(tmp_path / "s") as listener:
        link = AgentLink(str(tmp_path / "s"), monotonic=lambda: now[0])
        link.flush()
        with listener.accept()[0] as agent:
            agent.setblocking(False)
            received = 0
            for at, said, expected in table:
                now[0] = at
                if isinstance(said, int):
                    link.send(wire.StepReport(generation=1, rank=0, step=said), droppable=True)
                else:
                    link.send(phase(said))
                with contextlib.suppress(BlockingIOError):
                    received += agent.recv(1 << 20).count(b"\n")
                assert received == expected, (at, said)
            now[0] = 7.01
            link.send(wire.StepReport(generation=1, rank=0, step=12), droppable=True)
            assert link.drain(1.0), "the last words of a process take along what waits"
            assert agent.recv(1 << 20).count(b"\n") == 1
        link.close()


def test_a_slow_agent_never_blocks_and_loses_step_reports_only(tmp_path: Path) -> None:
    with listen(tmp_path / "s") as listener:
        link = AgentLink(str(tmp_path / "s"))
        link.flush()
        with listener.accept()[0] as agent:
            agent.settimeout(20)
            for step in range(60_000):
                link.send(wire.StepReport(generation=1, rank=0, step=step, digest="0" * 16), droppable=True)
            link.send(phase("finished"))
            received = b""
            while not received.endswith(b'"finished"}\n') and b"finished" not in received[-200:]:
                link.flush()
                received += agent.recv(1 << 20)
            lines = [wire.decode(line, wire.FromWorker) for line in received.splitlines()]
        link.close()
    steps = [line.step for line in lines if isinstance(line, wire.StepReport)]
    assert steps == sorted(steps)
    assert steps[0] == 0
    assert steps[-1] == 59_999
    assert len(steps) < 60_000
    assert isinstance(lines[-1], wire.WorkerPhase)


# --- the environment -------------------------------------------------------------------------------------------------


def test_environment_of_a_plain_process() -> None:
    plain = environment.read({}, Defaults(global_batch=12, micro_batch=4))
    assert (plain.rank, plain.world_size, plain.supervised, plain.generation) == (0, 1, False, 0)
    assert plain.spec.micro_batches == (3,)


def test_environment_of_torchrun() -> None:
    source = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    found = environment.read({**source, "REGROW_MESH": "2x2x1"}, Defaults(global_batch=10))
    assert found.spec.mesh == MeshShape(dp=2, tp=2)
    assert found.spec.micro_batches == (5, 5)
    assert found.master_address == "h:1"
    assert environment.read(source, Defaults(global_batch=10)).spec.micro_batches == (3, 3, 2, 2)


def test_the_ranks_of_a_node_whose_slots_have_them_in_another_order() -> None:
    """Two devices that change places, to see which of them is wrong (`supervisor.core.third`)."""
    order = wire.StartGeneration(
        epoch=1,
        seq=1,
        spec=wire.GenerationSpec(job="j", epoch=1, generation=2, mesh=MeshShape(dp=4), world_size=4, nodes=("a", "b")),
        job_spec=wire.JobSpec(job="j", argv=("x.py",), nproc_per_node=2),
        workers=(wire.WorkerAssignment(rank=2, local_rank=1), wire.WorkerAssignment(rank=3, local_rank=0)),
        group_rank=1,
        master_address="127.0.0.1:1",
    )
    paths = NodePaths(Path("/nowhere"))
    made = [layout.worker_environment(paths, order, worker, "b", {}) for worker in order.workers]
    files = {"REGROW_SPEC": "", "REGROW_JOB_SPEC": "", "REGROW_SOCKET": ""}
    found = [environment.read({name: text for name, text in (one | files).items() if text}, Defaults()) for one in made]
    assert [(one.rank, one.local_rank, one.first_rank) for one in found] == [(2, 1, 2), (3, 0, 2)]
    torchruns = environment.read({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, Defaults(global_batch=4))
    assert torchruns.first_rank == 2


@pytest.mark.parametrize(
    ("source", "asked", "says"),
    [
        ({"WORLD_SIZE": "4", "REGROW_MESH": "2x1x1"}, Defaults(), "needs 2 workers, the world has 4"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, Defaults(), "outside a world"),
        ({"RANK": "one"}, Defaults(), "not a number"),
        ({"REGROW_GLOBAL_BATCH": "12"}, Defaults(global_batch=16), "asks for a global batch of 16, the job says 12"),
        ({"REGROW_GLOBAL_BATCH": "12", "REGROW_MICRO_BATCH": "5"}, Defaults(), "not a multiple"),
        ({"REGROW_SPEC": "/nowhere"}, Defaults(), "cannot be read"),
        ({"REGROW_MESH": "3x"}, Defaults(), "cannot be read"),
    ],
)
def test_environment_that_contradicts_itself(source: dict[str, str], asked: Defaults, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        environment.read(source, asked)


def test_seed_of_job_and_script(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    for seed, asked, expected in ((0, 7, 7), (5, None, 5), (5, 5, 5), (0, None, 0)):
        job.write_bytes(msgspec.json.encode(wire.JobSpec(job="j", argv=(), seed=seed)))
        assert environment.read({"REGROW_JOB_SPEC": str(job)}, Defaults(seed=asked)).job_spec.seed == expected
    job.write_bytes(msgspec.json.encode(wire.JobSpec(job="j", argv=(), seed=5)))
    with pytest.raises(ConfigurationError, match="asks for seed 6, the job says 5"):
        environment.read({"REGROW_JOB_SPEC": str(job)}, Defaults(seed=6))


# --- the watch -------------------------------------------------------------------------------------------------------


def watched(**settings: Any) -> tuple[StateWatch, torch.nn.Module, torch.optim.Optimizer, Faults]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(6)])
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    faults = Faults(enabled=True, rank=0)
    return StateWatch([model], [optimizer], Digester(1), faults, **settings), model, optimizer, faults


def train(watch: StateWatch, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, *, whole: bool = False) -> str:
    model(torch.ones(1, 16)).sum().backward()
    watch.before_update()
    optimizer.step()
    optimizer.zero_grad()
    text = watch.applied(step, whole=whole)
    watch.resting(step)
    return text


@pytest.mark.parametrize("parts", [1, 2, 5, 9, 40])
def test_parts_cover_every_tensor_once(parts: int) -> None:
    tensors = [(f"t{size}", torch.zeros(size)) for size in (1, 500, 3, 0, 200, 200, 7, 1, 90)]
    cut = [part_of(tensors, part, parts) for part in range(parts)]
    assert [name for part in cut for name, _ in part] == [name for name, _ in tensors]


def test_rolling_watch_finds_a_flip_within_a_round() -> None:
    watch, model, optimizer, _ = watched(budget=0.005)
    train(watch, model, optimizer, 1)
    assert watch.cost_seconds() > 0
    watch.agreed_cost(10_000, 312_500)
    assert watch.parts == 8
    for step in range(2, 30):
        train(watch, model, optimizer, step)
    assert watch.take_mismatch() == ""
    found: list[str] = []
    for step in range(30, 38):
        train(watch, model, optimizer, step)
        flip_bit(model[3].weight.data, 17, 5)
        found.append(watch.take_mismatch())
    watch.before_update()
    found.append(watch.take_mismatch())
    assert {name for name in found if name} == {f"model.3.weight, {block_text(1, 1024)}"}


def test_rolling_digests_agree_between_replicas_and_are_whole_before_a_save() -> None:
    one, two = watched(budget=0.005), watched(budget=0.005)
    for watch, *_ in (one, two):
        watch.agreed_cost(10_000, 312_500)
    digests = [[train(*side[:3], step, whole=step == 7) for step in range(1, 12)] for side in (one, two)]
    assert digests[0] == digests[1]
    plain = watched(every=1)
    everything = [train(*plain[:3], step) for step in range(1, 12)]
    same = [step for step, (part, whole) in enumerate(zip(digests[0], everything, strict=True), start=1) if part == whole]
    assert same == [7]


def replicas_step(sides: list[Any], step: int) -> list[str]:
    """One step of replicas: all take the gradients of the first."""
    sides[0][1](torch.ones(1, 16)).sum().backward()
    gradients = [parameter.grad for parameter in sides[0][1].parameters()]
    texts: list[str] = []
    for watch, model, optimizer, _ in sides:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        watch.before_update()
        optimizer.step()
        optimizer.zero_grad()
        texts.append(watch.applied(step))
    return texts


@pytest.mark.parametrize("budget", [0.0, 0.005])
def test_two_ranks_digests_tell_the_tensor_and_the_block_that_differ(budget: float) -> None:
    """As the supervisor sees it: two reports, of which one has a tensor with a flipped bit; also where only a part is looked at."""
    sides = [watched(every=0 if budget else 1, budget=budget) for _ in range(2)]
    mesh, found = MeshShape(dp=2), set[str]()
    known = DigestEvidence()
    for watch, *_ in sides:
        watch.agreed_cost(10_000, 312_500)
    for step in range(1, 26):
        texts = replicas_step(sides, step)
        told = [side[0].take_evidence(names=rank == 0) for rank, side in enumerate(sides)]
        assert told[0] is not None
        assert told[1] is not None
        known = told[0] if told[0].names else known
        assert told[1].names == ()
        evidence = {0: msgspec.structs.replace(told[0], names=known.names, sizes=known.sizes), 1: told[1]}
        found.add(sdc.located(mesh, dict(enumerate(texts)), evidence))
        if step == 12:
            assert found == {""}
            flip_bit(sides[1][1][4].bias.data, 3, 9)
    assert found - {""} == {f"model.4.bias differs in {block_text(1, 64)} between ranks 0 and 1"}


def test_every_other_step() -> None:
    watch, model, optimizer, _ = watched(every=3)
    texts = [train(watch, model, optimizer, step) for step in range(1, 8)]
    assert [bool(text) for text in texts] == [False, False, True, False, False, True, False]
    assert train(watch, model, optimizer, 8, whole=True)


@pytest.mark.parametrize("where", ["optimizer", "parameter"])
def test_injected_flip_is_named(where: str) -> None:
    watch, model, optimizer, faults = watched(every=1)
    faults.bind(
        lambda: [(f"{i}.weight", layer.weight) for i, layer in enumerate(model)],
        lambda: [("4.bias.exp_avg_sq", optimizer.state[model[4].bias]["exp_avg_sq"])] if optimizer.state else [],
    )
    train(watch, model, optimizer, 1)
    faults.accept({"kind": "flip_bit", "where": where, "when": "rest", "bit": 3, "step": 2})
    train(watch, model, optimizer, 2)
    assert watch.take_mismatch() == ""
    train(watch, model, optimizer, 3)
    name, size = ("optimizer.4.bias.exp_avg_sq", 64) if where == "optimizer" else ("model.0.weight", 1024)
    assert watch.take_mismatch() == f"{name}, {block_text(1, size)}"
    assert [order.kind for order in faults.done] == ["flip_bit"]


def test_orders_for_others_and_nonsense_are_left_alone() -> None:
    faults = Faults(enabled=True, rank=2)
    faults.accept({"kind": "raise", "rank": 1})
    faults.accept({"kind": 5})
    faults.accept({"what": 1})
    faults.entered("step", 1)
    off = Faults(enabled=False, rank=2)
    off.accept({"kind": "raise"})
    off.entered("step", 1)
    assert faults.done == off.done == []


def test_cost_of_a_boundary(capsys: pytest.CaptureFixture[str]) -> None:
    """Below 1 % of a step of 50 ms, by CPU time; the figure is printed. Line, report, exchange, cadence: all but the state."""
    env = environment.read({}, Defaults(global_batch=8))
    loop = StepLoop(env, AgentLink(""), None, Cadence(env.job_spec.checkpoint, env.spec), Faults(enabled=False, rank=0))
    measures = Measures(loss=1.0, learning_rate=0.1)
    spent = 0.0
    for step in loop.steps(2000):
        begin = time.process_time()
        loop.complete(step, measures)
        spent += time.process_time() - begin
    with capsys.disabled():
        print(f"\nstep boundary: {spent / 2000 * 1e6:.0f} us of CPU time")
    assert spent / 2000 < 0.0005
    assert (loop.step, loop.samples, loop.finished) == (2000, 16_000, True)


def test_a_run_that_goes_on_hears_orders_as_soon_as_one_that_begins() -> None:
    """The steps of earlier generations are not this one's: a step that passes for nothing would put exchanges 50 steps apart."""
    env = environment.read({}, Defaults(global_batch=8))
    loop = StepLoop(env, AgentLink(""), None, Cadence(env.job_spec.checkpoint, env.spec), Faults(enabled=False, rank=0))
    control = ControlVector()
    loop.use_control(control, cost_seconds=0.0004)
    loop.restored(100_000, 800_000, 0.1)
    for step in loop.steps(100_003):
        time.sleep(0.02)  # the step
        loop.complete(step, Measures())
        assert control.period <= exchange_period(Words(step_us=20_000, cost_us=400))


def test_misuse_of_the_loop_is_told() -> None:
    env = environment.read({}, Defaults(global_batch=8))

    def loop() -> StepLoop:
        return StepLoop(env, AgentLink(""), None, Cadence(env.job_spec.checkpoint, env.spec), Faults(enabled=False, rank=0))

    skipping = loop()
    with pytest.raises(ConfigurationError, match="step 1 was not completed"):
        list(skipping.steps(3))
    twice = loop()
    steps = twice.steps(3)
    next(steps)
    twice.complete(1, Measures())
    with pytest.raises(ConfigurationError, match=r"complete\(1\) does not follow"):
        twice.complete(1, Measures())
    assert list(twice.steps(1)) == []
    assert twice.finished


class Recording:
    """A keeper that notes what is asked of it."""

    def __init__(self, *, fails: bool = False, busy: int = 0) -> None:
        self.saved: list[int] = []
        self.skipped: list[tuple[int, str]] = []
        self.told: dict[str, tuple[float, int]] = {}
        self.fails = fails
        self.busy = busy

    def ready(self) -> bool:
        self.busy -= 1
        return self.busy < 0

    def save(self, step: int, samples: int) -> wire.SaveReport:
        assert samples == 8 * step
        self.saved.append(step)
        return wire.SaveReport(generation=0, rank=0, step=step, outcome="snapshot", stall_seconds=0.001)

    def skip(self, step: int, reason: str) -> None:
        self.skipped.append((step, reason))

    def measured(self, name: str, value: float, step: int) -> None:
        self.told[name] = (value, step)

    def last_reason(self) -> str:
        return ""

    def wait_durable(self, step: int, seconds: float) -> bool:
        return not self.fails

    def write_seconds(self) -> float:
        return 0.001


def run_with(keeper: Recording, *, losses: dict[int, float] | None = None, stop_at: int = 0, total: int = 10) -> StepLoop:
    env = environment.read({}, Defaults(global_batch=8))
    cadence = Cadence(wire.CheckpointPolicy(min_interval_seconds=3000.0), env.spec)
    loop = StepLoop(env, AgentLink(""), None, cadence, Faults(enabled=False, rank=0))
    loop.keeper = keeper
    for step in loop.steps(total):
        if step == stop_at:
            loop.request(stop=True, save=True)
        loop.complete(step, Measures(loss=(losses or {}).get(step, 1.0)))
    return loop


def test_last_step_is_always_saved() -> None:
    keeper = Recording()
    assert run_with(keeper).finished
    assert keeper.saved == [10]
    assert keeper.told == {"loss": (1.0, 10)}


def test_stop_saves_one_exchange_later_and_ends() -> None:
    keeper = Recording()
    loop = run_with(keeper, stop_at=1, total=200)
    assert keeper.saved == [loop.step]
    assert loop.stopped
    assert loop.step == 2


def test_end_that_is_not_durable_is_an_error() -> None:
    with pytest.raises(OperationalError, match="did not become durable"):
        run_with(Recording(fails=True))


def test_end_that_is_not_finite_is_an_error() -> None:
    keeper = Recording()
    with pytest.raises(OperationalError, match="not finite"):
        run_with(keeper, losses={10: float("nan")})
    assert keeper.saved == []
    assert [step for step, _ in keeper.skipped] == [10]
    assert "not finite" in keeper.skipped[0][1]


def test_a_past_nan_does_not_stop_saves_for_ever() -> None:
    """A loss scaler skips such a step: the state is good again, and the veto goes with the doubt."""
    keeper = Recording()
    run_with(keeper, losses={2: float("inf")}, total=200)
    assert keeper.saved == [200]
