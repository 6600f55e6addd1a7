"""Verdicts on repeated micro-steps as tables: who was wrong, who was only wrong once, and when nobody can say."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.agent.worker.replay_judge import Evidence, Seen, calm, distance, is_rounding, judge, noise, not_repeatable, same, sample
from regrow.ids import MeshShape

OK, BAD, OTHER = Seen("aa"), Seen("bb"), Seen("cc")


def own(rank: int, *runs: Seen, clean: int = 5, **helped: tuple[Seen, ...]) -> Evidence:
    return Evidence(rank=rank, own=runs, helped={int(name[1:]): seen for name, seen in helped.items()}, clean=clean)


def mine(rank: int) -> Seen:
    """The right result of a rank's own work: each rank has other data."""
    return Seen(f"right {rank}")


def healthy(rank: int, runs: int = 4, **helped: tuple[Seen, ...]) -> Evidence:
    return own(rank, *(mine(rank) for _ in range(runs)), **helped)


CASES = {
    "all agree": ([healthy(0), healthy(1)], 2, "agree", (), ()),
    "the run that counts was wrong": ([healthy(0), own(1, BAD, *(mine(1),) * 4)], 2, "diverged", (), (1,)),
    "one repetition was wrong": ([healthy(0), own(1, mine(1), BAD, *(mine(1),) * 3)], 2, "diverged", (), (1,)),
    "wrong again": ([healthy(0), own(1, BAD, mine(1), OTHER, mine(1))], 2, "diverged", (1,), ()),
    "never the same": ([healthy(0), healthy(2), own(1, BAD, OTHER, Seen("d"))], 3, "diverged", (1,), ()),
    "alone, and clean before": ([own(0, BAD, OK, OTHER, OK)], 1, "diverged", (0,), ()),
    "alone, and never clean": ([own(0, BAD, OK, OTHER, OK, clean=0)], 1, "skipped", (), ()),
    "the program does not repeat": ([own(0, OK, BAD, OTHER, clean=0), own(1, OK, BAD, OTHER, clean=0)], 2, "skipped", (), ()),
    "it did repeat before": ([own(0, OK, BAD, OTHER, OK), own(1, OK, BAD, OTHER, OK)], 2, "diverged", (), ()),
    "two replicas differ": (
        [healthy(0, r1=(BAD, BAD)), healthy(1, r0=(mine(0), mine(0)))],
        2,
        "diverged",
        (),
        (),
    ),
    "a helper was wrong once": (
        [healthy(0, r1=(BAD, mine(1), mine(1))), healthy(1, r0=(mine(0), mine(0)))],
        2,
        "diverged",
        (),
        (0,),
    ),
    "two others outvote": (
        [healthy(0, r1=(BAD, BAD)), healthy(1, r2=(mine(2), mine(2))), healthy(2, r1=(BAD, BAD), r0=(mine(0), mine(0)))],
        3,
        "diverged",
        (1,),
        (),
    ),
    "an always wrong helper is outvoted": (
        [healthy(0, r1=(BAD, BAD)), healthy(1, r2=(mine(2),)), healthy(2, r1=(mine(1), mine(1)))],
        3,
        "diverged",
        (0,),
        (),
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_verdicts(name: str) -> None:
    evidence, dp, verdict, suspects, once = CASES[name]
    found = judge(evidence, MeshShape(dp=dp), 0.0)
    assert (found.verdict, found.suspects, found.once) == (verdict, suspects, once), found.reason
    assert found.repaired == (verdict == "diverged" and not suspects and bool(once))
    assert calm(evidence, 0.0) == (verdict == "agree")


def test_ranks_of_one_replica_are_named_together_those_of_two_are_not() -> None:
    """Tensor parallelism spreads a wrong product over its group before anybody looks: one of them, but not which."""
    wrong = lambda rank: own(rank, BAD, OTHER, mine(rank), mine(rank))  # noqa: E731
    mesh = MeshShape(dp=3, tp=2)
    together = judge([healthy(0), healthy(1), wrong(2), wrong(3), healthy(4), healthy(5)], mesh, 0.0)
    assert (together.verdict, together.suspects) == ("diverged", (2, 3))
    assert "one of ranks [2, 3]" in together.reason
    apart = judge([healthy(0), wrong(1), healthy(2), wrong(3), healthy(4), healthy(5)], mesh, 0.0)
    assert (apart.verdict, apart.suspects) == ("diverged", ())


class TestNoise:
    @pytest.mark.parametrize("sketch", [(1.0, 0.9, 0.25), (float("inf"), 0.5, 0.25), (float("nan"), 0.5, 0.25)])
    def test_what_no_order_of_sums_explains_is_no_noise(self, sketch: tuple[float, ...]) -> None:
        """A unit that is sick from the first check on: with a floor as high as that, all later checks would agree."""
        runs = (Seen("a", (1.0, 0.5, 0.25)), Seen("b", sketch))
        evidence = [own(0, *runs, clean=0)]
        assert noise(evidence) == 0.0
        assert judge(evidence, MeshShape(), 0.0).verdict == "skipped"

    def test_floor_is_the_measured_difference_with_a_margin(self) -> None:
        runs = (Seen("a", (1.0, 0.5, 0.25)), Seen("b", (1.0, 0.5 + 1e-7, 0.25)))
        evidence = [own(rank, *runs, clean=0) for rank in range(2)]
        assert is_rounding(evidence)
        floor = noise(evidence)
        assert floor == pytest.approx(8e-7, rel=1e-6)
        assert not_repeatable(evidence, 0.0)
        assert calm(evidence, floor)
        assert not same(runs[0], Seen("c", (1.0, 0.5 + 1e-5, 0.25)), floor)

    def test_a_difference_of_rounding_size_on_one_rank_accuses_nobody(self) -> None:
        """Kernels that add in another order now and then differ on one rank alone, after many equal runs."""
        near, far = (Seen("b", (1.0, 0.5 + size, 0.25)) for size in (3e-7, 1e-3))
        right = Seen("a", (1.0, 0.5, 0.25))
        assert is_rounding([own(0, right, right), own(1, right, near)])
        assert not is_rounding([own(0, right, right), own(1, right, far)])
        assert not is_rounding([own(0, right, right, r1=(far,)), own(1, right, right)])
        assert is_rounding([own(0, right, right, r1=(near,)), own(1, right, right)])
        assert noise([own(0, right, Seen("c", right.sketch))]) > 0.0, "0 would mean to the bit"

    def test_what_is_not_finite_is_never_near(self) -> None:
        assert distance(Seen("a", (1.0, 1.0, 1.0)), Seen("b", (float("nan"),) * 3)) == float("inf")
        assert distance(Seen("a", (1.0, 1.0, 1.0)), Seen("b", ())) == float("inf")
        assert distance(Seen("a", (0.0, 0.0, 0.0)), Seen("b", (0.0, 0.0, 0.0))) == 0.0


@given(
    st.integers(1, 4),
    st.lists(st.lists(st.sampled_from(["right", "x", "y"]), min_size=2, max_size=6), min_size=1, max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_nobody_is_accused_without_two_wrong_runs(clean: int, worlds: list[list[str]]) -> None:
    evidence = [own(rank, *(Seen(f"{rank}{run}") for run in runs), clean=clean) for rank, runs in enumerate(worlds)]
    found = judge(evidence, MeshShape(dp=len(worlds)), 0.0)
    for suspect in found.suspects:
        runs = worlds[suspect]
        assert len(runs) - max(runs.count(value) for value in set(runs)) >= 1
        assert len(set(runs)) > 1
    for rank in found.once:
        runs = worlds[rank]
        assert len(runs) - max(runs.count(value) for value in set(runs)) == 1


def test_share_of_checked_steps() -> None:
    """The sampling has the stated rate, every micro-step its turn, and half of the checks go to a buddy."""
    picked = [found for step in range(20_000) if (found := sample(7, step, 1 / 16, 4)) is not None]
    assert len(picked) == pytest.approx(20_000 / 16, rel=0.1)
    assert {one.unit for one in picked} == {0, 1, 2, 3}
    assert sum(one.buddy for one in picked) == pytest.approx(len(picked) / 2, rel=0.1)


def test_samples_are_alike_on_every_rank_and_differ_by_seed() -> None:
    first = [sample(1, step, 0.1, 4) for step in range(500)]
    assert first == [sample(1, step, 0.1, 4) for step in range(500)]
    assert first != [sample(2, step, 0.1, 4) for step in range(500)]
    assert all(sample(1, step, 1.0, 1) is not None for step in range(50))
    assert not any(sample(1, step, 0.0, 1) for step in range(50))


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_guarantee_of_the_health_page(share: float) -> None:
    """How often a check of two replicas, half in place and half on a buddy, sees a rank that is wrong in a share of its runs,
    always in the same way: at least 2q - 1.5 q^2."""
    chance = random.Random(5)
    seen, tries = 0, 20_000

    def run(owner: int, device: int) -> Seen:
        return Seen(f"wrong {owner}") if device == 1 and chance.random() < share else mine(owner)

    for number in range(tries):
        if number % 2:
            found = [own(rank, run(rank, rank), run(rank, rank)) for rank in (0, 1)]
        else:
            found = [own(rank, run(rank, rank), **{f"r{1 - rank}": (run(1 - rank, rank),)}) for rank in (0, 1)]
        seen += not calm(found, 0.0)
    assert seen / tries == pytest.approx(2 * share - 1.5 * share**2, abs=0.015)
