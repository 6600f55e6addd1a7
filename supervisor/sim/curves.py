"""Goodput over recovery time, failure rate and checkpoint interval: a grid of simulations, as rows and as a picture."""

from __future__ import annotations

import html
import itertools
from pathlib import Path
from typing import Any

import msgspec

from regrow import charts
from regrow.errors import ConfigurationError
from regrow.supervisor.sim import answer
from regrow.supervisor.sim.constants import Constants

RECOVERY = (0.25, 1.0, 4.0)
"""Factors on every phase of a start."""
RATES = (0.5, 1.0, 2.0, 4.0)
"""Factors on the failure rate."""
INTERVALS = (0.0, 300.0, 3600.0)
"""Seconds between saves; 0: the optimum that the production controller chooses."""
_PHASES = ("stop", "start", "start_cold", "rendezvous", "restore", "first_step", "requeue")


def curves(request: answer.Request) -> dict[str, Any]:
    """Simulate the grid. Rates are multiples of the request's; a trace has no rate and is refused.

    Raises:
        ConfigurationError: a trace or chaos, whose failures cannot be scaled.
    """
    if request.trace or request.chaos:
        raise ConfigurationError("curves need a failure rate", where="--curves", hint="leave --trace and --chaos away")
    rows: list[dict[str, Any]] = []
    for recovery, rate, interval in itertools.product(RECOVERY, RATES, INTERVALS):
        setup = msgspec.structs.replace(
            request.setup,
            constants=_scaled(request.setup.constants, recovery),
            rate_per_gpu_hour=request.setup.rate_per_gpu_hour * rate,
            interval_seconds=interval,
            max_interval_seconds=max(request.setup.max_interval_seconds, interval),
        )
        found = answer.answer(msgspec.structs.replace(request, setup=setup, journal=None))
        rows.append(
            {
                "recovery_factor": recovery,
                "failures_per_day": setup.gpus * setup.rate_per_gpu_hour * 24.0,
                "interval_seconds": interval,
                "goodput": found["goodput"],
                "ettr": found["ettr"],
            }
        )
    return {
        "curves": rows,
        "policy": request.setup.policy,
        "seeds": request.seeds,
        "nodes": request.setup.nodes,
        "days": request.setup.days,
    }


def _scaled(constants: Constants, factor: float) -> Constants:
    changed = {
        name: msgspec.structs.replace(
            constants.named(name),
            median=constants.named(name).median * factor,
            per_thousand_nodes=constants.named(name).per_thousand_nodes * factor,
        )
        for name in _PHASES
    }
    return msgspec.structs.replace(constants, **changed)


def text(document: dict[str, Any]) -> list[str]:
    """A table for a terminal."""
    lines = [
        f"{document['nodes']} nodes, {document['days']:g} days, policy {document['policy']}, {document['seeds']} seeds a point: median goodput",
        "recovery  interval " + "".join(f"{rate:>9.3g}/d" for rate in _rates(document)),
    ]
    for recovery, interval in itertools.product(RECOVERY, INTERVALS):
        cells = [
            row["goodput"]["p50"] for row in document["curves"] if (row["recovery_factor"], row["interval_seconds"]) == (recovery, interval)
        ]
        name = "optimum" if interval == 0 else f"{interval:.0f} s"
        lines.append(f"x {recovery:<8g}{name:<8} " + "".join(f"{cell:>11.2%}" for cell in cells))
    return lines


def _rates(document: dict[str, Any]) -> list[float]:
    return list(dict.fromkeys(row["failures_per_day"] for row in document["curves"]))


def page(document: dict[str, Any], path: Path) -> None:
    """One picture an interval, a curve a recovery time, as a self-contained page.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    about = f"Median goodput in per cent: {document['nodes']} nodes, {document['days']:g} days, policy {document['policy']}, {document['seeds']} seeds a point."
    parts = [f"<p class=soft>{html.escape(about)}</p>"]
    for interval in INTERVALS:
        series = {
            f"recovery x {recovery:g}": [
                (row["failures_per_day"], 100.0 * row["goodput"]["p50"])
                for row in document["curves"]
                if (row["recovery_factor"], row["interval_seconds"]) == (recovery, interval)
            ]
            for recovery in RECOVERY
        }
        name = "saves at the optimal interval" if interval == 0 else f"saves every {interval:.0f} s"
        parts.append(f"<h2>{name}</h2>{charts.lines(series, label=f'Goodput in per cent, {name}', x_label='failures a day')}")
    try:
        path.write_text(charts.page("Goodput over failures, recovery time and interval", "".join(parts)), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot be written: {error.strerror}", where=str(path), hint="check --curves") from error
