"""A simulation for people: a table, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regrow import charts
from regrow.errors import ConfigurationError

_CAUSES = 6
"""Causes that are shown."""


def text(document: dict[str, Any]) -> list[str]:
    """Lines for a terminal."""
    goodput, ettr = document["goodput"], document["ettr"]
    lines = [
        (
            f"{document['gpus']:,} GPUs on {document['nodes'] + document['spares']:,} nodes, {document['days']:g} days, policy {document['policy']},"
            f" {document['seeds']} seeds from {document['first_seed']}"
        ),
        f"goodput    p5 {goodput['p5']:.2%}  p50 {goodput['p50']:.2%}  p95 {goodput['p95']:.2%}   (reserved time, spares included)",
        f"ETTR       p5 {ettr['p5']:.2%}  p50 {ettr['p50']:.2%}  p95 {ettr['p95']:.2%}   (time of steps that stay / wall time)",
        f"failures   {document['failures']} a run; {document['charges']['p50']:.0f} charges, {document['generations']['p50']:.0f} generations",
        "lost       share   hours  (mean of the seeds)",
    ]
    for name, share in sorted(document["lost_share_by_phase"].items(), key=lambda item: -item[1]):
        seconds = document["lost_seconds_by_phase"][name]
        if seconds > 0:
            lines.append(f"  {name:<11}{share:6.2%} {seconds / 3600:8.2f}")
    causes = {name: seconds for name, seconds in document["lost_seconds_by_category"].items() if seconds > 0}
    if causes:
        lines.append("by cause                     hours  (recovery and lost work; a smaller mesh, saves and spares have no single one)")
        lines += [f"  {name[:22]:<24}{seconds / 3600:8.2f}" for name, seconds in list(causes.items())[:_CAUSES]]
    if "compare" in document:
        lines += ["", *_table(document)]
    return lines + [f"warning: {warning}" for warning in document["warnings"]]


def _table(document: dict[str, Any]) -> list[str]:
    lines = ["policy          p5       p50      p95      ETTR     recovery lost work  shrunk  spares"]
    for row in document["compare"]:
        shares = {name: max(0.0, share) for name, share in row["lost_share_by_phase"].items()}  # no "-0.00%" of rounding
        recovery = sum(share for name, share in shares.items() if name not in ("lost_work", "checkpoint", "shrunk", "spares"))
        mark = " *" if row["policy"] == document["best_policy"] else ""
        lines.append(
            f"{row['policy']:<14}{row['goodput']['p5']:8.2%} {row['goodput']['p50']:8.2%} {row['goodput']['p95']:8.2%} {row['ettr']['p50']:8.2%}"
            f" {recovery:8.2%} {shares['lost_work']:8.2%} {shares['shrunk']:8.2%} {shares['spares']:7.2%}{mark}"
        )
    return [*lines, "* best median goodput"]


def svg(document: dict[str, Any], path: Path) -> None:
    """Lost time by phase as a picture: one bar a policy.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    rows = document.get("compare") or [document]
    shares = {
        f"{row['policy']} {row['goodput']['p50']:.1%}": {
            name: 100.0 * share for name, share in row["lost_share_by_phase"].items() if share > 0
        }
        for row in rows
    }
    picture = charts.stacks(shares, label="Lost share of the reserved time by phase, in per cent", unit=" %")
    try:
        path.write_text(charts.standalone(picture), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot be written: {error.strerror}", where=str(path), hint="check --svg") from error
