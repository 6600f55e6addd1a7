"""Small charts as inline SVG for self-contained pages: no script, no network, readable in light and dark.

Every chart scales to its container, has a text label for screen readers, and takes colours from the page's style
(`STYLE`), chosen so that they stay apart for colour-blind readers (Okabe and Ito's palette).
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c00", "#7a5195")

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6470; --line: #d1d5db; --page: #ffffff; --good: #00734f; --bad: #b3361a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e7eb; --soft: #a3acb8; --line: #3a424d; --page: #14171c; --good: #4cc79b; --bad: #ff8a6b; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 62rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
td:first-child, th:first-child, td.text, th.text { text-align: left; } td:first-child, th { overflow-wrap: normal; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .soft { fill: var(--soft); }
.axis { stroke: var(--line); stroke-width: 1; } .curve { fill: none; stroke-width: 2; } pre { overflow-x: auto; }
.good { color: var(--good); } .bad { color: var(--bad); } .soft { color: var(--soft); } .warning { border-left: 4px solid #d97706; padding-left: .8rem; }
"""
"""For a <style> element of the page that holds the charts."""

_WIDTH, _LEFT, _RIGHT = 760, 56, 16

Points = Sequence[tuple[float, float]]
_Place = Callable[[float, float], tuple[float, float]]


def page(title: str, body: str) -> str:
    """A whole HTML document around `body` (already HTML)."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><h1>{html.escape(title)}</h1>{body}</html>"
    )


def lines(
    series: Mapping[str, Points], *, label: str, x_label: str = "", height: int = 260, marks: Mapping[float, str] | None = None
) -> str:
    """Curves over a common x axis, with a legend; `marks` are vertical lines with a text at x values."""
    every = [point for points in series.values() for point in points]
    if not every:
        return "<p class=soft>no data</p>"
    xs, ys = _range([x for x, _ in every]), _range([y for _, y in every])
    top, bottom = 30, height - 34

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (_WIDTH - _LEFT - _RIGHT) * (x - xs[0]) / (xs[1] - xs[0]),
            bottom - (bottom - top) * (y - ys[0]) / (ys[1] - ys[0]),
        )

    parts = [_open(height, label), _axes(xs, ys, place, bottom, x_label)]
    for x, text in (marks or {}).items():
        at = place(x, ys[0])[0]
        parts.append(f"<line class=axis x1={at:.1f} y1={top} x2={at:.1f} y2={bottom} stroke-dasharray='3 3'/>")
        parts.append(f"<text class=soft x={at + 3:.1f} y={top + 10}>{html.escape(text)}</text>")
    for index, (name, points) in enumerate(series.items()):
        colour = PALETTE[index % len(PALETTE)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        dash = " stroke-dasharray='6 4'" if index % 2 else ""
        parts.append(f"<polyline class=curve stroke='{colour}'{dash} points='{path}'/>")
        parts.append(_legend(index, name, colour))
    return "".join([*parts, "</svg>"])


def bars(values: Mapping[str, float], *, label: str, unit: str = "") -> str:
    """Horizontal bars, one a name."""
    top = max(values.values(), default=0.0) or 1.0
    parts = [_open(26 * len(values) + 6, label)]
    for row, (name, value) in enumerate(values.items()):
        width = max(1.0, 420 * value / top)
        parts.append(
            f"<text x=0 y={26 * row + 18}>{html.escape(name[:36])}</text>"
            f"<rect fill='{PALETTE[0]}' x=240 y={26 * row + 4} height=18 width={width:.1f} />"
            f"<text x={246 + width:.1f} y={26 * row + 18}>{value:g}{html.escape(unit)}</text>"
        )
    return "".join([*parts, "</svg>"])


def stacks(rows: Mapping[str, Mapping[str, float]], *, label: str, unit: str = " s") -> str:
    """One stacked horizontal bar a row, all to one scale, with a legend of the parts and the total at the end."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    longest = max((sum(row.values()) for row in rows.values()), default=0.0) or 1.0
    legend: list[str] = []
    x, line = 0, 0
    for index, name in enumerate(names):
        width = 30 + 7 * len(name)
        if x + width > _WIDTH:
            x, line = 0, line + 1
        legend.append(f"<rect {_paint(index)} x={x} y={4 + 18 * line} width=12 height=12 />")
        legend.append(f"<text x={x + 16} y={15 + 18 * line}>{html.escape(name)}</text>")
        x += width
    first = 34 + 18 * line
    parts = [_open(first + 30 * len(rows), label), *legend]
    for row, (title, values) in enumerate(rows.items()):
        y, at = first + 30 * row, 170.0
        parts.append(f"<text x=0 y={y + 15}>{html.escape(title[:26])}</text>")
        for name, value in values.items():
            width = 500 * value / longest
            parts.append(
                f"<rect {_paint(names.index(name))} x={at:.1f} y={y} width={width:.2f} height=20><title>{html.escape(name)} {value:.3f}{unit}</title></rect>"
            )
            at += width
        parts.append(f"<text x={at + 6:.1f} y={y + 15}>{sum(values.values()):.2f}{html.escape(unit)}</text>")
    return "".join([*parts, "</svg>"])


def _paint(index: int) -> str:
    """Fill of a part: beyond the palette its colours come again, pale and with an edge."""
    colour = PALETTE[index % len(PALETTE)]
    return f"fill='{colour}'" + (f" fill-opacity='0.35' stroke='{colour}'" if index >= len(PALETTE) else "")


def standalone(chart: str) -> str:
    """A chart as a file of its own: well-formed XML (a page of HTML may leave quotes away) with the colours that it needs."""

    def quoted(tag: re.Match[str]) -> str:
        return re.sub(r"'[^']*'|=([^\s'>]+)", lambda part: part[0] if part[1] is None else f"='{part[1]}'", tag[0])

    head, _, rest = re.sub(r"<[^>]+>", quoted, chart).partition(">")
    return f"{head}><style>{STYLE}</style><rect width='100%' height='100%' fill='var(--page)' />{rest}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An HTML table; cells are escaped. Columns of text stand left, columns of numbers right."""
    right = [all(_is_number(row[column]) for row in rows) and bool(rows) for column in range(len(header))]
    kinds = ["" if number else " class=text" for number in right]
    head = "".join(f"<th{kind}>{html.escape(cell)}</th>" for kind, cell in zip(kinds, header, strict=True))
    cells = ("".join(f"<td{kind}>{html.escape(str(cell))}</td>" for kind, cell in zip(kinds, row, strict=True)) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><tr>{head}</tr>{body}</table>"


def _is_number(cell: object) -> bool:
    """A number, perhaps with a unit after it, or nothing."""
    first = str(cell).split(" ")[0]
    return not first or first.replace(".", "", 1).lstrip("-").isdigit()


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between low and high, at most `most` + 1 of them."""
    raw = (high - low) / most
    if not raw > 0 or not math.isfinite(raw):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [first * step + index * step for index in range(int((high - first * step) / step + 1e-9) + 1)]


def _open(height: int, label: str) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' role=img aria-label='{html.escape(label, quote=True)}'>"
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _axes(xs: tuple[float, float], ys: tuple[float, float], place: _Place, bottom: int, x_label: str) -> str:
    parts = [f"<line class=axis x1={_LEFT} y1={bottom} x2={_WIDTH - _RIGHT} y2={bottom} />"]
    for value in ticks(*xs):
        x = place(value, ys[0])[0]
        parts.append(f"<text class=soft text-anchor=middle x={x:.1f} y={bottom + 16}>{value:g}</text>")
    for value in ticks(*ys, most=5):
        y = place(xs[0], value)[1]
        parts.append(f"<line class=axis x1={_LEFT} y1={y:.1f} x2={_WIDTH - _RIGHT} y2={y:.1f} />")
        parts.append(f"<text class=soft text-anchor=end x={_LEFT - 6} y={y + 4:.1f}>{value:g}</text>")
    parts.append(f"<text class=soft text-anchor=end x={_WIDTH - _RIGHT} y={bottom + 31}>{html.escape(x_label)}</text>")
    return "".join(parts)


def _legend(index: int, name: str, colour: str) -> str:
    x = _LEFT + 170 * index
    return f"<rect fill='{colour}' x={x} y=4 width=12 height=12 /><text x={x + 16} y=15>{html.escape(name)}</text>"
