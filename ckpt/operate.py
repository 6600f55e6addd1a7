"""What an operator does to a stopped job's checkpoints: fork, roll back further, skip batches. Every act is written down.

Nothing is changed in place: a checkpoint with another position is a new directory that shares the old one's shard files.
`operations.jsonl` in the folder says what was done, so that the account of samples stays right after old checkpoints have gone.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any, Literal

import msgspec

from regrow.ckpt import catalog
from regrow.ckpt.commit import publish
from regrow.ckpt.manifest import (
    RECORD_NAME,
    FileEntry,
    Parent,
    Record,
    digest,
    directory_name,
    encode,
    read_manifests,
    read_record,
    seal,
)
from regrow.ckpt.verify import Progress, verify
from regrow.errors import ConfigurationError, OperationalError
from regrow.ids import check_name
from regrow.syncing import sync_directory

OPERATIONS_NAME = "operations.jsonl"


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One act of an operator, a line of `operations.jsonl`. Samples are positions in the data, of the whole job."""

    kind: Literal["fork", "roll-back", "skip"]
    at: float
    """Unix seconds, for people."""
    reason: str
    from_directory: str
    from_step: int
    from_samples: int
    to_directory: str
    to_step: int
    to_samples: int
    set_aside: tuple[str, ...] = ()


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Where the samples went, up to the newest restorable checkpoint."""

    position: int
    """The next sample of the order of the data."""
    trained: int
    """Samples of the lineage: position less what was skipped."""
    skipped: int
    """Left out by an operator, still in force."""
    discarded: int
    """Trained once and rolled back by an operator: they are trained again, or skipped."""


def operations(folder: Path) -> list[Operation]:
    """What operators have done to a folder, oldest first.

    Raises:
        OperationalError: the file cannot be read.
    """
    path = folder / OPERATIONS_NAME
    try:
        lines = path.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Operation) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise OperationalError(f"cannot be read: {error}", where=str(path), hint="the account of samples depends on it") from error


def account(acts: list[Operation], position: int) -> Account:
    """Where the samples before `position` went. Pure."""
    skips: list[tuple[int, int]] = []
    discarded = 0
    for act in acts:
        if act.kind == "skip":
            skips.append((act.from_samples, act.to_samples))
        elif act.kind == "roll-back":
            skips = [skip for skip in skips if skip[1] <= act.to_samples]
            discarded += max(0, act.from_samples - act.to_samples)
    skipped = sum(end - start for start, end in skips if end <= position)
    return Account(position=position, trained=position - skipped, skipped=skipped, discarded=discarded)


def fork(source: Path, folder: Path, *, job: str, reason: str, progress: Progress | None = None) -> Path:
    """Start another job's folder from a checkpoint; its tensors are copied. Returns the new checkpoint's directory.

    Raises:
        ConfigurationError: the folder holds checkpoints already, or no job can have this name.
        OperationalError: the source is damaged, or storage fails.
    """
    check_name("job", job)
    if catalog.scan(folder):
        raise ConfigurationError("holds checkpoints already", where=str(folder), hint="fork into a new folder")
    record = _verified(source, progress)
    made = _derive(source, record, folder, job=job, samples=record.samples, link=False)
    for earlier in operations(source.parent):
        _note(folder, earlier)
    _note(folder, _operation("fork", reason, source, record, made, record.step, record.samples))
    return made


def roll_back(folder: Path, *, to_step: int | None, reason: str, progress: Progress | None = None) -> Operation:
    """Make an older checkpoint the newest restorable one: all later ones are set aside (not deleted).

    Args:
        folder: The job's checkpoints; the job must not run.
        to_step: Step to go back to; None: the next older one.
        reason: For the record.
        progress: Of the verification of the target.

    Raises:
        ConfigurationError: there is no such checkpoint, or it is the newest.
        OperationalError: the target is damaged.
    """
    entries = [entry for entry in catalog.scan(folder) if entry.state == "restorable"]
    older = [entry for entry in entries[1:] if to_step is None or entry.step == to_step]
    if not older:
        have = ", ".join(str(entry.step) for entry in entries[1:]) or "none"
        what = "an older checkpoint" if to_step is None else f"an older checkpoint of step {to_step}"
        raise ConfigurationError(f"there is not {what} to roll back to", where=str(folder), hint=f"older restorable steps: {have}")
    target = older[0]
    _verified(Path(target.directory), progress)
    later = entries[: entries.index(target)]
    newest = entries[0]
    act = Operation(
        kind="roll-back",
        at=time.time(),
        reason=reason,
        from_directory=newest.name,
        from_step=newest.step,
        from_samples=newest.samples,
        to_directory=target.name,
        to_step=target.step,
        to_samples=target.samples,
        set_aside=tuple(entry.name for entry in later),
    )
    _note(folder, act)
    for entry in later:
        catalog.set_aside(entry.directory, f"rolled back to step {target.step} by an operator: {reason}")
    return act


def skip(folder: Path, *, samples: int = 0, batches: int = 0, reason: str, progress: Progress | None = None) -> Operation:
    """Leave out the next samples of the data: the newest checkpoint gets a successor with a later position and the same tensors.

    Args:
        folder: The job's checkpoints; the job must not run.
        samples: How many samples of the whole job.
        batches: How many global batches, instead.
        reason: For the record.
        progress: Of the verification.

    Raises:
        ConfigurationError: nothing to skip from; the batch is not known; or the loader has a state of its own.
        OperationalError: the checkpoint is damaged, or storage fails.
    """
    entry = catalog.newest_restorable(folder)
    if entry is None:
        raise ConfigurationError("there is no checkpoint to skip from", where=str(folder), hint="`regrow ckpt ls` lists what there is")
    source = Path(entry.directory)
    record = _verified(source, progress)
    count = samples or batches * int(record.facts.get("batch", {}).get("global_batch", 0))
    if count <= 0:
        raise ConfigurationError("the checkpoint does not say its global batch", where=str(source), hint="give --samples")
    if any(rank.private.get("data") is not None for manifest in read_manifests(source, record) for rank in manifest.ranks):
        raise ConfigurationError(
            "the job's loader keeps a position of its own, which cannot be moved from outside",
            where=str(source),
            hint="only jobs that take their samples from run.batches can skip",
        )
    made = _derive(source, record, folder, job=record.job, samples=record.samples + count, link=True)
    act = _operation("skip", reason, source, record, made, record.step, record.samples + count)
    _note(folder, act)
    catalog.set_aside(source, f"its successor {made.name} skips samples {record.samples} to {record.samples + count}: {reason}")
    return act


def _verified(source: Path, progress: Progress | None) -> Record:
    result = verify(source, progress=progress)
    if not result.valid:
        first = next(problem for problem in result.problems if problem.kind != "unknown")
        raise OperationalError(f"is damaged: {first.file}: {first.detail}", where=str(source), hint="take another checkpoint")
    return read_record(source)


def _derive(source: Path, record: Record, folder: Path, *, job: str, samples: int, link: bool) -> Path:
    """A new checkpoint with the tensors of another one. Like every save: the record comes last."""
    made = folder / directory_name(record.step, record.generation, uuid.uuid4().hex[:8])
    parent = Parent(directory=source.name, record_digest=record.digest, generation=record.generation, step=record.step)
    try:
        made.mkdir(parents=True)
        sync_directory(folder)
        files = [_take(source, entry, made, link=link) for entry in record.files if entry.kind != "manifest"]
        nodes = {entry.name: entry for entry in record.files if entry.kind == "manifest"}
        for name, manifest in zip(nodes, read_manifests(source, record), strict=True):
            data = encode(msgspec.structs.replace(manifest, job=job, samples=samples, parent=parent))
            publish(made, name, data)
            files.append(msgspec.structs.replace(nodes[name], size_bytes=len(data), digest=digest(data)))
        sequence = max((0, *(entry.sequence for entry in catalog.scan(folder)))) + 1
        sealed = seal(
            msgspec.structs.replace(
                record,
                job=job,
                samples=samples,
                sequence=sequence,
                parent=parent,
                files=tuple(files),
                num_bytes=sum(entry.size_bytes for entry in files),
                written_at=time.time(),
            )
        )
        publish(made, RECORD_NAME, encode(sealed))
        sync_directory(folder)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise OperationalError(f"cannot be written: {error}", where=str(made), hint="check space and permissions") from error
    return made


def _take(source: Path, entry: FileEntry, made: Path, *, link: bool) -> FileEntry:
    target = made / entry.name
    if link:
        os.link(source / entry.name, target)
        return entry
    shutil.copyfile(source / entry.name, target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())
    return entry


def _operation(
    kind: Literal["fork", "skip"], reason: str, source: Path, record: Record, made: Path, to_step: int, to_samples: int
) -> Operation:
    return Operation(
        kind=kind,
        at=time.time(),
        reason=reason,
        from_directory=str(source.absolute()) if kind == "fork" else source.name,
        from_step=record.step,
        from_samples=record.samples,
        to_directory=made.name,
        to_step=to_step,
        to_samples=to_samples,
    )


def _note(folder: Path, act: Operation) -> None:
    path = folder / OPERATIONS_NAME
    with path.open("ab") as file:
        file.write(msgspec.json.encode(act) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    sync_directory(folder)


def lineage(folder: Path) -> list[dict[str, Any]]:
    """The newest restorable checkpoint and its ancestors as far as they are still there, newest first."""
    entries = {entry.name: entry for entry in catalog.scan(folder)}
    at = next((entry for entry in entries.values() if entry.state == "restorable"), None)
    chain: list[dict[str, Any]] = []
    while at is not None and at.name not in {one["directory"] for one in chain}:
        chain.append(
            {
                "directory": at.name,
                "state": at.state,
                "step": at.step,
                "samples": at.samples,
                "generation": at.generation,
                "mesh": str(at.mesh),
                "parent": at.parent.directory if at.parent else None,
                "parent_step": at.parent.step if at.parent else None,
            }
        )
        at = entries.get(at.parent.directory) if at.parent else None
    return chain
