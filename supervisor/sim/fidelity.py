"""The simulator against runs that happened: the same world and faults, and the medians of the recovery phases side by side.

Delays are measured in some runs and tried on others. What is *not* measured is what the simulator is to predict: detection and
decision by the production rules, which mesh follows, how many steps are computed again.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from regrow import wire
from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.supervisor.core import phases
from regrow.supervisor.core.view import Incident
from regrow.supervisor.journal import Entry
from regrow.supervisor.sim import constants, faults, setup
from regrow.supervisor.sim.constants import Constants, Delay
from regrow.supervisor.sim.faults import Fault
from regrow.supervisor.sim.inject import Injector
from regrow.supervisor.sim.models import JOB, Workload
from regrow.supervisor.sim.setup import Setup
from regrow.supervisor.sim.simulate import run_seed
from regrow.supervisor.sim.world import World
from regrow.supervisor.stats.parts import JobStory
from regrow.supervisor.stats.story import Story

WITHIN = 0.20
"""Largest relative error of a phase's median."""
RESOLUTION_SECONDS = 0.1
"""Shorter phases are shown and not judged: they are a few messages between processes that share two cores."""
_SPACING_SECONDS = 200.0
"""Between faults in the simulation: each finds a job that trains, as it did in the run."""
_NEVER_SECONDS = 1e7
_KINDS = {"node_lost": "killed", "sdc": "sdc", "unhealthy": "sick", "hang": "hang", "worker_exit": "program", "leaving": "leave"}


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One incident of a run."""

    kind: str
    """As the supervisor called it."""
    node: str
    returns_seconds: float | None
    """From its loss until its node was there again; None: it was not."""
    lost_steps: int
    """Completed steps since the checkpoint that the job went on from."""
    spans: dict[str, float]


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
    write_seconds: float
    delays: dict[str, list[float]]
    """{name of a delay of constants.toml: what was measured}."""


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
    found = tuple(_seen(case.incident, story) for case in job.cases if case.incident.recovered_at is not None)
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
        stall_seconds=_median(job.save_seconds),
        write_seconds=_median(job.write_seconds),
        delays=_delays(job, entries, steps),
    )


def _seen(incident: Incident, story: Story) -> Seen:
    known = story.nodes.get(incident.node)
    starts = [since for since, _, _ in known.spans] + [known.joined_at] if known is not None else []
    return Seen(
        kind=incident.kind,
        node=incident.node,
        returns_seconds=min((since - incident.symptom_at for since in starts if since > incident.symptom_at), default=None),
        lost_steps=max(0, incident.frontier - (incident.restored_step or 0)),
        spans=phases.spans(incident),
    )


def _median(values: Sequence[float]) -> float:
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
    return round(_median([later - one for one, later in itertools.pairwise(steps)]))


def _delays(job: JobStory, entries: list[Entry], steps: dict[str, float]) -> dict[str, list[float]]:
    """What the journal says of each delay. Changes that were wanted (growth) start workers, too."""
    found: dict[str, list[float]] = {}
    meshes = {generation.number: generation.mesh for generation in job.generations}
    for case in (*job.cases, *job.changes):
        incident, spans = case.incident, phases.spans(case.incident)
        if incident.recovered_at is None:
            continue
        for name, phase in (
            ("record", "fence"),
            ("stop", "stop"),
            ("start", "start"),
            ("rendezvous", "rendezvous"),
            ("restore", "restore"),
        ):
            found.setdefault(name, []).append(spans[phase])
        usual = steps.get(meshes[incident.generation_after])
        if usual is not None and case in job.cases:
            again = max(0, incident.frontier - (incident.restored_step or 0)) + 1
            found.setdefault("first_step", []).append(max(0.0, spans["first_step"] - again * usual))
        lost = [
            entry.at
            for entry in entries
            if entry.kind == "node_disconnected" and entry.node == incident.node and entry.at >= incident.symptom_at - 0.5
        ]
        exits = [
            entry.at
            for entry in entries
            if entry.kind == "workers_exited" and entry.node != incident.node and entry.at >= incident.symptom_at
        ]
        if incident.kind == "node_lost" and lost and exits:
            found.setdefault("exit_report", []).append(max(0.0, exits[0] - lost[0]))
    return found


def measured(runs: Sequence[Recorded]) -> Constants:
    """The shipped constants; what these runs show is drawn from what they show."""
    delays: dict[str, list[float]] = {}
    for run in runs:
        for name, values in run.delays.items():
            delays.setdefault(name, []).extend(values)
    changes = {
        name: Delay(median=_median(values), source="measured in a run", values=tuple(values)) for name, values in sorted(delays.items())
    }
    return msgspec.structs.replace(constants.load(), **changes)


# --- the same in virtual time


def simulated(run: Recorded, delays: Constants, seed: int) -> list[tuple[str, dict[str, float]]]:
    """(kind, spans) of the incidents of one simulated repetition of a run."""
    rng = random.Random(f"{run.name}/{seed}/instants")  # noqa: S311  # a simulation is to be repeated
    home = run.home
    usual = run.step_seconds.get(str(home)) or _median(list(run.step_seconds.values()))
    sequences = max(1, run.spec.global_batch // run.spec.micro_batch)
    shape = setup.check(
        Setup(
            constants=_checked_each_step(delays, usual),
            nodes=len(run.nodes),
            gpus_per_node=run.spec.nproc_per_node,
            days=(len(run.incidents) + 2) * _SPACING_SECONDS / 86_400.0,
            save_seconds=run.write_seconds,
            stall_seconds=run.stall_seconds,
            interval_seconds=usual * max(run.save_steps, 2 + max(seen.lost_steps for seen in run.incidents)),
            max_interval_seconds=_SPACING_SECONDS,
            step_seconds=usual,
            mesh=home,
            sequences=sequences,
            places=run.spec.nproc_per_node,
            keep=max(2, run.spec.checkpoint.keep_last),
            rate_per_gpu_hour=0.0,
        )
    )
    known = {MeshShape.parse(mesh): seconds for mesh, seconds in run.step_seconds.items()}
    workload = Workload(
        spec=msgspec.structs.replace(run.spec, job=JOB, checkpoint=wire.CheckpointPolicy(path="/c", max_interval_seconds=_SPACING_SECONDS)),
        step_seconds={(mesh.dp, mesh.pp): seconds for mesh, seconds in known.items()},
        home=home,
        full_seconds=usual,
        micro_batches=sequences,
        source="measured in the run",
    )
    worlds: list[World] = []

    def prepare(world: World) -> None:
        worlds.append(world)
        injector = Injector(world)
        for number, (seen, fault) in enumerate(_faults(run), 1):
            world.loop.at(_SPACING_SECONDS * number, lambda seen=seen, fault=fault: _place(world, injector, seen, fault, rng.random()))
            world.loop.at(_SPACING_SECONDS * (number + 0.9), world.leader.post)  # a look at the steps since

    run_seed(shape, workload, lambda _rng: (), seed, prepare=prepare)
    incidents = worlds[0].leader.view.jobs[JOB].incidents
    return [(one.kind, phases.spans(one)) for one in incidents if one.recovered_at is not None and one.cause != "planned"]


def _checked_each_step(delays: Constants, step_seconds: float) -> Constants:
    """Digests are compared once a step in the runs that flip bits."""
    return msgspec.structs.replace(delays, sdc_seen=msgspec.structs.replace(delays.sdc_seen, median=step_seconds, sigma=0.0))


def _faults(run: Recorded) -> list[tuple[Seen, Fault]]:
    """The run's faults in their order."""
    found: list[tuple[Seen, Fault]] = []
    for seen in run.incidents:
        kind = _KINDS.get(seen.kind)
        if kind is not None and seen.node in run.nodes:
            seconds = _NEVER_SECONDS if seen.returns_seconds is None else seen.returns_seconds
            place = (run.nodes.index(seen.node),)
            found.append((seen, Fault(at=0.0, kind=kind, nodes=place, seconds=seconds, component=seen.kind, category=seen.kind)))
    return found


def _place(world: World, injector: Injector, seen: Seen, fault: Fault, share: float) -> None:
    """As many steps after a save as in the run, and `share` of a step more."""
    run = world.run
    if run is None or run.paces is None or run.state != "training":
        world.loop.after(1.0, lambda: _place(world, injector, seen, fault, share))
        return
    saves = run.paces.saves(run.completed(world.now), world.now + _SPACING_SECONDS)
    done = run.step_done_at(saves[0][0] + seen.lost_steps) if saves else world.now
    world.loop.at(done + share * run.step_seconds, lambda: injector.happen(fault))


# --- side by side


def compare(measured_in: Sequence[Recorded], tried_on: Sequence[Recorded], *, seeds: int = 20) -> dict[str, Any]:
    """The document: medians of each phase over the incidents of `tried_on`, as they were and as simulated with the delays of `measured_in`."""
    delays = measured(measured_in)
    was = [(seen.kind, seen.spans) for run in tried_on for seen in run.incidents if seen.kind in _KINDS]
    made = [pair for run in tried_on for seed in range(1, seeds + 1) for pair in simulated(run, delays, seed)]
    kinds = sorted({kind for kind, _ in was})
    rows = [_row(phase, [spans[phase] for _, spans in was], [spans[phase] for _, spans in made]) for phase in phases.NAMES]
    whole = _row("whole", [sum(spans.values()) for _, spans in was], [sum(spans.values()) for _, spans in made])
    by_kind = {
        kind: _row(
            kind,
            [sum(spans.values()) for name, spans in was if name == kind],
            [sum(spans.values()) for name, spans in made if name == kind],
        )
        for kind in kinds
    }
    off = [row["name"] for row in rows if row["judged"] and not row["within"]]
    return {
        "phases": {row["name"]: row for row in rows},
        "whole": whole,
        "whole_by_kind": by_kind,
        "within": WITHIN,
        "off": off,
        "ok": not off,
        "incidents": {"measured_in": sum(len(run.incidents) for run in measured_in), "tried_on": len(was), "simulated": len(made)},
        "same_kinds": sorted({kind for kind, _ in made}) == kinds,
        "delays": {name: delays.named(name).median for name in sorted({name for run in measured_in for name in run.delays})},
        "seeds": seeds,
    }


def _row(name: str, was: list[float], made: list[float]) -> dict[str, Any]:
    real, virtual = _median(was), _median(made)
    error = virtual / real - 1.0 if real > 0 else 0.0
    judged = max(real, virtual) >= RESOLUTION_SECONDS
    return {
        "name": name,
        "measured_seconds": real,
        "simulated_seconds": virtual,
        "error": error,
        "judged": judged,
        "within": bool(made) and (abs(error) <= WITHIN or not judged),
    }


def text(document: dict[str, Any]) -> list[str]:
    """Lines for a terminal."""
    numbers = document["incidents"]
    lines = [
        f"delays measured in {numbers['measured_in']} incidents, tried on {numbers['tried_on']} others, {document['seeds']} seeds",
        "phase        measured  simulated    error",
    ]
    rows = [*document["phases"].values(), document["whole"], *document["whole_by_kind"].values()]
    for row in rows:
        note = "" if not row["judged"] else "  ok" if row["within"] else f"  off by more than {document['within']:.0%}"
        lines.append(f"{row['name']:<12}{row['measured_seconds']:8.2f} s {row['simulated_seconds']:8.2f} s {row['error']:+8.0%}{note}")
    return lines
