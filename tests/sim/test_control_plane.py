"""The queue of a leader against what can be said of it by hand, and the command that prints it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from regrow.errors import ConfigurationError
from regrow.supervisor.sim import leader_answer, leader_costs
from regrow.supervisor.sim.constants import shipped
from regrow.supervisor.sim.control_plane import BEAT_SECONDS, LOOK_SECONDS, SILENCE_SECONDS, Load, cores, simulate
from regrow.supervisor.sim.crowd import greeting_seconds
from regrow.supervisor.sim.leader_answer import Request, largest
from regrow.supervisor.sim.leader_costs import Costs

COSTS = Costs(
    beat=50e-6, word=5e-6, report=80e-6, report_word=10e-6, greeting=2e-3, abandoned=1e-4, step_turn=1e-3, worst_turn=3e-3, look=1e-4
)


def test_an_idle_leader_sees_silence_when_it_is_due() -> None:
    """From the last beat, at most a period before the loss, to the first look after the limit."""
    answer = simulate(COSTS, Load(nodes=80))
    assert answer.wait_p99_seconds < 4 * COSTS.beat
    assert (
        SILENCE_SECONDS - BEAT_SECONDS
        < answer.detection_p50_seconds
        <= answer.detection_p99_seconds
        < SILENCE_SECONDS + LOOK_SECONDS + 0.01
    )
    assert answer.num_false == 0
    by_hand = 80 * (2 * COSTS.beat + COSTS.report / 2) + 80 / 1000 * (COSTS.step_turn / 2 + COSTS.look / LOOK_SECONDS)
    assert answer.cores == pytest.approx(by_hand)


def test_a_full_thread_sees_late_and_an_overfull_one_never() -> None:
    slow = msgspec.structs.replace(COSTS, beat=1e-3)
    full = int(BEAT_SECONDS / slow.beat)
    assert simulate(slow, Load(nodes=full // 2)).detection_p99_seconds < 3.0
    assert simulate(slow, Load(nodes=int(1.3 * full))).detection_p99_seconds > 3.0
    assert math.isinf(simulate(slow, Load(nodes=2 * full)).wait_p99_seconds)


def test_the_largest_cluster_is_where_the_formula_says() -> None:
    per_node = cores(COSTS, Load(nodes=1000)) / 1000
    assert largest(COSTS, "cores") == pytest.approx(0.5 / per_node, rel=0.02)
    found = largest(COSTS, "greeting")
    assert 0.5 < found * COSTS.greeting / 10.0 < 1.0, "besides greeting it hears those that it has greeted, and some gave up meanwhile"
    assert greeting_seconds(COSTS, Load(nodes=found)) <= 10.0 < greeting_seconds(COSTS, Load(nodes=int(1.1 * found)))


def test_a_crowd_is_greeted_one_after_the_other_and_those_who_gave_up_come_again() -> None:
    few, many = greeting_seconds(COSTS, Load(nodes=500)), greeting_seconds(COSTS, Load(nodes=3000))
    assert few == pytest.approx(500 * COSTS.greeting / (1 - 250 * COSTS.beat / BEAT_SECONDS), rel=0.1)
    assert many > 3000 * COSTS.greeting, "most waited longer than three seconds, and their first connections cost time, too"
    assert math.isinf(greeting_seconds(COSTS, Load(nodes=20_000))), "the beats of those who are in leave no time for the others"


def test_an_aggregator_bears_more_and_one_beat_later() -> None:
    assert largest(COSTS, "cores", group=64) > 5 * largest(COSTS, "cores")
    alone, together = simulate(COSTS, Load(nodes=1024)), simulate(COSTS, Load(nodes=1024, group=64))
    assert together.cores < alone.cores / 5
    assert alone.detection_p50_seconds < together.detection_p50_seconds < alone.detection_p50_seconds + BEAT_SECONDS
    assert together.num_false == 0


@pytest.mark.parametrize(("unheard", "called_silent"), [(1.0, 0), (11.0, 64)])
def test_an_aggregator_that_ends_makes_its_nodes_silent_when_they_are_slow_to_leave_it(unheard: float, called_silent: int) -> None:
    assert simulate(COSTS, Load(nodes=512, group=64, unheard_seconds=unheard)).num_false == called_silent


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("beat = 1", "missing required field"),
        ("{}", "is not what the benchmark prints"),
        ("beat = [", "is not TOML"),
        ('{"samples": {"costs_seconds": {"beat": "soon"}}}', "wrong costs"),
        (shipped("leader.toml").replace("seconds = ", "seconds = -", 1), "beat is -"),
    ],
)
def test_costs_that_say_nothing_are_refused(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "costs").write_text(text)
    with pytest.raises(ConfigurationError, match=named):
        leader_costs.load(tmp_path / "costs")


def test_loads_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="group is 0"):
        simulate(COSTS, Load(nodes=8, group=0))
    with pytest.raises(ConfigurationError, match="aggregator for one node"):
        leader_answer.answer(Request(costs=COSTS, group=1))


def test_the_command_says_what_breaks_first(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(msgspec.json.encode({"samples": {"costs_seconds": COSTS}}))
    words = [sys.executable, "-m", "regrow", "simulate", "--leader", "--costs", str(file), "--json"]
    document = json.loads(subprocess.run(words, capture_output=True, timeout=120, check=True).stdout)
    assert document["largest_nodes"]["breaks_first"] == "greeting"
    assert document["largest_nodes"]["all"] == largest(COSTS, "greeting")
    sizes = {(row["nodes"], row["group"]): row["missed"] for row in document["rows"]}
    assert sizes[1024, 1] == []
    assert "greeting" in sizes[16_384, 1]
    assert sizes[16_384, 64] == []
    assert [row["nodes_called_silent"] for row in document["aggregator_lost"]] == [0, 64, 0]
