"""What a story is made of, and how journal entries become evidence."""

from __future__ import annotations

import msgspec

from regrow.supervisor.core.tracebacks import error_line
from regrow.supervisor.core.view import Incident
from regrow.supervisor.journal import Entry

EVIDENCE = frozenset(
    [
        "workers_exited",
        "node_disconnected",
        "node_silent",
        "lease_expired",
        "node_health",
        "progress_stalled",
        "peers_were_probed",
        "output_kept",
        "at_rest_mismatch",
        "received_wrong",
        "non_finite_seen",
        "restore_was_refused",
        "start_was_refused",
        "node_leaving",
        "command_given",
        "action_failed",
    ]
)
"""Kinds of entries that can be evidence of a fault."""

MOST_EVIDENCE = 16
"""Lines kept for one incident: the first ones, which are nearest to the cause."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the journal that speaks for an incident."""

    id: int
    at: float
    kind: str
    node: str
    text: str


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One completed step."""

    step: int
    at: float
    loss: float | None
    seconds: float
    generation: int


class Generation(msgspec.Struct, kw_only=True):
    """One agreed set of members and mesh, over its life."""

    number: int
    epoch: int
    at: float
    mesh: str
    world_size: int
    num_nodes: int
    reason: str
    restore_step: int | None
    recorded_at: float | None = None
    first_step_at: float | None = None
    last_step: int | None = None
    ended_at: float | None = None
    end: str = ""
    """How it ended: replaced, parked, paused, done, failed, stopped; empty while it runs."""


class Case(msgspec.Struct, kw_only=True):
    """An incident with what was seen and why it was answered so."""

    incident: Incident
    reason: str
    """Of the decision, with its numbers."""
    evidence: list[Evidence]
    device: str = ""
    """GPU UUID, where the evidence names one."""
    version: str = ""
    """Version of the rules that decided."""
    traceback: str = ""


class Node(msgspec.Struct, kw_only=True):
    """A node's times: joined, and left when it is not connected."""

    name: str
    first_joined_at: float
    joined_at: float
    slots: int
    devices: list[str]
    left_at: float | None = None
    spans: list[tuple[float, float, int]] = []
    """(from, to, slots) of earlier connections."""


class JobStory(msgspec.Struct, kw_only=True):
    """One job."""

    name: str
    generations: list[Generation] = []
    cases: list[Case] = []
    changes: list[Case] = []
    """What we wanted: growth, drains by an operator."""
    steps: list[Step] = []
    frontier: int = 0
    state: str = ""
    reason: str = ""
    base: int | None = None
    """Step from which the first generation went on."""
    productive_seconds: float = 0.0
    """Of the steps that the lineage still has."""
    passed: set[tuple[int, str, str]] = set()
    """(generation, node, phase) that were seen: a node's first word counts."""
    save_seconds: list[float] = []
    """Stall of each snapshot."""
    write_seconds: list[float] = []


def speaks(entry: Entry) -> bool:
    """False for an entry of an evidential kind that says nothing bad: a healthy verdict, a worker that we stopped."""
    if entry.kind == "node_health":
        return entry.data.get("verdict", {}).get("state") not in ("healthy", "unknown", None)
    if entry.kind == "workers_exited":
        exits = entry.data.get("exits", [])
        return any(not item.get("torn_down") and not item.get("declared_end") for item in exits)
    return True


def add_evidence(case: Case, entry: Entry, nodes: dict[str, Node]) -> None:
    """Add an entry to a case: its line, the GPU that it names, the traceback of the case's rank."""
    if len(case.evidence) >= MOST_EVIDENCE or any(item.id == entry.id for item in case.evidence):
        return
    case.evidence.append(Evidence(id=entry.id, at=entry.at, kind=entry.kind, node=entry.node, text=words(entry)))
    if entry.node and entry.node == case.incident.node and not case.device:
        case.device = _device(entry, case.incident.rank, nodes.get(entry.node))
    for item in entry.data.get("exits", []):
        if item.get("rank") == case.incident.rank and item.get("error"):
            case.traceback = str(item["error"])


def _device(entry: Entry, rank: int, node: Node | None) -> str:
    named = entry.data.get("verdict", {}).get("device_uuids", [])
    if named:
        return str(named[0])
    devices = node.devices if node is not None else []
    for item in entry.data.get("exits", []):
        if item.get("rank") == rank and 0 <= item.get("local_rank", -1) < len(devices):
            return devices[item["local_rank"]]
    return ""


def words(entry: Entry) -> str:
    """An entry in one line."""
    verdict = entry.data.get("verdict", {})
    told = (str(item) for item in verdict.get("evidence", []))
    more = "; ".join([item for item in told if item not in entry.text][:3])
    if entry.kind == "output_kept":
        lines = [line for line in str(entry.data.get("text", "")).splitlines() if line.strip()]
        return f"{entry.data.get('kind', 'output')} of rank {entry.data.get('rank', '?')}: {(lines or [''])[0]}"[:240]
    if entry.kind == "at_rest_mismatch":
        return f"rank {entry.data.get('rank')}: {entry.data.get('tensor')} changed at rest before step {entry.data.get('step')}"
    if entry.kind == "received_wrong":
        return f"step {entry.data.get('step')}: {entry.data.get('reason')}"[:400]
    if entry.kind == "non_finite_seen":
        return f"not finite at step {entry.data.get('step')}: {entry.data.get('ranks')}"
    if entry.kind == "lease_expired":
        return f"the lease of {entry.node} expired"
    if entry.kind == "workers_exited":
        more = "; ".join(filter(None, (error_line(str(item.get("error", ""))) for item in entry.data.get("exits", []))))
    return (entry.text + (f": {more}" if more else "") or entry.kind)[:400]
