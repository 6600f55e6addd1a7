"""Pictures as text: SVG documents and terminal plots, without a plotting library.

Colours are a fixed palette that stays readable in light and dark viewers and when printed; shapes carry text labels, so
colour is never the only difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Paul Tol's bright scheme, distinguishable for colour-blind readers."""
_INK, _GRID, _PAPER = "#222222", "#dddddd", "#ffffff"


class Svg:
    """An SVG document that grows. Coordinates in pixels."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str, *, title: str = "", stroke: str = _PAPER) -> None:
        """A box; `title` is its tooltip."""
        tip = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" fill="{fill}" stroke="{stroke}">{tip}</rect>'
        )

    def text(self, x: float, y: float, text: str, *, size: float = 12, anchor: str = "start", fill: str = _INK) -> None:
        """A line of text with its baseline at y."""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>')

    def line(self, points: Sequence[tuple[float, float]], stroke: str = _INK, *, width: float = 1.0, dash: str = "") -> None:
        """A polyline."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{dashed}/>')

    def render(self) -> str:
        """The document."""
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
            f' font-family="sans-serif" role="img" aria-label="{escape(self._title)}">'
        )
        return "\n".join(
            [head, f"<title>{escape(self._title)}</title>", f'<rect width="100%" height="100%" fill="{_PAPER}"/>', *self._parts, "</svg>\n"]
        )


def curve_svg(
    title: str,
    x_label: str,
    y_label: str,
    series: dict[str, list[tuple[float, float]]],
    marks: Sequence[tuple[float, float, str]] = (),
    verticals: Sequence[tuple[float, str]] = (),
) -> str:
    """Curves over a logarithmic x axis with marked points and labelled vertical lines."""
    width, height, left, right, top, bottom = 760.0, 440.0, 70.0, 20.0, 62.0, 50.0
    points = [point for line in series.values() for point in line if math.isfinite(point[1]) and point[0] > 0]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    floor = min([0.0, *(y for _, y in points)])
    ceiling = max(y for _, y in points)
    ceiling += (ceiling - floor or 1.0) * 0.05
    spread = math.log(high / low) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (width - left - right) * math.log(x / low) / spread,
            height - bottom - (height - top - bottom) * (y - floor) / (ceiling - floor),
        )

    svg = Svg(width, height, title)
    svg.text(left, 24, title, size=15)
    for index in range(6):
        value = floor + (ceiling - floor) * index / 5
        _, y = at(low, value)
        svg.line([(left, y), (width - right, y)], _GRID)
        svg.text(left - 6, y + 4, f"{value:.3g}", size=11, anchor="end")
        x_value = low * (high / low) ** (index / 5)
        x, _ = at(x_value, floor)
        svg.text(x, height - bottom + 18, f"{x_value:.3g}", size=11, anchor="middle")
    svg.text((left + width - right) / 2, height - 12, x_label, anchor="middle")
    svg.text(left, top - 12, y_label, size=11)
    for index, (name, line) in enumerate(series.items()):
        colour = PALETTE[index % len(PALETTE)]
        svg.line([at(x, y) for x, y in line if math.isfinite(y) and x > 0], colour, width=2)
        svg.text(width - right - 4, top + 14 + 16 * index, name, anchor="end", fill=colour)
    for x, label in verticals:
        if low <= x <= high:
            place, _ = at(x, floor)
            svg.line([(place, top), (place, height - bottom)], _INK, dash="4 3")
            svg.text(place + 4, height - bottom - 6, label, size=11)
    for x, y, label in marks:
        if low <= x <= high:
            px, py = at(x, y)
            svg.rect(px - 4, py - 4, 8, 8, PALETTE[1])
            svg.text(px, py - 14, label, size=12, anchor="middle")
    return svg.render()


def curve_text(points: Sequence[tuple[float, float]], *, mark: float, width: int = 64, height: int = 12) -> list[str]:
    """A terminal plot over a logarithmic x axis; the column nearest `mark` is drawn with a plus sign."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    low, high = finite[0][0], finite[-1][0]
    columns = [low * (high / low) ** (index / (width - 1)) for index in range(width)]
    values = [_interpolate(finite, x) for x in columns]
    floor, ceiling = min(values), max(values)
    # The interesting part is the valley: what is far above it is cut off.
    ceiling = min(ceiling, floor + max(floor, (ceiling - floor) * 0.05) * 4) or 1.0
    rows = [[" "] * width for _ in range(height)]
    marked = min(range(width), key=lambda index: abs(math.log(columns[index] / mark))) if mark > 0 else -1
    for index, value in enumerate(values):
        share = (min(value, ceiling) - floor) / ((ceiling - floor) or 1.0)
        rows[height - 1 - round(share * (height - 1))][index] = "+" if index == marked else "." if value > ceiling else "*"
    lines = [f"{floor + (ceiling - floor) * (height - 1 - row) / (height - 1):>10.4g} |{''.join(cells)}" for row, cells in enumerate(rows)]
    lines.append(" " * 11 + "+" + "-" * width)
    lines.append(" " * 12 + f"{low:.3g}".ljust(width - 8) + f"{high:.3g}".rjust(8))
    return lines


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * max(0.0, x - x0) / (x1 - x0)
    return points[-1][1]
