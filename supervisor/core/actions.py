"""Everything that the core can order: a closed union. An action is idempotent where it lands; ids are (epoch, seq)."""

from __future__ import annotations

from typing import Literal

import msgspec

from regrow import wire
from regrow.supervisor.core.records import Charge, IncidentSeed, LedgerRecord, QuarantineRecord


class _Action(msgspec.Struct, frozen=True, kw_only=True, tag_field="action", omit_defaults=True):
    pass


class RecordGeneration(_Action, frozen=True, kw_only=True, tag="record_generation"):
    """Write the next generation by compare-and-swap, with its members and the ledger, in one transaction."""

    job: str
    spec: wire.GenerationSpec
    members: dict[str, tuple[wire.WorkerAssignment, ...]]
    incident: IncidentSeed | None = None
    charge: Charge | None = None
    ledger: LedgerRecord = LedgerRecord()
    damaged: dict[int, str] = {}
    """Checkpoints that must not be used again: {step: why}."""
    not_before: float | None = None
    """Back-off: members start no earlier."""


class StartMember(_Action, frozen=True, kw_only=True, tag="start_member"):
    """Tell a member to kill what is older and to start its workers."""

    job: str
    node: str
    generation: int
    group_rank: int
    master_address: str


class StopWorkers(_Action, frozen=True, kw_only=True, tag="stop_workers"):
    """Kill what a node runs of a job, up to this generation."""

    job: str
    node: str
    generation: int
    grace_seconds: float = 0.0
    reason: str = ""


class AskSave(_Action, frozen=True, kw_only=True, tag="ask_save"):
    """Ask all members for a save at the next agreed step boundary."""

    job: str
    generation: int
    nodes: tuple[str, ...]
    purpose: Literal["growth", "drain", "pause", "save-and-stop", "preempt"]
    stop_after: bool = False
    deadline_seconds: float = 60.0
    reason: str = ""


class EndBoundary(_Action, frozen=True, kw_only=True, tag="end_boundary"):
    """A save that was asked for is not waited for any more."""

    job: str
    reason: str


class TellRate(_Action, frozen=True, kw_only=True, tag="tell_rate"):
    """New failure rate for the interval controller of the workers."""

    job: str
    generation: int
    nodes: tuple[str, ...]
    failures_per_second: float
    tier_rates: wire.TierRates | None = None


class AskStacks(_Action, frozen=True, kw_only=True, tag="ask_stacks"):
    """Collect the stacks of all ranks."""

    job: str
    generation: int
    nodes: tuple[str, ...]


class AskReach(_Action, frozen=True, kw_only=True, tag="ask_reach"):
    """Let members try which of the others they can reach on the data network."""

    job: str
    generation: int
    peers: dict[str, tuple[str, ...]]
    """{member: those that it is to try}."""


class AskAgain(_Action, frozen=True, kw_only=True, tag="ask_again"):
    """Let some nodes try whether one that was put out as cut off can be reached on the data network again."""

    node: str
    witnesses: tuple[str, ...]


class ReleaseNode(_Action, frozen=True, kw_only=True, tag="release_node"):
    """A leaving node may go: nothing of it is in use."""

    node: str
    reason: str


class ClearHealth(_Action, frozen=True, kw_only=True, tag="clear_health"):
    """Tell an agent to end the conditions that it holds against its node: an operator says that it is repaired."""

    node: str


class SetQuarantine(_Action, frozen=True, kw_only=True, tag="set_quarantine"):
    """Write the state of a piece of hardware."""

    record: QuarantineRecord


class SetCheckpoint(_Action, frozen=True, kw_only=True, tag="set_checkpoint"):
    """Add evidence to a checkpoint's record, or mark it damaged."""

    job: str
    step: int
    generation: int
    evidence: tuple[str, ...] = ()
    damaged: str = ""


class ParkJob(_Action, frozen=True, kw_only=True, tag="park_job"):
    """Nothing can be formed now: the job waits, visibly, and goes on by itself when it can."""

    job: str
    reason: str
    state: Literal["parked", "paused"] = "parked"
    incident: IncidentSeed | None = None
    charge: Charge | None = None
    ledger: LedgerRecord = LedgerRecord()


class EndJob(_Action, frozen=True, kw_only=True, tag="end_job"):
    """The job is over."""

    job: str
    state: Literal["done", "failed", "stopped"]
    reason: str
    exit_code: int
    """0 done, 1 failed, 2 configuration, 3 finished but degraded; 78: do not requeue, the program is at fault."""
    cause: str = ""
    node: str = ""
    rank: int = -1
    traceback: str = ""
    ledger: LedgerRecord = LedgerRecord()


class SaveLedger(_Action, frozen=True, kw_only=True, tag="save_ledger"):
    """Write the ledger alone (a budget was restored, an incident's verdict was corrected)."""

    job: str
    ledger: LedgerRecord
    incident: str = ""
    """The one whose verdict is corrected: its charge is gone from the ledger, its cause is not known any more."""
    corrected: str = ""
    """What is known now."""


class Observe(_Action, frozen=True, kw_only=True, tag="observe"):
    """An automatic action that is only written down: what would have been done, and why it was not."""

    key: str
    kind: str
    would: str
    why: str
    job: str = ""
    node: str = ""


class Page(_Action, frozen=True, kw_only=True, tag="page"):
    """Call a person."""

    key: str
    reason: str
    job: str = ""
    node: str = ""


Action = (
    RecordGeneration
    | StartMember
    | StopWorkers
    | AskSave
    | EndBoundary
    | TellRate
    | AskStacks
    | AskReach
    | AskAgain
    | ReleaseNode
    | ClearHealth
    | SetQuarantine
    | SetCheckpoint
    | ParkJob
    | EndJob
    | SaveLedger
    | Observe
    | Page
)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now, why (with the numbers), and when to look again at the latest (None: at the next event)."""

    actions: tuple[Action, ...] = ()
    reason: str = ""
    wake_at: float | None = None
