"""What the supervisor's own journal says of a phase of benchmarks/scale.py."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from collections.abc import Sequence
from pathlib import Path


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile: a value that was seen."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """n, p50, p99 and the greatest."""
    if not values:
        return {"n": 0}
    return {"n": len(values), "p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "max": max(values)}


class Judge:
    """Reads the archive; its thread writes behind, so what is missing now may come."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rows(self, kinds: Sequence[str], since: float) -> list[tuple[float, str, str, dict[str, object]]]:
        """(at, kind, node, body) of entries of these kinds from an instant on."""
        marks = ",".join("?" * len(kinds))
        with contextlib.closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)) as database:
            found = database.execute(
                f"select at, kind, node, body from events where kind in ({marks}) and at >= ? order by id", (*kinds, since)
            ).fetchall()
        return [(at, kind, node, json.loads(body)) for at, kind, node, body in found]

    def detections(self, lost_at: dict[str, float]) -> dict[str, float]:
        """{node: seconds from its loss to the supervisor's record that it cannot be heard}."""
        found: dict[str, float] = {}
        for at, _, node, _ in self.rows(("node_silent", "node_disconnected"), min(lost_at.values())):
            if node in lost_at and node not in found and at >= lost_at[node]:
                found[node] = at - lost_at[node]
        return found

    def generations(self, since: float) -> list[float]:
        """Instants at which a new generation was decided."""
        return [at for at, _, _, _ in self.rows(("record_generation",), since)]

    def count(self, kind: str, since: float = 0.0) -> int:
        """Entries of a kind."""
        return len(self.rows((kind,), since))
