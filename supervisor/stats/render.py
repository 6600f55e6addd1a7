"""The report for people: text, Markdown, and one self-contained HTML file with plots drawn as inline SVG."""

from __future__ import annotations

import html
import textwrap
from typing import Any

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


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #6b7280; --line: #d1d5db; --bar: #2563eb; --page: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --soft: #9ca3af; --line: #374151; --bar: #60a5fa; --page: #111418; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
td:first-child, th:first-child { text-align: left; } svg { width: 100%; height: auto; } text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.bar { fill: var(--bar); } .axis { stroke: var(--line); } .curve { fill: none; stroke: var(--bar); stroke-width: 2; }
.warning { border-left: 4px solid #d97706; padding-left: .8rem; } pre { overflow-x: auto; }
"""


def page(document: Document, title: str) -> str:
    """A self-contained HTML page: no script, no network."""
    failures = document["failures"]
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{count}</td><td>{100 * failures['share_by_component'][name]:.1f} %</td></tr>"
        for name, count in failures["by_component"].items()
    )
    warnings = "".join(f"<p class=warning>{html.escape(warning)}</p>" for warning in document["warnings"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><pre>{html.escape(chr(10).join(_summary(document)))}</pre>{warnings}"
        f"<h2>Failures by category</h2>{bars(failures['by_category'])}<h2>Failures over time</h2>{_cumulative(document)}"
        f"<h2>By component</h2><table><tr><th>component</th><th>failures</th><th>share</th></tr>{rows}</table></html>"
    )


def bars(counts: dict[str, float]) -> str:
    """Horizontal bars as SVG."""
    top = max(counts.values(), default=1) or 1
    height = 26 * len(counts) + 6
    parts = [f"<svg viewBox='0 0 760 {height}' role=img aria-label='bar chart'>"]
    for row, (name, count) in enumerate(counts.items()):
        y = 26 * row
        parts.append(
            f"<text x=0 y={y + 18}>{html.escape(name[:34])}</text><rect class=bar x=240 y={y + 4} height=18 width={max(1.0, 440 * count / top):.1f} />"
            f"<text x={246 + 440 * count / top:.1f} y={y + 18}>{count:g}</text>"
        )
    return "".join([*parts, "</svg>"])


def _cumulative(document: Document) -> str:
    """Cumulative unplanned failures against hours."""
    start, end = document["window_hours"]["start"], document["window_hours"]["end"]
    hours = [incident["at_hours"] for incident in document["incidents"] if not incident["planned"]]
    points, total = [(0.0, 0)], max(1, len(hours))
    for count, hour in enumerate(hours, start=1):
        x = (hour - start) / (end - start)
        points += [(x, count - 1), (x, count)]
    points.append((1.0, len(hours)))
    path = " ".join(f"{50 + 690 * x:.1f},{200 - 180 * count / total:.1f}" for x, count in points)
    return (
        "<svg viewBox='0 0 760 230' role=img aria-label='cumulative failures'><line class=axis x1=50 y1=200 x2=740 y2=200 />"
        "<line class=axis x1=50 y1=20 x2=50 y2=200 />"
        f"<polyline class=curve points='{path}'/><text x=50 y=220>{start:g} h</text><text x=700 y=220>{end:g} h</text><text x=10 y=26>{len(hours)}</text></svg>"
    )
