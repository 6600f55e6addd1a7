"""Runs that happened, as their journals tell them: incidents, step times, and what each delay was."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from regrow import wire
from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.supervisor.core import hang, phases
from regrow.supervisor.core.view import Incident
from regrow.supervisor.journal import Entry
from regrow.supervisor.sim import faults
from regrow.supervisor.stats.parts import JobStory
from regrow.supervisor.stats.story import Story

KINDS = {"node_lost": "killed", "sdc": "sdc", "unhealthy": "sick", "hang": "hang", "worker_exit": "program", "leaving": "leave"}
"""{kind of incident: kind of fault in the simulator}."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One incident of a run."""

    kind: str
    """As the supervisor called it."""
    node: str
    returns_seconds: float | None
    """From its loss until its node was there again; None: it was not."""
    lost_steps: int
    """Completed steps since the state that the job went on from: a checkpoint, or what was in memory."""
    spans: dict[str, float]
    how: str = ""
    """Of a hang, as in `Fault.how`."""
    alone: bool = False
    """The job had one member: nobody is there who could say that it is gone."""

    @property
    def label(self) -> str:
        """Its kind, and of a hang which."""
        return f"{self.kind} {self.how}".strip()

    @property
    def fault(self) -> str:
        """What it is in the simulator, as `World.after` has it."""
        return f"{KINDS.get(self.kind, self.kind)} {self.how}".strip()


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its journal tells it."""

    name: str
    spec: wire.JobSpec
    home: MeshShape
    """Mesh of the first generation."""
    nodes: tuple[str, ...]
    incidents: tuple[Seen, ...]
    step_seconds: dict[str, float]
    """{mesh: median seconds of its steps}, without the first one of a generation."""
    save_steps: int
    """Median steps between two saves; 0: none was taken."""
    stall_seconds: float
    delays: dict[str, dict[str, list[float]]]
    """{name of a delay of constants.toml: {kind of fault (`Seen.fault`; empty: a change that was wanted): what was measured}}."""


def read(path: Path) -> Recorded:
    """A run's journal: `journal.sqlite`, a folder that has one, or lines of JSON.

    Raises:
        ConfigurationError: no journal, or none with a job and an incident that was recovered from.
    """
    if path.is_dir():
        path = next((path / name for name in ("journal.sqlite", "supervisor/journal.sqlite") if (path / name).is_file()), path)
    try:
        entries = [msgspec.convert(item, Entry) for item in faults.entries(path)]
        loaded = next((entry for entry in entries if entry.kind == "job_loaded"), None)
        spec = msgspec.convert(loaded.data["spec"], wire.JobSpec, strict=False) if loaded is not None else None
    except (msgspec.ValidationError, KeyError) as error:
        raise ConfigurationError(f"is not a journal: {error}", where=str(path), hint="give <state>/journal.sqlite of a run") from error
    story = Story().read(entries)
    job = story.jobs.get(spec.job) if spec is not None else None
    if spec is None or job is None or not job.generations:
        raise ConfigurationError("holds no job that started", where=str(path), hint="give the journal of a run from its start")
    found = tuple(_seen(case.incident, story, entries) for case in job.cases if case.incident.recovered_at is not None)
    if not found:
        raise ConfigurationError(
            "holds no incident that was recovered from", where=str(path), hint="give a run with faults (regrow demo, regrow chaos run)"
        )
    steps = _step_seconds(job)
    return Recorded(
        name=path.parent.parent.name or path.stem,
        spec=spec,
        home=MeshShape.parse(job.generations[0].mesh),
        nodes=tuple(sorted(story.nodes)),
        incidents=found,
        step_seconds=steps,
        save_steps=_save_steps(entries),
        stall_seconds=median(job.save_seconds),
        delays=_delays(job, entries, steps, found),
    )


def _seen(incident: Incident, story: Story, entries: list[Entry]) -> Seen:
    known = story.nodes.get(incident.node)
    starts = [since for since, _, _ in known.spans] + [known.joined_at] if known is not None else []
    before = [entry for entry in entries if entry.generation == incident.generation_before]
    return Seen(
        kind=incident.kind,
        node=incident.node,
        returns_seconds=min((since - incident.symptom_at for since in starts if since > incident.symptom_at), default=None),
        lost_steps=max(0, incident.frontier - (incident.restored_step or 0)),
        spans=phases.spans(incident),
        how=_how(incident, before) if incident.kind == "hang" else "",
        alone=any(entry.kind == "record_generation" and entry.data["num_nodes"] == 1 for entry in before),
    )


def _how(incident: Incident, before: list[Entry]) -> str:
    """How it hung, by the words of its ranks when the limit was over."""
    words = [word for entry in before if entry.kind == "progress_stalled" for word in entry.data.get("ranks", ())]
    if any(msgspec.convert(word, wire.RankProgress).phase in hang.STOPPED for word in words):
        return "stopped"
    return "alike" if incident.rank < 0 else ""


def median(values: Sequence[float]) -> float:
    """0 of nothing."""
    return statistics.median(values) if values else 0.0


def _step_seconds(job: JobStory) -> dict[str, float]:
    """Median per mesh; a generation's first step, with its caches and connections, belongs to the recovery."""
    meshes = {generation.number: generation.mesh for generation in job.generations}
    first: set[int] = set()
    times: dict[str, list[float]] = {}
    for step in job.steps:
        if step.generation in first:
            times.setdefault(meshes[step.generation], []).append(step.seconds)
        first.add(step.generation)
    return {mesh: statistics.median(values) for mesh, values in times.items()}


def _save_steps(entries: list[Entry]) -> int:
    steps = sorted({int(entry.data["step"]) for entry in entries if entry.kind == "checkpoint_moved" and entry.data["state"] == "snapshot"})
    return round(median([later - one for one, later in itertools.pairwise(steps)]))


def _delays(job: JobStory, entries: list[Entry], steps: dict[str, float], seen: tuple[Seen, ...]) -> dict[str, dict[str, list[float]]]:
    """What the journal says of each delay. Changes that were wanted (growth) start workers, too."""
    found: dict[str, dict[str, list[float]]] = {}
    meshes = {generation.number: generation.mesh for generation in job.generations}
    told = iter(seen)
    for case in (*job.cases, *job.changes):
        incident, spans = case.incident, phases.spans(case.incident)
        if incident.recovered_at is None:
            continue
        one = next(told) if case in job.cases else None
        if one is not None and one.alone:
            continue
        fault = one.fault if one is not None else ""

        def add(name: str, seconds: float, fault: str = fault) -> None:
            found.setdefault(name, {}).setdefault(fault, []).append(seconds)

        for name, phase in _PHASES.items():
            add(name, spans[phase])
        usual = steps.get(meshes[incident.generation_after])
        if usual is not None and fault:
            again = max(0, incident.frontier - (incident.restored_step or 0)) + 1
            add("first_step", max(0.0, spans["first_step"] - again * usual))
        for name, seconds in _until_decided(incident, entries):
            add(name, seconds)
    return found


_PHASES = {"record": "fence", "stop": "stop", "start": "start", "rendezvous": "rendezvous", "restore": "restore"}


def _until_decided(incident: Incident, entries: list[Entry]) -> list[tuple[str, float]]:
    """What the leader heard before it decided: of a lost node's peers, each for itself, that they fail; of a hang the stacks."""
    there = [entry for entry in entries if incident.symptom_at - 0.5 <= entry.at <= incident.decided_at]
    lost = [entry.at for entry in there if entry.kind == "node_disconnected" and entry.node == incident.node]
    asked = [entry.at for entry in there if entry.kind == "ask_stacks"]
    stacks = [entry.at for entry in there if entry.kind == "output_kept" and entry.data.get("kind") == "stacks"]
    peers: dict[str, float] = {}
    for entry in there:
        if entry.node != incident.node and entry.at >= incident.symptom_at and _fails(entry):
            peers.setdefault(entry.node, entry.at)
    if incident.kind == "node_lost" and lost:
        return [("exit_report", max(0.0, at - lost[0])) for at in peers.values()]
    return [("stacks", max(0.0, stacks[-1] - asked[0]))] if incident.kind == "hang" and asked and stacks else []


def _fails(entry: Entry) -> bool:
    """A worker ended because its peer is gone, or says that it lost one and waits."""
    return entry.kind == "workers_exited" or (entry.kind == "member_phase" and entry.data.get("phase") == wire.LOST_PEER_PHASE)
