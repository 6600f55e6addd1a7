"""The report for people: text, Markdown, and one self-contained HTML file with plots drawn as inline SVG."""

from __future__ import annotations

import html
import textwrap
from typing import Any

from regrow import charts
from regrow.supervisor.stats import fits, incident_text

Document = dict[str, Any]


def text(document: Document) -> str:
    """A terminal report that fits 80 columns."""
    return "\n".join([*_summary(document), "", *_table_text(document), *incident_text.text(document), *_warnings(document)])


def markdown(document: Document, title: str = "Failure report") -> str:
    """The same as Markdown."""
    rows = ["| category | failures | share | lost GPU-hours |", "|---|---:|---:|---:|"]
    failures = document["failures"]
    for name, count in failures["by_category"].items():
        lost = _known(failures["lost_gpu_hours_by_category"].get(name))
        rows.append(f"| {_cell(name)} | {count} | {100 * failures['share_by_category'][name]:.1f} % | {lost} |")
    parts = ["| component | failures | share |", "|---|---:|---:|"]
    parts += [
        f"| {_cell(name)} | {count} | {100 * failures['share_by_component'][name]:.1f} % |"
        for name, count in failures["by_component"].items()
    ]
    sizes = ["| GPUs | MTBF | P(no failure in 24 h) |", "|---:|---:|---:|"]
    sizes += [
        f"| {item['gpus']} | {_number(item['mtbf_hours'], ' h')} | {item['p_no_failure_24h']:.4f} |" for item in document["projection"]
    ]
    lines = [
        f"# {title}",
        "",
        "```text",
        *_summary(document),
        "```",
        "",
        *rows,
        "",
        *parts,
        "",
        "At other sizes, if failures scale with GPUs:",
        "",
        *sizes,
        "",
    ]
    lines += incident_text.markdown(document)
    return "\n".join([*lines, *[f"> {warning}\n" for warning in document["warnings"]]]).rstrip() + "\n"


def _known(hours: float | None) -> str:
    """Lost time that no row tells is unknown, not zero."""
    return f"{hours:.4g}" if hours else "-"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


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
    if weibull["shape"] is not None and weibull["shape"] > fits.TOO_REGULAR:
        lines.append(f"{'gaps':<14}{weibull['verdict'].removeprefix('gaps are ')}: no fit is shown")
    elif weibull["shape"] is not None:
        lines.append(
            f"gaps          Weibull shape {weibull['shape']:.3g} (95 %: {weibull['shape_lower95']:.3g} to {weibull['shape_upper95']:.3g}),"
            f" scale {weibull['scale_hours']:.4g} h"
        )
        lines.append(f"{'':<14}{weibull['verdict']}")
    lines += _time_lines(document)
    lines += [
        f"lemon node    {lemon['node']}: {lemon['count']} failures, {lemon['expected']:.2f} expected"
        for lemon in document["nodes"]["lemons"]
    ]
    return [part for line in lines for part in textwrap.wrap(line, 78, subsequent_indent=" " * 14, break_on_hyphens=False)]


def _time_lines(document: Document) -> list[str]:
    """Lost time, MTTD and MTTR, the best interval, age."""
    goodput, lines = document["goodput"], list[str]()
    used = goodput.get("measured")
    if used is not None:
        lines.append(
            f"goodput       {used.goodput:.3f}: {used.lineage_steps} steps of the lineage x {used.best_gpu_seconds_per_step:.4g} GPU-s at best,"
            f" of {used.reserved_gpu_seconds:.5g} GPU-s reserved; ETTR {used.ettr:.3f} with start-up"
        )
    if goodput["ettr"] is not None:
        ettr = f", ETTR {goodput['ettr']:.3f}" if used is None else " in incidents"
        lines.append(f"lost          {goodput['lost_hours']:.4g} h = {goodput['lost_gpu_hours']:.6g} GPU-hours{ettr}")
    if goodput["cost"] is not None:
        lines.append(f"cost          {goodput['cost']:,.2f} at {goodput['price_per_gpu_hour']:g} per GPU-hour")
    for label, name in (("MTTD", "detect"), ("MTTR", "recover"), ("per incident", "lost")):
        found = document["durations"][name]
        if found["n"]:
            tails = ", ".join(f"p{q} {found[f'p{q}_seconds']:.3g}" for q in (50, 90, 99) if found[f"p{q}_seconds"] is not None)
            text = f"mean {found['mean_seconds']:.3g} s ({tails}{', ' if tails else ''}max {found['max_seconds']:.3g}), n {found['n']}"
            lines.append(f"{label:<13} {text}")
            lines.append(f"{'':<14}weighted by GPUs {found['gpu_weighted_mean_seconds']:.3g} s")
    best = document["interval"]
    if best is not None:
        low, high = best["best_seconds_at_upper_rate"], best["best_seconds_at_lower_rate"]
        band = f"{low:.4g} to {high:.4g} s" if high is not None else f"at least {low:.4g} s"
        lines.append(f"interval      best {best['best_seconds']:.4g} s ({band}), overhead {100 * best['overhead_at_best']:.2f} %")
        if best["used_seconds"]:
            lines.append(f"{'':<14}used {best['used_seconds']:.4g} s, overhead {100 * best['overhead_at_used']:.2f} %")
    age = document["age"]
    constructed = (document["weibull"]["shape"] or 0.0) > fits.TOO_REGULAR
    if age["p_value"] is not None and not constructed:
        lines.append(f"age           {age['verdict']} (p {age['p_value']:.2g})")
    return lines


def _table_text(document: Document) -> list[str]:
    failures = document["failures"]
    if not failures["by_category"]:
        return ["no unplanned failure"]
    rows = [f"{'category':<32}{'failures':>9}{'share':>9}{'lost GPU-h':>14}"]
    for name, count in failures["by_category"].items():
        share = 100 * failures["share_by_category"][name]
        rows.append(f"{name[:31]:<32}{count:>9}{share:>8.1f}%{_known(failures['lost_gpu_hours_by_category'].get(name)):>14}")
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
        f"{_durations(document)}<h2>Failures over time</h2>{_cumulative(document)}"
        f"<h2>By component</h2>{charts.table(('component', 'failures', 'share'), rows)}"
        f"{_survival(document)}<h2>At other sizes</h2><p class=soft>If failures scale with GPUs; switches and storage do not.</p>{_sizes(document)}"
        f"{incident_text.page(document)}",
    )


def _survival(document: Document) -> str:
    if (document["weibull"]["shape"] or 0.0) > fits.TOO_REGULAR:
        return "<h2>Time between failures</h2><p class=soft>Not drawn: the times were constructed, so their gaps mean nothing.</p>"
    survival = document["survival"]
    curves = {name: _steps(curve) for name, curve in list(survival["by_component"].items())[:4] if curve["hours"]}
    parts = [
        "<h2>Time between failures, by component</h2><p class=soft>Kaplan-Meier: share of gaps longer than so many hours; the last gap is censored.</p>",
        charts.lines({name[:22]: points for name, points in curves.items()}, label="survival of gaps by component", x_label="hours"),
    ]
    nodes = survival["first_failure_of_a_node"]
    if nodes is not None:
        points = {"no failure yet": _steps(nodes), "lower 95 %": _steps(nodes, "lower95"), "upper 95 %": _steps(nodes, "upper95")}
        parts += [
            "<h2>Nodes without a failure</h2>",
            charts.lines(points, label="nodes without a failure", x_label=f"hours of {nodes['scale']}"),
        ]
    return "".join(parts)


def _steps(curve: Document, name: str = "survival") -> list[tuple[float, float]]:
    points, value = [(0.0, 1.0)], 1.0
    for hour, share in zip(curve["hours"], curve[name], strict=True):
        points += [(hour, value), (hour, share)]
        value = share
    return [*points, (curve["last_hours"], value)]


_DURATIONS = {"detect_seconds": "until noticed", "recover_seconds": "until training again", "lost_seconds": "lost in all"}


def _durations(document: Document) -> str:
    """Share of incidents that took no longer than so many seconds, and what they cost by category."""
    series: dict[str, list[tuple[float, float]]] = {}
    for key, name in _DURATIONS.items():
        known = sorted(item[key] for item in document["incidents"] if item[key] is not None and not item["planned"])
        if known and known[-1] > 0:
            steps = [point for rank, value in enumerate(known) for point in ((value, rank / len(known)), (value, (rank + 1) / len(known)))]
            series[name] = [(0.0, 0.0), *steps]
    if not series:
        return ""
    lost = {name: round(hours, 4) for name, hours in document["failures"]["lost_gpu_hours_by_category"].items() if hours}
    weighted = f"<h2>Lost GPU-hours by category</h2>{charts.bars(lost, label='lost GPU-hours by category')}" if lost else ""
    return (
        f"{weighted}<h2>How long incidents took</h2><p class=soft>Share of incidents that took no longer.</p>"
        f"{charts.lines(series, label='distribution of durations', x_label='seconds')}"
    )


def _sizes(document: Document) -> str:
    rows = [
        (item["gpus"], _number(item["mtbf_hours"], " h"), _number(item["mtbf_lower95_hours"], " h"), f"{item['p_no_failure_24h']:.4f}")
        for item in document["projection"]
    ]
    return charts.table(("GPUs", "MTBF", "MTBF, lower 95 %", "P(no failure in 24 h)"), rows)


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
