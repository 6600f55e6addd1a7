"""Where a report comes from: a file of failures, a journal's archive, a run folder, or a live supervisor's entries."""

from __future__ import annotations

import contextlib
import sqlite3
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from regrow.errors import ConfigurationError
from regrow.supervisor.core import phases
from regrow.supervisor.journal import Entry
from regrow.supervisor.stats.history import Failure, History, read
from regrow.supervisor.stats.more import SaveCosts
from regrow.supervisor.stats.parts import Case, JobStory
from regrow.supervisor.stats.story import Story, seconds_lost

_ARCHIVES = ("journal.sqlite", "supervisor/journal.sqlite", "*/supervisor/journal.sqlite")

FAULTS = "faults.json"
"""In a chaos run's folder: what was injected and when."""

_LEAST_STEPS = 5
"""Fewer steps of a mesh do not say how fast it is."""


class Source(msgspec.Struct, kw_only=True):
    """A history, and what a journal knows beyond it."""

    history: History
    name: str
    gpus: int = 0
    """Largest number of connected slots; 0: the file does not say."""
    exposure_gpu_hours: float = 0.0
    """Connected slots x time; 0: to be taken from gpus x window."""
    end_hours: float | None = None
    job: JobStory | None = None
    end_at: float = 0.0
    node_hours: dict[str, float] = {}
    """Age of each node at the end of the observation, failed or not."""
    measured: Measured | None = None
    injected: dict[str, float] = {}
    """Unix time of the fault behind an incident, by incident, where a chaos run has told it."""


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True):
    """A line of FAULTS: the ground truth of a chaos run."""

    kind: str
    node: str = ""
    rank: int = -1
    at: float
    """Unix seconds, by the clock of the machine that injected it."""
    incident: str = ""
    """The incident that it led to; empty: none."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal's steps say of the use of the GPUs."""

    goodput: float
    """lineage_steps x best_gpu_seconds_per_step / reserved_gpu_seconds"""
    lineage_steps: int
    best_gpu_seconds_per_step: float
    """The best median step x workers of all generations."""
    reserved_gpu_seconds: float
    """Slots of all nodes from their first word on: spares, idle, quarantined and lost ones included."""
    ettr: float
    """Time of the lineage's steps over wall time: start-up counts as lost."""


def measure(story: Story, job: JobStory, start: float, end: float) -> Measured | None:
    """Goodput and ETTR as the supervisor defines them; None before a mesh has shown its speed."""
    times: dict[int, list[float]] = {}
    for step in job.steps:
        if step.seconds > 0:
            times.setdefault(step.generation, []).append(step.seconds)
    worlds = {item.number: item.world_size for item in job.generations}
    known = [
        statistics.median(found) * worlds[number] for number, found in times.items() if number in worlds and len(found) >= _LEAST_STEPS
    ]
    reserved = sum(node.slots * (end - max(start, node.first_joined_at)) for node in story.nodes.values())
    steps = job.frontier - (job.base or 0)
    if not known or reserved <= 0 or end <= start or steps < 1:
        return None
    return Measured(
        goodput=min(1.0, steps * min(known) / reserved),
        lineage_steps=steps,
        best_gpu_seconds_per_step=min(known),
        reserved_gpu_seconds=reserved,
        ettr=min(1.0, job.productive_seconds / (end - start)),
    )


def load(path: Path, job: str = "") -> Source:
    """Read whatever `path` is.

    Raises:
        ConfigurationError: no such file, no journal in the folder, or a file that is none of these.
    """
    if path.is_dir():
        found = [item for pattern in _ARCHIVES for item in sorted(path.glob(pattern))]
        if not found:
            raise ConfigurationError(
                "has no journal", where=str(path), hint="give a run folder of `regrow run`, or a supervisor's --state folder"
            )
        newest = max(found, key=lambda item: item.stat().st_mtime)
        return _since_injection(of_entries(_archived(newest), job=job, name=path.name), injections(path))
    if not path.is_file():
        raise ConfigurationError("is no file or folder", where=str(path), hint="give a job, a run folder, a journal, or a CSV or JSON file")
    with path.open("rb") as file:
        begin = file.read(16)
    if begin.startswith(b"SQLite format 3"):
        return of_entries(_archived(path), job=job, name=path.stem)
    return Source(history=read(path), name="/".join(part for part in (path.parent.name, path.name) if part))


def injections(folder: Path) -> dict[str, float]:
    """When the fault behind an incident was injected (Unix seconds), by incident: what `regrow chaos run` left in its folder.

    Raises:
        ConfigurationError: the file is there and is not one of ours.
    """
    path = folder / FAULTS
    if not path.is_file():
        return {}
    try:
        return {fault.incident: fault.at for fault in msgspec.json.decode(path.read_bytes(), type=list[InjectedFault]) if fault.incident}
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"cannot be read: {error}", where=str(path), hint="remove it: times then count from the journal"
        ) from error


def _since_injection(source: Source, injected: dict[str, float]) -> Source:
    """MTTD from the fault itself, where it is known, in place of the journal's first word of it."""
    if source.job is None or not injected:
        return source
    detected = {case.incident.id: case.incident.detected_at for case in source.job.cases}
    known = detected.keys() & injected.keys()
    failures = tuple(
        msgspec.structs.replace(failure, detect_seconds=max(0.0, detected[failure.incident] - injected[failure.incident]))
        if failure.incident in known
        else failure
        for failure in source.history.failures
    )
    said = f"MTTD counts from the injected fault in {len(known)} of {len(detected)} incidents, else from the journal's first word"
    history = msgspec.structs.replace(source.history, failures=failures, warnings=(*source.history.warnings, said))
    return msgspec.structs.replace(source, history=history, injected={name: injected[name] for name in known})


def _archived(path: Path) -> list[Entry]:
    """All entries of an archive, read without writing to it."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            rows = database.execute("select body from events order by id").fetchall()
        return [msgspec.json.decode(body, type=Entry) for (body,) in rows]
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"is not a journal: {error}", where=str(path), hint="give <state>/journal.sqlite") from error


def of_archive(url: str, cluster: str, job: str = "") -> Source:
    """A job's history from the PostgreSQL archive: the journals of all leaders as one.

    Raises:
        ConfigurationError: no archive there, or it has no entries of the cluster or of the job.
        OperationalError: the server does not answer.
    """
    from regrow.supervisor import archive

    bodies = archive.entries(url, cluster, job)
    if not bodies:
        raise ConfigurationError(
            f"has no entries of cluster {cluster!r}", where=archive.without_password(url), hint="name it with --cluster"
        )
    found = [msgspec.structs.replace(msgspec.convert(body, Entry), id=number) for number, body in enumerate(bodies, 1)]
    return of_entries(found, job=job, name=f"archive of {cluster}")


def of_entries(entries: Iterable[Entry], *, job: str, name: str) -> Source:
    """A job's history as the journal tells it.

    Raises:
        ConfigurationError: the journal has no such job, several, or none.
    """
    story = Story().read(entries)
    known = sorted(story.jobs)
    if job and job not in story.jobs:
        raise ConfigurationError(f"there is no job {job!r}", where=name, hint=f"known jobs: {', '.join(known) or 'none'}")
    if not job and len(known) != 1:
        raise ConfigurationError(f"there are {len(known)} jobs: {', '.join(known) or 'none'}", where=name, hint="name one with --job")
    chosen = story.jobs[job or known[0]]
    start, end = _window(story, chosen)
    failures = [_failure(case, start, end, story, chosen) for case in chosen.cases]
    failures += [_failure(case, start, end, story, chosen) for case in chosen.changes]
    failures.sort(key=lambda failure: failure.at_hours)
    slots = sum(node.slots for node in story.nodes.values())
    return Source(
        history=History(failures=tuple(failures), warnings=_doubts(story)),
        name=chosen.name,
        gpus=max([slots, *(item.world_size for item in chosen.generations)]),
        exposure_gpu_hours=story.gpu_seconds(start, end) / 3600,
        end_hours=(end - start) / 3600,
        job=chosen,
        end_at=end,
        measured=measure(story, chosen, start, end),
        node_hours={node.name: max(0.0, end - node.first_joined_at) / 3600 for node in story.nodes.values()},
    )


def _window(story: Story, job: JobStory) -> tuple[float, float]:
    start = job.generations[0].at if job.generations else (story.first_at or 0.0)
    ended = job.generations[-1].ended_at if job.generations and job.state in ("done", "failed", "stopped") else None
    end = ended if ended is not None else (story.last_at or start)
    symptoms = [case.incident.symptom_at for case in (*job.cases, *job.changes)]
    return min([start, *symptoms]), max([end, *symptoms])


def _doubts(story: Story) -> tuple[str, ...]:
    first = story.first_at
    if not story.version and first is not None:
        return ("the journal does not begin with a leader's term, or is of an older version: what came before is not counted",)
    return ()


def _failure(case: Case, start: float, end: float, story: Story, job: JobStory) -> Failure:
    incident = case.incident
    node = story.nodes.get(incident.node)
    whole = phases.whole(incident)
    world = next((item.world_size for item in job.generations if item.number == incident.generation_before), 0)
    return Failure(
        at_hours=(incident.symptom_at - start) / 3600,
        node=incident.node,
        component=incident.kind,
        category=incident.cause,
        planned=incident.cause == "planned",
        incident=incident.id,
        lost_seconds=min(seconds_lost(case, end), max(0.0, end - incident.symptom_at)),
        detect_seconds=max(0.0, incident.detected_at - incident.symptom_at),
        recover_seconds=max(0.0, whole - (incident.detected_at - incident.symptom_at)) if whole is not None else None,
        gpus=world,
        node_age_hours=(incident.symptom_at - node.first_joined_at) / 3600 if node is not None else None,
        num_rows=1 + sum(item.kind == "workers_exited" and item.node != incident.node for item in case.evidence),
    )


def incidents(source: Source) -> list[dict[str, Any]]:
    """The journal's incidents for a post-mortem, with what each lost and what would have helped."""
    from regrow.supervisor.stats.cases import document

    if source.job is None:
        return []
    return [document(case, source.job, source.end_at) | _injected_at(source, case) for case in source.job.cases]


def _injected_at(source: Source, case: Case) -> dict[str, float]:
    at = source.injected.get(case.incident.id)
    return {} if at is None else {"injected_at": at}


def costs(source: Source, *, save_seconds: float = 0.0, restore_seconds: float = 0.0, used_seconds: float = 0.0) -> SaveCosts | None:
    """What saves cost: as given, else as the journal measured it (medians); None when neither says."""
    job = source.job
    stalls = job.save_seconds if job is not None else []
    restarts = [value for case in job.cases if (value := phases.restart_seconds(case.incident)) is not None] if job is not None else []
    save = save_seconds or (statistics.median(stalls) if stalls else 0.0)
    if save <= 0:
        return None
    restore = restore_seconds or (statistics.median(restarts) if restarts else 0.0)
    return SaveCosts(save_seconds=save, restore_seconds=restore, used_seconds=used_seconds or None)
