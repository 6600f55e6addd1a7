"""The queue of a leader against what can be said of it by hand."""

from __future__ import annotations

import msgspec
import pytest

from regrow.errors import ConfigurationError
from regrow.supervisor.sim.control_plane import BEAT_SECONDS, Costs, Load, cores, largest, misses, simulate

COSTS = Costs(beat=50e-6, word=5e-6, greeting=2e-3, step_turn=1e-3, worst_turn=3e-3)


def test_an_idle_queue_waits_for_nothing_but_the_service() -> None:
    answer = simulate(COSTS, Load(nodes=20))
    assert answer.wait_p99_seconds < 2 * COSTS.beat
    assert answer.longest_gap_seconds == pytest.approx(BEAT_SECONDS, abs=1e-3)
    assert answer.cores == pytest.approx(20 * COSTS.beat / BEAT_SECONDS, rel=0.02)
    assert not misses(answer)


def test_past_its_capacity_detection_is_late() -> None:
    slow = msgspec.structs.replace(COSTS, beat=1e-3)
    full = int(BEAT_SECONDS / slow.beat)
    assert "detection" not in misses(simulate(slow, Load(nodes=full // 2)))
    assert "detection" in misses(simulate(slow, Load(nodes=2 * full)))


def test_the_largest_cluster_is_where_the_formula_says() -> None:
    per_node = COSTS.beat / BEAT_SECONDS + COSTS.step_turn / 1000.0 / 2.0
    assert largest(COSTS, "cpu") == pytest.approx(0.5 / per_node, rel=0.02)
    found = largest(COSTS, "greeting")
    assert found * COSTS.greeting / (1.0 - cores(COSTS, Load(nodes=found))) == pytest.approx(10.0, rel=0.02)


def test_an_aggregator_bears_more() -> None:
    assert largest(COSTS, "cpu", group=64, most_nodes=65_536) > 5 * largest(COSTS, "cpu")
    with pytest.raises(ConfigurationError, match="group is 0"):
        simulate(COSTS, Load(nodes=8, group=0))
