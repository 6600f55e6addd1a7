"""The incidents of a post-mortem for people: terminal, Markdown and HTML."""

from __future__ import annotations

import html
import textwrap
from typing import Any

from regrow import charts

Document = dict[str, Any]
_WIDTH = 78


def text(document: Document) -> list[str]:
    """Lines for a terminal of 80 columns; nothing without a journal."""
    lines: list[str] = []
    for item in document.get("journal_incidents", []):
        lines += ["", f"{item['id']}: {title(item)}"]
        lines += [line for label, value in facts(item) for line in _wrapped(f"{label:<11}{value}", 13)]
        lines += [line for found in item["evidence"][:6] for line in _wrapped(f"- {_evidence(item, found)}", 4)]
    return lines


def _wrapped(line: str, indent: int) -> list[str]:
    return textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent=" " * indent, break_on_hyphens=False)


def title(item: Document) -> str:
    """Kind, where, and how long."""
    where = ", ".join(str(part) for part in (item["node"], f"rank {item['rank']}" if item["rank"] >= 0 else "") if part)
    state = "recovered" if item["recovered"] else "not recovered"
    return f"{item['kind'].replace('_', ' ')}{f' ({where})' if where else ''}, {state}, {item['lost_seconds']:.2f} s"


def facts(item: Document) -> list[tuple[str, str]]:
    """(label, value) of what is known."""
    first = item["first_bad_event"]
    spans = ", ".join(f"{name.replace('_', ' ')} {seconds:.2f}" for name, seconds in item["phases"].items())
    alike = ", ".join(f"{other['id']} (same {' and '.join(other['same'])})" for other in item["similar"])
    found = [
        ("first", _evidence(item, first) if first else "no line of the journal"),
        ("GPU", item["device"]),
        ("class", f"{item['class']}, confidence {item['confidence']}: {item['confidence_reason']}"),
        ("what", item["text"]),
        ("phases", f"{spans} s" if spans else ""),
        ("lost", f"{item['lost_gpu_hours']:.4g} GPU-hours, {item['lost_steps'] or 0} steps computed again"),
        ("action", f"{item['action']} (rules: {item['rules']})"),
        ("why", item["reason"]),
        ("alike", alike),
        ("earlier", item["earlier"]),
    ]
    return [(label, value) for label, value in found if value]


def _evidence(item: Document, found: Document) -> str:
    node = f" {found['node']}" if found["node"] else ""
    return f"{round(found['at'] - item['at'], 2) + 0.0:+.2f} s {found['kind'].replace('_', ' ')}{node}: {found['text']}"


def markdown(document: Document) -> list[str]:
    """Sections for a Markdown file."""
    lines: list[str] = []
    for item in document.get("journal_incidents", []):
        lines += [f"## {item['id']}: {title(item)}", ""]
        lines += [f"- **{label}** {_plain(value)}" for label, value in facts(item)]
        lines += [f"- {_plain(_evidence(item, found))}" for found in item["evidence"]]
        lines += [""]
    return lines


def _plain(value: str) -> str:
    return value.replace("<", "&lt;").replace("\n", " ")


def page(document: Document) -> str:
    """HTML sections, with the phases of all recoveries on one scale."""
    items = document.get("journal_incidents", [])
    if not items:
        return ""
    rows = {item["id"]: item["phases"] for item in items if item["phases"]}
    parts = ["<h2>Recoveries, phase by phase</h2>", charts.stacks(rows, label="phases of each recovery"), "<h2>Incidents</h2>"]
    for item in items:
        known = "".join(
            f"<tr><td class=text>{html.escape(label)}</td><td class=text>{html.escape(value)}</td></tr>" for label, value in facts(item)
        )
        lines = "".join(f"<li>{html.escape(_evidence(item, found))}</li>" for found in item["evidence"])
        trace = f"<pre>{html.escape(item['traceback'])}</pre>" if item["traceback"] else ""
        parts.append(f"<h3>{html.escape(item['id'])}: {html.escape(title(item))}</h3><table>{known}</table><ul>{lines}</ul>{trace}")
    return "".join(parts)
