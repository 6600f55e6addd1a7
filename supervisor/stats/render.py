"""The report for people: text, Markdown, and one self-contained HTML file with plots drawn as inline SVG."""

from __future__ import annotations

import html
import textwrap
from typing import Any

from regrow import charts

Document = dict[str, Any]


def text(document: Document) -> str:
    """A terminal report that fits 80 columns."""
    return "\n".join([*_summary(document), "", *_table_text(document), *_warnings(document)])


def markdown(document: Document) -> str:
    """The same as Markdown."""
    rows = ["| category | failures | share | lost GPU-weighted |", "|---|---:|---:|---:|"]
    failures = document["failures"]
    for name, count in failures["by_category"].items():
        lost = failures["lost_seconds_by_category"].get(name, 0.0) / 3600
        rows.append(f"| {name} | {count} | {100 * failures['share_by_category'][name]:.1f} % | {lost:.1f} h |")
    lines = ["# Failure report", "", *[f"- {line}" for line in _summary(document)], "", *rows, ""]
    return "\n".join([*lines, *[f"> {warning}" for warning in document["warnings"]]]) + "\n"


def _number(value: float | None, unit: str = "") -> str:
    return "not bounded" if value is None else f"{value:.4g}{unit}"


def _summary(document: Document) -> list[str]:
    rate, mtbf, failures, weibull = (document[key] for key in ("rate_per_gpu_hour", "mtbf_hours", "failures", "weibull"))
    lines = [
        f"exposure      {document['exposure_gpu_hours']:.6g} GPU-hours on {document['gpus']} GPUs",
        f"failures      {failures['count']} unplanned, {failures['planned']} planned, {failures['victim_rows']} rows of victims",
        f"rate          {rate['point']:.4g} per GPU-hour (95 %: {rate['lower95']:.3g} to {rate['upper95']:.3g})",
        f"MTBF          {_number(mtbf['point'], ' h')} (95 %: {_number(mtbf['lower95'])} to {_number(mtbf['upper95'])}), {mtbf['scope']}",
    ]
    if weibull["shape"] is not None:
        lines.append(
            f"gaps          Weibull shape {weibull['shape']:.3g} (95 %: {weibull['shape_lower95']:.3g} to {weibull['shape_upper95']:.3g}),"
            f" scale {weibull['scale_hours']:.4g} h"
        )
        lines += textwrap.wrap(weibull["verdict"], 78, initial_indent=" " * 14, subsequent_indent=" " * 14)
    goodput = document["goodput"]
    if goodput["ettr"] is not None:
        lines.append(f"lost          {goodput['lost_hours']:.1f} h = {goodput['lost_gpu_hours']:.6g} GPU-hours, ETTR {goodput['ettr']:.3f}")
    lines += [
        f"lemon node    {lemon['node']}: {lemon['count']} failures, {lemon['expected']:.2f} expected"
        for lemon in document["nodes"]["lemons"]
    ]
    return lines


def _table_text(document: Document) -> list[str]:
    failures = document["failures"]
    rows = [f"{'category':<32}{'failures':>9}{'share':>9}{'lost h':>10}"]
    for name, count in failures["by_category"].items():
        share = 100 * failures["share_by_category"][name]
        rows.append(f"{name[:31]:<32}{count:>9}{share:>8.1f}%{failures['lost_seconds_by_category'].get(name, 0) / 3600:>10.1f}")
    return rows


def _warnings(document: Document) -> list[str]:
    if not document["warnings"]:
        return []
    return ["", *(line for warning in document["warnings"] for line in textwrap.wrap(f"! {warning}", 78, subsequent_indent="  "))]


def page(document: Document, title: str) -> str:
    """A self-contained HTML page: no script, no network."""
    failures = document["failures"]
    warnings = "".join(f"<p class=warning>{html.escape(warning)}</p>" for warning in document["warnings"])
    rows = [(name, count, f"{100 * failures['share_by_component'][name]:.1f} %") for name, count in failures["by_component"].items()]
    return charts.page(
        title,
        f"<pre>{html.escape(chr(10).join(_summary(document)))}</pre>{warnings}"
        f"<h2>Failures by category</h2>{charts.bars(failures['by_category'], label='failures by category')}"
        f"<h2>Failures over time</h2>{_cumulative(document)}"
        f"<h2>By component</h2>{charts.table(('component', 'failures', 'share'), rows)}",
    )


def _cumulative(document: Document) -> str:
    """Cumulative unplanned failures against hours, beside an even rate."""
    start, end = document["window_hours"]["start"], document["window_hours"]["end"]
    hours = [incident["at_hours"] for incident in document["incidents"] if not incident["planned"]]
    steps = [(start, 0.0)]
    for count, hour in enumerate(hours, start=1):
        steps += [(hour, count - 1.0), (hour, float(count))]
    steps.append((end, float(len(hours))))
    return charts.lines(
        {"failures": steps, "even rate": [(start, 0.0), (end, float(len(hours)))]}, label="cumulative failures over hours", x_label="hours"
    )
