"""What a run looks like while it goes: a live table on a terminal, plain lines elsewhere. Everything goes to stderr."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

MAX_LINES = 9
"""Newest notes shown under the table."""

_FEW_STEPS = 5
"""Without a terminal: one line for so many."""

_STATE_STYLE = {
    "member": "green",
    "spare": "cyan",
    "healthy": "green",
    "suspect": "yellow",
    "lost": "red",
    "quarantined": "red",
    "draining": "yellow",
    "gone": "dim",
}


class LiveView:
    """Shows job documents and notes; `plain` or no terminal: one line a note and one every few steps."""

    def __init__(self, *, title: str, total_steps: int = 0, plain: bool = False) -> None:
        self._console = Console(stderr=True)
        self._plain = plain or not self._console.is_terminal
        self._title = title
        self._total = total_steps
        self._begin = time.monotonic()
        self._notes: list[tuple[float, str, str]] = []
        self._document: dict[str, Any] = {}
        self._page = ""
        self._said_step = -1
        self._said_generation = -1
        self._live = Live(console=self._console, refresh_per_second=8, transient=False, get_renderable=self._render)

    @property
    def is_table(self) -> bool:
        """A table on a terminal, that shows each step."""
        return not self._plain

    def __enter__(self) -> Self:
        if not self._plain:
            self._live.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        if not self._plain:
            self._live.stop()

    def note(self, text: str, style: str = "") -> None:
        """A line with the time since the start."""
        self._notes.append((time.monotonic() - self._begin, text, style))
        if self._plain:
            self._write(text)

    def at(self, address: str | None) -> None:
        """Where the supervisor's page is: stays in sight on a terminal, one line elsewhere."""
        self._page = f"{address}/" if address else ""
        if self._plain and self._page:
            self._write(f"page {self._page}")

    def update(self, document: dict[str, Any]) -> None:
        """The newest `job show` document."""
        self._document = document
        if not self._plain:
            return
        step, generation = document.get("step") or 0, document.get("generation") or 0
        if generation != self._said_generation and generation:
            self._said_generation = generation
            self._write(f"generation {generation} on mesh {document.get('mesh')}")
        if step // _FEW_STEPS != self._said_step // _FEW_STEPS and step > 0:
            self._said_step = step
            self._write(self._headline())

    def _write(self, text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - self._begin:6.1f} s] {text}\n")
        sys.stderr.flush()

    def _headline(self) -> str:
        document = self._document
        loss = document.get("loss")
        parts = [f"step {document.get('step') or 0}" + (f" of {self._total}" if self._total else "")]
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        parts.append(f"generation {document.get('generation') or '-'}")
        parts.append(f"mesh {document.get('mesh') or '-'}")
        checkpoint = document.get("checkpoint") or {}
        if checkpoint.get("step") is not None:
            parts.append(f"checkpoint {checkpoint['step']}")
        return ", ".join(parts)

    def _render(self) -> RenderableType:
        head = Text(f"{self._title}  {time.monotonic() - self._begin:5.1f} s  ", style="bold")
        head.append(str(self._document.get("state", "starting")), style="reverse")
        recovering = self._recovering()
        if recovering:
            head.append(f"  recovering: {recovering}", style="bold yellow")
        nodes = Table.grid(padding=(0, 2))
        for node in self._document.get("nodes", []):
            state = str(node.get("state", ""))
            ranks = ",".join(str(rank) for rank in node.get("ranks", []))
            nodes.add_row(node.get("node", ""), Text(state, style=_STATE_STYLE.get(state, "")), f"ranks {ranks}" if ranks else "")
        notes = [Text(f"{at:6.1f} s  {text}", style=style) for at, text, style in self._notes[-MAX_LINES:]]
        where = [Text(f"page {self._page}", style="dim")] if self._page else []
        return Group(head, *where, Text(self._headline()), nodes, *notes)

    def _recovering(self) -> str:
        for incident in self._document.get("incidents", []):
            if not incident.get("recovered") and not incident.get("closed"):
                return f"{incident.get('kind', '')}, {incident.get('phase') or 'detect'}"
        return ""
