"""Recovery in the surviving processes, as a user sees it: who keeps its pid, what is computed twice, what is behind it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.launcher import TEST_MARK, Run
from tests.e2e.test_run import assert_like_twin
from tests.e2e.test_spare import lose_power

from regrow.agent.progress import read_progress
from regrow.demo import compare, lineage, steplog, twin
from regrow.processes import marked

TOY = Path(__file__).with_name("toy.py")
NUM_NODES = 2
STEPS = 60
MOST_DESCRIPTORS = 150
"""Of a worker, however many generations it lived through: one has about 50, and what two before it had is let go late."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def twin_losses(request: pytest.FixtureRequest) -> dict[int, float]:
    """{step: loss} of the toy without Regrow around it."""
    return request.getfixturevalue("twin")


def story(folder: Path) -> tuple[dict[int, float], list[int]]:
    """{step: loss} as any rank wrote it down, and the step that each generation went on after.

    The last step of a rank that was killed may be in the logs of its peers only: they had applied it.
    """
    kept: dict[int, float] = {}
    restored: list[int] = []
    numbers = sorted({int(path.stem[1:].split("-")[0]) for path in (folder / "log").glob("g*.jsonl")})
    for number in numbers:
        logs = [path.read_text().splitlines() for path in (folder / "log").glob(f"g{number}-r*.jsonl")]
        parsed = [[json.loads(line) for line in log if line.endswith("}")] for log in logs]
        restored.append(parsed[0][0]["restored"])
        assert {log[0]["restored"] for log in parsed} == {restored[-1]}
        kept = {step: loss for step, loss in kept.items() if step <= restored[-1]}
        kept |= {line["step"]: line["loss"] for log in parsed for line in log[1:]}
    return kept, restored


def pids(run: Run, generation: int, nodes: int = NUM_NODES) -> dict[tuple[int, int], int]:
    """{(node, slot): pid} as the workers of a generation publish it."""
    found: dict[tuple[int, int], int] = {}
    for index in range(nodes):
        for path in (run.root / "nodes" / f"n{index}" / "jobs").glob(f"*/g{generation}/progress"):
            found |= {(index, word.slot): word.pid for word in read_progress(path) if word.pid}
    return found


def stores(run: Run) -> list[int]:
    """Pids of all TCPStores: of a generation, and one on each node that stands ready."""
    return [pid for pid in marked(TEST_MARK, run.mark) if Path(f"/proc/{pid}/comm").read_text().strip() == "regrow-store"]


def recovered(run: Run, job: str, number: int, kind: str = "incidents") -> dict[str, Any]:
    """The incident (or wanted change, with "changes") of that number, once it is over."""
    return run.until(
        lambda: next((item for item in run.job(job).get(kind, [])[number : number + 1] if item["recovered"]), None),
        f"the end of {kind} {number}",
    )


def beyond(run: Run, job: str, step: int) -> int:
    """Wait for a step; the one that is there then."""
    return run.until(lambda: (found := run.job(job).get("step") or 0) > step and found, f"step {step}")


def start(launch: Callable[..., Run], tmp_path: Path) -> Run:
    flags = ("--local", str(NUM_NODES), "--nproc-per-node", "2", "--global-batch", "8", "--job", "toy", "--in-place")
    return launch(*flags, str(TOY), "--steps", str(STEPS), "--log", str(tmp_path / "log"))


def test_survivors_keep_their_processes_and_nothing_is_computed_twice(
    launch: Callable[..., Run], tmp_path: Path, twin_losses: dict[int, float]
) -> None:
    run = start(launch, tmp_path)
    beyond(run, "toy", 5)
    frontiers: list[int] = []
    for number, (node, rank) in enumerate((("n1", 3), ("n0", 0))):
        generation = run.job("toy")["generation"]
        before = pids(run, generation)
        assert len(before) == 2 * NUM_NODES
        assert run.inject(node, "kill_worker", rank)["done"]
        incident = recovered(run, "toy", number)
        after = pids(run, run.job("toy")["generation"])
        killed = (int(node[1:]), rank % 2)
        assert {place for place in before if before[place] != after[place]} == {killed}, run.story()
        assert incident["rung"] == "in_place"
        assert incident["lost_steps"] == 0
        frontiers.append(incident["frontier"])
        assert sum(incident["phases"].values()) == pytest.approx(incident["seconds"], rel=0.02)
        beyond(run, "toy", incident["frontier"] + 5)
    run.until(lambda: len(stores(run)) <= 1 + NUM_NODES, "the end of the stores of generations that are over")
    assert run.wait() == 0, run.story()
    found, restored = story(tmp_path)
    assert_like_twin(found, twin_losses, STEPS)
    assert [step >= frontier for step, frontier in zip(restored[1:], frontiers, strict=True)] == [True, True]
    assert run.result()["lost_steps"] == 0
    assert run.gone(5.0) == []


def test_a_stopped_survivor_costs_a_fork_and_no_more(launch: Callable[..., Run], tmp_path: Path, twin_losses: dict[int, float]) -> None:
    """Rank 2 cannot hear the order: it is forked at once, in the same generation, with a peer's state, and no deadline is waited for."""
    run = start(launch, tmp_path)
    beyond(run, "toy", 5)
    before = pids(run, run.job("toy")["generation"])
    os.kill(before[(1, 0)], signal.SIGSTOP)
    os.kill(before[(0, 1)], signal.SIGKILL)
    incident = recovered(run, "toy", 0)
    after = pids(run, run.job("toy")["generation"])
    assert {place for place in before if before[place] != after[place]} == {(1, 0), (0, 1)}, run.story()
    assert incident["generation_after"] == incident["generation_before"] + 1
    log = (run.root / "nodes" / "n1.log").read_text()
    assert "in place: ranks [2] are stopped: forked anew" in log, log[-3000:]
    assert "did not change over in time" not in log, log[-3000:]
    assert run.wait() == 0, run.story()
    assert_like_twin(story(tmp_path)[0], twin_losses, STEPS)
    assert run.gone(5.0) == []


def test_state_goes_over_to_another_mesh_from_memory(launch: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a DP2 x TP2 job is lost with its node: the other half goes on as two pipeline stages with the step that it had."""
    steps, small = 40, ("--hidden", "48", "--seq", "32", "--samples", "256")
    (tmp_path / "twins").mkdir()
    one, two = asyncio.run(twin.run_twins(tmp_path / "twins", steps, 0, controls_after=20, script_flags=small))
    monkeypatch.setenv(steplog.VARIABLE, str(tmp_path / "steps"))
    sizes = ("--local", "2", "--nproc-per-node", "2", "--mesh", "2x2x1", "--meshes", "4:2x2x1 2:1x1x2", "--nnodes", "1:2")
    flags = (*sizes, "--global-batch", "16", "--micro-batch", "2", "--in-place", "--job", "gpt")
    run = launch(*flags, "-m", "regrow.demo.train_gpt", "--steps", str(steps), "--seed", "0", *small)
    run.until(lambda: (run.job("gpt").get("checkpoint") or {}).get("step"), "a checkpoint")
    run.until(lambda: run.job("gpt")["step"] >= run.job("gpt")["checkpoint"]["step"] + 2, "steps beyond the checkpoint")
    before = pids(run, run.job("gpt")["generation"])
    assert lose_power(run, "n1") >= 5
    incident = recovered(run, "gpt", 0)
    assert (incident["rung"], incident["lost_steps"]) == ("shrink", 0), run.story()
    after = pids(run, incident["generation_after"], 1)
    assert after == {place: pid for place, pid in before.items() if place[0] == 0}
    assert run.wait() == 0, run.story()
    (spec,) = run.root.glob(f"nodes/n0/jobs/gpt/g{incident['generation_after']}/spec.json")
    on_disk = json.loads(spec.read_text())["restore"]["step"]
    segments = lineage.read_lineage(tmp_path / "steps").segments
    went_on = next(segment.restored for segment in segments if segment.generation == incident["generation_after"])
    assert went_on >= incident["frontier"] > on_disk, "from memory: the checkpoint is older"
    result = compare.compare(tmp_path / "steps", one, last_step=steps, tolerances=compare.state_tolerances(one, two))
    assert not set(result.failed) - {"rng"}, f"{result.failed} {result.checks}"  # streams are derived anew
    assert len(result.meshes) >= 2
    assert run.gone(5.0) == []


def test_a_node_that_is_drained_hands_its_ranks_to_a_spare_and_no_step_is_computed_twice(
    launch: Callable[..., Run], tmp_path: Path, twin_losses: dict[int, float]
) -> None:
    """As for a node that degrades: its verdict drains it. At a boundary, survivors in place, the spare with a peer's state."""
    flags = ("--local", "3", "--nproc-per-node", "1", "--nnodes", "2:2", "--global-batch", "8", "--job", "toy", "--in-place")
    run = launch(*flags, str(TOY), "--steps", "120", "--log", str(tmp_path / "log"))
    beyond(run, "toy", 5)
    places = {node["node"]: node["ranks"] for node in run.job("toy")["nodes"]}
    (spare,) = (node for node, ranks in places.items() if not ranks)
    (sick,) = (node for node, ranks in places.items() if ranks == [1])
    before = pids(run, run.job("toy")["generation"], 3)
    run.post(f"/v1/nodes/{sick}/drain")
    incident = recovered(run, "toy", 0, "changes")
    assert (incident["kind"], incident["lost_steps"]) == ("drain", 0)
    assert {node["node"]: node["ranks"] for node in run.job("toy")["nodes"]}[spare] == [1]
    after = pids(run, incident["generation_after"], 3)
    (kept,) = (pid for place, pid in before.items() if place in after and after[place] == pid)
    assert kept, "the other member keeps its process"
    assert run.wait() == 0, run.story()
    assert_like_twin(story(tmp_path)[0], twin_losses, 120)
    assert run.gone(5.0) == []


SWALLOWS = """
import os, pathlib, torch, torch.distributed as dist, regrow

def main():
    run = regrow.attach()
    if run.rank == 1:
        pathlib.Path(f"pid-g{run.spec.generation}").write_text(str(os.getpid()))
    for step in run.steps(10**6):
        while True:
            try:
                run_step()
            except BaseException:
                if run.rank == 1:
                    continue  # whatever comes, it goes on
                raise
            break
        pathlib.Path(f"at-g{run.spec.generation}").touch()
        run.complete(step)

def run_step():
    import time
    time.sleep(0.02)
    dist.all_reduce(torch.ones(1))

regrow.in_place(main)
"""


def test_code_that_swallows_the_change_is_forked_anew(launch: Callable[..., Run], tmp_path: Path) -> None:
    script = tmp_path / "swallows.py"
    script.write_text(SWALLOWS)
    run = launch("--local", "2", "--nproc-per-node", "1", "--job", "swallows", "--in-place", str(script))
    run.until(lambda: (run.job("swallows").get("step") or 0) > 3, "steps")
    first = int((tmp_path / "pid-g1").read_text())
    assert run.inject("n0", "kill_worker")["done"]
    run.until((tmp_path / "at-g2").exists, "a step of the second generation")
    assert int((tmp_path / "pid-g2").read_text()) != first
    assert not Path(f"/proc/{first}").exists()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_two_hundred_of_two_hundred_on_the_3d_example(launch: Callable[..., Run], tmp_path: Path) -> None:
    """Random ranks at random moments, on DP2 x TP2 x PP2: each time in place, no survivor replaced, no step computed twice.
    REGROW_RECOVERIES=40 REGROW_SEED=6: so many, others."""
    chance = random.Random(int(os.environ.get("REGROW_SEED", "5")))
    flags = ("--local", "4", "--nproc-per-node", "2", "--mesh", "2x2x2", "--global-batch", "16", "--micro-batch", "2", "--job", "gpt")
    small = ("--hidden", "48", "--seq", "32", "--steps", "1000000", "--samples", "256")
    run = launch(*flags, "--in-place", "--max-restarts", "1000", "-m", "regrow.demo.train_gpt", *small)
    beyond(run, "gpt", 3)
    bad: list[str] = []
    for number in range(int(os.environ.get("REGROW_RECOVERIES", "200"))):
        generation = run.job("gpt")["generation"]
        before = pids(run, generation, 4)
        place = chance.choice(sorted(before))
        time.sleep(chance.uniform(0.0, 0.5))  # the random moment
        os.kill(before[place], signal.SIGKILL)
        incident = run.until(
            lambda g=generation: next(
                (item for item in run.job("gpt").get("incidents", []) if item["generation_before"] == g and item["recovered"]), None
            ),
            f"recovery {number}",
        )
        after = pids(run, run.job("gpt")["generation"], 4)
        changed = {other for other in before if before[other] != after.get(other)}
        if incident["rung"] != "in_place" or changed != {place} or incident["generation_after"] != generation + 1:
            bad.append(f"{number}: {incident['rung']} {changed} for {place}, lost {incident['lost_steps']}, {incident['seconds']:.2f} s")
        print(number, place, incident["rung"], incident["lost_steps"], f"{incident['seconds']:.2f}", flush=True)
        beyond(run, "gpt", incident["frontier"] + 2)
    assert not bad, "\n".join(bad)
    last = pids(run, run.job("gpt")["generation"], 4)
    descriptors = {place: len(list(Path(f"/proc/{pid}/fd").iterdir())) for place, pid in last.items()}
    assert max(descriptors.values()) <= MOST_DESCRIPTORS, descriptors
