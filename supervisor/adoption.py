"""A store that lost its memory: emptied, or restored from an older snapshot, while agents and training go on.

`regrow supervisor --adopt` rebuilds the store from what agents run and what lies on storage, without touching a worker, and
says what could not be known. Without the flag nothing is rebuilt: an empty store may as well be a wrong address.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from pathlib import Path

import msgspec

from regrow import wire
from regrow.ckpt import verify
from regrow.store.base import Comparison, Operation, Put, Store, StoreError, mod_revision, version
from regrow.supervisor import orders
from regrow.supervisor.core import events as e
from regrow.supervisor.core.commits import committed
from regrow.supervisor.core.records import LedgerRecord
from regrow.supervisor.effects import Members
from regrow.supervisor.keys import Keys
from regrow.supervisor.loading import on_storage
from regrow.supervisor.term import Term

log = logging.getLogger("regrow.supervisor.adoption")

_CHUNK_NODES = 128
_CHUNK_RECORDS = 64


def newer(running: wire.RunningGeneration, loaded: e.JobLoaded | None) -> bool:
    """Whether agents run a generation that the store does not know. In a store that kept its memory the record comes first."""
    if running.spec is None or running.job_spec is None:
        return False
    return loaded is None or running.generation > loaded.highest_generation


def told(hellos: list[wire.Hello]) -> dict[str, list[wire.Hello]]:
    """{job: agents that run its highest generation}."""
    found: dict[str, list[wire.Hello]] = {}
    for hello in hellos:
        running = hello.running
        if running is None:
            continue
        known = found.get(running.job)
        number = known[0].running.generation if known and known[0].running is not None else -1
        if running.generation > number:
            found[running.job] = [hello]
        elif known is not None and running.generation == number:
            known.append(hello)
    return found


async def adopt(term: Term, store: Store, keys: Keys, loaded: tuple[e.JobLoaded, ...], *, limit_seconds: float) -> None:
    """Wait for agents to tell what they run; write and load each job as they run it, or as the store has it where it is no older.

    Raises:
        StoreError: the store did not take it, or this term is over.
    """
    stored = {job.spec.job: job for job in loaded}
    await _all_told(term, stored, limit_seconds)
    running = told(list(term.hellos.values()))
    for name in sorted({*stored, *running}):
        known, hellos = stored.get(name), running.get(name, [])
        first = hellos[0].running if hellos else None
        if first is not None and newer(first, known):
            await _take_over(term, store, keys, known, hellos)
        elif known is not None:
            term.post(known)
        else:
            log.error("job=%s runs, and its agents do not tell its specification: submit it again", name)
    term.post(*(e.NodeJoined(at=term.now(), hello=hello) for hello in term.hellos.values()))


async def _all_told(term: Term, stored: dict[str, e.JobLoaded], limit_seconds: float) -> None:
    """Until every member of what is told to run has spoken, or the time is over."""

    active = {name for name, job in stored.items() if job.generation is not None}

    def complete() -> bool:
        running = told(list(term.hellos.values()))
        jobs = {name: hellos[0].running for name, hellos in running.items()}
        specs = [one.spec for one in jobs.values() if one is not None and one.spec is not None]
        return bool(specs) and all(name in term.hellos for spec in specs for name in spec.nodes) and active <= set(jobs)

    try:
        async with asyncio.timeout(limit_seconds):
            while not complete():
                term.hello_came.clear()
                await term.hello_came.wait()
    except TimeoutError:
        log.warning("not every agent has told what it runs within %.1f s: %d have", limit_seconds, len(term.hellos))


async def _take_over(term: Term, store: Store, keys: Keys, known: e.JobLoaded | None, hellos: list[wire.Hello]) -> None:
    first = hellos[0].running
    assert first is not None
    assert first.spec is not None
    assert first.job_spec is not None
    spec, job_spec = first.spec, first.job_spec
    members = {hello.node: hello.running.workers for hello in hellos if hello.running is not None}
    members |= {name: () for name in spec.nodes if name not in members}
    stored = list(known.checkpoints) if known is not None else []
    found = await asyncio.to_thread(on_storage, job_spec, stored)
    ledger = known.ledger if known is not None and known.ledger is not None else LedgerRecord()
    ledger = msgspec.structs.replace(ledger, state="", reason="", exit_code=0, cause="")
    unknown = _unknown(known, hellos, spec, job_spec)
    highest = max(found.highest_generation, spec.generation, *(hello.highest_generation for hello in hellos))
    adopted = e.JobLoaded(
        at=term.now(),
        spec=job_spec,
        generation=spec,
        members=members,
        ledger=ledger,
        command="run",
        checkpoints=found.checkpoints,
        highest_generation=highest,
        num_damaged=found.num_damaged,
        unknown=unknown,
    )
    mark, revision = await _write(term, store, keys, adopted)
    term.effects.generation_revisions[job_spec.job] = revision
    for line in unknown:
        log.warning("job=%s adopted: %s", job_spec.job, line)
    term.post(msgspec.structs.replace(adopted, mark=mark))


def _unknown(known: e.JobLoaded | None, hellos: list[wire.Hello], spec: wire.GenerationSpec, job_spec: wire.JobSpec) -> tuple[str, ...]:
    """What could not be known, in sentences for people."""
    lines: list[str] = []
    if known is None:
        lines.append("the restart ledger is empty: charges before the adoption are not known")
        lines.append("quarantine and cordons are only those that the store still has")
        lines.append("an operator's command before the adoption is not known: the job is taken to run")
    else:
        lines.append(f"the store had generation {known.highest_generation}, agents run {spec.generation}: charges in between are not known")
        if known.command != "run":
            lines.append(f"the store says {known.command!r}, which is older than generation {spec.generation}: give it again if it holds")
    silent = [name for name in spec.nodes if name not in {hello.node for hello in hellos}]
    if silent:
        lines.append(f"{len(silent)} members of generation {spec.generation} have not told that they run it: {', '.join(silent[:8])}")
    path = job_spec.checkpoint.path
    if path and not Path(path).is_dir():
        lines.append(f"checkpoints: {path} cannot be seen from this host, only committed ones of the store are known")
    return tuple(lines)


async def _write(term: Term, store: Store, keys: Keys, adopted: e.JobLoaded) -> tuple[str, int]:
    """The job's records under the leader's comparison, the generation last: until then agents commit nothing. The mark of the journal's
    entry, and the generation's mod_revision."""
    spec, members, job = adopted.generation, adopted.members, adopted.spec.job
    assert spec is not None
    names = list(spec.nodes)
    chunks = [names[start : start + _CHUNK_NODES] for start in range(0, len(names), _CHUNK_NODES)]
    early: list[Operation] = [
        Put(keys.members(job, spec.generation, index), msgspec.json.encode(Members(nodes={name: members[name] for name in chunk})))
        for index, chunk in enumerate(chunks)
    ]
    early += [Put(keys.checkpoint(job, record.step), msgspec.json.encode(record)) for record in adopted.checkpoints]
    for start in range(0, len(early), _CHUNK_RECORDS):
        await _transact(term, store, early[start : start + _CHUNK_RECORDS])
    record = wire.GenerationRecord(
        number=spec.generation,
        epoch=spec.epoch,
        mesh=spec.mesh,
        committing_node=spec.committing_node,
        num_members=len(spec.nodes),
        members_hash=hashlib.sha256(msgspec.json.encode(members)).hexdigest()[:16],
        spec=spec,
    )
    last: list[Operation] = [
        Put(keys.job(job, "spec"), msgspec.json.encode(adopted.spec)),
        Put(keys.job(job, "ledger"), msgspec.json.encode(adopted.ledger)),
        Put(keys.job(job, "command"), msgspec.json.encode(wire.CommandRecord(command="run", by="adoption"))),
        Put(keys.job(job, "generation"), msgspec.json.encode(record)),
    ]
    return await orders.write(term, store, keys, last, adopted)


async def _transact(term: Term, store: Store, operations: list[Operation]) -> None:
    compare: list[Comparison] = [term.effects.comparison] if term.effects.comparison is not None else []
    result = await store.transaction(compare, operations)
    if not result.succeeded:
        raise StoreError("this supervisor's term is over", where="adoption")


async def record_pending(term: Term, store: Store, keys: Keys, loaded: e.JobLoaded) -> wire.CheckpointRecord | None:
    """The newest durable checkpoint of the last granted generation that the store does not have, written by compare-and-swap after
    every byte of it was read back. None: there is none, or it was not as it had been written.

    Raises:
        StoreError: the store did not take it.
    """
    generation, job = loaded.generation, loaded.spec.job
    known = term.effects.generation_revisions.get(job)
    if generation is None or known is None:
        return None
    durable = [record for record in loaded.checkpoints if record.generation == generation.generation and not record.damaged]
    if not durable:
        return None
    newest = max(durable, key=lambda record: record.step)
    key = keys.checkpoint(job, newest.step)
    if await store.get(key) is not None:
        return None
    checked = await asyncio.to_thread(verify.verify, Path(newest.directory))
    if not checked.valid:
        why = "; ".join(f"{problem.file}: {problem.detail}" for problem in checked.problems[:3])
        log.error("job=%s step=%d is durable and not as it was written: %s", job, newest.step, why)
        term.post(committed(job, msgspec.structs.replace(newest, damaged=why), term.now()))
        return None
    record = msgspec.structs.replace(newest, evidence=("read_back",))
    compare = [version(key) == 0, mod_revision(keys.job(job, "generation")) == known]
    compare += [term.effects.comparison] if term.effects.comparison is not None else []
    told = msgspec.json.encode(wire.checkpoint_event(job, record, term.now()))
    mark = wire.checkpoint_mark(job, record.generation, record.step)
    result = await store.transaction(compare, [Put(key, msgspec.json.encode(record)), Put(keys.event(mark), told)])
    if not result.succeeded:
        return None
    log.info("job=%s step=%d was durable and pending: committed after reading it back", job, newest.step)
    term.post(committed(job, record, term.now()))
    return record
