"""What the page shows, as one document and as the changes to it. Built at most five times a second, and only while somebody looks.

A viewer gets the whole document first and then changes: nodes and fields of jobs that differ, new steps, new journal lines. One
builder serves all viewers. A viewer that is too slow is cut off; its browser connects again and begins with the whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from regrow.ids import MeshShape
from regrow.release import VERSION
from regrow.supervisor import documents
from regrow.supervisor.core.view import JobView, Member, NodeView, View
from regrow.supervisor.journal import Entry, Journal
from regrow.supervisor.stats.parts import words
from regrow.supervisor.stats.story import Story

log = logging.getLogger("regrow.supervisor.web")

BUILD_SECONDS = 0.2
"""Least time between two builds."""

IDLE_SECONDS = 1.0
"""Look again after this long without a journal entry: silences grow and states change with time alone."""

_BACKLOG = 64
_LOG_LINES = 200
_MOST_CHECKPOINTS = 50
_QUIET = frozenset(("digests_reported", "spare_store_changed", "start_member", "member_phase", "steps_completed"))
"""Kinds that would drown the page's log; they are in `regrow events`."""

Look = Callable[[], tuple[View | None, float]]
Document = dict[str, Any]


class Feed:
    """The page's document and its viewers."""

    def __init__(self, journal: Journal, look: Look, name: str) -> None:
        self._journal = journal
        self._look = look
        self._name = name
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self._builder: asyncio.Task[None] | None = None
        self._document: Document = {}
        self._story = Story()

    async def follow(self) -> AsyncIterator[bytes]:
        """Server-sent events for one viewer: `whole`, then `change` and `beat`."""
        viewer: asyncio.Queue[bytes | None] = asyncio.Queue(_BACKLOG)
        self._ensure()
        viewer.put_nowait(_sse("whole", self._whole()))
        self._viewers.add(viewer)
        try:
            while (message := await viewer.get()) is not None:
                yield message
        finally:
            self._viewers.discard(viewer)

    def _ensure(self) -> None:
        if self._builder is None or self._builder.done():
            self._story = Story().read(self._journal.since(0, limit=20_000))
            self._document = self._build()
            self._builder = asyncio.create_task(self._run(), name="supervisor-page")

    def _whole(self) -> Document:
        steps = {name: _points(story.steps) for name, story in self._story.jobs.items()}
        lines = [line(entry) for entry in self._journal.since(0, limit=4_000) if entry.kind not in _QUIET]
        return self._document | {"steps": steps, "log": lines[-_LOG_LINES:]}

    async def _run(self) -> None:
        """Until nobody looks any more."""
        follower = self._journal.follow()
        try:
            while True:
                entries = await _collect(follower)
                if not self._viewers or None in entries:
                    break
                fresh = [entry for entry in entries if entry is not None]
                self._publish(fresh)
                await asyncio.sleep(BUILD_SECONDS)
                if not self._journal.follows(follower):
                    break
        finally:
            self._journal.unfollow(follower)
            for viewer in self._viewers:
                _end(viewer)

    def _publish(self, entries: list[Entry]) -> None:
        self._story.read(entries)
        document = self._build()
        change = difference(self._document, document)
        self._document = document
        steps: dict[str, list[list[Any]]] = {}
        for entry in entries:
            if entry.kind == "steps_completed":
                data = entry.data
                point = [data["step"], entry.at, data.get("loss"), data.get("step_seconds", 0.0), entry.generation]
                steps.setdefault(entry.job, []).append(point)
        lines = [line(entry) for entry in entries if entry.kind not in _QUIET]
        if steps:
            change["steps"] = steps
        if lines:
            change["log"] = lines[-_LOG_LINES:]
        message = _sse("change", change | {"at": document["at"]}) if change else _sse("beat", {"at": document["at"]})
        for viewer in list(self._viewers):
            try:
                viewer.put_nowait(message)
            except asyncio.QueueFull:
                self._viewers.discard(viewer)
                log.warning("a viewer of the page was too slow and is cut off")
                _end(viewer)

    def _build(self) -> Document:
        view, now = self._look()
        return build(view, now, self._story, name=self._name)


def build(view: View | None, now: float, story: Story, *, name: str) -> Document:
    """The document; without a view (this supervisor does not lead) only what it is."""
    base = {"at": now, "supervisor": name, "version": VERSION, "leading": view is not None}
    if view is None:
        return base | {"epoch": 0, "store_up": False, "automation": True, "nodes": {}, "jobs": {}, "quarantine": {}}
    running = _members(view)
    return base | {
        "epoch": view.epoch,
        "store_up": view.store_up,
        "automation": view.automation,
        "nodes": {key: _node(view, item, running.get(key)) for key, item in sorted(view.nodes.items())},
        "jobs": {key: _job(job, now, story) for key, job in sorted(view.jobs.items())},
        "quarantine": {key: msgspec.to_builtins(record) for key, record in sorted(view.quarantine.items()) if record.state != "healthy"},
    }


def _members(view: View) -> dict[str, tuple[str, Member]]:
    """{node: (job, its part in the job's generation)}."""
    return {
        node: (name, member)
        for name, job in view.jobs.items()
        if job.generation is not None and job.generation.stage != "ended"
        for node, member in job.generation.members.items()
    }


def _node(view: View, item: NodeView, part: tuple[str, Member] | None) -> list[Any]:
    """[state, slots, health, job, ranks, silent since (null: it beats)]: short, since there are thousands."""
    job, member = part if part is not None else ("", None)
    ranks = [worker.rank for worker in member.workers] if member is not None else []
    return [documents.node_state(view, item, member), item.slots, item.health.state, job, ranks, item.silent_since]


def _job(job: JobView, now: float, story: Story) -> Document:
    summary = documents.job_summary(job, now)
    known = story.jobs.get(job.spec.job)
    cases = {case.incident.id: case for case in (*known.cases, *known.changes)} if known is not None else {}
    for item in (*summary["incidents"], *summary["changes"]):
        case = cases.get(item["id"])
        item["reason"] = case.reason if case is not None else ""
        item["device"] = case.device if case is not None else ""
        item["evidence"] = msgspec.to_builtins(case.evidence) if case is not None else []
    stored = [
        summary["checkpoints"][index] | {"at": found.committed_at} for index, (_, found) in enumerate(sorted(job.checkpoints.items()))
    ]
    for item in stored:
        del item["age_seconds"]
    summary["checkpoint"].pop("age_seconds", None)
    summary["checkpoints"] = stored[-_MOST_CHECKPOINTS:]
    summary["generations"] = msgspec.to_builtins(known.generations[-200:]) if known is not None else []
    mesh = job.generation.spec.mesh if summary["mesh"] and job.generation is not None else None
    summary["axes"] = _axes(mesh)
    summary["checkpoint_path"] = job.spec.checkpoint.path
    for name in ("failures_per_hour", "goodput", "ettr"):
        value = summary[name]
        summary[name] = round(value, 5) if value is not None else None
    return summary


def _axes(mesh: MeshShape | None) -> dict[str, int] | None:
    return {name: int(getattr(mesh, name)) for name in ("dp", "pp", "cp", "tp")} if mesh is not None else None


def difference(old: Document, new: Document) -> Document:
    """What differs: {"set": top-level values, "nodes": {name: row or null}, "jobs": {name: fields or null}}; without `at`."""
    change: Document = {}
    plain = {key: value for key, value in new.items() if key not in ("nodes", "jobs", "at") and old.get(key) != value}
    if plain:
        change["set"] = plain
    nodes = _keyed(old.get("nodes", {}), new["nodes"])
    if nodes:
        change["nodes"] = nodes
    jobs: Document = {name: None for name in old.get("jobs", {}) if name not in new["jobs"]}
    for name, job in new["jobs"].items():
        fields = _keyed(old.get("jobs", {}).get(name, {}), job)
        if fields:
            jobs[name] = fields
    if jobs:
        change["jobs"] = jobs
    return change


def _keyed(old: Document, new: Document) -> Document:
    changed = {key: value for key, value in new.items() if key not in old or old[key] != value}
    return changed | dict.fromkeys(old.keys() - new.keys())


def line(entry: Entry) -> list[Any]:
    """[id, at, kind, job, node, generation, text] of a journal entry."""
    return [entry.id, entry.at, entry.kind, entry.job, entry.node, entry.generation, words(entry)]


def _points(steps: list[Any], most: int = 1_000) -> list[Any]:
    """At most about `most` of them, the newest kept."""
    stride = max(1, len(steps) // most)
    return steps[(len(steps) - 1) % stride :: stride] if steps else []


async def _collect(follower: asyncio.Queue[Entry | None]) -> list[Entry | None]:
    """All entries that are there, or nothing after a while."""
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            found = [await follower.get()]
    except TimeoutError:
        return []
    while not follower.empty():
        found.append(follower.get_nowait())
    return found


def _end(viewer: asyncio.Queue[bytes | None]) -> None:
    """Its stream ends after what it has, or at once when it is full."""
    if viewer.full():
        viewer.get_nowait()
    viewer.put_nowait(None)


def _sse(kind: str, document: Document) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(document))
