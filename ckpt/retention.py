"""What may be deleted. One owner a job (the committing agent), and only what a record or a name of ours covers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path

import msgspec

from regrow.ckpt.catalog import CatalogEntry, scan
from regrow.ckpt.manifest import RECORD_NAME, parse_directory
from regrow.ckpt.recycling import TRASH
from regrow.errors import ConfigurationError, OperationalError

_METRIC = re.compile(r"[A-Za-z0-9_./-]+")


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How much is kept."""

    keep_last: int = 3
    """Newest restorable checkpoints; at least one is always kept."""
    keep_every_steps: int = 0
    """Also keep those whose step is a multiple of this; 0: none."""
    keep_every_seconds: float = 0.0
    """Also keep one in each interval of this length, by the time written; 0: none."""
    keep_best: int = 0
    """Also keep so many with the best values of `best_metric`; 0: none."""
    best_metric: str = ""
    best_is_highest: bool = False
    """False: the lowest is the best."""


def check_metric(name: str) -> str:
    """The name of a metric, when it can be one.

    Raises:
        ConfigurationError: it holds what a flag could not name.
    """
    if not _METRIC.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no name of a metric", hint="letters, digits and _ . / - only, like held_out_loss")
    return name


def parse_best(text: str) -> tuple[str, int, bool]:
    """METRIC[:N][:max] as (name, how many, whether the highest is the best); N is 1, the lowest is the best by default.

    Raises:
        ConfigurationError: not of that form.
    """
    name, *rest = text.split(":")
    highest = bool(rest) and rest[-1] in ("max", "min")
    direction = rest.pop() if highest else "min"
    number = rest.pop() if rest else "1"
    if rest or not number.isdecimal() or int(number) < 1:
        raise ConfigurationError(f"{text!r} is not METRIC[:N][:max]", where="--keep-best", hint="like held_out_loss, or accuracy:2:max")
    return check_metric(name), int(number), direction == "max"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one directory, and why."""

    name: str
    step: int
    keep: bool
    reason: str


def choose(
    entries: list[CatalogEntry], policy: Retention, *, generation: int, protected: Collection[str] = (), barred: Collection[str] = ()
) -> list[Choice]:
    """Decide for every entry of a folder. Pure.

    Args:
        entries: From `catalog.scan`, newest first.
        policy: How much is kept.
        generation: The one that runs; leftovers of earlier ones are garbage.
        protected: Names of directories in use: the restore point of the running generation, verified ones.
        barred: Names of those that the store knows to be bad: none is the best, whatever it measured.
    """
    restorable = [entry for entry in entries if entry.state == "restorable"]
    newest_step = restorable[0].step if restorable else -1
    kept_last = {entry.name for entry in restorable[: max(1, policy.keep_last)]}
    spaced = _spaced(restorable, policy)
    good = [entry for entry in restorable if entry.name not in barred]
    top = best(good, policy.best_metric, count=policy.keep_best, highest=policy.best_is_highest)
    choices: list[Choice] = []
    for entry in entries:
        reason = ""
        if entry.name in protected:
            reason = "protected"
        elif entry.state == "damaged":
            reason = "damaged: set aside for you to look at"
        elif entry.state == "partial":
            over = entry.generation < generation or (entry.generation == generation and entry.step < newest_step)
            reason = "" if over else "may still be written"
        elif entry.name in kept_last:
            reason = "newest" if restorable and entry is restorable[0] else f"one of the last {policy.keep_last}"
        elif entry.name in top:
            reason = f"one of the best {policy.keep_best} by {policy.best_metric}"
        elif entry.name in spaced:
            reason = "kept at an interval"
        what = "never became a checkpoint" if entry.state == "partial" else f"older than the last {policy.keep_last}"
        choices.append(Choice(name=entry.name, step=entry.step, keep=bool(reason), reason=reason or what))
    return choices


def best(restorable: Collection[CatalogEntry], metric: str, *, count: int, highest: bool = False) -> list[str]:
    """Names of the checkpoints with the best values, the best first; equal values: the later measurement first. Pure.

    A value holds for the state that it was measured of: of several checkpoints that carry one measurement only the first counts.
    """
    first: dict[tuple[float, int], CatalogEntry] = {}
    for entry in sorted(restorable, key=lambda one: one.sequence):
        found = entry.metrics.get(metric)
        if found is not None:
            first.setdefault((found.value, found.step), entry)
    ranked = sorted(first, key=lambda held: (-held[0] if highest else held[0], -held[1]))
    return [first[held].name for held in ranked[: max(0, count)]]


def _spaced(restorable: list[CatalogEntry], policy: Retention) -> set[str]:
    kept: set[str] = set()
    seen: set[int] = set()
    for entry in reversed(restorable):
        if policy.keep_every_steps and entry.step % policy.keep_every_steps == 0:
            kept.add(entry.name)
        if policy.keep_every_seconds:
            interval = int(entry.written_at // policy.keep_every_seconds)
            if interval not in seen:
                seen.add(interval)
                kept.add(entry.name)
    return kept


def prune(
    path: str | Path,
    policy: Retention,
    *,
    generation: int,
    protected: Collection[str] = (),
    barred: Collection[str] = (),
    dry_run: bool = False,
    recycle: bool = False,
) -> list[Choice]:
    """Apply the policy to a folder. Call it after a publication, from the one owner. A missing folder is fine.

    A directory leaves in one rename before its content goes, so no reader ever sees half a checkpoint.

    `recycle`: the tensor data stays in the trash until the next call, for writers that run (`regrow.ckpt.recycling`).

    Raises:
        OperationalError: the folder cannot be listed, or a directory cannot be removed.
    """
    folder = Path(path)
    choices = choose(scan(folder, strict=False), policy, generation=generation, protected=protected, barred=barred)
    if dry_run:
        return choices
    _empty_trash(folder)
    for choice in choices:
        if not choice.keep:
            _remove(folder, choice.name, recycle=recycle)
    return choices


def _remove(folder: Path, name: str, *, recycle: bool) -> None:
    trash = folder / f"{TRASH}{name}-{uuid.uuid4().hex[:8]}"
    try:
        (folder / name).rename(trash)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OperationalError(f"cannot be removed: {error.strerror}", where=str(folder / name), hint="check permissions") from error
    if recycle:
        with contextlib.suppress(OSError):
            (trash / RECORD_NAME).unlink(missing_ok=True)
    else:
        shutil.rmtree(trash, ignore_errors=True)


def _empty_trash(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as items:
        for item in items:
            inner = item.name.removeprefix(TRASH).rpartition("-")[0]
            if item.name.startswith(TRASH) and parse_directory(inner):
                shutil.rmtree(item.path, ignore_errors=True)
