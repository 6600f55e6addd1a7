"""A site's history: ten days on 16 nodes with seven interruptions whose losses are known to the second."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.errors import ConfigurationError
from regrow.supervisor.sim import backtest, constants, history

DATA = Path(__file__).parents[1] / "data" / "backtest"
FILES = ("--jobs", str(DATA / "jobs.csv"), "--steps", str(DATA / "steps.csv"), "--kernel", str(DATA / "kernel.csv"))


def regrow(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "regrow", "backtest", *words], capture_output=True, text=True, timeout=120, check=False)


def test_a_whole_history(tmp_path: Path) -> None:
    done = regrow(*FILES, "--seeds", "6", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (job,) = document["jobs"]
    assert job["step_seconds"] == pytest.approx(12.0, rel=0.01)
    kinds = [stop["kind"] for stop in job["interruptions"]]
    assert kinds == ["host", "gpu", "program", "gpu", "host", "hang", "leave"]
    assert document["lost_hours"]["observed"] == pytest.approx(sum(stop["lost_seconds"] for stop in job["interruptions"]) / 3600)
    saved, lost = document["saved_hours"], document["lost_hours"]
    assert saved["low"] < saved["point"] < saved["high"]
    assert saved["point"] == pytest.approx(lost["observed"] - lost["regrow"]["p50"])
    assert document["evictions"]["verdicts"] == 3
    (wrong,) = document["evictions"]["lines"]
    assert wrong["node"] == "gpu09"
    assert wrong["kind"] == "nvlink_fault"


def test_the_loss_of_an_interruption_is_the_time_until_its_step_is_reached_again() -> None:
    attempts = [
        history.Attempt(job="j", start=0.0, end=1000.0, state="FAILED", num_nodes=2, gpus=16),
        history.Attempt(job="j", start=1500.0, end=9000.0, state="COMPLETED", num_nodes=2, gpus=16),
    ]
    steps = [history.Progress(at=at, step=step, job="j") for at, step in ((100, 1), (990, 90), (1700, 61), (1990, 90), (8900, 700))]
    (case,) = backtest.cases(attempts, steps, [])
    (stop,) = case.interruptions
    assert (stop.lost_seconds, stop.measured) == (1000.0, True)
    (case,) = backtest.cases(attempts, [], [])
    (stop,) = case.interruptions
    assert (stop.lost_seconds, stop.measured) == (500.0, False)


def test_a_wrong_eviction_costs_a_drain(small) -> None:
    attempts = [
        history.Attempt(job="j", start=0.0, end=50_000.0, state="NODE_FAIL", num_nodes=8, gpus=64, failed_node="b"),
        history.Attempt(job="j", start=51_000.0, end=90_000.0, state="COMPLETED", num_nodes=8, gpus=64),
    ]
    lines = [history.Evidence(at=at, node="c", kind="x", action="reset", line="x") for at in (10_000.0, 20_000.0, 30_000.0)]
    costs = backtest.Costs(constants=constants.load(), step_seconds=10.0)
    (calm,), (wrong,) = backtest.cases(attempts, [], []), backtest.cases(attempts, [], lines)
    assert (len(calm.wrong), len(wrong.wrong)) == (0, 3)
    assert backtest.simulated_lost(wrong, costs, 1) > backtest.simulated_lost(calm, costs, 1)


def test_accounting_as_slurm_prints_it(tmp_path: Path) -> None:
    """sacct -X --duplicates --parsable2 --format=JobName,State,Start,End,NNodes,NodeList"""
    path = tmp_path / "sacct.txt"
    path.write_text(
        "JobName|State|Start|End|NNodes|NodeList\n"
        "llm|NODE_FAIL|2026-05-01T00:00:00|2026-05-01T08:00:00|4|gpu[01-03],login7\n"
        "llm|CANCELLED by 1001|2026-05-01T08:10:00|2026-05-01T09:00:00|4|gpu[01-04]\n"
        "llm|RUNNING|2026-05-01T09:30:00|Unknown|4|gpu[01-04]\n"
        "other|COMPLETED|2026-05-01T01:00:00|2026-05-01T20:00:00|1|gpu09\n"
    )
    found = history.attempts(path)
    assert found[0].nodes == ("gpu01", "gpu02", "gpu03", "login7")
    assert found[1].state == "CANCELLED"
    assert found[2].end == found[3].end
    (case,) = backtest.cases(found, [], [])
    assert [stop.kind for stop in case.interruptions] == ["host"]
    assert (case.by_hand, case.gpus_known) == (1, False)
    with pytest.raises(ConfigurationError, match="no range"):
        history.node_names("gpu[9-2]", "line 2")


def test_the_bound_on_wrong_evictions() -> None:
    assert backtest.wrong_share_upper95(0, 0) == 1.0
    assert backtest.wrong_share_upper95(0, 30) == pytest.approx(1.0 - 0.05 ** (1 / 30))
    assert backtest.wrong_share_upper95(1, 20) == pytest.approx(0.2161, abs=1e-4)
    assert backtest.wrong_share_upper95(8, 8) == 1.0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--jobs", "/no/such.csv"), "/no/such.csv"),
        (("--jobs", str(DATA / "steps.csv")), "no column job"),
        (("--jobs", str(DATA / "jobs.csv")), "--step-seconds"),
        ((*FILES, "--seeds", "1"), "--seeds"),
        ((*FILES, "--policy", "hope"), "--policy"),
        ((*FILES, "--save-seconds", "-1"), "--save-seconds"),
    ],
)
def test_wrong_input_is_exit_2(words: tuple[str, ...], named: str) -> None:
    done = regrow(*words)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert not done.stdout


def test_a_bad_value_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("job,start,end,state\nj,1,2,FAILED\nj,3,noon,FAILED\n")
    done = regrow("--jobs", str(path))
    assert done.returncode == 2
    assert "line 3" in done.stderr
    assert "noon" in done.stderr
