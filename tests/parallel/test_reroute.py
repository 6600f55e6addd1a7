"""Re-routing a lost stage's micro-batches: the plain step is 1F1B's, nothing is gained beyond the bubble, memory is told."""

from __future__ import annotations

import pytest

from regrow.parallel.reroute import dropped, reroute


@pytest.mark.parametrize(("dp", "pp", "count"), [(2, 2, 4), (4, 4, 8), (8, 4, 16), (3, 8, 24)])
@pytest.mark.parametrize("split", [False, True])
def test_no_loss_costs_nothing(dp: int, pp: int, count: int, *, split: bool) -> None:
    found = reroute(dp, pp, count, [], split_backward=split)
    assert found is not None
    assert (found.slower, found.most_in_flight, found.played) == (0.0, 1.0, True)


@pytest.mark.parametrize(("dp", "pp", "count"), [(2, 2, 4), (2, 4, 8), (4, 4, 8), (8, 4, 16), (16, 4, 32), (128, 16, 16)])
def test_rerouting_gains_the_bubble_at_most(dp: int, pp: int, count: int) -> None:
    """The peers of the lost stage have as much to do as every replica has after one was dropped."""
    for stage in {0, pp // 2, pp - 1}:
        found = reroute(dp, pp, count, [(0, stage)])
        assert found is not None
        work = count * dp / (dp - 1)
        assert found.slower >= max(0.0, work / (count + pp - 1) - 1.0) - 1e-9
        assert found.slower <= dropped(dp, pp, count, 1) + (pp + 1) / (count + pp - 1)
        assert found.most_in_flight >= 1.0


def test_weight_gradients_in_the_bubbles_help_a_middle_stage() -> None:
    plain, split = (reroute(8, 4, 16, [(0, 2)], split_backward=each) for each in (False, True))
    assert plain is not None
    assert split is not None
    assert split.slower < plain.slower


def test_dropping_a_replica_by_hand() -> None:
    """Megatron 76.1B: 32 replicas of 56 micro-batches on 4 stages; 31 run up to 58: (58 + 3) / (56 + 3)."""
    assert dropped(32, 4, 56, 1) == pytest.approx(61 / 59 - 1)


def test_a_stage_without_a_worker_cannot_go_on() -> None:
    assert reroute(2, 4, 8, [(0, 1), (1, 1)]) is None
    assert reroute(2, 4, 8, [(0, 1), (1, 2)]) is not None


def test_a_large_step_is_estimated_and_says_so() -> None:
    found = reroute(6, 64, 512, [(0, 3)])
    assert found is not None
    assert not found.played
    assert found.slower == dropped(6, 64, 512, 1)
