"""A rank that really becomes slow, by a process that stops and continues it all the time: a spare takes its place."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from tests.e2e.launcher import Run
from tests.e2e.test_in_place import beyond, pids, recovered, story
from tests.e2e.test_run import assert_like_twin

TOY = Path(__file__).with_name("toy.py")
STEPS = 400
WARM = 100
"""More steps than the detector takes to know what is usual (64)."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]


@contextlib.contextmanager
def slowed(pid: int, stopped_seconds: float, running_seconds: float) -> Generator[None]:
    """Stop and continue a process until left, or until it is gone."""
    over = threading.Event()

    def drive() -> None:
        with contextlib.suppress(ProcessLookupError):  # its place was taken
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(stopped_seconds)
                os.kill(pid, signal.SIGCONT)
                over.wait(running_seconds)

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_rank_that_became_slow_is_moved_to_a_spare(
    launch: Callable[..., Run], tmp_path: Path, twin: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGROW_POLICY_SLOW_RATIO", "0.3")
    monkeypatch.setenv("REGROW_POLICY_SLOW_SECONDS", "3")
    flags = ("--local", "4", "--nproc-per-node", "1", "--nnodes", "3:3", "--global-batch", "8", "--job", "toy")
    run = launch(*flags, str(TOY), "--steps", str(STEPS), "--work", "30", "--pause", "0", "--log", str(tmp_path / "log"))
    beyond(run, "toy", WARM)
    assert not run.job("toy").get("changes"), "nobody is slow yet"
    before = pids(run, 1, nodes=4)
    where = {rank: node["node"] for node in run.job("toy")["nodes"] for rank in node["ranks"]}
    (spare,) = (node["node"] for node in run.job("toy")["nodes"] if not node["ranks"])
    victim = before[(int(where[1][1:]), 0)]
    with slowed(victim, 0.03, 0.01):
        change = recovered(run, "toy", 0, "changes")
    assert (change["kind"], change["node"], change["lost_steps"]) == ("slow", where[1], 0), run.story()
    after = {rank: node["node"] for node in run.job("toy")["nodes"] for rank in node["ranks"]}
    assert after == where | {1: spare}, "the others keep their ranks"
    assert run.wait() == 0, run.story()
    assert run.result()["incidents"] == [], "nobody is charged"
    assert_like_twin(story(tmp_path)[0], twin, STEPS)
    assert run.gone(5.0) == []
