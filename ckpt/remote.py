"""A second tier of a checkpoint folder in an object store or on another file system (fsspec): mirror, list, fetch, retention.

The objects are the files of a checkpoint as they are, under ``<url>/<directory>/``. As on a disk only the record makes a
checkpoint: it is uploaded last, and created only if it is not there yet (a conditional PUT on S3), so two that mirror the
same folder cannot tear each other's. A removal takes the record away first.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from regrow.ckpt import catalog
from regrow.ckpt.commit import publish
from regrow.ckpt.manifest import (
    RECORD_NAME,
    DamagedCheckpointError,
    Record,
    RemovedCheckpointError,
    parse_directory,
    parse_record,
    read_record,
)
from regrow.ckpt.verify import verify
from regrow.errors import ConfigurationError, OperationalError
from regrow.syncing import sync_directory

Progress = Callable[[int, int], None]


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint in the second tier."""

    directory: str
    record: Record


class Mirrored(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass of `mirror` did."""

    uploaded: tuple[str, ...]
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    num_bytes: int


class Tier:
    """A folder behind a URL such as s3://bucket/job, gs://bucket/job or file:///mnt/job."""

    def __init__(self, url: str) -> None:
        """Open it.

        Raises:
            ConfigurationError: fsspec or the package for this kind of URL is not installed, or the URL cannot be used.
        """
        try:
            import fsspec
        except ImportError as error:
            raise ConfigurationError("fsspec is not installed", where=url, hint="pip install 'regrow[objects]'") from error
        try:
            self._makes_folders = "file" in fsspec.core.split_protocol(url)[0:1] or "://" not in url
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"cannot be used: {error}", where=url, hint="s3://bucket/folder, gs://… or file:///…") from error
        self.url = url
        self._root = str(root).rstrip("/")

    def scan(self) -> list[Remote]:
        """All checkpoints, newest first; what has no record is none.

        Raises:
            OperationalError: it cannot be listed, which is never read as "no checkpoints".
        """
        found: list[Remote] = []
        for name in self._names():
            data = self._read(f"{self._root}/{name}/{RECORD_NAME}")
            if data is None:
                continue
            try:
                found.append(Remote(directory=name, record=parse_record(data, Path(name) / RECORD_NAME)))
            except DamagedCheckpointError:
                continue  # never restored, and overwritten by nobody
        return sorted(found, key=lambda one: one.record.sequence, reverse=True)

    def upload(self, directory: Path, *, progress: Progress | None = None) -> int:
        """Put a checkpoint there, its record last. Returns the bytes; 0 when it was there already.

        Raises:
            RemovedCheckpointError: retention was faster; what was copied of it has no record and counts as nothing.
            OperationalError: the store refuses or cannot be reached.
        """
        target = f"{self._root}/{directory.name}"
        record = read_record(directory)
        if self._read(f"{target}/{RECORD_NAME}") is not None:
            return 0
        done = 0
        with _Told("cannot be written", target):
            if self._makes_folders:
                self._fs.makedirs(target, exist_ok=True)  # an object store has no folders, and a bucket is not ours to make
            for entry in record.files:
                if not (directory / entry.name).exists():
                    raise _missing(directory, entry.name)
                self._fs.put_file(str(directory / entry.name), f"{target}/{entry.name}")
                done += entry.size_bytes
                if progress is not None:
                    progress(done, record.num_bytes)
            try:
                last = (directory / RECORD_NAME).read_bytes()  # still there: so were all files until now
            except FileNotFoundError as error:
                raise _missing(directory, RECORD_NAME) from error
            try:
                self._fs.pipe_file(f"{target}/{RECORD_NAME}", last, mode="create")
            except FileExistsError:
                return 0  # another one mirrored the same checkpoint: the bytes are the same
        return done

    def download(self, remote: Remote, folder: Path, *, progress: Progress | None = None) -> Path:
        """Bring a checkpoint into a folder; it appears when every byte of it has been verified.

        Raises:
            OperationalError: the store cannot be read, or what it holds is not what was committed.
        """
        target = folder / remote.directory
        if (target / RECORD_NAME).exists():
            return target
        temporary = folder / f".{remote.directory}.{uuid.uuid4().hex[:8]}.part"
        source, done = f"{self._root}/{remote.directory}", 0
        try:
            temporary.mkdir(parents=True)
            with _Told("cannot be read", source):
                for entry in remote.record.files:
                    self._fs.get_file(f"{source}/{entry.name}", str(temporary / entry.name))
                    done += entry.size_bytes
                    if progress is not None:
                        progress(done, remote.record.num_bytes)
                publish(temporary, RECORD_NAME, self._fs.cat_file(f"{source}/{RECORD_NAME}"))
            result = verify(temporary)
            if not result.valid:
                first = next(problem for problem in result.problems if problem.kind != "unknown")
                raise DamagedCheckpointError(f"is damaged: {first.file}: {first.detail}", where=f"{self.url}/{remote.directory}")
            temporary.rename(target)
            sync_directory(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return target

    def remove(self, name: str) -> None:
        """Take a checkpoint away: its record first, so that nobody restores half of it."""
        target = f"{self._root}/{name}"
        with _Told("cannot be removed", target):
            self._fs.rm_file(f"{target}/{RECORD_NAME}")
            self._fs.rm(target, recursive=True)

    def _names(self) -> list[str]:
        with _Told("cannot be listed", self.url):
            self._fs.invalidate_cache()
            try:
                listed: list[Any] = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        return [name for path in listed if parse_directory(name := str(path).rstrip("/").rsplit("/", 1)[-1])]

    def _read(self, path: str) -> bytes | None:
        with _Told("cannot be read", path):
            try:
                return self._fs.cat_file(path)
            except FileNotFoundError:
                return None


def _missing(directory: Path, name: str) -> DamagedCheckpointError:
    if (directory / RECORD_NAME).exists():
        return DamagedCheckpointError("is missing", where=str(directory / name), hint="`regrow ckpt verify` says what else is wrong")
    return RemovedCheckpointError("was removed while it was being copied", where=str(directory))


class _Told:
    """Turns what a store's client raises into an OperationalError."""

    def __init__(self, what: str, where: str) -> None:
        self._what = what
        self._where = where

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, OperationalError | ConfigurationError):
            hint = "check address, credentials and network; nothing is concluded from a store that does not answer"
            raise OperationalError(f"{self._what}: {error or type(error).__name__}", where=self._where, hint=hint) from error


def mirror(folder: Path, tier: Tier, *, keep: int, progress: Progress | None = None) -> Mirrored:
    """One pass: upload the newest restorable checkpoints that are not there, remove what is older than the last `keep`.

    Args:
        folder: The job's checkpoints.
        tier: Where to.
        keep: How many to have there; at least the newest complete one stays.
        progress: Of the upload in progress.

    Raises:
        OperationalError: the folder or the store cannot be used.
    """
    newest = [entry for entry in catalog.scan(folder) if entry.state == "restorable"][:keep]
    uploaded: list[str] = []
    num_bytes = 0
    for entry in newest:
        try:
            count = tier.upload(Path(entry.directory), progress=progress)
        except RemovedCheckpointError:
            continue  # a newer one is there, or the next pass finds it
        num_bytes += count
        uploaded += [entry.name] if count else []
    aside = {entry.name for entry in catalog.scan(folder) if entry.state == "damaged"}
    there = [remote for remote in tier.scan() if remote.directory not in aside]
    kept = {remote.directory for remote in there[: max(1, keep)]}
    gone = [remote.directory for remote in tier.scan() if remote.directory not in kept] if kept else []
    for name in gone:
        tier.remove(name)
    return Mirrored(uploaded=tuple(uploaded), removed=tuple(gone), kept=tuple(sorted(kept)), num_bytes=num_bytes)


def fetch(tier: Tier, folder: Path, *, step: int | None = None, progress: Progress | None = None) -> Path:
    """Bring the newest checkpoint (or that of a step) into a folder.

    Raises:
        ConfigurationError: there is none.
        OperationalError: the store cannot be read; all candidates are damaged.
    """
    candidates = [remote for remote in tier.scan() if step is None or remote.record.step == step]
    if not candidates:
        which = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise ConfigurationError(f"there is not {which} there", where=tier.url, hint="`regrow ckpt ls` on the folder that was mirrored")
    problems: list[str] = []
    for remote in candidates:
        try:
            return tier.download(remote, folder, progress=progress)
        except DamagedCheckpointError as error:
            problems.append(str(error))
    raise OperationalError(f"no checkpoint there is intact: {'; '.join(problems)}", where=tier.url)
