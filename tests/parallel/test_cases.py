"""Section I of the project's list of real failures (mesh planning): what the planner answers. The runtime's part of the same
cases is in tests/parallel_runtime."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from regrow.errors import ConfigurationError
from regrow.parallel import batch
from regrow.parallel.mesh import layers_per_stage

Regrow = Callable[..., tuple[int, Any, str]]
SMALL = ("--hidden", 1024, "--heads", 16, "--vocab", 32000, "--seq", 1024)


def test_i01_no_layer_vanishes() -> None:
    """Case I01: every layer in exactly one stage for every pair of sizes; the stages differ by one layer at most."""
    for layers, stages in itertools.product(range(1, 130), range(1, 33)):
        if layers < stages:
            with pytest.raises(ConfigurationError):
                layers_per_stage(layers, stages)
            continue
        counts = layers_per_stage(layers, stages)
        assert (len(counts), sum(counts)) == (stages, layers)
        assert max(counts) - min(counts) <= 1
        assert min(counts) >= 1


def test_i01_uneven_stages_are_shown(regrow: Regrow) -> None:
    """Case I01: 126 layers on 16 stages as Llama 3 has them, and said so to people."""
    flags = ("--layers", 126, *SMALL, "--nodes", 16, "--gpus-per-node", 1, "--dp", 1, "--tp", 1, "--pp", 16, "--global-batch", 32)
    code, document, _ = regrow("plan", *flags)
    assert code == 0
    assert document["best"]["layers_per_stage"] == [7, *[8] * 14, 7]


@pytest.mark.parametrize("lost", [0, 1, 2, 3, 5, 7])
@pytest.mark.parametrize("total", [7, 60, 64])
def test_i03_the_batch_is_exact_after_any_shrink(regrow: Regrow, lost: int, total: int) -> None:
    """Case I03: micro-batch x micro-batches over the *replicas*, not over all GPUs, is the global batch, whatever is lost."""
    flags = ("--layers", 16, *SMALL, "--nodes", 8, "--gpus-per-node", 2, "--tp", 2, "--pp", 1, "--global-batch", total, "--lose", lost)
    code, document, _ = regrow("plan", *flags)
    assert code == 0
    best = document["best"]
    assert len(best["micro_batches"]) == best["mesh"]["dp"] <= 8 - lost
    assert best["micro_batch"] * sum(best["micro_batches"]) == total == best["global_batch"]


def test_i03_caps_hold() -> None:
    """Case I03: the chosen batch never exceeds the stated cap, and is a multiple of a micro-batch that is allowed."""
    for cap, micros in itertools.product(range(4, 60), ((2, 3, 4), (4,), (3, 4), (4, 4))):
        made = batch.elastic_batch(cap, micros)
        assert 0 < made <= cap
        assert any(made % micro == 0 for micro in micros)


def test_i05_idle_devices_are_counted_and_tp_stays_inside(regrow: Regrow) -> None:
    """Case I05: nodes of 8, 8, 7 and 6 GPUs: no TP across nodes, used and idle add up, and the reason says how many are idle."""
    flags = ("--layers", 16, *SMALL, "--gpus-per-node", "8,8,7,6", "--global-batch", 64)
    for tp in (2, 4, 8):
        code, document, _ = regrow("plan", *flags, "--nodes", 4, "--tp", tp)
        assert code == 0
        best = document["best"]
        groups = sum(size // tp for size in (8, 8, 7, 6))
        assert best["mesh"]["dp"] * best["mesh"]["pp"] <= groups
        assert best["gpus_used"] + best["gpus_idle"] == 29
        assert f"{best['gpus_idle']} GPUs idle" in best["reason"]
        assert document["inventory"]["uneven"] == [8, 8, 7, 6]


def test_i05_more_devices_than_there_are_is_refused(regrow: Regrow) -> None:
    """Case I05: DP 4 x TP 4 on four GPUs asks for sixteen; the refusal has both numbers, and a plan that works."""
    code, document, _ = regrow(
        "plan", "--layers", 8, *SMALL, "--nodes", 1, "--gpus-per-node", 4, "--dp", 4, "--tp", 4, "--global-batch", 16
    )
    assert code == 1
    assert any("= 16 GPUs, 4 are there" in each["reason"] for each in document["rejected"])
    assert document["nearest"][0]["gpus_used"] <= 4


def test_i07_the_mean_is_over_samples_not_over_members() -> None:
    """Case I07: with unequal counts a mean of the replicas' means is wrong, the sum over the global count is right."""
    values = [Fraction(sample * sample) for sample in range(16)]
    truth = sum(values) / len(values)
    for dp in (2, 3, 5, 7):
        counts = batch.split(16, 1, dp)
        starts = [sum(counts[:rank]) for rank in range(dp)]
        parts = [values[start : start + count] for start, count in zip(starts, counts, strict=True)]
        assert sum(sum(part) for part in parts) / sum(counts) == truth
        if counts[0] != counts[-1]:
            means = [sum(part) / len(part) for part in parts]
            assert not math.isclose(sum(means) / dp, truth)
