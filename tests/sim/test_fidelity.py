"""The simulator against runs that happened: delays measured in four of them, tried on four others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from regrow.errors import ConfigurationError
from regrow.supervisor.sim import constants, fidelity, recorded

DATA = Path(__file__).parents[1] / "data" / "journals"
MEASURED = tuple(DATA / f"kills-{number}.jsonl" for number in (0, 2, 8, 10))
TRIED = tuple(DATA / f"kills-{number}.jsonl" for number in (6, 7, 12, 13))


def regrow(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "regrow", "simulate", *words], capture_output=True, text=True, timeout=120, check=False)


def test_phase_medians_of_other_runs_are_met_within_a_fifth() -> None:
    words = [word for path in MEASURED for word in ("--measure", str(path))] + [word for path in TRIED for word in ("--against", str(path))]
    done = regrow(*words, "--seeds", "5", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0, document
    assert document["ok"]
    assert document["incidents"] == {"measured_in": 9, "tried_on": 7, "simulated": 35, "left_out": 0}
    assert document["same_kinds"]
    step = document["phases"]["first_step"]
    assert step["judged"]
    assert abs(step["error"]) < 0.1
    assert document["phases"]["decide"]["simulated_seconds"] == pytest.approx(document["phases"]["decide"]["measured_seconds"], rel=0.05)


def test_a_delay_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = fidelity.measured

    def slower(runs):
        found = measure(runs)
        return msgspec.structs.replace(found, first_step=constants.Delay(median=2.0, source="wrong"))

    monkeypatch.setattr(fidelity, "measured", slower)
    document = fidelity.compare([recorded.read(MEASURED[0])], [recorded.read(TRIED[1])], seeds=2)
    assert document["off"] == ["first_step"]
    assert not document["ok"]


def test_what_a_journal_says() -> None:
    run = recorded.read(DATA / "kills-8.jsonl")
    assert [(seen.kind, seen.node, seen.lost_steps) for seen in run.incidents] == [("worker_exit", "n0", 20), ("node_lost", "n0", 48)]
    assert run.incidents[1].returns_seconds == pytest.approx(0.6, abs=0.1)
    assert run.home.world_size == 2
    assert 0.3 < run.delays["exit_report"]["killed"][0] < 0.5


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--measure", str(MEASURED[0])), "--against"),
        (("--measure", str(MEASURED[0]), "--against", str(MEASURED[0])), "proves nothing"),
        (("--measure", "/no/such.sqlite", "--against", str(TRIED[0])), "/no/such.sqlite"),
    ],
)
def test_wrong_input_is_exit_2(words: tuple[str, ...], named: str) -> None:
    done = regrow(*words)
    assert done.returncode == 2
    assert named in done.stderr
    assert not done.stdout


def test_a_file_that_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"kind":"job_loaded","at":1}\n')
    with pytest.raises(ConfigurationError, match="is not a journal"):
        recorded.read(path)
    path.write_text("\n".join(line for line in TRIED[0].read_text().splitlines() if '"record_generation"' not in line))
    with pytest.raises(ConfigurationError, match="no job that started"):
        recorded.read(path)


def test_hangs_by_their_kind_and_lost_nodes_are_what_they_were() -> None:
    """Delays are the run's own here: what is looked at are the decisions, and which delays are drawn after which fault."""
    run = recorded.read(DATA / "hangs-and-losses.jsonl")
    labels = [seen.label for seen in run.incidents if not seen.alone]
    assert {label: labels.count(label) for label in labels} == {"hang stopped": 2, "hang alike": 3, "node_lost": 5}
    assert [seen.lost_steps for seen in run.incidents if seen.label == "node_lost"] == [0, 0, 4, 3, 0], "what was in memory is not lost"
    document = fidelity.compare([run], [run], seeds=5)
    assert document["incidents"] == {"measured_in": 13, "tried_on": 10, "simulated": 50, "left_out": 3}
    assert document["same_kinds"]
    assert document["ok"]
    assert document["whole_by_kind"]["hang stopped"]["within"]
    assert document["whole_by_kind"]["hang alike"]["within"]
    lost = document["phases_by_kind"]["node_lost"]
    for phase in ("decide", "stop", "restore"):
        assert lost[phase]["simulated_seconds"] == pytest.approx(lost[phase]["measured_seconds"], rel=0.2)
    made = [
        spans for seed in range(1, 6) for label, spans in fidelity.simulated(run, fidelity.measured([run]), seed) if label == "hang stopped"
    ]
    assert {round(spans["decide"], 3) for spans in made} == {0.0}, "a process that does not run is decided upon at once"
