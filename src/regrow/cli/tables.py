"""Tables for terminals: 80 columns where there is no terminal to ask, colours only on one, and none with NO_COLOR."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PLAIN_COLUMNS = 80
STYLES = {
    "running": "green",
    "done": "green",
    "member": "green",
    "spare": "cyan",
    "failed": "bold red",
    "unhealthy": "bold red",
    "gone": "red",
    "suspect": "yellow",
    "recovering": "yellow",
    "parked": "yellow",
    "quarantined": "magenta",
    "draining": "yellow",
    "cordoned": "dim",
}
"""Style of a state's word: the word itself says it too."""


def console(file: TextIO | None = None) -> Console:
    """Writes to `file` (default: stdout). Not a terminal: 80 columns, no colour, no control codes."""
    from rich.console import Console

    target = file or sys.stdout
    return Console(file=target, width=None if target.isatty() else PLAIN_COLUMNS, highlight=False, markup=False, emoji=False)


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> Table:
    """Columns whose name begins with # hold numbers and stand right. Long cells wrap, the table never grows beyond the terminal."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, title=title or None, title_justify="left", title_style="bold", header_style="bold", pad_edge=False)
    for name in header:
        number = name.startswith("#")
        made.add_column(name.removeprefix("#"), justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in rows:
        made.add_row(*(Text(str(cell), style=STYLES.get(str(cell), "")) for cell in row))
    return made


def indented(screen: Console, text: str) -> None:
    """A paragraph two columns in."""
    from rich.padding import Padding
    from rich.text import Text

    screen.print(Padding(Text(text), (0, 0, 0, 2), expand=False))


def percent(value: float | None) -> str:
    """A share, or a dash when it is not known."""
    return "-" if value is None else f"{100 * value:.1f} %"


def ranks(numbers: Sequence[int]) -> str:
    """0-7,12: runs of ranks."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def ago(seconds: float) -> str:
    """A duration in the unit that fits."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"
