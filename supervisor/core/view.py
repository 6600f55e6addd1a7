"""What the supervisor knows: frozen values, rebuilt by `fold` only. No instant defaults to 0.0: unknown is None."""

from __future__ import annotations

from typing import Literal

import msgspec

from regrow import wire
from regrow.supervisor.core.links import Reach
from regrow.supervisor.core.records import Accused, EffortRecord, LearnedRecord, LedgerRecord, QuarantineRecord


class AskedAgain(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that were asked whether they reach one that was cut off, and what they found."""

    at: float
    witnesses: tuple[str, ...]
    found: dict[str, bool] = {}
    """{witness: did the host answer}."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One host with one agent."""

    name: str
    incarnation: str
    address: str
    peer_address: str
    slots: int
    joined_at: float
    """Of this connection."""
    devices: tuple[wire.Device, ...] = ()
    hardware_id: str = ""
    connected: bool = True
    disconnected_at: float | None = None
    silent_since: float | None = None
    """Last beat heard; None while it beats."""
    late_until: float | None = None
    """It was late when another node fell silent: at this instant it has beaten, or is silent, too."""
    lease_expired: bool = False
    spare_store: str = ""
    health: wire.HealthVerdict = wire.HealthVerdict()
    healthy_since: float | None = None
    leaving: str = ""
    leaving_at: float | None = None
    leave_by: float | None = None
    released: bool = False
    unusable: str = ""
    """Why the host needs recycling: a process that cannot be killed."""
    highest_epoch: int = 0
    highest_generation: int = 0
    running: tuple[str, int] | None = None
    """(job, generation) that the agent says it runs."""
    boot_id: str = ""
    stop_sent: tuple[int, float] | None = None
    """(generation, when) of the last order to stop."""
    clear_asked: bool = False
    """An operator says that it is repaired, and its agent has not been told."""
    clear_sent_at: float | None = None
    """When the agent was told; None again with its next verdict."""
    asked_again: AskedAgain | None = None
    """The last try whether it can be reached again on the data network."""

    @property
    def reachable(self) -> bool:
        """Orders reach it: connected and not silent."""
        return self.connected and self.silent_since is None


class ExitFact(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that ended, and where and when we heard of it."""

    node: str
    at: float
    exit: wire.WorkerExit


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A node's part in a generation."""

    node: str
    group_rank: int
    workers: tuple[wire.WorkerAssignment, ...]
    sent_at: float | None = None
    phases: dict[str, float] = {}
    """{phase: when all workers of the node had passed it}."""
    refused_at: float | None = None
    refused: str = ""
    empty_at: float | None = None
    """When its agent came (back) without our workers."""
    adopted: bool = False


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """No progress word changed."""

    at: float
    since: float
    limit_seconds: float
    ranks: tuple[wire.RankProgress, ...] = ()
    lingering: bool = False


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """State that differs between replicas, or changed at rest."""

    at: float
    step: int
    rank: int
    """The suspect; -1: cannot be told."""
    text: str
    clean_step: int | None = None
    """Newest step at which the check that found it found nothing, -1: none; None: agreement of digests tells."""


class NonFinite(msgspec.Struct, frozen=True, kw_only=True):
    """A streak of steps with something infinite or NaN."""

    at: float
    first_step: int
    last_step: int
    rank: int
    """The one rank whose own gradient was so at first; -1: several, or none that is known."""
    what: str
    num_ranks: int = 0
    again: bool = False
    """The one rank's work gave it again when it was repeated there."""
    replica: int = -1
    """Several ranks, all of this one replica."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The restore point could not be loaded."""

    at: float
    node: str
    rank: int
    step: int
    problem: str


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that computes longer than it did."""

    excess_ratio: float
    """Share of the compute time."""
    since: float


class GenerationView(msgspec.Struct, frozen=True, kw_only=True):
    """One agreed set of members and mesh, from its record to its end."""

    spec: wire.GenerationSpec
    members: dict[str, Member]
    stage: Literal["recording", "starting", "running", "ended"]
    created_at: float
    recorded_at: float | None = None
    master_address: str = ""
    adopted: bool = False
    """Taken over from an earlier leader: its members must tell that they run it."""
    exits: dict[int, ExitFact] = {}
    refusal: Refusal | None = None
    stall: Stall | None = None
    stacks_asked_at: float | None = None
    stacks: dict[int, str] = {}
    reach_asked_at: float | None = None
    reach_asked: tuple[str, ...] = ()
    """Who was asked: members, and helpers that are none."""
    reach: dict[str, Reach] = {}
    """What members say of the data network, when they were asked."""
    divergence: Divergence | None = None
    non_finite: NonFinite | None = None
    replay_clean_step: int = -1
    """Newest step of which a repeated micro-step agreed on all ranks."""
    rested: tuple[int, ...] = ()
    """The last steps after which every rank took a digest of its own memory, with no other rank to compare it with."""
    wrong_once: dict[int, int] = {}
    """{rank: checks in which it was wrong in one run and right in the others}."""
    wrong_step: str = ""
    """The first step did not follow the restored one."""
    slow: dict[int, Slow] = {}
    """{rank: how much slower it became}; rank -1: all of them."""
    lost_peer_at: float | None = None
    """When a worker that goes on in place said that a peer is gone: it waits, and does not end."""
    num_sole_ranks: int | None = None
    """Ranks whose parts of the state no other rank holds, as they found out themselves; None: not told yet."""
    num_sole_nodes: int | None = None
    """Nodes that hold parts which no other node does."""
    completed_step: int | None = None
    taken_up: int | None = None
    """The step after which it began, as its members say who restored a state (the lowest of them)."""
    first_step_at: float | None = None
    progress_at: float | None = None
    """Last completed step or phase."""
    rate_told: float = 0.0
    tiers_told: wire.TierRates | None = None

    @property
    def number(self) -> int:
        """Its number."""
        return self.spec.generation

    def node_of(self, rank: int) -> str:
        """The node that runs a rank; empty when there is none."""
        return next((name for name, member in self.members.items() if any(w.rank == rank for w in member.workers)), "")

    def device_of(self, rank: int) -> str:
        """The GPU UUID of a rank; empty when not known."""
        return next((w.device_uuid for member in self.members.values() for w in member.workers if w.rank == rank), "")


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is committed."""

    step: int
    generation: int
    directory: str
    record_digest: str = ""
    samples: int = 0
    committed_at: float
    evidence: tuple[str, ...] = ()
    damaged: str = ""


class VoidSaves(msgspec.Struct, frozen=True, kw_only=True):
    """Saves in a row that did not become checkpoints."""

    count: int
    step: int
    """Of the newest."""
    reason: str


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """A save that an order waits for."""

    purpose: str
    asked_at: float
    deadline: float
    generation: int
    asked_step: int = 0
    """Completed step when it was asked: an older checkpoint does not count."""
    stop_after: bool = False
    failed: str = ""
    committed_step: int | None = None


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """First symptom to first new step."""

    id: str
    kind: str
    cause: str
    symptom_at: float
    detected_at: float
    decided_at: float
    node: str = ""
    rank: int = -1
    text: str = ""
    rung: str = ""
    generation_before: int = 0
    generation_after: int = 0
    frontier: int = 0
    restored_step: int | None = None
    marks: dict[str, float] = {}
    """Ends of the recovery phases after `decide`."""
    first_step_at: float | None = None
    recovered_at: float | None = None
    """First completed step beyond the frontier."""
    closed: bool = False

    @property
    def mark(self) -> tuple[str, float, int, bool, str]:
        """What has changed when a job's incidents have to be written again."""
        return self.id, self.symptom_at, self.generation_after, self.closed, self.cause


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended."""

    state: Literal["done", "failed", "stopped"]
    reason: str
    exit_code: int
    at: float
    cause: str = ""
    node: str = ""
    rank: int = -1
    traceback: str = ""


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """Accumulators of goodput. GPU-seconds and seconds."""

    since: float
    reserved_gpu_seconds: float = 0.0
    reserved_at: float
    """Up to when `reserved_gpu_seconds` is counted."""
    num_reserved: int = 0
    productive_seconds: float = 0.0
    lost_steps: int = 0
    best_gpu_seconds_per_step: float | None = None


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """One training run."""

    spec: wire.JobSpec
    submitted_at: float
    effort: Effort
    command: str = "run"
    command_at: float | None = None
    generation: GenerationView | None = None
    before: GenerationView | None = None
    """What ran while the next generation is being recorded: it goes on when that fails."""
    highest_generation: int = 0
    checkpoints: dict[int, CheckpointView] = {}
    num_damaged: int = 0
    void_saves: VoidSaves | None = None
    """Since the newest checkpoint; None: that was the last save."""
    tiers: tuple[wire.TierInterval, ...] = ()
    """How often each tier is saved to, as rank 0 said at its last save."""
    ledger: LedgerRecord = LedgerRecord()
    incidents: tuple[Incident, ...] = ()
    returned: tuple[str, str] | None = None
    """(incident, what is known now): who was called lost answers again, and is the same process as before."""
    boundary: Boundary | None = None
    boundary_failed_at: float | None = None
    frontier: int = 0
    """Highest completed step of the lineage."""
    effort_base: int = 0
    past: EffortRecord | None = None
    """What earlier leaders counted; `effort` is of this term."""
    """The step that this run continued from: earlier ones are not its work."""
    loss: float | None = None
    samples: int = 0
    agreed_steps: frozenset[int] = frozenset()
    """Steps at which all replicas agreed."""
    digest_checks: dict[str, int] = {}
    """{verdict: count}."""
    accused: Accused | None = None
    """The last one."""
    outcome: Outcome | None = None
    parked: str = ""
    paused: bool = False
    enough_since: float | None = None
    """Since when the least number of nodes is there, before the first generation."""
    last_formed_at: float | None = None
    not_before: float | None = None
    """Back-off: no new generation before this instant."""
    restart_seconds: float | None = None
    """Measured duration of the last recovery."""
    learned: LearnedRecord = LearnedRecord()
    """Times that earlier leaders wrote down."""
    step_seconds: tuple[float, ...] = ()
    mesh_seconds: dict[str, tuple[int, float]] = {}
    """{mesh: (world size, median step seconds)}, for scaling efficiency."""
    unstarted: int = 0
    """Generations in a row that did not reach a first step and that the program is not to blame for."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """An automatic action that was only written down."""

    at: float
    kind: str
    would: str
    why: str
    job: str = ""
    node: str = ""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    epoch: int = 0
    term_at: float | None = None
    """Start of this leader's term."""
    next_seq: int = 1
    store_up: bool = True
    sighted_at: float | None = None
    """When the first node could be heard again after none could: until then the observer was at fault."""
    automation: bool = True
    nodes: dict[str, NodeView] = {}
    jobs: dict[str, JobView] = {}
    quarantine: dict[str, QuarantineRecord] = {}
    cordoned: frozenset[str] = frozenset()
    drains: frozenset[str] = frozenset()
    """Nodes that an operator wants empty; they are cordoned, too."""
    clears: frozenset[str] = frozenset()
    """Nodes whose quarantine an operator ended."""
    pages: dict[str, float] = {}
    """Pages sent: {key: when}."""
    observed: dict[str, Observation] = {}
    """Automatic actions of this term that were only written down, by occasion."""
