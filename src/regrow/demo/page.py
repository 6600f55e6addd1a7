"""The HTML report of a demo: loss against the twin, recoveries phase by phase, the checks, the faults."""

from __future__ import annotations

import html
from typing import Any

from regrow import charts


def render(result: dict[str, Any]) -> str:
    """One self-contained page of the result document (see `regrow.demo.main`)."""
    verdict = "<p class=good><b>All checks hold.</b></p>" if result["ok"] else "<p class=bad><b>A check does not hold.</b></p>"
    return charts.page(
        f"Regrow demo, seed {result['seed']}",
        "".join(
            [
                verdict,
                f"<p class=soft>{html.escape(result['summary'])}</p>",
                "<h2>Loss, with and without faults</h2>",
                _loss(result),
                "<h2>What was broken, and what became of it</h2>",
                _faults(result),
                "<h2>Recoveries, phase by phase</h2>",
                _phases(result),
                "<h2>Generations</h2>",
                _generations(result),
                "<h2>Checks</h2>",
                _checks(result),
            ]
        ),
    )


def _loss(result: dict[str, Any]) -> str:
    series = {"run with faults": result["loss"], "twin without": result["twin_loss"]}
    marks = {float(fault["step"]) + 0.5: fault["kind"] for fault in result["faults"]}
    return charts.lines(series, label="loss by step, run and twin", x_label="step", marks=marks)


def _faults(result: dict[str, Any]) -> str:
    rows = [
        (
            fault["kind"],
            fault["node"],
            fault["rank"] if fault["rank"] >= 0 else "",
            fault["step"],
            f"{fault['mesh_before']} → {fault['mesh_after']}",
            f"{fault['recovered_seconds']:.2f} s",
            fault["named"],
        )
        for fault in result["faults"]
    ]
    return charts.table(("fault", "node", "rank", "after step", "mesh", "recovered in", "named as"), rows)


def _phases(result: dict[str, Any]) -> str:
    rows = {f"{incident['id']} {incident['kind']}": incident["phases"] for incident in result["incidents"] if incident.get("phases")}
    table = charts.table(
        ("incident", "rung", "lost steps", "seconds"),
        [
            (
                f"{incident['id']} {incident['kind']}",
                incident.get("rung", ""),
                incident.get("lost_steps", ""),
                f"{incident.get('seconds') or 0:.2f}",
            )
            for incident in result["incidents"]
        ],
    )
    return charts.stacks(rows, label="seconds per recovery phase") + table


def _generations(result: dict[str, Any]) -> str:
    rows = [
        (entry["generation"], entry["mesh"], entry["first_step"], entry["last_step"], entry["ranks"]) for entry in result["generations"]
    ]
    return charts.table(("generation", "mesh", "first step", "last step", "ranks"), rows)


def _checks(result: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td class={'good' if check['ok'] else 'bad'}>{'holds' if check['ok'] else 'FAILS'}</td>"
        f"<td style='text-align:left'>{html.escape(check['name'])}</td><td style='text-align:left'>{html.escape(check['detail'])}</td></tr>"
        for check in result["checks"]
    )
    return f"<table>{rows}</table>"
