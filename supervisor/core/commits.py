"""A checkpoint record of the store as a fact."""

from __future__ import annotations

from regrow import wire
from regrow.supervisor.core import events as e


def committed(job: str, record: wire.CheckpointRecord, at: float) -> e.CheckpointMoved:
    """What the store says of a checkpoint that is committed, to the core: of a watch, a listing, or the simulator's store."""
    return e.CheckpointMoved(
        at=at,
        job=job,
        generation=record.generation,
        step=record.step,
        state="committed",
        directory=record.directory,
        record_digest=record.record_digest,
        samples=record.samples,
        num_bytes=record.num_bytes,
        evidence=record.evidence,
        damaged=record.damaged,
    )
