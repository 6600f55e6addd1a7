"""Taking up a job: its records in one transaction, then the facts for the core."""

from __future__ import annotations

import asyncio

import msgspec

from regrow import wire
from regrow.errors import ConfigurationError
from regrow.ids import check_name
from regrow.parallel.planner import choose_mesh
from regrow.store.base import Put, Store
from regrow.supervisor import orders
from regrow.supervisor.core import events as e
from regrow.supervisor.core.records import LedgerRecord
from regrow.supervisor.core.view import JobView
from regrow.supervisor.keys import Keys
from regrow.supervisor.loading import on_storage
from regrow.supervisor.term import Term


def validate(spec: wire.JobSpec) -> None:
    """Refuse a job that can never run.

    Raises:
        ConfigurationError: what is wrong, and which flag to change.
    """
    check_name("job", spec.job)
    if not spec.argv or not spec.argv[0]:
        raise ConfigurationError("no script is given", where="argv", hint="argv is the script path, then its arguments")
    if spec.nproc_per_node < 1:
        raise ConfigurationError(f"nproc_per_node = {spec.nproc_per_node}", where="--nproc-per-node", hint="use at least 1")
    if not 1 <= spec.min_nodes <= spec.max_nodes:
        raise ConfigurationError(
            f"min_nodes = {spec.min_nodes}, max_nodes = {spec.max_nodes}", where="--nnodes", hint="use MIN:MAX with 1 <= MIN <= MAX"
        )
    most = spec.max_nodes * spec.nproc_per_node
    if spec.mesh is not None and spec.mesh.world_size > most:
        raise ConfigurationError(
            f"mesh {spec.mesh} needs {spec.mesh.world_size} workers, {spec.max_nodes} nodes with {spec.nproc_per_node} have {most}",
            where="--mesh",
            hint="make the mesh smaller, or raise --nnodes or --nproc-per-node",
        )
    for workers, mesh in spec.mesh_table.items():
        if mesh.world_size > workers:
            raise ConfigurationError(f"mesh {mesh} needs {mesh.world_size} workers, the entry is for {workers}", where="mesh_table")
    if choose_mesh(spec, most) is None:
        raise ConfigurationError(
            f"no legal mesh for {most} workers keeps a global batch of {spec.global_batch} in micro-batches of {spec.micro_batch}",
            where="--mesh, --global-batch",
            hint="`regrow plan` lists what is possible and why the rest is not",
        )


async def submit(term: Term, store: Store, keys: Keys, spec: wire.JobSpec, now: float) -> None:
    """Write the job's records, then tell the core.

    Raises:
        ConfigurationError: it can never run, or another job of this name runs.
        StoreError: the store did not take it, or this term is over.
    """
    validate(spec)
    known = term.view.jobs.get(spec.job)
    if known is not None and known.outcome is None and known.spec == spec:
        return
    if known is not None and known.outcome is None and _is_active(term, known):
        raise ConfigurationError(
            f"job {spec.job!r} runs already with another specification",
            where=f"job {spec.job}",
            hint=f"`regrow job stop {spec.job}` first, or choose another name",
        )
    _check_folder(term, spec)
    ledger = known.ledger if known is not None else _stored_ledger(await store.get(keys.job(spec.job, "ledger")))
    fresh = LedgerRecord(frontier=0 if spec.checkpoint.fresh_start else ledger.frontier)
    loaded = e.JobLoaded(at=now, spec=spec, ledger=fresh, submitted=True)
    writes = [
        Put(keys.job(spec.job, "spec"), msgspec.json.encode(spec)),
        Put(keys.job(spec.job, "ledger"), msgspec.json.encode(fresh)),
        Put(keys.job(spec.job, "command"), msgspec.json.encode(wire.CommandRecord(command="run", by="submit"))),
    ]
    mark, _ = await orders.write(term, store, keys, writes, loaded)
    listing = await store.get_prefix(f"{keys.jobs}{spec.job}/checkpoints/")
    stored = [msgspec.json.decode(item.value, type=wire.CheckpointRecord) for item in listing]
    found = await asyncio.to_thread(on_storage, spec, stored)
    item = await store.get(keys.job(spec.job, "generation"))
    number = 0
    if item is not None:
        number = msgspec.json.decode(item.value, type=wire.GenerationRecord).number
        term.effects.generation_revisions[spec.job] = item.mod_revision
    term.post(
        msgspec.structs.replace(
            loaded,
            mark=mark,
            checkpoints=() if spec.checkpoint.fresh_start else found.checkpoints,
            num_damaged=0 if spec.checkpoint.fresh_start else found.num_damaged,
            highest_generation=max(number, found.highest_generation, known.highest_generation if known is not None else 0),
        )
    )


def _check_folder(term: Term, spec: wire.JobSpec) -> None:
    """Two jobs that run must not share a folder: the retention of one deletes what the other needs."""
    path = spec.checkpoint.path
    for other in term.view.jobs.values():
        if path and other.spec.job != spec.job and other.outcome is None and other.spec.checkpoint.path == path:
            raise ConfigurationError(
                f"job {other.spec.job!r} has this checkpoint folder and is not over",
                where=path,
                hint=f"give each job a folder of its own; `regrow ckpt fork` starts one from a checkpoint of {other.spec.job}",
            )


def _is_active(term: Term, job: JobView) -> bool:
    return any(node.running is not None and node.running[0] == job.spec.job for node in term.view.nodes.values())


def _stored_ledger(item: object) -> LedgerRecord:
    value = getattr(item, "value", None)
    return msgspec.json.decode(value, type=LedgerRecord) if isinstance(value, bytes) else LedgerRecord()
