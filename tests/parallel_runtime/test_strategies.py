"""Every strategy that the support matrix names (docs/parallelism-runtime.md): the loss of one process, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regrow.demo.compare import LOSS_TOLERANCE, compare
from regrow.demo.lineage import read_lineage
from regrow.demo.model import Config, Gpt
from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.parallel.apply import Strategy, apply_mesh

SMALL = ("--layers", "4", "--hidden", "48", "--seq", "48", "--seed", "6", "--samples", "64", "--steps", "3")
QUICK = {
    "zbv": ("1x1x2", "--schedule", "zbv"),
    "hsdp": ("4x1x1", "--zero", "3", "--shard-size", "2"),
    "selective": ("2x1x1", "--recompute", "selective"),
    "tied-stages": ("1x1x2", "--tied", "--schedule", "interleaved"),
    "zero1-unequal": ("3x1x1", "--zero", "1"),
    "context-3": ("dp=1,cp=3",),
    "experts-unequal": ("dp=3,ep=3", "--experts", "6"),
    "uneven-stages": ("1x1x3",),
    "eight-bit-zero1": ("2x1x1", "--eight-bit", "--zero", "1"),
}
MORE = {
    "gpipe": ("2x1x2", "--schedule", "gpipe"),
    "interleaved": ("1x2x2", "--schedule", "interleaved"),
    "interleaved-zb": ("2x1x2", "--schedule", "interleaved-zb"),
    "dualpipev": ("1x1x2", "--schedule", "dualpipev"),
    "zbv-zero3": ("2x1x2", "--schedule", "zbv", "--zero", "3"),
    "zbv-recompute": ("1x2x2", "--schedule", "zbv", "--recompute", "full"),
    "zero2": ("3x1x1", "--zero", "2"),
    "zero3": ("4x1x1", "--zero", "3"),
    "zero3-tp-pp": ("2x2x2", "--zero", "3"),
    "zero3-unequal": ("3x1x1", "--zero", "3"),
    "whole-sequence": ("1x2x1", "--whole-sequence"),
    "whole-sequence-3d": ("2x2x2", "--whole-sequence"),
    "whole-sequence-zero3": ("2x2x1", "--whole-sequence", "--zero", "3"),
    "hsdp-tp": ("4x2x1", "--zero", "2", "--shard-size", "2"),
    "full-pp": ("1x1x3", "--recompute", "full"),
    "selective-tp": ("1x2x1", "--recompute", "selective"),
    "selective-zero3": ("2x1x1", "--recompute", "selective", "--zero", "3"),
    "tied-tp": ("1x2x1", "--tied"),
    "tied-zbv": ("1x1x2", "--tied", "--schedule", "zbv"),
    "tied-zero3-pp": ("2x1x2", "--tied", "--zero", "3"),
    "tied-zero3-tp": ("2x2x1", "--tied", "--zero", "3"),
    "tied-3d": ("2x2x2", "--tied"),
    "zero2-tp": ("2x2x1", "--zero", "2"),
    "zero2-pp": ("2x1x2", "--zero", "2"),
    "hsdp-pp": ("4x1x2", "--zero", "3", "--shard-size", "2"),
    "zero1-tp": ("2x2x1", "--zero", "1"),
    "zero1-3d": ("2x2x2", "--zero", "1"),
    "tied-zero1-pp": ("3x1x2", "--tied", "--zero", "1"),
    "context-unequal": ("dp=3,cp=2",),
    "context-tp": ("dp=1,tp=2,cp=2",),
    "context-pp": ("dp=1,pp=2,cp=2", "--schedule", "zbv"),
    "context-zero1": ("dp=2,cp=2", "--zero", "1"),
    "context-zero3": ("dp=3,cp=2", "--zero", "3"),
    "context-3d-zero3": ("dp=1,tp=2,pp=2,cp=2", "--zero", "3"),
    "context-selective": ("dp=1,cp=2", "--recompute", "selective"),
    "experts-pp": ("dp=2,pp=2,ep=2", "--experts", "4"),
    "experts-pp-unequal": ("dp=3,pp=2,ep=3", "--experts", "6"),
    "experts-zero1": ("dp=4,ep=2", "--experts", "4", "--zero", "1"),
    "experts-zero3": ("3x1x1", "--experts", "4", "--zero", "3"),
    "experts-full": ("dp=2,ep=2", "--experts", "4", "--recompute", "full"),
    "experts-tied": ("dp=2,ep=2", "--experts", "4", "--tied"),
    "eight-bit": ("3x1x1", "--eight-bit"),
    "eight-bit-zero3-tp": ("2x3x1", "--eight-bit", "--zero", "3"),
    "eight-bit-pp": ("1x1x3", "--eight-bit"),
}
OTHER_FUNCTION = ("--tied", "--experts", "--eight-bit")
"""Flags that change what is computed, and so the run to compare with."""
EIGHT_BIT = 2e-4
"""Tolerance of the loss where a rounding difference may move an 8-bit code of a moment."""


def function_of(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments that change what is computed."""
    chosen: list[str] = []
    for place, word in enumerate(arguments):
        if word in OTHER_FUNCTION:
            chosen += arguments[place : place + (2 if word == "--experts" else 1)]
    return tuple(chosen)


def run_and_compare(ranks: Any, strategies: dict[str, tuple[str, ...]]) -> None:
    functions = {name: function_of(arguments) for name, arguments in strategies.items()}
    twins = {function: f"one{''.join(function)}" for function in {(), *functions.values()}}
    jobs = [ranks.training(name, "1x1x1", *SMALL, *function) for function, name in twins.items()]
    jobs += [ranks.training(name, mesh, *SMALL, *arguments) for name, (mesh, *arguments) in strategies.items()]
    done = ranks.run(jobs)
    failed: dict[str, Any] = {}
    for name, function in functions.items():
        tolerance = EIGHT_BIT if "--eight-bit" in function else LOSS_TOLERANCE
        comparison = compare(done[name].ok(), done[twins[function]].ok(), last_step=3, loss_tolerance=tolerance)
        if not comparison.passed:
            failed[name] = [check for check in comparison.checks if not check.passed]
    assert not failed, failed
    last = {name: read_lineage(done[name].folder).steps[3].losses[0] for name in twins.values()}
    assert len(set(last.values())) == len(twins), last


def test_strategies_have_the_loss_of_one_process(ranks: Any) -> None:
    """Case I01 too: four layers on three stages, none vanishes."""
    run_and_compare(ranks, QUICK)


@pytest.mark.soak
def test_more_strategies_have_the_loss_of_one_process(ranks: Any) -> None:
    run_and_compare(ranks, MORE)


@pytest.mark.soak
def test_bf16_and_eight_bit_moments_lie_inside_the_band_of_seeds(ranks: Any) -> None:
    arguments = [*SMALL[:-1], "40", "--lr", "2e-3"]
    jobs = [ranks.training(f"seed{seed}", "1x1x1", *arguments, "--seed", str(seed)) for seed in range(4)]
    others = {
        "bf16": ("2x1x1", "--zero", "2", "--bf16"),
        "bf16-tp": ("2x2x1", "--zero", "3", "--bf16"),
        "bf16-pp": ("2x1x2", "--zero", "2", "--bf16"),
        "8-bit": ("1x1x1", "--eight-bit"),
    }
    jobs += [ranks.training(name, mesh, *arguments, "--seed", "0", *flags) for name, (mesh, *flags) in others.items()]
    done = ranks.run(jobs)
    last = {name: read_lineage(result.ok()).steps[40].losses[0] for name, result in done.items()}
    seeds = [loss for name, loss in last.items() if name not in others]
    for name in others:
        assert min(seeds) < last[name] < max(seeds), last
        assert last[name] != last["seed0"]


def test_the_rank_that_makes_a_nan_is_named_before_its_peers_have_it(ranks: Any) -> None:
    done = ranks.run([ranks.job("nan", 3, "spoil:spoiled_rank", {"folder": "{folder}"})])
    folder = done["nan"].ok()
    assert [(folder / f"broken{rank}").read_text() for rank in range(3)] == ["(1,)"] * 3


@pytest.mark.parametrize(
    ("shape", "changed", "words"),
    [
        ("3x1x1", {"micro_batches": (4, 4)}, "for dp = 3"),
        ("2x1x1", {"micro_batches": (8, 0)}, "for dp = 2"),
        ("1x1x5", {}, "5 layers"),
        ("1x1x2", {"schedule": "dualpipe"}, "not known"),
        ("1x1x3", {"schedule": "zbv"}, "needs 6 layers"),
        ("1x1x2", {"schedule": "zbv", "micro_batches": (1,)}, "at least 2 micro-batches"),
        ("1x1x2", {"layers_per_stage": (3, 2)}, "do not put 4 layers"),
        ("2x1x1", {"micro_batches": (4, 4), "zero_stage": 4}, "ZeRO stage 4"),
        ("2x1x1", {"micro_batches": (4, 4), "shard_size": 2}, "shard groups"),
        ("2x1x1", {"micro_batches": (4, 4), "compute": torch.bfloat16}, "bf16"),
        ("dp=2,cp=2", {"micro_batches": (4, 4), "zero_stage": 3, "shard_size": 1}, "cp = 2"),
        ("dp=1,cp=5", {}, "cannot be cut into 5 equal parts"),
        ("dp=1,cp=16", {}, "a multiple of 4"),
        ("dp=1,tp=5,cp=3", {}, "sequence of 32 cannot be cut evenly over tp = 5"),
        ("dp=2,ep=2", {"micro_batches": (4, 4)}, "no mixture of experts"),
        ("dp=3,ep=2", {"micro_batches": (3, 3, 2), "experts": 4}, "does not divide dp = 3"),
        ("dp=2,tp=2,ep=2", {"micro_batches": (4, 4), "experts": 4}, "tp = 2 and cp = 1"),
        ("dp=2,cp=2,ep=2", {"micro_batches": (4, 4), "experts": 4}, "tp = 1 and cp = 2"),
        ("dp=2,ep=2", {"micro_batches": (4, 4), "experts": 4, "zero_stage": 3}, "ZeRO stage 3"),
        ("dp=1,tp=2", {"experts": 4}, "tp = 2: mixtures"),
    ],
)
def test_refusals_name_the_factors(shape: str, changed: dict[str, Any], words: str) -> None:
    given = {"micro_batch": 2, "micro_batches": (8,)} | changed
    config = Config(experts=given.pop("experts", 0))
    with pytest.raises(ConfigurationError) as caught:
        apply_mesh(Gpt(config), None, MeshShape.parse(shape), Strategy(**given))
    assert words in str(caught.value)
    assert caught.value.hint


def test_wrong_share_of_samples_is_refused() -> None:
    net = apply_mesh(Gpt(Config(layers=1)), None, MeshShape(), Strategy(micro_batch=2, micro_batches=(2,)))
    sample = torch.zeros(3, 96, dtype=torch.int64)
    with pytest.raises(ConfigurationError, match="3 samples"):
        net.forward_backward(sample, sample, torch.zeros(3, dtype=torch.int64))
