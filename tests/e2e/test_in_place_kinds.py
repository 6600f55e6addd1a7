"""In place is broken on purpose: whatever a script holds, a fault costs a change in place or a fork, never a hang or a wrong loss.

.venv/bin/pytest -m soak -s tests/e2e/test_in_place_kinds.py
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.launcher import Run
from tests.e2e.test_in_place import TOY, beyond, pids, recovered, story
from tests.e2e.test_run import assert_like_twin
from tests.e2e.test_spare import lose_power

KINDS_SCRIPT = Path(__file__).with_name("kinds.py")
KINDS = ("ddp", "fsdp2", "hsdp", "subgroups", "loader", "compiled", "holder", "speeds")
"""speeds: ranks of different speeds."""
STEPS = 50
SHARDED = ("fsdp2",)
"""A part of the state dies with its holder: these go on from the checkpoint."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_kills_of_a_script_of_this_kind(kind: str, launch: Callable[..., Run], tmp_path: Path, twin: dict[int, float]) -> None:
    flags = ("--local", "2", "--nproc-per-node", "2", "--global-batch", "8", "--job", "kind", "--in-place")
    run = launch(*flags, str(KINDS_SCRIPT), "--kind", kind, "--steps", str(STEPS), "--log", str(tmp_path / "log"))
    beyond(run, "kind", 5)
    bound = run.until(lambda: run.job("kind")["checkpoint"]["bound"], "what a loss would cost")
    assert (bound["sole_ranks"], bound["sole_nodes"]) == ((4, 2) if kind in SHARDED else (0, 0))
    for number, place in enumerate(((1, 1), (0, 0))):
        before = pids(run, run.job("kind")["generation"])
        os.kill(before[place], signal.SIGKILL)
        incident = recovered(run, "kind", number)
        after = pids(run, run.job("kind")["generation"])
        replaced = {other for other in before if before[other] != after.get(other)}
        print(kind, place, incident["rung"], f"lost {incident['lost_steps']}, replaced {sorted(replaced)}, {incident['seconds']:.2f} s")
        if kind not in SHARDED:
            assert incident["lost_steps"] == 0, run.story()
        assert replaced == {place}, run.story()
        beyond(run, "kind", incident["frontier"] + 3)
    assert run.wait() == 0, run.story()
    assert_like_twin(story(tmp_path)[0], twin, STEPS)
    assert run.gone(5.0) == []


@pytest.mark.parametrize("kind", ["deaf", "woken"])
def test_a_rank_that_is_held_in_c_costs_a_fork_at_most(
    kind: str, launch: Callable[..., Run], tmp_path: Path, twin: dict[int, float]
) -> None:
    """It holds the interpreter's lock: no thread of the process hears the order. It is killed and forked anew when its 2 s are over; unless
    the signal that asks for its stack ends what held it: then it is on its way, and killing it now would cost its peers theirs."""
    flags = ("--local", "2", "--nproc-per-node", "2", "--global-batch", "8", "--job", "kind", "--in-place")
    run = launch(*flags, str(KINDS_SCRIPT), "--kind", kind, "--steps", str(STEPS), "--log", str(tmp_path / "log"))
    run.until((tmp_path / "log" / "held").exists, "a rank that is held in C")
    before = pids(run, 1)
    os.kill(before[(1, 1)], signal.SIGKILL)
    recovered(run, "kind", 0)
    after = pids(run, 2)
    replaced = {place for place in before if before[place] != after.get(place)}
    assert replaced == ({(1, 0), (1, 1)} if kind == "deaf" else {(1, 1)}), run.story()
    assert run.wait() == 0, run.story()
    incidents = [(one["rung"], one["lost_steps"], one["seconds"]) for one in run.result()["incidents"]]
    print(kind, incidents)
    assert [rung for rung, _, _ in incidents] == ["in_place"], run.story()
    assert_like_twin(story(tmp_path)[0], twin, STEPS)
    assert run.gone(5.0) == []


def test_a_kill_while_the_job_grows(
    launch: Callable[..., Run], tmp_path: Path, twin: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is lost and comes back; a worker is killed in the middle of the change that takes it in."""
    monkeypatch.setenv("REGROW_POLICY_GROWTH_COOLDOWN_SECONDS", "1")
    monkeypatch.setenv("REGROW_SUPERVISOR_OBSERVE_ONLY", "quarantine")
    flags = ("--local", "3", "--nproc-per-node", "1", "--nnodes", "2:3", "--global-batch", "8", "--job", "toy", "--in-place")
    run = launch(*flags, str(TOY), "--steps", "400", "--log", str(tmp_path / "log"))
    beyond(run, "toy", 5)
    assert lose_power(run, "n2") >= 3
    shrunk = recovered(run, "toy", 0)["generation_after"]
    run.until(lambda: (run.job("toy").get("generation") or 0) > shrunk, "the job grows")
    victim = next(iter(pids(run, shrunk, 3).values()))
    os.kill(victim, signal.SIGKILL)
    beyond(run, "toy", (run.job("toy").get("step") or 0) + 20)
    run.until(lambda: "dp=3" in (run.job("toy").get("mesh") or ""), "three ranks again")
    assert run.wait() == 0, run.story()
    assert_like_twin(story(tmp_path)[0], twin, 400)
    assert run.gone(5.0) == []
