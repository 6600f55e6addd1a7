"""Other sizes than the published ones, each answer worked out here by hand from the formulas' text, not by the product's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Regrow = Callable[..., tuple[int, Any, str]]
BIG = ("--gpu-memory-gb", 1e5)


def exactly(value: float) -> Any:
    return pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(
    ("params", "nodes", "mesh", "zero", "optimizer", "gigabytes"),
    [
        (13e9, 2, (16, 1, 1), 2, "mixed", 13 * (2 + 14 / 16)),
        (70e9, 8, (4, 8, 2), 1, "mixed", 70 / 16 * (4 + 12 / 4)),
        (70e9, 8, (64, 1, 1), 3, "8bit", 70 * 10 / 64),
        (7e9, 1, (8, 1, 1), 0, "fp32", 7 * 16),
        (30e9, 4, (32, 1, 1), 1, "mixed-fp32-grad", 30 * (6 + 12 / 32)),
        (3e9, 1, (8, 1, 1), 2, "bf16", 3 * (2 + 6 / 8)),
    ],
)
def test_model_state(
    regrow: Regrow, params: float, nodes: int, mesh: tuple[int, int, int], zero: int, optimizer: str, gigabytes: float
) -> None:
    axes = [word for name, size in zip(("--dp", "--tp", "--pp"), mesh, strict=True) for word in (name, size)]
    flags = ("--params", params, "--nodes", nodes, *axes, "--zero", zero, "--optimizer", optimizer, "--global-batch", 64, *BIG)
    code, document, _ = regrow("plan", *flags)
    assert code == 0
    used = document["best"]["memory_bytes"]
    assert (used["weights"] + used["gradients"] + used["optimizer"]) / 1e9 == exactly(gigabytes)


DEEP = ("--layers", 64, "--hidden", 1024, "--heads", 16, "--vocab", 32000, "--seq", 1024, "--micro-batch", 1, "--nodes", 2)


@pytest.mark.parametrize(
    ("schedule", "count", "ratio"),
    [
        (("gpipe",), 64, 15 / 64),
        (("1f1b",), 20, 15 / 20),
        (("interleaved", "--virtual", 4), 32, 15 / (4 * 32)),
        (("zb-h1",), 32, 15 / 32 / 3),
        (("zbv",), 32, 0.0),
    ],
)
def test_bubbles_of_sixteen_stages(regrow: Regrow, schedule: tuple[object, ...], count: int, ratio: float) -> None:
    _, document, _ = regrow("plan", *DEEP, "--dp", 1, "--tp", 1, "--pp", 16, "--global-batch", count, "--schedule", *schedule)
    best = document["best"]
    assert best["bubble_ratio"] == exactly(ratio)
    assert best["bubble_fraction"] == exactly(ratio / (1 + ratio))


def test_gpipe_keeps_all_micro_batches_and_1f1b_as_many_as_stages(regrow: Regrow) -> None:
    kept = [
        regrow("plan", *DEEP, "--dp", 1, "--tp", 1, "--pp", 16, "--global-batch", 64, "--schedule", name)[1]["best"]["memory_bytes"]
        for name in ("gpipe", "1f1b")
    ]
    assert kept[0]["activations"] / kept[1]["activations"] == exactly(64 / 16)


WIDE = ("--layers", 4, "--hidden", 8192, "--heads", 64, "--vocab", 32000, "--seq", 4096, "--nodes", 1, "--dp", 1, "--tp", 8, "--pp", 1)
SBH = 4096 * 2 * 8192


@pytest.mark.parametrize(
    ("flags", "factor"),
    [
        (("--recompute", "none"), (34 + 5 * 64 * 4096 / 8192) / 8),
        (("--recompute", "flash"), 34 / 8),
        (("--recompute", "selective"), 18 / 8),
        (("--recompute", "full"), 2 / 8),
        (("--recompute", "flash", "--no-sequence-parallel"), 10 + 24 / 8),
    ],
)
def test_activations_under_tp_8(regrow: Regrow, flags: tuple[object, ...], factor: float) -> None:
    _, document, _ = regrow("plan", *WIDE, "--global-batch", 2, "--micro-batch", 2, *flags, *BIG)
    assert document["best"]["memory_bytes"]["activations"] == exactly(4 * SBH * factor)


def test_tp_traffic(regrow: Regrow) -> None:
    """Four layers, two points, forward and backward, all-reduces of 2 x 7/8 of b s h in 16 bits."""
    _, document, _ = regrow("plan", *WIDE, "--global-batch", 2, "--micro-batch", 2, "--recompute", "flash", *BIG)
    assert document["best"]["comm_bytes"]["tp"] == exactly(4 * 2 * 2 * 2 * 7 / 8 * SBH * 2)


def test_pp_traffic(regrow: Regrow) -> None:
    """A middle stage sends activations on and gradients back, once a micro-batch; a stage of two sends one of them."""
    message = 1024 * 1024 * 2
    for stages, crossings in ((16, 2), (2, 1)):
        _, document, _ = regrow("plan", *DEEP, "--dp", 1, "--tp", 1, "--pp", stages, "--global-batch", 32)
        assert document["best"]["comm_bytes"]["pp"] == exactly(crossings * 32 * message)


@pytest.mark.parametrize(("gpus", "rate", "save"), [(1024, 1e-5, 60), (512, 3e-6, 12), (100_000, 2e-5, 5)])
def test_young_of_a_cluster(regrow: Regrow, gpus: int, rate: float, save: float) -> None:
    _, document, _ = regrow("interval", "--gpus", gpus, "--rate-per-gpu-hour", rate, "--save-seconds", save, "--method", "young")
    assert document["mtbf_hours"] == exactly(1 / (gpus * rate))
    assert document["t_opt_hours"] * 3600 == exactly((2 * save * 3600 / (gpus * rate)) ** 0.5)


@pytest.mark.parametrize(("rate", "a", "b"), [(0.2, 4, 55.8), (0.01, 2.5, 12), (3, 8, 100)])
def test_any_coefficients(regrow: Regrow, rate: float, a: float, b: float) -> None:
    _, document, _ = regrow("interval", "--failures-per-hour", rate, "--a", a, "--b", b)
    best = (b / (a * rate)) ** 0.5
    assert document["t_opt_hours"] == exactly(best)
    assert document["expected_cost_at_t_opt"] == exactly(2 * (a * b * rate) ** 0.5)


@pytest.mark.parametrize(("gpus", "memory", "zero2", "zero3"), [(8, 40, 40 / (2 + 14 / 8), 20), (64, 141, 141 / (2 + 14 / 64), 564)])
def test_largest_models(regrow: Regrow, gpus: int, memory: float, zero2: float, zero3: float) -> None:
    _, document, _ = regrow("plan", "--params", 1e9, "--nodes", gpus // 8, "--gpu-memory-gb", memory)
    formula = document["largest_model"]["by_formula"]
    assert formula["zero2"]["billion"] == exactly(zero2)
    assert formula["zero3"]["billion"] == exactly(zero3)
