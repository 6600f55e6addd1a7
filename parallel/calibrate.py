"""Constants from measured step times, and how well the model ranks meshes.

A CPU run calibrates the ranking on CPUs only: nothing about GPU times follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.parallel import cost, search
from regrow.parallel.search import Plan, Request


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A measured mesh."""

    mesh: MeshShape
    step_seconds: float
    micro_batch: int = 1
    zero_stage: int | None = None


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """New constants and how they fit."""

    constants: cost.Constants
    rank_correlation: float
    """Spearman's, predicted against measured, with the new constants; 1 for a single sample."""
    worst_error: float
    """Largest relative error."""
    predicted: tuple[float, ...]


def read(text: str, source: str) -> list[Sample]:
    """Samples from JSON: a list of, or {"samples": [...]} with, {"mesh": "2x2x2", "step_seconds": 1.2, "micro_batch"?, "zero_stage"?}.

    Raises:
        ConfigurationError: not this format, or a time that is not positive.
    """
    try:
        document = msgspec.json.decode(text)
        rows = document["samples"] if isinstance(document, dict) else document
        made = [
            Sample(
                mesh=MeshShape.parse(str(row["mesh"])),
                step_seconds=float(row["step_seconds"]),
                micro_batch=int(row.get("micro_batch", 1)),
                zero_stage=row.get("zero_stage"),
            )
            for row in rows
        ]
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        hint = 'write [{"mesh": "2x2x2", "step_seconds": 1.2}, ...]'
        raise ConfigurationError(f"is not a list of measured meshes: {error!r}", where=source, hint=hint) from error
    if not made or any(not math.isfinite(each.step_seconds) or each.step_seconds <= 0 for each in made):
        raise ConfigurationError("step times must be positive and at least one is needed", where=source, hint="measure some steps first")
    return made


def calibrate(request: Request, samples: Sequence[Sample], *, rounds: int = 24) -> Calibration:
    """Fit the constants to measured meshes of one inventory. See `calibrate_all`."""
    return calibrate_all([(request, sample) for sample in samples], rounds=rounds)


def calibrate_all(measured: Sequence[tuple[Request, Sample]], *, rounds: int = 24) -> Calibration:
    """Fit efficiency, matrix width, tokens of a micro-batch, the cost of tensor-parallel traffic and the fixed overhead to measured step times, each
    with the request that describes its machine.

    Coordinate descent on the sum of squared logarithms of predicted over measured; deterministic.

    Raises:
        ConfigurationError: nothing measured, no model shape, or a measured mesh that its request cannot hold.
    """
    if not measured or not measured[0][0].model.known:
        raise ConfigurationError("calibration needs the model's shape", where="--calibrate", hint="give --layers --hidden ... or --model")
    constants = measured[0][0].constants
    times = [sample.step_seconds for _, sample in measured]

    def guess(trial: cost.Constants) -> list[float]:
        return [predict(request, [sample], trial)[0] for request, sample in measured]

    best = _misfit(guess(constants), times)
    spans = {
        "efficiency": 2.0,
        "half_width": 2.0,
        "half_tokens": 2.0,
        "step_overhead": min(times) / 4.0,
        "tp_overlap": 0.5,
        "pp_overlap": 0.5,
    }
    for _ in range(rounds):
        for name, span in spans.items():
            for trial in _trials(constants, name, span):
                misfit = _misfit(guess(trial), times)
                if misfit < best:
                    best, constants = misfit, trial
        spans = {name: math.sqrt(span) if name in _FACTORS else span * 0.7 for name, span in spans.items()}
    predicted = guess(constants)
    return Calibration(
        constants=constants,
        rank_correlation=rank_correlation(predicted, times),
        worst_error=max(abs(each / truth - 1.0) for each, truth in zip(predicted, times, strict=True)),
        predicted=tuple(predicted),
    )


_FACTORS = ("efficiency", "half_width", "half_tokens")
_OVERLAPS = ("tp_overlap", "pp_overlap")
"""Negative overlap stands for traffic that costs more than its bytes, as DTensor's dispatch and gloo's waits do on CPUs."""


def _trials(constants: cost.Constants, name: str, span: float) -> list[cost.Constants]:
    value = getattr(constants, name)
    if name in _FACTORS:
        values = [value * span, value / span]
    elif name in _OVERLAPS:
        # 1 - overlap is what counts: it may double, or vanish.
        values = [1.0 - (1.0 - value) * (1.0 + 8.0 * span), 1.0 - (1.0 - value) / (1.0 + 8.0 * span)]
    else:
        values = [value + span, max(0.0, value - span)]
    return [msgspec.structs.replace(constants, **{name: each}) for each in values]


def predict(request: Request, samples: Sequence[Sample], constants: cost.Constants) -> list[float]:
    """Step times of the measured meshes under some constants, in their order.

    Raises:
        ConfigurationError: a mesh that the request cannot hold, with the reason.
    """
    made: list[float] = []
    for sample in samples:
        one = msgspec.structs.replace(request, constants=constants, tp=sample.mesh.tp, zero=sample.zero_stage)
        judged = search.judge(one, sample.mesh, sample.micro_batch)
        if not isinstance(judged, Plan):
            raise ConfigurationError(
                f"measured mesh {sample.mesh}: {judged}", where="--calibrate", hint="describe the inventory of the run"
            )
        made.append(judged.step_seconds)
    return made


def _misfit(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return sum(math.log(each / truth) ** 2 for each, truth in zip(predicted, measured, strict=True))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, ties with their mean rank; 1 for fewer than two values or without any spread."""
    if len(first) < 2:
        return 1.0
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) - 1) / 2.0
    cover = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return cover / spread if spread else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            ranks[order[place]] = (start + end) / 2.0
        start = end + 1
    return ranks
