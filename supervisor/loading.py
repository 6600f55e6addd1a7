"""What a new leader, or a job that was just submitted, starts from: the store's records, and what storage says of them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from regrow import wire
from regrow.ckpt import catalog
from regrow.errors import OperationalError
from regrow.store.base import Listing, Store
from regrow.supervisor import recent
from regrow.supervisor.core import events as e
from regrow.supervisor.core.records import LearnedRecord, LedgerRecord, QuarantineRecord
from regrow.supervisor.effects import Cordon, Incidents, Members
from regrow.supervisor.keys import Keys

log = logging.getLogger("regrow.supervisor.loading")
T = TypeVar("T")


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Events to begin with, and the revisions that compare-and-swaps need."""

    events: tuple[e.Event, ...]
    generation_revisions: dict[str, int]
    told: dict[str, wire.EventRecord]
    """The newest events of earlier terms, by their marks (`recent`)."""


async def load(store: Store, keys: Keys, now: float) -> Loaded:
    """Everything of the cluster that decisions depend on.

    Raises:
        StoreError: it cannot be read.
    """
    jobs = await store.get_prefix(keys.jobs)
    quarantined = await store.get_prefix(keys.quarantine)
    cordons = await store.get_prefix(keys.cordons)
    automation = await store.get(keys.automation)
    records = tuple(record for item in quarantined if (record := _read(item.key, item.value, QuarantineRecord)) is not None)
    orders = [order for item in cordons if (order := _read(item.key, item.value, Cordon)) is not None]
    events: list[e.Event] = [
        e.QuarantineLoaded(
            at=now,
            records=records,
            cordoned=tuple(order.node for order in orders),
            drained=tuple(order.node for order in orders if order.drain),
        )
    ]
    if automation is not None and automation.value == b"off":
        events.append(e.AutomationSwitched(at=now, on=False, by="store"))
    revisions: dict[str, int] = {}
    for name in sorted({item.key.removeprefix(keys.jobs).split("/", 1)[0] for item in jobs}):
        made, revision = await _job(keys, jobs, name, now)
        revisions |= {name: revision} if revision else {}
        events += [made] if made is not None else []
    return Loaded(events=tuple(events), generation_revisions=revisions, told=await recent.load(store, keys))


async def _job(keys: Keys, listing: Listing, name: str, now: float) -> tuple[e.JobLoaded | None, int]:
    prefix = f"{keys.jobs}{name}/"
    items = {item.key.removeprefix(prefix): item for item in listing if item.key.startswith(prefix)}
    spec = _value(items, "spec", wire.JobSpec)
    if spec is None:
        return None, 0
    generation = _value(items, "generation", wire.GenerationRecord)
    ledger = _value(items, "ledger", LedgerRecord)
    command = _value(items, "command", wire.CommandRecord)
    stored = [
        record
        for key, item in items.items()
        if key.startswith("checkpoints/") and (record := _read(item.key, item.value, wire.CheckpointRecord)) is not None
    ]
    found = await asyncio.to_thread(on_storage, spec, stored)
    members: dict[str, tuple[wire.WorkerAssignment, ...]] = {}
    if generation is not None:
        chunks = [item for key, item in items.items() if key.startswith(f"members/{generation.number}/")]
        for item in chunks:
            chunk = _read(item.key, item.value, Members)
            members |= chunk.nodes if chunk is not None else {}
    incidents = _value(items, "incidents", Incidents)
    over = ledger is not None and bool(ledger.state)
    loaded = e.JobLoaded(
        at=now,
        spec=spec,
        generation=generation.spec if generation is not None and not over else None,
        members=members if not over else {},
        ledger=ledger,
        learned=_value(items, "learned", LearnedRecord),
        incidents=incidents.items if incidents is not None else (),
        command=command.command if command is not None else "run",
        checkpoints=found.checkpoints,
        num_damaged=found.num_damaged,
        highest_generation=max(found.highest_generation, generation.number if generation is not None else 0),
    )
    return loaded, items["generation"].mod_revision if "generation" in items else 0


class OnStorage(msgspec.Struct, frozen=True, kw_only=True):
    """The store's list of checkpoints, corrected by what the folder holds."""

    checkpoints: tuple[wire.CheckpointRecord, ...]
    num_damaged: int = 0
    highest_generation: int = 0


def on_storage(spec: wire.JobSpec, stored: list[wire.CheckpointRecord]) -> OnStorage:
    """Compare the store's records with the folder, where this host can see it. A folder that it cannot see proves nothing."""
    path = spec.checkpoint.path
    if not path or not Path(path).is_dir():
        return OnStorage(checkpoints=tuple(stored))
    try:
        entries = catalog.scan(path)
    except OperationalError as error:
        log.warning("job=%s checkpoint folder is not listed: %s", spec.job, error)
        return OnStorage(checkpoints=tuple(stored))
    by_directory = {entry.directory: entry for entry in entries}
    checked: dict[int, wire.CheckpointRecord] = {}
    for record in stored:
        entry = by_directory.get(str(Path(record.directory).absolute()))
        problem = "its directory is gone" if entry is None else entry.problem if entry.state != "restorable" else ""
        checked[record.step] = msgspec.structs.replace(record, damaged=record.damaged or problem)
    known = {str(Path(record.directory).absolute()) for record in stored}
    num_damaged = 0
    for entry in entries:
        if entry.directory in known:
            continue
        if entry.state == "damaged":
            num_damaged += 1
        elif entry.state == "restorable" and (entry.step not in checked or checked[entry.step].damaged):
            checked[entry.step] = wire.CheckpointRecord(
                step=entry.step,
                generation=entry.generation,
                epoch=entry.epoch,
                directory=entry.directory,
                record_digest=entry.record_digest,
                samples=entry.samples,
                num_bytes=entry.num_bytes,
            )
    highest = max((entry.generation for entry in entries), default=0)
    return OnStorage(checkpoints=tuple(checked[step] for step in sorted(checked)), num_damaged=num_damaged, highest_generation=highest)


def _value(items: dict[str, Any], name: str, kind: type[T]) -> T | None:
    return _read(items[name].key, items[name].value, kind) if name in items else None


def _read(key: str, value: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.MsgspecError as error:
        log.error("key=%s is not readable: %s", key, error)  # noqa: TRY400  # foreign data, not a bug: no traceback
        return None
