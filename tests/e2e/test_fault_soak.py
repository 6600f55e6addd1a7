"""Hundreds of random faults in one run of the 3D example, survivors in place: it ends like a run that nothing happened to.

    REGROW_SOAK_FAULTS=500 REGROW_SOAK_SEED=1 .venv/bin/pytest -m soak -s tests/e2e/test_fault_soak.py

In parts, where a machine is not there for that long: REGROW_SOAK_FAULTS=40 with one seed after the other, each to its end, and
REGROW_SOAK_TWINS=FOLDER, where the runs without faults are kept from part to part.

Kinds, moments and phases come from the seed: a worker, two workers of different nodes, a whole node, a shim, an agent, a
writer, the supervisor, etcd, a stopped worker, and a second fault while the first is being recovered from.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.launcher import TEST_MARK, Run
from tests.e2e.test_spare import lose_power

from regrow.agent.progress import read_progress
from regrow.demo import compare, steplog, twin
from regrow.processes import marked

FAULTS = int(os.environ.get("REGROW_SOAK_FAULTS", "60"))
SEED = int(os.environ.get("REGROW_SOAK_SEED", "1"))
STEPS_A_FAULT = 4
"""At most, from one fault to the next."""
STEPS = STEPS_A_FAULT * FAULTS + 40
NODES = 4
SMALL = ("--hidden", "48", "--seq", "32", "--samples", "256")
KINDS = {
    "worker": 6,
    "two_workers": 2,
    "again": 3,
    "stopped": 1,
    "node": 2,
    "shim": 1,
    "agent": 1,
    "writer": 1,
    "supervisor": 1,
    "etcd": 1,
}
"""{kind: share}."""
MOST_MORE_DESCRIPTORS = 64
"""A process that lived through many generations has at most so many open descriptors more than the youngest: those of two
generations before, which are let go late (21 each; six changes over in a row stay at that)."""
MOST_ARENAS = 16
"""Of a node's writer: two workers, two arenas each, and those of a mesh before that were not given up yet."""
MOST_STORES = 3
"""Of a node: the spare, the generation's, one that is just ending."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(6 * 3600)]


def workers(run: Run) -> dict[tuple[int, int], int]:
    """{(node, slot): pid} of the generation that runs; empty while there is none."""
    generation = run.job("gpt").get("generation") or 0
    found: dict[tuple[int, int], int] = {}
    for index in range(NODES):
        for path in (run.root / "nodes" / f"n{index}" / "jobs").glob(f"*/g{generation}/progress"):
            found |= {(index, word.slot): word.pid for word in read_progress(path) if word.pid and Path(f"/proc/{word.pid}").exists()}
    return found


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """It may be gone by now: that is the fault's own fault."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Faults:
    """Does one fault after another."""

    def __init__(self, run: Run, chance: random.Random) -> None:
        self.run = run
        self.chance = chance
        self.story: list[str] = []

    def step(self) -> int:
        """Of the job now."""
        return self.run.job("gpt").get("step") or 0

    def fault(self) -> str:
        """One, at a random moment of a step."""
        kind = self.chance.choices(list(KINDS), list(KINDS.values()))[0]
        time.sleep(self.chance.uniform(0.0, 0.4))  # the random moment
        self.story.append(f"step {self.step()}: {kind}")
        getattr(self, kind)()
        return kind

    def worker(self) -> None:
        """SIGKILL of one."""
        there = workers(self.run)
        if there:
            kill(self.chance.choice(sorted(there.values())))

    def two_workers(self) -> None:
        """Of whatever nodes, at once."""
        there = sorted(workers(self.run).values())
        for pid in self.chance.sample(there, k=min(2, len(there))):
            kill(pid)

    def again(self) -> None:
        """A second fault while the first is being recovered from."""
        self.worker()
        time.sleep(self.chance.uniform(0.0, 1.0))  # the random phase
        getattr(self, self.chance.choice(("worker", "agent", "supervisor", "shim")))()

    def stopped(self) -> None:
        """A hang."""
        there = workers(self.run)
        if there:
            kill(self.chance.choice(sorted(there.values())), signal.SIGSTOP)

    def node(self) -> None:
        """Everything of it."""
        lose_power(self.run, f"n{self.chance.randrange(NODES)}")

    def shim(self) -> None:
        """With its workers."""
        self._inject("kill_shim")

    def agent(self) -> None:
        """Its workers go on."""
        self._inject("kill_agent")

    def writer(self) -> None:
        """With the checkpoint that it is writing."""
        self._inject("kill_writer")

    def supervisor(self) -> None:
        """Training goes on."""
        for pid in self.run.pids("regrow supervisor"):
            kill(pid)

    def etcd(self) -> None:
        """Training goes on."""
        for pid in self.run.pids("--name=etcd"):
            kill(pid)

    def _inject(self, kind: str) -> None:
        with contextlib.suppress(OSError):  # the agent is away: killed by the fault before
            self.run.inject(f"n{self.chance.randrange(NODES)}", kind)


def descriptors(pid: int) -> list[str]:
    """What a process has open."""
    return [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]


def explained(pid: int) -> Counter[str]:
    """What a process has open, by kind: of sockets the state and the peer's port, of files their place, and its threads by name."""
    states: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            states[f"socket:[{words[9]}]"] = f"{table} state {words[3]}"
    found = Counter(states.get(target, target.split(":", 1)[0]) for target in descriptors(pid))
    tasks = (path / "comm" for path in Path(f"/proc/{pid}/task").iterdir())
    return found + Counter(f"thread {name.read_text(encoding='utf-8').strip()}" for name in tasks)


def assert_nothing_piles_up(run: Run) -> None:
    """Descriptors of workers, arenas of writers, stores of shims: as many as one generation needs, however many there were."""
    found = workers(run)
    open_now = {place: len(descriptors(pid)) for place, pid in found.items()}
    story = {place: sorted(explained(pid).items()) for place, pid in found.items()}
    assert max(open_now.values()) - min(open_now.values()) <= MOST_MORE_DESCRIPTORS, f"{open_now} {story}"
    arenas = {pid: sum("regrow-arena" in target for target in descriptors(pid)) for pid in run.pids("regrow.ckpt.writer")}
    assert max(arenas.values()) <= MOST_ARENAS, arenas
    stores = [pid for pid in marked(TEST_MARK, run.mark) if Path(f"/proc/{pid}/comm").read_text().strip() == "regrow-store"]
    assert len(stores) <= MOST_STORES * NODES, stores


def twins(folder: Path) -> tuple[Path, Path]:
    """Step logs of the runs without faults, new ones or those of the part before."""
    root = Path(os.environ.get("REGROW_SOAK_TWINS", folder / "twins")) / str(STEPS)
    if (root / "done").exists():
        return root / "twin", root / "second"
    root.mkdir(parents=True)
    found = asyncio.run(twin.run_twins(root, STEPS, 0, controls_after=20, script_flags=SMALL))
    (root / "done").touch()
    return found


def test_random_faults_leave_no_trace(launch: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = twins(tmp_path)
    monkeypatch.setenv(steplog.VARIABLE, str(tmp_path / "steps"))
    for name, seconds in (("HANG_FLOOR", 4), ("HANG_FIRST_STEP", 20), ("GROWTH_COOLDOWN", 2), ("RECONNECT", 5)):
        monkeypatch.setenv(f"REGROW_POLICY_{name}_SECONDS", str(seconds))
    monkeypatch.setenv("REGROW_SUPERVISOR_OBSERVE_ONLY", "quarantine")  # faults on purpose say nothing of a node
    sizes = ("--local", str(NODES), "--nproc-per-node", "2", "--mesh", "2x2x2", "--global-batch", "16", "--micro-batch", "2")
    flags = (*sizes, "--in-place", "--max-restarts", "100000", "--job", "gpt")
    run = launch(*flags, "-m", "regrow.demo.train_gpt", "--steps", str(STEPS), "--seed", "0", *SMALL)
    faults = Faults(run, random.Random(SEED))
    kinds: Counter[str] = Counter()
    for number in range(FAULTS):
        least = min(faults.step() + faults.chance.randint(1, STEPS_A_FAULT), STEPS - 20)
        run.until(lambda least=least: faults.step() >= least, f"step {least} after {faults.story[-3:]}")
        kinds[faults.fault()] += 1
        print(number, faults.story[-1], flush=True)
    last = faults.step()
    run.until(lambda: faults.step() > min(last + 5, STEPS - 5) and workers(run), f"steps after {faults.story[-3:]}")
    assert_nothing_piles_up(run)
    assert run.wait(3600) == 0, f"{faults.story}\n{run.story()}"
    incidents: list[dict[str, Any]] = run.result()["incidents"]
    print(dict(kinds), len(incidents), "incidents", Counter(item["rung"] for item in incidents), run.result()["lost_steps"], "steps lost")
    result = compare.compare(tmp_path / "steps", one, last_step=STEPS, tolerances=compare.state_tolerances(one, two))
    assert result.passed, f"{result.failed} {result.checks} {faults.story}"
    assert run.gone(5.0) == []
