"""The story of a run, folded from the journal: generations, incidents with their evidence and reasons, steps, nodes.

The journal is the only input, so the same story comes from a live supervisor, from its archive and from a run folder. Phases
are computed by the same functions that the supervisor uses (`core.phases`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from regrow.ids import MeshShape
from regrow.supervisor.core import phases
from regrow.supervisor.core.view import Incident
from regrow.supervisor.journal import Entry
from regrow.supervisor.stats.parts import EVIDENCE, Case, Generation, JobStory, Node, Step, add_evidence, speaks

PLANNED = "planned"
_BEFORE_SECONDS = 10.0
"""How long before its first symptom an incident's evidence may lie."""
_RECENT = 400
_STEPS = 4_000
_MARKS = {"stopped": "stop", "started": "start", "rendezvous": "rendezvous", "restored": "restore"}
_change = msgspec.structs.replace


class Story:
    """Feed it entries in order; read `jobs` and `nodes`."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobStory] = {}
        self.nodes: dict[str, Node] = {}
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.version = ""
        self._recent: deque[Entry] = deque(maxlen=_RECENT)
        self.decision: tuple[float, str] = (float("-inf"), "")
        """(when, reason) of the last decision: its first order carries the reason, and after a bar what is waited for."""
        self._quarantined: dict[str, tuple[float, str]] = {}

    def read(self, entries: Iterable[Entry]) -> Story:
        """Add many."""
        for entry in entries:
            self.add(entry)
        return self

    def add(self, entry: Entry) -> None:
        """Add one."""
        self.first_at = entry.at if self.first_at is None else min(self.first_at, entry.at)
        self.last_at = entry.at if self.last_at is None else max(self.last_at, entry.at)
        if "seq" in entry.data and entry.at != self.decision[0]:
            self.decision = (entry.at, entry.text.partition(" | ")[0])
        self._note(entry)
        self._node(entry)
        if entry.kind == "set_quarantine":
            record = entry.data.get("record", {})
            self._quarantined[str(record.get("node", ""))] = (entry.at, str(record.get("key", "")))
        if entry.kind == "leader_started":
            self.version = str(entry.data.get("version", self.version))
        if not entry.job:
            return
        job = self.jobs.setdefault(entry.job, JobStory(name=entry.job))
        handler = _HANDLERS.get(entry.kind)
        if handler is not None:
            handler(self, job, entry)

    # --- nodes and evidence

    def _node(self, entry: Entry) -> None:
        known = self.nodes.get(entry.node)
        if entry.kind == "node_joined":
            if known is None:
                known = Node(name=entry.node, first_joined_at=entry.at, joined_at=entry.at, slots=0, devices=[])
                self.nodes[entry.node] = known
            elif known.left_at is None:
                known.spans.append((known.joined_at, entry.at, known.slots))
            known.joined_at, known.left_at = entry.at, None
            known.slots = int(entry.data.get("slots", known.slots))
            known.devices = [str(item) for item in entry.data.get("devices", known.devices)]
        elif entry.kind == "node_disconnected" and known is not None and known.left_at is None:
            known.left_at = entry.at
            known.spans.append((known.joined_at, entry.at, known.slots))

    def gpu_seconds(self, start: float, end: float) -> float:
        """Exposure within a window: connected slots x time. A node that is still connected counts up to the end."""
        total = 0.0
        for node in self.nodes.values():
            spans = [*node.spans, *([(node.joined_at, end, node.slots)] if node.left_at is None else [])]
            total += sum(slots * max(0.0, min(end, until) - max(start, since)) for since, until, slots in spans)
        return total

    def _note(self, entry: Entry) -> None:
        if entry.kind not in EVIDENCE or not speaks(entry):
            return
        self._recent.append(entry)
        for job in self.jobs.values():
            case = job.cases[-1] if job.cases else None
            if case is not None and not case.incident.closed and entry.job in ("", job.name):
                add_evidence(case, entry, self.nodes)

    # --- incidents

    def seed(self, job: JobStory, entry: Entry, *, after: int, restored: int | None) -> None:
        """Open an incident, or carry the open one over to the generation that follows (as `core.fold_issued` does)."""
        seed = entry.data.get("incident")
        last = job.cases[-1] if job.cases and not job.cases[-1].incident.closed else None
        if last is not None and (seed is None or not seed.get("cause") or seed["cause"] == PLANNED or seed["id"] == last.incident.id):
            rung = str(seed.get("rung", "")) if seed else last.incident.rung
            last.incident = _change(
                last.incident,
                generation_after=after,
                decided_at=entry.at,
                restored_step=restored,
                marks={},
                rung=rung or last.incident.rung,
            )
            last.reason = self.decision[1] or last.reason
            return
        if seed is None or not seed.get("cause"):
            return
        if last is not None:
            last.incident = _change(last.incident, closed=True)
        made = Incident(
            id=str(seed["id"]),
            kind=str(seed["kind"]),
            cause=str(seed["cause"]),
            symptom_at=float(seed["symptom_at"]),
            detected_at=float(seed["detected_at"]),
            decided_at=entry.at,
            node=str(seed.get("node", "")),
            rank=int(seed.get("rank", -1)),
            text=str(seed.get("text", "")),
            rung=str(seed.get("rung", "")),
            generation_before=job.generations[-1].number if job.generations else 0,
            generation_after=after,
            frontier=max(job.frontier, last.incident.frontier) if last is not None else job.frontier,
            restored_step=restored,
        )
        case = Case(incident=made, reason=self.decision[1], evidence=[], version=self.version)
        if made.cause == PLANNED:
            job.changes.append(case)
            return
        since = made.symptom_at - _BEFORE_SECONDS
        if job.cases:
            since = max(since, job.cases[-1].incident.decided_at)
        for found in self._recent:
            if found.at >= since and found.job in ("", job.name):
                add_evidence(case, found, self.nodes)
        case.evidence.sort(key=lambda item: item.at)
        at, key = self._quarantined.get(made.node, (float("-inf"), ""))
        if not case.device and at >= since and key.startswith("GPU-"):
            case.device = key
        job.cases.append(case)


# --- handlers of one job's entries


def _recorded(story: Story, job: JobStory, entry: Entry) -> None:
    data = entry.data
    restore = data.get("restore")
    restored = int(restore["step"]) if restore else 0
    if job.generations and entry.generation <= job.generations[-1].number:  # another life of a job of this name
        for case in job.cases[-1:]:
            case.incident = _change(case.incident, closed=True)
        job.frontier, job.base, job.productive_seconds = 0, None, 0.0
    story.seed(job, entry, after=entry.generation, restored=restored)
    _end_generation(job, entry.at, "replaced")
    mesh = str(data.get("mesh", ""))
    job.generations.append(
        Generation(
            number=entry.generation,
            epoch=entry.epoch,
            at=entry.at,
            mesh=mesh,
            world_size=MeshShape.parse(mesh).world_size if mesh else 0,
            num_nodes=int(data.get("num_nodes", 0)),
            reason=story.decision[1],
            restore_step=restored if restore else None,
        )
    )
    job.base = restored if job.base is None else job.base
    _roll_back(job, restored)
    job.passed, job.frontier, job.state = set(), restored, ""


def _roll_back(job: JobStory, restored: int) -> None:
    """What the lineage loses is no productive time any more: at the mean of its steps."""
    done = job.frontier - (job.base or 0)
    if done > 0:
        job.productive_seconds *= max(0, restored - (job.base or 0)) / done if restored < job.frontier else 1.0


def _in_store(_story: Story, job: JobStory, entry: Entry) -> None:
    if job.generations and job.generations[-1].number == entry.generation:
        job.generations[-1].recorded_at = entry.at
        _mark(job, entry.generation, "fence", entry.at)


def _phase(_story: Story, job: JobStory, entry: Entry) -> None:
    name = _MARKS.get(str(entry.data.get("phase", "")))
    if name is not None and (entry.generation, entry.node, name) not in job.passed:
        job.passed.add((entry.generation, entry.node, name))
        _mark(job, entry.generation, name, entry.at)


def _mark(job: JobStory, generation: int, name: str, at: float) -> None:
    """The last member that passes a phase ends it."""
    case = next((item for item in reversed([*job.cases, *job.changes]) if item.incident.generation_after == generation), None)
    if case is not None and case.incident.first_step_at is None:
        case.incident = _change(case.incident, marks=case.incident.marks | {name: at})


def _step(_story: Story, job: JobStory, entry: Entry) -> None:
    step = int(entry.data["step"])
    if job.generations and job.generations[-1].number == entry.generation:
        current = job.generations[-1]
        if current.last_step is not None and step <= current.last_step:
            return
        if current.last_step is None and current.epoch == entry.epoch:
            _kept(job, entry, step - int(entry.data.get("num_steps", 1)))
        current.first_step_at = current.first_step_at or entry.at
        current.last_step = step
    seconds = float(entry.data.get("step_seconds", 0.0))
    job.productive_seconds += seconds * max(0, step - job.frontier)
    job.frontier = max(job.frontier, step)
    job.steps.append(Step(step, entry.at, entry.data.get("loss"), seconds, entry.generation))
    if len(job.steps) > _STEPS:
        job.steps[: _STEPS // 2] = job.steps[: _STEPS // 2 : 2]
    for case in (*job.cases[-1:], *job.changes[-1:]):
        incident = case.incident
        if incident.closed or incident.generation_after != entry.generation:
            continue
        if incident.first_step_at is None:
            incident = _change(incident, first_step_at=entry.at)
        if step > incident.frontier:
            incident = _change(incident, recovered_at=entry.at, closed=True)
        case.incident = incident


def _kept(job: JobStory, entry: Entry, began_after: int) -> None:
    """Where a generation really went on from, by its first report: survivors and memory may hold newer states than the checkpoint."""
    for case in job.cases[-1:]:
        incident = case.incident
        if not incident.closed and incident.generation_after == entry.generation and incident.restored_step is not None:
            case.incident = _change(incident, restored_step=max(incident.restored_step, min(began_after, incident.frontier)))


def _parked(story: Story, job: JobStory, entry: Entry) -> None:
    story.seed(job, entry, after=0, restored=None)
    state = str(entry.data.get("state", "parked"))
    _end_generation(job, entry.at, state)
    job.state, job.reason = state, str(entry.data.get("reason", ""))


def _ended(story: Story, job: JobStory, entry: Entry) -> None:
    state = str(entry.data.get("state", "failed"))
    for case in job.cases[-1:]:
        case.incident = _change(case.incident, closed=True)
    if state == "failed":
        seed = {
            "id": f"{job.name}-end",
            "kind": "ended",
            "cause": str(entry.data.get("cause") or "unknown"),
            "symptom_at": entry.at,
            "detected_at": entry.at,
            "node": entry.data.get("node", "") or entry.node,
            "rank": entry.data.get("rank", -1),
            "text": str(entry.data.get("reason", "")),
            "rung": "stop",
        }
        story.seed(job, _change(entry, data=entry.data | {"incident": seed}), after=0, restored=None)
        if job.cases:
            last = job.cases[-1]
            last.incident = _change(last.incident, closed=True)
            last.traceback = str(entry.data.get("traceback", "")) or last.traceback
    _end_generation(job, entry.at, state)
    job.state, job.reason = state, str(entry.data.get("reason", ""))


def _end_generation(job: JobStory, at: float, how: str) -> None:
    if job.generations and job.generations[-1].ended_at is None:
        job.generations[-1].ended_at, job.generations[-1].end = at, how


def _saved(_story: Story, job: JobStory, entry: Entry) -> None:
    if entry.data.get("stall_seconds"):
        job.save_seconds = [*job.save_seconds[-999:], float(entry.data["stall_seconds"])]
    if entry.data.get("write_seconds"):
        job.write_seconds = [*job.write_seconds[-999:], float(entry.data["write_seconds"])]


def _corrected(_story: Story, job: JobStory, entry: Entry) -> None:
    """A verdict that turned out wrong (`core.fold_issued` does the same)."""
    for case in job.cases:
        if case.incident.id == entry.data.get("incident"):
            text = f"{case.incident.text}; {entry.data.get('corrected', '')}"
            case.incident = _change(case.incident, cause="unknown", text=text)


_HANDLERS = {
    "save_ledger": _corrected,
    "record_generation": _recorded,
    "generation_recorded": _in_store,
    "member_phase": _phase,
    "steps_completed": _step,
    "park_job": _parked,
    "end_job": _ended,
    "checkpoint_moved": _saved,
}


def seconds_lost(case: Case, end_at: float) -> float:
    """Wall seconds of an incident: to its recovery, else to the end of the story."""
    whole = phases.whole(case.incident)
    return whole if whole is not None else max(0.0, end_at - case.incident.symptom_at)
