"""Values that both events and actions carry, and that are written to the store."""

from __future__ import annotations

from typing import Literal

import msgspec

from regrow import wire
from regrow.ids import MeshShape


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """One incident's entry in the restart ledger."""

    at: float
    cause: str
    generation: int
    incident: str
    step: int = -1
    """The frontier when it happened."""
    fingerprint: str = ""
    early: bool = False
    """A program error before the first step ever: the same start would fail again."""
    ran_seconds: float = 0.0
    """How long a script without step reports had run: its only sign of progress."""
    text: str = ""


class EffortRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a job got and what it made of it, over all leaders' terms: the accumulators of goodput and ETTR."""

    since: float
    """Unix seconds."""
    until: float
    """Up to when it is counted."""
    reserved_gpu_seconds: float = 0.0
    num_reserved: int = 0
    productive_seconds: float = 0.0
    best_gpu_seconds_per_step: float | None = None
    base_step: int = 0
    """Steps before this one were not made on this account."""
    frontier: int = 0
    """Completed steps at `until`."""


class LearnedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """/jobs/<job>/learned: times from which limits follow. Survives the leader."""

    generation: int = -1
    """The last one that completed a step."""
    step_seconds: float | None = None
    """Median of the last steps."""
    phase_seconds: dict[str, float] = {}
    """{phase: longest of the last ones}."""
    version: int = wire.PROTOCOL_VERSION


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A device of a node."""

    node: str
    device: str = ""
    """GPU UUID; empty: not known."""
    slot: int = 0


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks had after a step, and where they ran."""

    digests: dict[int, str]
    places: dict[int, Place]


class Undecided(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas that differed without a majority. The step comes again after the roll-back, from the same state: what it gives then tells."""

    step: int
    mesh: MeshShape
    tries: tuple[Try, ...]
    """The first time and each time since."""


class Accused(msgspec.Struct, frozen=True, kw_only=True):
    """A device that was shown to be wrong and does not train any more: nothing has to be rolled back for it."""

    at: float
    place: Place
    text: str


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """/jobs/<job>/ledger: charges and how the job ended. Survives the leader."""

    charges: tuple[Charge, ...] = ()
    restored_at: float | None = None
    """Charges up to this instant do not count any more."""
    frontier: int = 0
    state: str = ""
    """done, failed, stopped; empty: goes on."""
    reason: str = ""
    exit_code: int = 0
    cause: str = ""
    num_incidents: int = 0
    forgotten: dict[str, int] = {}
    """{cause: number} of charges that are too old to be kept one by one."""
    num_from_memory: int = 0
    """Charges after which the job went on from memory, not from storage."""
    since: float = 0.0
    """When the job was submitted, Unix seconds: failures over a shorter time would be a higher rate. 0: not known."""
    effort: EffortRecord | None = None
    """Written now and then while the job trains."""
    undecided: Undecided | None = None
    """The last digests of which none had a majority."""
    version: int = wire.PROTOCOL_VERSION


class QuarantineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """/quarantine/<hardware-id>: one piece of hardware that is not trusted."""

    key: str
    state: Literal["healthy", "suspect", "quarantined", "burn_in", "probation"]
    since: float
    until: float | None = None
    """When the state may end by time."""
    strikes: int = 0
    reason: str = ""
    node: str = ""
    evidence: tuple[str, ...] = ()
    boot_id: str = ""
    """Boot of the host when it was quarantined: another one is evidence of a repair."""
    suspicion: float = 0.0
    """Results that were wrong once and right when repeated, as of `suspected_at`: it halves in two weeks and is counted on in later jobs."""
    suspected_at: float | None = None
    suspected_by: str = ""
    """The last one that was counted: job/generation/rank/number."""
    version: int = wire.PROTOCOL_VERSION


class IncidentSeed(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an incident when it is decided upon."""

    id: str
    kind: str
    """node_lost, unreachable, worker_exit, hang, sdc, unhealthy, leaving, restore_refused, start_failed, returned_empty, growth,
    operator ..."""
    cause: str
    """infrastructure, preemption, program, unknown; empty: planned, nothing is charged."""
    symptom_at: float
    detected_at: float
    node: str = ""
    rank: int = -1
    text: str = ""
    rung: str = ""
