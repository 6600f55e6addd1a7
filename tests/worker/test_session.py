"""The worker library in real processes on gloo, against an agent that is a Unix socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.worker.conftest import SCRIPTS, FakeAgent, World, wait_for

from regrow import wire
from regrow.agent.progress import read_progress
from regrow.agent.worker.session import GenerationChanged

OFTEN = wire.CheckpointPolicy(max_interval_seconds=0.1)
NEVER = wire.CheckpointPolicy(min_interval_seconds=3000.0)


def test_generation_changed_passes_except_exception() -> None:
    assert issubclass(GenerationChanged, BaseException)
    assert not issubclass(GenerationChanged, Exception)
    assert "generation 7 is over: node b is gone" in str(GenerationChanged(7, "node b is gone"))


def test_a_run_tells_everything(world: World, agent: FakeAgent, tmp_path: Path) -> None:
    """Greeting, phases in order, one report a step with loss and digest, progress words, the declared end."""
    world.start("toy.py", world_size=2, policy=NEVER)
    first, second = world.wait()
    assert first["weights"] == second["weights"]
    for rank in (0, 1):
        hello = agent.of(wire.WorkerHello, rank)
        assert len(hello) == 1
        assert hello[0].pid == world.processes[rank].pid
        phases = [line.phase for line in agent.of(wire.WorkerPhase, rank)]
        assert phases == ["imported", "rendezvous", "first_step", "finished"]
        reports = agent.of(wire.StepReport, rank)
        assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6]
        assert [report.samples for report in reports] == [12, 24, 36, 48, 60, 72]
        assert all(report.loss > 0 and len(report.digest) == 16 and not report.at_rest_mismatch for report in reports)
        assert all(report.step_seconds > 0 and report.compute_seconds > 0 for report in reports)
    assert [line.digest for line in agent.of(wire.StepReport, 0)] == [line.digest for line in agent.of(wire.StepReport, 1)]
    words = read_progress(tmp_path / "g1" / "progress")
    assert [(word.started_step, word.applied_step, word.phase) for word in words] == [(6, 6, "finished")] * 2
    assert {word.generation for word in words} == {1}


def test_standalone_is_a_job_of_its_own(tmp_path: Path) -> None:
    """No agent, no launcher: `python toy.py`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("REGROW_", "RANK", "WORLD_SIZE"))}
    env |= {"OUTPUT": str(tmp_path / "out.json"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "toy.py")], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["mesh"] == "dp=1,tp=1,pp=1"
    assert [len(entry["samples"]) for entry in result["log"]] == [12] * 6


def test_plain_torchrun(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("REGROW_")}
    env |= {"OUTPUT": str(tmp_path / "out.json"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPTS / "toy.py")]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["mesh"] == "dp=2,tp=1,pp=1"


def test_every_mesh_has_the_same_losses(world: World) -> None:
    """12 samples as 6 micro-batches over 1, 3 and 4 replicas (2, 2, 1, 1): the same batch, the same losses to rounding."""
    losses = []
    for generation, dp in enumerate((1, 3, 4), start=1):
        world.start("toy.py", world_size=dp, generation=generation, policy=NEVER)
        losses.append([entry["loss"] for entry in world.wait(generation=generation)[0]["log"]])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_signal_to_one_rank_stops_all_at_one_step(world: World, agent: FakeAgent, tmp_path: Path) -> None:
    """Case D07: SIGTERM to rank 3 of 4 only; all save and end at one step, with one checkpoint."""
    world.start("toy.py", world_size=4, env={"STEPS": "100000", "STEP_SECONDS": "0.05", "KEEP": str(tmp_path)}, policy=NEVER)
    wait_for(lambda: len(agent.steps(3)) >= 3, "rank 3 steps")
    world.processes[3].send_signal(signal.SIGTERM)
    results = world.wait()
    assert {result["stopped"] for result in results} == {True}
    steps = {result["step"] for result in results}
    assert len(steps) == 1
    assert {line.phase for line in agent.of(wire.WorkerPhase)} == {"imported", "rendezvous", "first_step", "stopped"}
    assert "finished" not in {word.phase for word in read_progress(tmp_path / "g1" / "progress")}, "it was asked to stop, it is not done"
    step = steps.pop()
    assert all(result["saved"][-1] == step for result in results)
    assert {tuple(result["saved"]) for result in results} == {tuple(results[0]["saved"])}
    assert sorted(path.name for path in tmp_path.glob(f"{step}-*.pt")) == [f"{step}-{rank}.pt" for rank in range(4)]
    snapshots = agent.of(wire.SaveReport)
    assert {line.outcome for line in snapshots} == {"snapshot"}


def test_order_to_one_rank_saves_on_all(world: World, agent: FakeAgent, tmp_path: Path) -> None:
    """An order that only one rank's agent passed on: every rank saves the same step, then training goes on."""
    world.start("toy.py", world_size=3, env={"STEPS": "60", "STEP_SECONDS": "0.04", "KEEP": str(tmp_path)}, policy=NEVER)
    wait_for(lambda: len(agent.steps(2)) >= 3, "rank 2 steps")
    agent.send(2, save=True)
    results = world.wait()
    assert {tuple(result["saved"]) for result in results} == {tuple(results[0]["saved"])}
    ordered = [step for step in results[0]["saved"] if step not in (1, 2, 60)]
    assert ordered
    assert {result["step"] for result in results} == {60}


def test_busy_rank_makes_all_skip(world: World, agent: FakeAgent, tmp_path: Path) -> None:
    """Case F07: one rank has no room; nobody saves, the skip is loud, and the save is taken when there is room."""
    world.start("toy.py", world_size=3, env={"STEPS": "12", "STEP_SECONDS": "0.02", "KEEP": str(tmp_path), "BUSY_UNTIL": "8"})
    results = world.wait()
    assert {tuple(result["saved"]) for result in results} == {tuple(results[0]["saved"])}
    assert min(results[0]["saved"]) > 8
    assert {result["skipped"] for result in results} == {results[0]["skipped"]}
    skipped = [line for line in agent.of(wire.SaveReport, 0) if line.outcome == "skipped"]
    assert skipped
    assert "no room" in skipped[0].reason


def test_samples_are_used_once_an_epoch_over_changing_replicas(world: World, tmp_path: Path) -> None:
    """Cases G07 and G09 in real processes: DP 4 -> 3 -> 5 -> 2 over 101 samples, a rank killed in mid-step each time; the ids
    of the steps that count are each sample once an epoch, abandoned steps are done again."""
    num_samples, total = 101, 60
    restore: wire.RestorePoint | None = None
    lineage: list[int] = []
    for generation, dp in enumerate((4, 3, 5, 2), start=1):
        keep = tmp_path / f"keep{generation}"
        keep.mkdir()
        env = {"STEPS": str(total), "STEP_SECONDS": "0.05", "KEEP": str(keep), "NUM_SAMPLES": str(num_samples), "DIGEST_EVERY": "0"}
        base = restore.step if restore else 0
        world.start("toy.py", world_size=dp, generation=generation, env=env, restore=restore, policy=OFTEN)
        if generation < 4:
            wait_for(lambda keep=keep, base=base, dp=dp: complete(keep, dp) >= base + 3, "a save of all ranks")
            world.processes[dp - 1].kill()
            for process in world.processes:
                process.kill()
            world.codes()
            step = complete(keep, dp)
            restore = wire.RestorePoint(step=step, directory=str(keep), samples=step * 12)
        else:
            world.wait(generation=4)
            step = total
        lineage += used(tmp_path / f"g{generation}", dp, range(base + 1, step + 1))
    assert len(lineage) == total * 12
    for epoch in range(len(lineage) // num_samples):
        assert Counter(lineage[epoch * num_samples : (epoch + 1) * num_samples]) == Counter(range(num_samples))


def complete(keep: Path, world_size: int) -> int:
    """The newest step that all ranks saved."""
    counts = Counter(int(path.name.split("-")[0]) for path in keep.glob("*-*.pt"))
    return max((step for step, count in counts.items() if count == world_size), default=0)


def used(folder: Path, world_size: int, steps: range) -> list[int]:
    """Samples of these steps in order, over all ranks."""
    rows: dict[tuple[int, int], list[int]] = {}
    for rank in range(world_size):
        for line in (folder / f"ids-{rank}.jsonl").read_text().splitlines():
            step, samples = json.loads(line)
            rows[step, rank] = samples
    return [sample for step in steps for rank in range(world_size) for sample in rows[step, rank]]


def test_uncaught_error_is_written_down(world: World, agent: FakeAgent, tmp_path: Path) -> None:
    """torch elastic's error file with rank and step; a code that is not 0; no declared end."""
    world.start("toy.py", world_size=1, env={"FAIL_AT": "3:0"}, policy=NEVER)
    assert world.codes() == [1]
    document = json.loads((tmp_path / "g1" / "error-0.json").read_text())
    message = document["message"]
    assert message["message"] == "ValueError: no good at step 3"
    extra = message["extraInfo"]
    assert "toy.py" in extra["py_callstack"]
    assert (extra["rank"], extra["step"], extra["generation"], extra["node"]) == (0, 3, 1, "a")
    assert extra["timestamp"].isdigit()
    assert "ValueError: no good at step 3" in world.log(0)
    assert [line.phase for line in agent.of(wire.WorkerPhase)][-1] == "first_step"
    assert read_progress(tmp_path / "g1" / "progress")[0].phase == "step"


def test_error_file_with_record(world: World, tmp_path: Path) -> None:
    world.start("recorded.py", policy=NEVER)
    assert world.codes() == [1]
    extra = json.loads((tmp_path / "g1" / "error-0.json").read_text())["message"]["extraInfo"]
    assert (extra["rank"], extra["step"]) == (0, 2)
    assert "in main" in extra["py_callstack"]


def test_leaving_the_loop_early_is_not_the_end(world: World, agent: FakeAgent, tmp_path: Path) -> None:
    """Exit 0 without having reached the end: the agent can tell (case D05)."""
    world.start("leaves.py", policy=NEVER)
    assert world.codes() == [0]
    assert "finished" not in [line.phase for line in agent.of(wire.WorkerPhase)]
    assert read_progress(tmp_path / "g1" / "progress")[0].phase != "finished"


def test_agent_restart_costs_nothing(world: World, agent: FakeAgent) -> None:
    """The line is made again: greeting and phases again, reports go on, no step is lost."""
    world.start("toy.py", world_size=2, env={"STEPS": "60", "STEP_SECONDS": "0.03"}, policy=NEVER)
    wait_for(lambda: len(agent.steps(0)) >= 3 and len(agent.steps(1)) >= 3, "steps")
    agent.stop()
    before = len(agent.of(wire.WorkerHello))
    seen = len(agent.lines)
    agent.start()
    wait_for(lambda: len(agent.of(wire.WorkerHello)) == before + 2, "both ranks greet again")
    world.wait()
    again = [line for line in agent.lines[seen:] if isinstance(line, wire.WorkerPhase) and line.rank == 0]
    assert [line.phase for line in again] == ["imported", "rendezvous", "first_step", "finished"]
    for rank in (0, 1):
        assert set(agent.steps(rank)) >= {60, 59}
        missing = set(range(1, 61)) - set(agent.steps(rank))
        assert len(missing) <= 2, "only a line that was on its way may be lost"


def test_no_agent_at_the_start(world: World, agent: FakeAgent) -> None:
    """An agent that is away when a worker attaches: training starts, and reports when it is there."""
    agent.stop()
    world.start("toy.py", world_size=1, env={"STEPS": "40", "STEP_SECONDS": "0.03"}, policy=NEVER)
    wait_for((world.folder / "g1" / "ids-0.jsonl").exists, "a step")
    agent.start()
    world.wait()
    assert set(agent.steps(0)) == set(range(1, 41))


def test_stacks_of_a_blocked_rank(world: World, agent: FakeAgent, tmp_path: Path) -> None:
    """SIGUSR2 writes the stacks of a rank that waits in a collective for a stopped peer."""
    world.start("toy.py", world_size=2, env={"STEPS": "100000", "STEP_SECONDS": "0.01"}, policy=NEVER)
    wait_for(lambda: len(agent.steps(0)) >= 2, "steps")
    world.processes[1].send_signal(signal.SIGSTOP)
    step = agent.steps(0)[-1]
    wait_for(lambda: read_progress(tmp_path / "g1" / "progress")[0].age_seconds() > 1.0, "rank 0 is blocked")
    assert read_progress(tmp_path / "g1" / "progress")[0].started_step >= step
    world.processes[0].send_signal(signal.SIGUSR2)
    stacks = tmp_path / "g1" / "stacks-0.txt"
    wait_for(lambda: "in main" in stacks.read_text(), "stacks are written")
    assert "toy.py" in stacks.read_text()


@pytest.mark.parametrize(("order", "expected"), [({"when": "rest"}, "at rest"), ({"when": "update"}, "diverged")])
def test_bit_flip_is_seen(world: World, agent: FakeAgent, order: dict[str, str], expected: str) -> None:
    """A flipped bit in the optimizer state of rank 1: at rest by its own digest, in the update by the other replica's."""
    world.start("toy.py", world_size=2, env={"STEPS": "80", "STEP_SECONDS": "0.03", "REGROW_CHAOS": "1"}, policy=NEVER)
    wait_for(lambda: len(agent.steps(1)) >= 3, "steps")
    agent.send(1, inject={"kind": "flip_bit", "where": "optimizer", "bit": 20, "name": "2.weight.exp_avg", **order})
    world.wait()
    reports = [{line.step: line for line in agent.of(wire.StepReport, rank)} for rank in (0, 1)]
    named = [line.at_rest_mismatch for line in reports[1].values() if line.at_rest_mismatch]
    first_diverged = min((step for step in reports[0] if reports[0][step].digest != reports[1][step].digest), default=0)
    assert not [line for line in reports[0].values() if line.at_rest_mismatch]
    assert first_diverged > 3
    if expected == "at rest":
        assert [name.partition(",")[0] for name in named] == ["optimizer.2.weight.exp_avg"]
        assert reports[1][first_diverged].at_rest_mismatch
    else:
        assert named == []


def test_chaos_is_off_by_default(world: World, agent: FakeAgent) -> None:
    world.start("toy.py", world_size=1, env={"STEPS": "40", "STEP_SECONDS": "0.03"}, policy=NEVER)
    wait_for(lambda: len(agent.steps(0)) >= 3, "steps")
    agent.send(0, inject={"kind": "raise"})
    world.wait()
    assert "REGROW_CHAOS is not 1" in world.log(0)


@pytest.mark.parametrize(
    ("inject", "code"), [({"kind": "raise"}, 1), ({"kind": "exit", "code": 77}, 77), ({"kind": "kill"}, -signal.SIGKILL)]
)
def test_injected_ends(world: World, agent: FakeAgent, inject: dict[str, object], code: int) -> None:
    world.start("toy.py", world_size=1, env={"STEPS": "100000", "STEP_SECONDS": "0.03", "REGROW_CHAOS": "1"}, policy=NEVER)
    wait_for(lambda: len(agent.steps(0)) >= 2, "steps")
    agent.send(0, inject=inject)
    assert world.codes() == [code]


def test_injected_hang_shows_in_progress(world: World, agent: FakeAgent, tmp_path: Path) -> None:
    world.start("toy.py", world_size=1, env={"STEPS": "100000", "STEP_SECONDS": "0.01", "REGROW_CHAOS": "1"}, policy=NEVER)
    wait_for(lambda: len(agent.steps(0)) >= 2, "steps")
    agent.send(0, inject={"kind": "hang", "phase": "step"})
    word = wait_for(
        lambda: next((word for word in read_progress(tmp_path / "g1" / "progress") if word.age_seconds() > 1.0), None), "no progress"
    )
    assert word.started_step == word.applied_step + 1


def test_injected_nan_is_never_saved(world: World, agent: FakeAgent, tmp_path: Path) -> None:
    """Case K03: after a NaN no checkpoint of the job is published, on any rank."""
    env = {"STEPS": "100000", "STEP_SECONDS": "0.02", "REGROW_CHAOS": "1", "KEEP": str(tmp_path)}
    world.start("toy.py", world_size=2, env=env, policy=OFTEN)
    wait_for(lambda: len(agent.steps(1)) >= 3, "steps")
    agent.send(1, inject={"kind": "nan"})
    refused = wait_for(lambda: [line for line in agent.of(wire.SaveReport) if line.outcome in ("skipped", "failed")], "a refused save")
    seen = min((line for line in agent.of(wire.StepReport) if line.nonfinite), key=lambda line: (line.step, -line.rank))
    assert (seen.rank, seen.nonfinite) == (1, "0.weight"), "the rank and tensor that made it, before the reduction spread it"
    assert "not finite" in refused[0].reason
    alone = [line for line in agent.of(wire.SaveReport) if line.outcome == "failed"]
    assert all("not finite" in (tmp_path / f"{line.step}-{line.rank}.skipped").read_text() for line in alone), "its writer is told"
    taken = Counter(line.step for line in agent.of(wire.SaveReport) if line.outcome == "snapshot")
    assert all(count < 2 for step, count in taken.items() if step >= seen.step), "never by all ranks, so nobody commits it"


def test_wrong_mesh_is_refused_before_anything(world: World) -> None:
    world.start("toy.py", world_size=1, env={"REGROW_SPEC": "", "REGROW_MESH": "dp=2,tp=2"}, supervised=True)
    assert world.codes() == [1]
    assert "needs 4 workers, the world has 1" in world.log(0)
