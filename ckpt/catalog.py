"""Which checkpoints a folder holds, by their records only: never by a directory's name, time or a pointer."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any, Literal

import msgspec

from regrow.ckpt.manifest import DAMAGED_NAME, DamagedCheckpointError, Metric, Parent, Record, parse_directory, read_record
from regrow.errors import ConfigurationError, OperationalError
from regrow.ids import MeshShape
from regrow.wire import RestorePoint

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_PROBE_BYTES = 4096
"""A block: a full file system takes an empty file."""


class CatalogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One directory of a checkpoint folder.

    `state`: restorable (record intact, files present with their sizes), damaged (set aside, or the record or a file
    is not as committed), partial (no record: never became a checkpoint).
    """

    directory: str
    """Absolute path."""
    state: Literal["restorable", "damaged", "partial"]
    problem: str = ""
    step: int = -1
    generation: int = -1
    epoch: int = -1
    samples: int = 0
    sequence: int = -1
    job: str = ""
    mesh: MeshShape = MeshShape()
    world_size: int = 0
    num_bytes: int = 0
    record_digest: str = ""
    parent: Parent | None = None
    written_at: float = 0.0
    facts: dict[str, Any] = {}
    metrics: dict[str, Metric] = {}

    @property
    def name(self) -> str:
        """The directory's own name."""
        return Path(self.directory).name

    def restore_point(self) -> RestorePoint:
        """The entry as what a generation loads."""
        return RestorePoint(
            step=self.step,
            directory=self.directory,
            record_digest=self.record_digest,
            generation=self.generation,
            samples=self.samples,
        )


def scan(path: str | Path, *, strict: bool = True) -> list[CatalogEntry]:
    """All checkpoints and leftovers of ours in a folder, newest first; a folder that is not there holds none.

    Names that are not ours are left out.

    Args:
        path: The job's checkpoint folder.
        strict: False, for whoever adds to the folder or clears it up: one that cannot be read (no permission, a bad sector) is
            damaged, and stops nothing. True, for whoever takes the newest: it may be that one, and the trouble may pass.

    Raises:
        OperationalError: the folder cannot be listed, or (strict) a checkpoint cannot be read. Never read as "no checkpoints".
    """
    folder = Path(path)
    try:
        with os.scandir(folder) as items:
            names = [item.name for item in items if parse_directory(item.name) and item.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        hint = "check mount and permissions; nothing is concluded from a folder that cannot be read"
        raise OperationalError(f"checkpoint folder cannot be listed: {error.strerror}", where=str(folder), hint=hint) from error
    entries = [read_entry(folder / name) if strict else _read_leniently(folder / name) for name in names]
    return sorted(entries, key=lambda entry: (entry.sequence, entry.generation, entry.step), reverse=True)


def _read_leniently(directory: Path) -> CatalogEntry:
    try:
        return read_entry(directory)
    except OperationalError as error:
        step, generation, _ = parse_directory(directory.name) or (-1, -1, "")
        where = str(directory.absolute())
        return CatalogEntry(directory=where, state="damaged", problem=error.what, step=step, generation=generation)


def read_entry(directory: Path) -> CatalogEntry:
    """What one directory is.

    Raises:
        OperationalError: it cannot be read for a reason other than damage.
    """
    where = str(directory.absolute())
    try:
        record = read_record(directory)
        problem = set_aside_reason(directory) or _missing(directory, record)
    except FileNotFoundError:
        named = parse_directory(directory.name)
        step, generation = (named[0], named[1]) if named else (-1, -1)
        return CatalogEntry(directory=where, state="partial", problem="has no record", step=step, generation=generation)
    except DamagedCheckpointError as error:
        return CatalogEntry(directory=where, state="damaged", problem=str(error))
    except OSError as error:
        hint = "check permissions and storage, or move it away"
        raise OperationalError(f"checkpoint cannot be read: {error.strerror}", where=where, hint=hint) from error
    return CatalogEntry(
        directory=where,
        state="damaged" if problem else "restorable",
        problem=problem,
        step=record.step,
        generation=record.generation,
        epoch=record.epoch,
        samples=record.samples,
        sequence=record.sequence,
        job=record.job,
        mesh=record.mesh,
        world_size=record.world_size,
        num_bytes=record.num_bytes,
        record_digest=record.digest,
        parent=record.parent,
        written_at=record.written_at,
        facts=record.facts,
        metrics=record.metrics,
    )


def set_aside_reason(directory: Path) -> str:
    """Why a checkpoint was set aside; empty when it was not."""
    try:
        note = msgspec.json.decode((directory / DAMAGED_NAME).read_bytes())
    except FileNotFoundError:
        return ""
    except msgspec.DecodeError:
        return "was set aside"
    return f"was set aside: {note.get('reason', '')}" if isinstance(note, dict) else "was set aside"


def _missing(directory: Path, record: Record) -> str:
    for entry in record.files:
        try:
            size = (directory / entry.name).stat().st_size
        except FileNotFoundError:
            return f"{entry.name} is missing"
        if size != entry.size_bytes:
            return f"{entry.name} has {size} bytes, committed were {entry.size_bytes}"
    return ""


def newest_restorable(path: str | Path, *, not_after_step: int | None = None) -> CatalogEntry | None:
    """The newest checkpoint that can be restored, or None when there is none.

    Args:
        path: The job's checkpoint folder.
        not_after_step: Leave out later steps (rolling back further).
    """
    for entry in scan(path):
        if entry.state == "restorable" and (not_after_step is None or entry.step <= not_after_step):
            return entry
    return None


def decide_restore(path: str | Path, *, expected: bool = False, fresh_start: bool = False) -> CatalogEntry | None:
    """What a starting job loads. None means: start at step 0, and that this is right.

    Args:
        path: The job's checkpoint folder.
        expected: Something else (the store) says that a checkpoint was committed.
        fresh_start: The user wants step 0 although nothing valid is there.

    Raises:
        OperationalError: something was to be restored and nothing valid is there.
    """
    entries = scan(path)
    for entry in entries:
        if entry.state == "restorable":
            return entry
    damaged = [entry for entry in entries if entry.state == "damaged"]
    if (damaged or expected) and not fresh_start:
        seen = "; ".join(f"{entry.name}: {entry.problem}" for entry in damaged) or "the folder holds none"
        raise OperationalError(
            f"a checkpoint was expected and none can be restored ({seen})",
            where=str(path),
            hint="`regrow ckpt verify` names the damage; ask for a fresh start to begin at step 0 (--fresh-start)",
        )
    return None


def check_place(path: str | Path) -> None:
    """A job writes to a file system and commits there by rename and fsync; an object store is a copy behind it.

    Raises:
        ConfigurationError: the path is a URL (of which `Path` would make a folder of that name here).
    """
    found = _URL.match(str(path))
    if found is not None:
        scheme = found[1].lower()
        hint = (
            "give the folder's path"
            if scheme == "file"
            else "let the job write to a folder that all its nodes see and copy it there: `regrow run --checkpoint-dir FOLDER --mirror URL`; "
            "`regrow ckpt fetch URL FOLDER` brings one back to look at"
        )
        raise ConfigurationError(f"is a URL ({scheme}), and checkpoints are written to folders", where=str(path), hint=hint)


def check_writable(path: str | Path) -> None:
    """Make the checkpoint folder where it is missing, and prove by a file that it can be written, before anybody trains for it.

    Raises:
        ConfigurationError: it cannot.
    """
    folder = Path(path)
    hint = "give a folder that all workers can write, or make room"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise ConfigurationError(f"the checkpoint folder cannot be written: {error.strerror}", where=str(path), hint=hint) from error


def check_own(path: str | Path, job: str) -> None:
    """For a fresh start: a folder with another job's checkpoints would take none of this one's.

    Raises:
        ConfigurationError: it holds some, with the job's name.
        OperationalError: the folder cannot be listed.
    """
    for entry in scan(path):
        if entry.state == "restorable" and entry.job != job:
            hint = "give this job a folder of its own, or go on from them without --fresh"
            raise ConfigurationError(f"holds checkpoints of job {entry.job} ({entry.name})", where=str(path), hint=hint)


def highest_generation(path: str | Path) -> int:
    """Highest generation that any directory of the folder names, 0 when none: a new cluster continues above it."""
    return max((entry.generation for entry in scan(path)), default=0)


def set_aside(directory: str | Path, reason: str) -> None:
    """Mark a checkpoint as damaged. Nothing is deleted; `catalog.scan` tells the reason from now on."""
    note = Path(directory) / DAMAGED_NAME
    try:
        with note.open("xb") as file:
            file.write(msgspec.json.encode({"reason": reason}) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return
