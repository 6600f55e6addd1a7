"""Everything that the core can learn: a closed union of facts. Each has `at`, seconds on the supervisor's own clock.

Beats are not among them: the detector at the edge keeps them in a table and only its state changes become events.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from regrow import wire
from regrow.supervisor.core.actions import Action
from regrow.supervisor.core.records import LearnedRecord, LedgerRecord, QuarantineRecord
from regrow.supervisor.core.view import Incident


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    at: float


class _Order(_Event, frozen=True, kw_only=True):
    by: str = ""
    mark: str = ""
    """Name of the store's own entry of it (`supervisor.recent`)."""


class _OfGeneration(_Event, frozen=True, kw_only=True):
    job: str
    generation: int


# --- the supervisor itself -------------------------------------------------------------------------------------


class LeaderStarted(_Event, frozen=True, kw_only=True, tag="leader_started"):
    """A term began. Nodes must say anew what they run."""

    epoch: int
    supervisor: str = ""


class EpochRaised(_Event, frozen=True, kw_only=True, tag="epoch_raised"):
    """An agent had seen a higher epoch than ours: we went above it."""

    epoch: int


class StoreChanged(_Event, frozen=True, kw_only=True, tag="store_changed"):
    """The store answers again, or does not."""

    up: bool
    reason: str = ""


class Tick(_Event, frozen=True, kw_only=True, tag="tick"):
    """Time passed up to a wake-up that a decision asked for."""


class Issued(_Event, frozen=True, kw_only=True, tag="issued"):
    """An action was decided and is about to be dispatched. Folded before its dispatch."""

    seq: int
    action: Action
    reason: str = ""


class ActionFailed(_Event, frozen=True, kw_only=True, tag="action_failed"):
    """An action had no effect."""

    seq: int
    kind: str
    job: str = ""
    node: str = ""
    generation: int = 0
    reason: str
    fenced: bool = False


class AutomationSwitched(_Order, frozen=True, kw_only=True, tag="automation_switched"):
    """The one switch that stops every automatic action."""

    on: bool


# --- jobs ------------------------------------------------------------------------------------------------------


class JobLoaded(_Event, frozen=True, kw_only=True, tag="job_loaded"):
    """A job exists: just submitted, or read from the store by a new leader."""

    spec: wire.JobSpec
    generation: wire.GenerationSpec | None = None
    members: dict[str, tuple[wire.WorkerAssignment, ...]] = {}
    ledger: LedgerRecord | None = None
    learned: LearnedRecord | None = None
    command: str = "run"
    checkpoints: tuple[wire.CheckpointRecord, ...] = ()
    highest_generation: int = 0
    """Highest number that storage knows of: a new cluster continues above it."""
    num_damaged: int = 0
    """Checkpoints on storage that exist and cannot be used: a fresh start would be a silent loss."""
    submitted: bool = False
    incidents: tuple[Incident, ...] = ()
    """Those that leaders before this one wrote down, oldest first; the last may be open."""
    unknown: tuple[str, ...] = ()
    """Rebuilt from agents and storage after the store lost it: what could not be known."""
    mark: str = ""


class CommandGiven(_Order, frozen=True, kw_only=True, tag="command_given"):
    """An operator wants something of a job. It is in the store already."""

    job: str
    command: Literal["run", "stop", "save-and-stop", "pause", "abort"]


# --- nodes -----------------------------------------------------------------------------------------------------


class NodeJoined(_Event, frozen=True, kw_only=True, tag="node_joined"):
    """An agent connected and told what it is and runs."""

    hello: wire.Hello


class NodeDisconnected(_Event, frozen=True, kw_only=True, tag="node_disconnected"):
    """The connection closed: the agent process is gone. Its workers may live."""

    node: str
    reason: str = ""


class NodeSilent(_Event, frozen=True, kw_only=True, tag="node_silent"):
    """No beat for the silence limit."""

    node: str
    last_heard_at: float
    late: tuple[str, ...] = ()
    """Nodes that have not beaten for more than half of the limit: what took this one may have taken them. Told with the first of
    those that fall silent together."""
    late_until: float = 0.0
    """When the last of them would be silent, too."""


class NodeHeard(_Event, frozen=True, kw_only=True, tag="node_heard"):
    """A silent node beats again."""

    node: str


class LeaseExpired(_Event, frozen=True, kw_only=True, tag="lease_expired"):
    """The node's key left the store."""

    node: str


class SpareStoreChanged(_Event, frozen=True, kw_only=True, tag="spare_store_changed"):
    """The node's unused TCPStore has another address, or there is none."""

    node: str
    address: str


class NodeHealth(_Event, frozen=True, kw_only=True, tag="node_health"):
    """The node's health verdict changed."""

    node: str
    verdict: wire.HealthVerdict


class NodeLeaving(_Event, frozen=True, kw_only=True, tag="node_leaving"):
    """The node goes away in an orderly manner."""

    node: str
    reason: str
    notice_seconds: float = 0.0


class NodeCommandGiven(_Order, frozen=True, kw_only=True, tag="node_command_given"):
    """An operator's order on a node."""

    node: str
    command: Literal["cordon", "uncordon", "drain", "clear"]


class QuarantineLoaded(_Event, frozen=True, kw_only=True, tag="quarantine_loaded"):
    """What a new leader read from the store."""

    records: tuple[QuarantineRecord, ...] = ()
    cordoned: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()


# --- generations -----------------------------------------------------------------------------------------------


class GenerationRecorded(_OfGeneration, frozen=True, kw_only=True, tag="generation_recorded"):
    """The generation record is in the store: from here on lower ones cannot publish."""


class MemberPhase(_Event, frozen=True, kw_only=True, tag="member_phase"):
    """All workers of a node passed a phase."""

    node: str
    job: str
    generation: int
    phase: str
    step: int = -1
    seconds: float = 0.0
    detail: dict[str, object] = {}


class WorkersExited(_Event, frozen=True, kw_only=True, tag="workers_exited"):
    """Workers of a node ended."""

    node: str
    job: str
    generation: int
    exits: tuple[wire.WorkerExit, ...]


class StepsCompleted(_OfGeneration, frozen=True, kw_only=True, tag="steps_completed"):
    """Every rank applied `step`. `num_steps` steps since the last such event."""

    step: int
    num_steps: int = 1
    step_seconds: float = 0.0
    loss: float | None = None
    samples: int = 0
    tokens: int = 0
    learning_rate: float | None = None
    grad_norm: float | None = None
    slow: dict[int, float] = {}
    """{rank: by what share of the compute time it computes longer than it did, against the others}; rank -1: all."""


class DigestsReported(_OfGeneration, frozen=True, kw_only=True, tag="digests_reported"):
    """Digests of the full state of each rank after a step, for the vote over replicas."""

    step: int
    digests: dict[int, str]
    located: str = ""
    """When they differ: in which tensor and block, if that can be told."""


class AtRestMismatch(_OfGeneration, frozen=True, kw_only=True, tag="at_rest_mismatch"):
    """A rank's own state changed between two steps: that rank's memory is not to be trusted."""

    rank: int
    step: int
    tensor: str


class ReceivedWrong(_OfGeneration, frozen=True, kw_only=True, tag="received_wrong"):
    """Sharded parameters arrived otherwise in an all-gather than their owner had them at rest."""

    rank: int
    """Whose fault it is; -1: cannot be told."""
    step: int
    reason: str


class ReplayJudged(_OfGeneration, frozen=True, kw_only=True, tag="replay_judged"):
    """A sampled micro-step was done again and its gradients compared."""

    step: int
    verdict: wire.ReplayVerdict


class NonFiniteSeen(_OfGeneration, frozen=True, kw_only=True, tag="non_finite_seen"):
    """Something was infinite or NaN at a step: {rank: what}. Named parameters are of the rank's own gradient, before any sum."""

    step: int
    ranks: dict[int, str]
    again: tuple[int, ...] = ()
    """Ranks on which the same work gave it again when it was repeated."""


class ProgressStalled(_OfGeneration, frozen=True, kw_only=True, tag="progress_stalled"):
    """No rank's progress word changed for longer than the limit."""

    since: float
    limit_seconds: float
    ranks: tuple[wire.RankProgress, ...] = ()
    lingering: bool = False
    """The program is over (ranks ended with 0, or declared their end); `ranks` are those that neither end nor use CPU time."""


class ProgressResumed(_OfGeneration, frozen=True, kw_only=True, tag="progress_resumed"):
    """A stalled generation moves again."""


class OutputKept(_Event, frozen=True, kw_only=True, tag="output_kept"):
    """Evidence for people: stacks, last log lines."""

    node: str
    job: str
    generation: int
    rank: int
    kind: str
    text: str


class PeersWereProbed(_Event, frozen=True, kw_only=True, tag="peers_were_probed"):
    """A node tried to reach others on the data network. `job` is empty where one was tried that had been put out as cut off."""

    node: str
    job: str
    generation: int
    reached: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()


class RestoreWasRefused(_Event, frozen=True, kw_only=True, tag="restore_was_refused"):
    """A rank could not load the restore point."""

    node: str
    job: str
    generation: int
    rank: int
    step: int
    problem: str


class StartWasRefused(_Event, frozen=True, kw_only=True, tag="start_was_refused"):
    """An agent did not start a generation."""

    node: str
    job: str
    generation: int
    reason: str
    fenced: bool = False
    node_unusable: bool = False


class CheckpointMoved(_OfGeneration, frozen=True, kw_only=True, tag="checkpoint_moved"):
    """A checkpoint reached another state."""

    step: int
    state: Literal["snapshot", "durable", "committed", "pending", "failed", "skipped"]
    node: str = ""
    directory: str = ""
    record_digest: str = ""
    samples: int = 0
    stall_seconds: float = 0.0
    write_seconds: float = 0.0
    num_bytes: int = 0
    reason: str = ""
    tiers: tuple[wire.TierInterval, ...] = ()
    evidence: tuple[str, ...] = ()
    damaged: str = ""


class CheckpointGone(_Event, frozen=True, kw_only=True, tag="checkpoint_gone"):
    """Its owner removed a checkpoint (retention)."""

    job: str
    step: int
    generation: int = 0


Event = (
    LeaderStarted
    | EpochRaised
    | StoreChanged
    | Tick
    | Issued
    | ActionFailed
    | AutomationSwitched
    | JobLoaded
    | CommandGiven
    | NodeJoined
    | NodeDisconnected
    | NodeSilent
    | NodeHeard
    | LeaseExpired
    | SpareStoreChanged
    | NodeHealth
    | NodeLeaving
    | NodeCommandGiven
    | QuarantineLoaded
    | GenerationRecorded
    | MemberPhase
    | WorkersExited
    | StepsCompleted
    | DigestsReported
    | AtRestMismatch
    | ReceivedWrong
    | NonFiniteSeen
    | ReplayJudged
    | ProgressStalled
    | ProgressResumed
    | OutputKept
    | PeersWereProbed
    | RestoreWasRefused
    | StartWasRefused
    | CheckpointMoved
    | CheckpointGone
)
