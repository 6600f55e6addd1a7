"""The answer of `regrow interval`: formula first, then what a job would really use."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from regrow.ckpt import interval, tiers
from regrow.ckpt.interval import Bounds, Controller, Measured
from regrow.errors import ConfigurationError, OperationalError
from regrow.parallel import draw

LLAMA3_RATE = 419 / (16384 * 54 * 24)
"""All-cause rate a GPU and hour of Llama 3 405B: 419 interruptions, 16,384 GPUs, 54 days (https://arxiv.org/abs/2407.21783)."""
_MOST = 1e12
_HOPELESS = 0.5
"""Share of the time lost beyond which no interval helps. Ours."""
_POSITIVE = ("failures_per_hour", "mtbf_hours", "rate_per_gpu_hour", "observed_hours", "gpus", "a", "b", "max_seconds", "keep")
_NOT_NEGATIVE = (
    "save_seconds",
    "stall_seconds",
    "restore_seconds",
    "detect_seconds",
    "step_seconds",
    "notice_seconds",
    "min_seconds",
    "checkpoint_gb",
    "write_gb_per_second",
    "storage_gb",
    "max_lost_gpu_hours",
    "observed_failures",
    "node_state_gb",
    "node_memory_gb",
    "max_stall_share",
)
_FORMULAS = {
    "seed": "E(T) = a f T + b/T, T* = sqrt(b / (a f))",
    "young": "T* = sqrt(2 C M)",
    "daly": "T* = sqrt(2 C M) (1 + sqrt(C/2M)/3 + C/2M/9) - C",
    "exact": "T* = M (1 + W0(-exp(-1 - C/M))), the minimum for exponential failures",
}
PRESETS: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"failures_per_hour": 0.5, "method": "seed"}, "seed text, example 9.6.3: a = 4, b = 55.8, half a failure an hour"),
    "bloom": (
        {"mtbf_hours": 168.0, "save_seconds": 40.0, "step_seconds": 105.0, "method": "young"},
        "BLOOM 176B on 384 GPUs (https://arxiv.org/abs/2211.05100): a failure a week, saves of 40 s, steps of 105 s",
    ),
    "llama3": (
        {"gpus": 16384, "rate_per_gpu_hour": LLAMA3_RATE, "method": "exact"},
        "Llama 3 405B on 16,384 GPUs: 419 interruptions in 54 days (https://arxiv.org/abs/2407.21783); its time of a save is not published",
    ),
}
_RATES = ("failures_per_hour", "mtbf_hours", "rate_per_gpu_hour", "observed_hours")


def _with_preset(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags with a preset's numbers where the user gave none; a rate of the user's replaces the preset's."""
    name = flags["preset"]
    if name is None:
        return flags
    if name not in PRESETS:
        raise ConfigurationError(f"unknown preset {name!r}", where="--preset", hint=f"one of {', '.join(PRESETS)}")
    own_rate = any(flags[each] is not None for each in _RATES)
    own_method = flags["method"] is not None
    numbers = {
        key: value
        for key, value in PRESETS[name][0].items()
        if not flags[key] and not (own_rate and key in _RATES) and not (own_method and key == "method")
    }
    return flags | numbers


def answer(flags: dict[str, Any]) -> dict[str, Any]:
    """The document of the contract.

    Raises:
        ConfigurationError: no rate, several rates, or numbers that mean nothing.
    """
    flags = _with_preset(flags)
    _check(flags)
    rate, scope, warnings = _rate(flags)
    mtbf = 1.0 / rate
    method = _method(flags)
    a, b = flags["a"] or interval.SEED_A, flags["b"] or interval.SEED_B
    cost_hours = _cost_seconds(flags) / 3600.0
    optimum = _optimum(method, rate, cost_hours, a, b)
    costs = _curve(method, optimum, rate, cost_hours, a, b, flags)
    measured = _measured(flags)
    bounds = Bounds(
        min_seconds=flags["min_seconds"],
        max_seconds=math.inf if flags["max_seconds"] is None else flags["max_seconds"],
        write_bytes_per_second=flags["write_gb_per_second"] * 1e9,
        max_stall_ratio=flags["max_stall_share"],
        max_lost_gpu_hours=flags["max_lost_gpu_hours"],
        gpus=flags["gpus"] or 0,
    )
    chosen = Controller(bounds).apply(optimum * 3600.0, measured, rate / 3600.0)
    warnings += [*chosen.warnings, *interval.storage_warnings(flags["checkpoint_gb"], flags["storage_gb"], flags["keep"])]
    warnings += tiers.memory_warnings(flags["node_state_gb"], flags["node_memory_gb"], copies=True)
    if chosen.overhead_ratio > _HOPELESS:
        warnings.append(
            f"saves, lost work and recovery take more than {_HOPELESS:.0%} of the time: at this failure rate training hardly advances;"
            " repair the machines first (failures in batches are one cause, not many), then speed up restore and save"
        )
    if method == "seed" and flags["save_seconds"] is not None and flags["b"] is None:
        warnings.append("the seed preset has its own cost of saving (b = 55.8): --save-seconds does not enter T*")
    return {
        "preset": {"name": flags["preset"], "source": PRESETS[flags["preset"]][1]} if flags["preset"] else None,
        "t_opt_hours": optimum,
        "method": method,
        "formula": _FORMULAS[method],
        "coefficients": {"a": a, "b": b} if method == "seed" else {"save_seconds": _cost_seconds(flags)},
        "expected_cost_at_t_opt": _cost(method, optimum, rate, cost_hours, a, b, flags),
        "cost_unit": "E(T) in the unit of a and b" if method == "seed" else "share of the useful time",
        "failures_per_hour": rate,
        "mtbf_hours": mtbf,
        "rate_scope": scope,
        "p_no_failure_in_interval": math.exp(-optimum / mtbf),
        "p_no_failure_24h": math.exp(-24.0 / mtbf),
        "interval_seconds": chosen.interval_seconds,
        "steps": chosen.steps,
        "overhead_ratio": chosen.overhead_ratio if flags["save_seconds"] is not None or flags["stall_seconds"] is not None else None,
        "bounds": {
            "lower_seconds": chosen.lower_seconds,
            "lower_rule": chosen.lower_rule,
            "upper_seconds": chosen.upper_seconds if math.isfinite(chosen.upper_seconds) else None,
            "upper_rule": chosen.upper_rule if math.isfinite(chosen.upper_seconds) else None,
            "rule": chosen.rule,
            "rule_text": chosen.reason,
        },
        "notice": {
            "given_seconds": flags["notice_seconds"],
            "needed_seconds": interval.notice_needed(measured),
            "fits": flags["notice_seconds"] >= interval.notice_needed(measured) if flags["notice_seconds"] else None,
        },
        "tiers": _tiers(flags, rate),
        "curve": costs,
        "warnings": warnings,
    }


def write_svg(document: dict[str, Any], path: Path) -> None:
    """E(T) with T* and MTBF / 2 marked.

    Raises:
        OperationalError: the file cannot be written.
    """
    points = [(point["hours"], point["cost"]) for point in document["curve"]]
    text = draw.curve_svg(
        f"Cost of the checkpoint interval ({document['method']}), {document['failures_per_hour']:.3g} failures an hour",
        "interval T in hours",
        f"cost, {document['cost_unit']}",
        {document["formula"].split(",")[0]: points},
        [(document["t_opt_hours"], document["expected_cost_at_t_opt"], f"T* = {document['t_opt_hours']:.3g} h")],
        [(document["mtbf_hours"] / 2.0, "MTBF/2")],
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OperationalError(f"cannot write: {error.strerror}", where=str(path), hint="choose another --svg path") from error


def _tiers(flags: dict[str, Any], rate: float) -> list[dict[str, Any]]:
    parsed: list[interval.Tier] = []
    for text in flags["tier"] or []:
        parts = text.split(":")
        try:
            name, numbers = parts[0], [float(part) for part in parts[1:]]
            share, stall, write = numbers
        except ValueError as error:
            hint = "NAME:SHARE:STALL:WRITE, for example disk:0.3:0.5:20 (share of failures, seconds, seconds)"
            raise ConfigurationError(f"{text!r} is not a tier", where="--tier", hint=hint) from error
        if not 0 < share <= 1 or not all(0 <= value <= _MOST for value in (stall, write)):
            raise ConfigurationError(f"{text!r} has impossible numbers", where="--tier", hint="0 < share <= 1, times of at least 0 s")
        parsed.append(interval.Tier(name=name, share=share, stall_seconds=stall, write_seconds=write))
    bounds = Bounds(max_seconds=math.inf, max_stall_ratio=flags["max_stall_share"])
    found = interval.tier_intervals(tuple(parsed), rate / 3600.0, bounds)
    return [
        {
            "name": name,
            "interval_seconds": one.interval_seconds,
            "overhead_ratio": one.overhead_ratio,
            "rule": one.rule,
            "reason": one.reason,
        }
        for name, one in found.items()
    ]


def _check(flags: dict[str, Any]) -> None:
    for name in (*_POSITIVE, *_NOT_NEGATIVE):
        value = flags[name]
        if value is None:
            continue
        # Beyond these limits no unit makes sense, and exponentials leave the range of floating point.
        beyond = value > _MOST or 0 < value < 1 / _MOST
        if not math.isfinite(value) or value < 0 or beyond or (value == 0 and name in _POSITIVE):
            hint = f"give a number {'above' if name in _POSITIVE else 'of at least'} 0 and at most {_MOST:g}"
            if name in ("failures_per_hour", "rate_per_gpu_hour") and value == 0:
                hint = "no failure seen is no rate of 0: use --observed-failures 0 --observed-hours H"
            raise ConfigurationError(f"{value}", where="--" + name.replace("_", "-"), hint=hint)
    if not 0.0 < flags["tier_share"] <= 1.0:
        raise ConfigurationError(f"{flags['tier_share']}", where="--tier-share", hint="a share above 0 and at most 1")
    if flags["max_lost_gpu_hours"] and not flags["gpus"]:
        raise ConfigurationError("the cap needs the number of GPUs", where="--max-lost-gpu-hours", hint="add --gpus")


def _rate(flags: dict[str, Any]) -> tuple[float, str, list[str]]:
    given = [name for name in ("failures_per_hour", "mtbf_hours", "rate_per_gpu_hour", "observed_hours") if flags[name] is not None]
    if len(given) != 1:
        what = "no failure rate is given" if not given else f"{len(given)} failure rates are given: {', '.join(given)}"
        raise ConfigurationError(
            what,
            where="regrow interval",
            hint="give one of --failures-per-hour, --mtbf-hours, --gpus with --rate-per-gpu-hour, --observed-*",
        )
    share = flags["tier_share"]
    scope = "of the job, all causes as given" if share == 1.0 else f"of the job, the {share:.0%} that need this tier"
    if given[0] == "failures_per_hour":
        return flags["failures_per_hour"] * share, scope, []
    if given[0] == "mtbf_hours":
        return share / flags["mtbf_hours"], scope, []
    if given[0] == "observed_hours":
        return _observed(flags)
    if flags["gpus"] is None:
        raise ConfigurationError(
            "a rate a GPU needs the number of GPUs", where="--gpus", hint="add --gpus, or give --mtbf-hours of the job"
        )
    per_gpu = flags["rate_per_gpu_hour"]
    rate = share / interval.job_mtbf(flags["gpus"], per_gpu)
    ratio = LLAMA3_RATE / per_gpu
    found: list[str] = []
    if ratio > 2.0:
        found.append(
            f"{per_gpu:g} a GPU-hour is {ratio:.1f} times below the all-cause rate of Llama 3 ({LLAMA3_RATE:.3g}): "
            "is it the rate of one GPU cause only? The interval needs all causes"
        )
    return rate, f"of {flags['gpus']} GPUs in series, MTBF = 1/(G lambda)", found


def _observed(flags: dict[str, Any]) -> tuple[float, str, list[str]]:
    seen, hours = flags["observed_failures"], flags["observed_hours"]
    if seen is None:
        raise ConfigurationError("how many were seen?", where="--observed-failures", hint="0 is an answer")
    rate = interval.posterior_rate(seen, hours, 0.0) * flags["tier_share"]
    found: list[str] = []
    if seen < 5:
        upper = -math.log(0.05) / hours if seen == 0 else (seen + 1.645 * math.sqrt(seen) + 1.35) / hours
        found.append(
            f"{seen} failures in {hours:g} h say little: the rate is below {upper:.3g} an hour with 95 % confidence"
            f" (MTBF above {1 / upper:.4g} h); the Jeffreys estimate {rate:.3g} is used"
        )
    return rate, f"of the job, (n + 1/2) / exposure from {seen} failures in {hours:g} h", found


def _method(flags: dict[str, Any]) -> str:
    method = flags["method"]
    if method is None:
        method = "exact" if _cost_seconds(flags) and not (flags["a"] or flags["b"]) else "seed"
    if method not in interval.METHODS:
        raise ConfigurationError(f"unknown method {method!r}", where="--method", hint=f"one of {', '.join(interval.METHODS)}")
    if method != "seed" and not _cost_seconds(flags):
        raise ConfigurationError(f"{method} needs the time of a save", where="--save-seconds", hint="give a number above 0")
    if method != "seed" and (flags["a"] or flags["b"]):
        raise ConfigurationError(f"--a and --b belong to the seed's formula, not to {method}", where="--method", hint="leave them out")
    return method


def _cost_seconds(flags: dict[str, Any]) -> float:
    stall = flags["stall_seconds"] if flags["stall_seconds"] is not None else flags["save_seconds"]
    return stall or 0.0


def _measured(flags: dict[str, Any]) -> Measured:
    return Measured(
        stall_seconds=_cost_seconds(flags),
        write_seconds=flags["save_seconds"] or 0.0,
        restore_seconds=flags["restore_seconds"],
        detect_seconds=flags["detect_seconds"],
        step_seconds=flags["step_seconds"],
        notice_seconds=flags["notice_seconds"],
        checkpoint_bytes=flags["checkpoint_gb"] * 1e9,
    )


def _optimum(method: str, rate: float, cost: float, a: float, b: float) -> float:
    if method == "seed":
        return interval.linear_optimum(rate, a, b)
    return {"young": interval.young, "daly": interval.daly, "exact": interval.exact}[method](cost, 1.0 / rate)


def _cost(method: str, hours: float, rate: float, cost: float, a: float, b: float, flags: dict[str, Any]) -> float:
    if method == "seed":
        return interval.linear_cost(hours, rate, a, b)
    recovery = (flags["detect_seconds"] + flags["restore_seconds"]) / 3600.0
    if method == "young":
        return interval.measured_overhead(hours, cost, rate, 0.0, 0.0, recovery)
    return interval.exponential_overhead(hours, cost, 1.0 / rate, recovery)


def _curve(method: str, optimum: float, rate: float, cost: float, a: float, b: float, flags: dict[str, Any]) -> list[dict[str, float]]:
    hours = [optimum * 10.0 ** (index / 20.0 - 1.0) for index in range(41)]
    costs = [(each, _cost(method, each, rate, cost, a, b, flags)) for each in hours]
    return [{"hours": each, "cost": value} for each, value in costs if math.isfinite(value)]
