"""`regrow plan --calibrate RUN`: what a run's journal says of its model, its batch, and the step times of its meshes."""

from __future__ import annotations

import contextlib
import sqlite3
import statistics
from pathlib import Path
from typing import Any

import msgspec

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.parallel.calibrate import Sample

_PLACES = ("journal.sqlite", "supervisor/journal.sqlite", "*/supervisor/journal.sqlite")
_WARM_UP = 2
"""First steps of a generation, which compile, allocate and fill caches. Ours."""
_LEAST = 3
"""Steps after those, fewer say nothing."""
_FAKE = "GPU-fa4e"
"""How the fake driver of `regrow demo` names its GPUs (docs/fake-nvml.md): the work was done by CPUs."""
_SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "experts")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal knows of one job."""

    job: str
    spec: dict[str, Any]
    samples: tuple[Sample, ...]
    """One a mesh: the median of its steps."""
    steps: tuple[int, ...]
    """Steps behind each sample."""
    nodes: int
    """Of the largest generation."""
    has_gpus: bool


def is_run(path: Path) -> bool:
    """Whether this is a run folder or a journal, not a JSON file of measured meshes."""
    return path.is_dir() or path.suffix == ".sqlite"


def read(path: Path) -> Run:
    """The newest job of a run folder (`regrow run`, a supervisor's --state) or a journal.

    Raises:
        ConfigurationError: no journal, no job, or no mesh with enough steps.
    """
    entries = _entries(_journal(path))
    loaded = [entry for entry in entries if entry["kind"] == "job_loaded"]
    if not loaded:
        raise ConfigurationError("tells of no job", where=str(path), hint="give the folder of a run that trained")
    job = loaded[-1]["job"]
    spec: dict[str, Any] = loaded[-1]["data"].get("spec", {})
    meshes: dict[int, str] = {}
    seconds: dict[int, list[float]] = {}
    nodes = 1
    for entry in entries:
        if entry["job"] != job:
            continue
        number, data = entry["generation"], entry["data"]
        if entry["kind"] == "record_generation" and data.get("mesh"):
            meshes[number], seconds[number] = data["mesh"], []
            nodes = max(nodes, int(data.get("num_nodes", 1)))
        elif entry["kind"] == "steps_completed" and data.get("step_seconds", 0.0) > 0 and number in seconds:
            seconds[number].append(data["step_seconds"])
    by_mesh: dict[str, list[float]] = {}
    for number, times in seconds.items():
        by_mesh.setdefault(meshes[number], []).extend(times[_WARM_UP:])
    kept = {mesh: times for mesh, times in by_mesh.items() if len(times) >= _LEAST}
    if not kept:
        hint = f"a mesh counts with {_LEAST} steps after its first {_WARM_UP}"
        raise ConfigurationError("has no mesh with enough steps", where=str(path), hint=hint)
    micro = int(spec.get("micro_batch") or 1)
    return Run(
        job=job,
        spec=spec,
        samples=tuple(
            Sample(mesh=MeshShape.parse(mesh), step_seconds=statistics.median(times), micro_batch=micro, zero_stage=spec.get("zero_stage"))
            for mesh, times in kept.items()
        ),
        steps=tuple(map(len, kept.values())),
        nodes=nodes,
        has_gpus=any(_real(entry["data"].get("devices", [])) for entry in entries if entry["kind"] == "node_joined"),
    )


def _real(devices: list[str]) -> bool:
    return any(not device.startswith(_FAKE) for device in devices)


def fill(flags: dict[str, Any], run: Run) -> str:
    """Flags that were not given, from the run: shape, batch, nodes. Says what was taken."""
    taken: list[str] = []

    def take(name: str, value: Any) -> None:
        if flags[name] is None and value:
            flags[name] = value
            taken.append(f"{name.replace('_', '-')} {value}")

    if flags["model"] is None and flags["params"] is None and flags["layers"] is None:
        shape = run.spec.get("model") or {}
        for name in _SHAPE:
            take(name, shape.get(name))
    take("global_batch", run.spec.get("global_batch"))
    if flags["micro_batch"] is None and run.spec.get("micro_batch"):
        take("micro_batch", str(run.spec["micro_batch"]))
    if flags["inventory"] is None and flags["nodes"] is None and flags["gpus_per_node"] is None:
        take("nodes", run.nodes)
        take("gpus_per_node", str(run.spec.get("nproc_per_node") or 1))
    if not run.has_gpus and flags["inventory"] is None:
        take("gpu_type", "cpu")
    return f"from run {run.job}: {', '.join(taken)}" if taken else f"step times from run {run.job}"


def _journal(path: Path) -> Path:
    if path.is_file():
        return path
    found = [item for pattern in _PLACES for item in path.glob(pattern)]
    if not found:
        hint = "give a run folder, a supervisor's --state folder, or a JSON file of measured meshes"
        raise ConfigurationError("has no journal", where=str(path), hint=hint)
    return max(found, key=lambda item: item.stat().st_mtime)


def _entries(path: Path) -> list[dict[str, Any]]:
    kinds = ("job_loaded", "record_generation", "steps_completed", "node_joined")
    query = f"select body from events where kind in ({', '.join('?' * len(kinds))}) order by id"  # noqa: S608 - question marks only
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            rows = database.execute(query, kinds).fetchall()
        return [msgspec.json.decode(body, type=dict[str, Any]) for (body,) in rows]
    except (sqlite3.Error, msgspec.DecodeError) as error:
        raise ConfigurationError(f"is not a journal: {error}", where=str(path), hint="give a run folder") from error
