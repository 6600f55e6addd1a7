"""Faults and where they come from: rates, the Llama 3 table, a CSV file, a run's journal; and chaos for safety runs."""

from __future__ import annotations

import math
import random
import sqlite3
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from regrow.errors import ConfigurationError
from regrow.supervisor.sim.constants import shipped
from regrow.supervisor.sim.setup import Setup
from regrow.supervisor.stats import history

KINDS = (
    "gpu",
    "host",
    "program",
    "network",
    "hang",
    "leave",
    "sdc",
    "agent",
    "leader",
    "pause",
    "store",
    "storage",
    "silence",
    "damage",
)
"""What may break: see `inject`. The first seven are what a training run sees; the rest is the world around it."""
RECORDED = ("killed", "sick")
"""Further kinds that only a run's journal has: all processes of a node killed; a part condemned while its worker runs."""
DISTURBING = ("gpu", "host", "program", "network", "hang", "leave", "sdc")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that breaks, when, where, and for how long."""

    at: float
    kind: str
    nodes: tuple[int, ...] = ()
    repair: str = ""
    """Delay of constants.toml until it is back; empty: nothing to repair."""
    seconds: float | None = None
    """Known duration, in place of a drawn one."""
    component: str = ""
    category: str = ""
    how: str = ""
    """Of a hang: "stopped" (a process does not run), "alike" (all stand at the same place and can say so); empty: either a rank that
    is behind and cannot say where, or all of them, by chance. Delays that were measured after faults of this kind are drawn."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of a table."""

    component: str
    category: str
    count: int
    kind: str
    repair: str = ""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Causes with their counts over an observation."""

    days: float
    gpus: int
    gpus_per_node: int
    planned: int
    row: tuple[Row, ...]


def llama3_table() -> Table:
    """The published causes of Llama 3's interruptions."""
    return msgspec.convert(tomllib.loads(shipped("llama3.toml")), Table)


def llama3(setup: Setup, rng: random.Random) -> tuple[Fault, ...]:
    """The table's faults at uniform instants: its very counts at its own size, counts scaled by GPU-hours at another."""
    table = llama3_table()
    planned = Row(component="Planned", category="Planned Maintenance", count=table.planned, kind="leave", repair="maintenance")
    scale = setup.gpus * setup.days / (table.gpus * table.days)
    found: list[Fault] = []
    for row in (*table.row, planned):
        wanted = row.count * scale
        number = row.count if scale == 1.0 else int(wanted) + (rng.random() < wanted - int(wanted))
        found += [_of_row(setup, row, rng.uniform(0.0, setup.seconds), rng) for _ in range(number)]
    return _in_order(found)


def _of_row(setup: Setup, row: Row, at: float, rng: random.Random) -> Fault:
    node = rng.randrange(setup.reserved)
    return Fault(at=at, kind=row.kind, nodes=(node,), repair=row.repair, component=row.component, category=row.category)


def generated(setup: Setup, rng: random.Random, *, shape: float = 1.0, rack: int = 0, rack_share: float = 0.0) -> tuple[Fault, ...]:
    """A renewal process of faults with the mix of causes of the Llama 3 table.

    Args:
        shape: of a Weibull distribution of the gaps; 1: exponential; below 1: failures follow failures.
        rack: nodes of a failure domain (rack or NVLink domain); 0: every node its own.
        rack_share: share of the faults that take a whole domain with them.
    """
    per_second = setup.gpus * setup.rate_per_gpu_hour / 3600.0
    if per_second <= 0:
        return ()
    mean = 1.0 / per_second
    scale = mean / math.gamma(1.0 + 1.0 / shape)
    rows = llama3_table().row
    weights = [row.count for row in rows]
    found: list[Fault] = []
    at = rng.weibullvariate(scale, shape)
    while at < setup.seconds:
        fault = _of_row(setup, rng.choices(rows, weights)[0], at, rng)
        if rack > 1 and rng.random() < rack_share:
            fault = _whole_rack(setup, fault, rack, rng)
        found.append(fault)
        at += rng.weibullvariate(scale, shape)
    return tuple(found)


def _whole_rack(setup: Setup, fault: Fault, rack: int, rng: random.Random) -> Fault:
    first = fault.nodes[0] // rack * rack
    nodes = tuple(range(first, min(first + rack, setup.reserved)))
    kind, repair = ("network", "outage") if rng.random() < 0.5 else ("host", "reboot")
    return msgspec.structs.replace(fault, kind=kind, repair=repair, nodes=nodes, component="domain", category="Domain")


def chaos(setup: Setup, rng: random.Random) -> tuple[Fault, ...]:
    """Everything breaks, often, and close together: for safety, not for goodput. About one burst in two hours."""
    found: list[Fault] = []
    at = rng.uniform(600.0, 3600.0)
    while at < setup.seconds:
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
            found.append(_chaotic(setup, at, rng))
            at += rng.choice((0.0, rng.uniform(0.0, 3.0), rng.uniform(0.0, 40.0)))
        at += rng.expovariate(1.0 / 7200.0) + 60.0
    return _in_order(found)


def _chaotic(setup: Setup, at: float, rng: random.Random) -> Fault:
    kind = rng.choice(KINDS)
    node = rng.randrange(setup.reserved)
    size = rng.choice((1, 1, 2, 4)) if kind in ("host", "network") else 1
    if kind == "silence":
        size = rng.choice((1, 3, setup.reserved))
    nodes = tuple(sorted({(node + offset) % setup.reserved for offset in range(size)}))
    low, high = {
        "gpu": (300.0, 7200.0),
        "host": (60.0, 7200.0),
        "network": (1.0, 600.0),
        "leave": (60.0, 3600.0),
        "sdc": (300.0, 7200.0),
        "agent": (0.2, 20.0),
        "leader": (1.0, 20.0),
        "pause": (1.0, 60.0),
        "store": (1.0, 180.0),
        "storage": (1.0, 600.0),
        "silence": (0.5, 120.0),
    }.get(kind, (0.0, 0.0))
    return Fault(at=at, kind=kind, nodes=nodes, seconds=rng.uniform(low, high), component=kind, category="Chaos")


def from_file(path: Path, setup: Setup) -> tuple[tuple[Fault, ...], list[str]]:
    """Faults of a CSV or JSON history (columns of `regrow report`), or of a run's journal (SQLite, or JSON lines).

    Raises:
        ConfigurationError: the file cannot be read or holds no failure.
    """
    notes: list[str] = []
    if path.suffix in (".csv", ".json"):
        read = history.read(path)
        notes += read.warnings
        found = _of_history(read, setup)
    else:
        found = _of_journal(path, setup)
    kept = [fault for fault in found if fault.at <= setup.seconds]
    if not kept:
        raise ConfigurationError(
            f"holds no failure within {setup.days:g} days", where=str(path), hint="give --days, or a trace with failures"
        )
    if len(kept) < len(found):
        notes.append(f"{len(found) - len(kept)} failures of the trace lie after day {setup.days:g} and are left out")
    return _in_order(kept), notes


def last_hours(path: Path) -> float:
    """Hours from the first failure of a history to its last, for a default length."""
    if path.suffix not in (".csv", ".json"):
        return 0.0
    failures = history.read(path).failures
    return failures[-1].at_hours - min(0.0, failures[0].at_hours) if failures else 0.0


_WORDS = (
    ("sdc", ("silent", "sdc", "corruption")),
    ("hang", ("watchdog", "timeout", "hang", "unknown")),
    ("network", ("network", "switch", "cable", "nic", "infiniband", "link")),
    ("leave", ("maintenance", "planned", "preempt", "upgrade")),
    ("program", ("software", "dependency", "program", "user", "python")),
    ("gpu", ("gpu", "hbm", "sram", "xid", "ecc", "nvlink", "thermal", "memory")),
)


def kind_of(text: str) -> str:
    """What kind of fault a site's words mean: the first list that has one of them; else a lost host."""
    lowered = text.lower()
    return next((kind for kind, words in _WORDS if any(word in lowered for word in words)), "host")


_REPAIR = {"gpu": "reset", "host": "reboot", "network": "outage", "leave": "maintenance", "sdc": "replace"}


def _of_history(read: history.History, setup: Setup) -> list[Fault]:
    places: dict[str, int] = {}
    first = min(0.0, read.failures[0].at_hours) if read.failures else 0.0
    found: list[Fault] = []
    for index, failure in enumerate(read.failures):
        node = places.setdefault(failure.node or f"row {index}", len(places)) % setup.reserved
        kind = "leave" if failure.planned else kind_of(f"{failure.category} {failure.component}")
        fault = Fault(
            at=(failure.at_hours - first) * 3600.0,
            kind=kind,
            nodes=(node,),
            repair=_REPAIR.get(kind, ""),
            component=failure.component,
            category=failure.category or "unknown",
        )
        found.append(fault)
    return found


_INCIDENTS = {
    "node_lost": ("host", "reboot"),
    "unreachable": ("host", "reboot"),
    "returned_empty": ("host", "reboot"),
    "worker_exit": ("program", ""),
    "hang": ("hang", ""),
    "sdc": ("sdc", "replace"),
    "unhealthy": ("gpu", "reset"),
    "leaving": ("leave", "maintenance"),
    "start_failed": ("host", "reboot"),
}


def _of_journal(path: Path, setup: Setup) -> list[Fault]:
    """Incidents that a supervisor recorded, at their own distances."""
    found: list[Fault] = []
    places: dict[str, int] = {}
    start: float | None = None
    for entry in entries(path):
        at = float(entry.get("at", 0.0))
        start = at if start is None else start
        incident = (entry.get("data") or {}).get("incident") if entry.get("kind") in ("record_generation", "park_job") else None
        if not incident or incident.get("cause") in ("", "planned", None):
            continue
        kind, repair = _INCIDENTS.get(str(incident.get("kind")), ("program", ""))
        node = places.setdefault(str(incident.get("node", "")), len(places)) % setup.reserved
        found.append(
            Fault(at=at - start, kind=kind, nodes=(node,), repair=repair, component=str(incident["kind"]), category=incident["cause"])
        )
    return found


def entries(path: Path) -> list[dict[str, Any]]:
    """Entries of a journal: SQLite, or lines of JSON.

    Raises:
        ConfigurationError: neither.
    """
    try:
        if path.read_bytes()[:15] == b"SQLite format 3":
            database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            try:
                return [msgspec.json.decode(body) for (body,) in database.execute("select body from events order by id")]
            finally:
                database.close()
        return [msgspec.json.decode(line) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, sqlite3.Error, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"is not a trace: {error}", where=str(path), hint="give a CSV or JSON history, or the journal of a run"
        ) from error


def _in_order(found: list[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(found, key=lambda fault: (fault.at, fault.kind, fault.nodes)))
