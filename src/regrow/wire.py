"""Every message that crosses a process boundary, versioned.

JSON, one object a line, tagged by `type`. A reader ignores fields that it does not know and fills in defaults for
fields that an older writer did not send, so version N reads N-1 and N+1. A message type that is unknown is not an
error: `decode` returns `Unknown`.

Who talks to whom:

    worker  <-> agent        Unix stream socket REGROW_SOCKET         FromWorker / ToWorker
    agent   <-> supervisor   the beat connection (TCP, TLS seam)      FromAgent  / ToAgent
    agent    -> agent        the committing agent's peer port (TCP)   PeerMessage
    all     <-> etcd         values under /regrow/<cluster>/          records
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from regrow.ids import MeshShape

PROTOCOL_VERSION = 1
"""Version of the messages below. The lowest version that may write is in the cluster's `meta` record."""

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Lines longer than this are refused: nobody sends such a thing, so it is an attack or a bug."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    pass


# --- what things are -------------------------------------------------------------------------------------------


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as NVML identifies it. History is keyed by uuid (and serial), never by index."""

    uuid: str
    serial: str = ""
    name: str = ""
    pci_bus_id: str = ""
    index: int = 0
    memory_bytes: int = 0


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner needs to know of a model. Zero means not stated."""

    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    ffn: int = 0
    vocab: int = 0
    seq: int = 0
    params: int = 0
    experts: int = 0


class CheckpointPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Where checkpoints go and the bounds of the interval controller. All times in seconds."""

    path: str = ""
    keep_last: int = 3
    keep_every_hours: float = 0.0
    """Besides the last ones, one in each interval of so many hours is kept. 0: none."""
    keep_best: int = 0
    """Besides those, so many with the best values of `best_metric` (`run.metric`, or "loss"). 0: none."""
    best_metric: str = ""
    best_is_highest: bool = False
    min_interval_seconds: float = 0.0
    max_interval_seconds: float = 3600.0
    prior_failures_per_hour: float = 0.0
    fresh_start: bool = False
    """True: starting at step 0 although checkpoints were expected is what the user wants."""
    node_files: bool = False
    """The ranks of a node write into one file: for parallel file systems, where many files cost more than many bytes."""
    peer_memory: bool = False
    """Each node's snapshots are copied into the memory of another node as well."""
    memory_interval_seconds: float = 0.0
    """Between checkpoints on storage the state is saved into memory alone, so often; with several nodes as with `peer_memory`. 0: never."""
    mirror_url: str = ""
    """After each commit the newest checkpoints are copied there (fsspec: s3://, gs://, file://). Empty: nowhere."""
    mirror_keep: int = 3
    """Checkpoints to have there."""
    memory_auto: bool = False
    """The same as often as the interval controller says."""

    @property
    def memory_tier(self) -> bool:
        """Are there snapshots that stay in memory?"""
        return self.memory_auto or self.memory_interval_seconds > 0.0


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for. Immutable for the life of the job."""

    job: str
    argv: tuple[str, ...]
    """Script path first, then its arguments. With `module` the first word is a module name."""
    module: bool = False
    cwd: str = "."
    env: dict[str, str] = {}
    nproc_per_node: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    mesh: MeshShape | None = None
    """Mesh of the full world. None: data parallel over all workers."""
    mesh_table: dict[int, MeshShape] = {}
    """Explicit choice per number of workers; wins over the planner."""
    model: ModelShape | None = None
    global_batch: int = 0
    micro_batch: int = 1
    equal_replicas: bool = False
    """Only meshes whose replicas all run the same number of micro-batches, at the price of idle workers."""
    zero_stage: int = 0
    seed: int = 0
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    max_restarts: int = 100
    nice: int = 0
    """Niceness of the workers. Local runs use 10, so that beats are never late."""
    start_method: Literal["warm", "cold"] = "warm"
    preload: tuple[str, ...] = ()
    """Modules that the shim imports besides torch."""
    hang_seconds: float = 0.0
    """A fixed limit for a step without progress. 0: learned from history."""
    hang_phase_seconds: dict[str, float] = {}
    """Fixed limits of phases that are no steps: eval, save, restore. Others are learned."""
    hang_idle_seconds: float = 0.0
    """A script that reports no progress is hung when none of its ranks used CPU time for so long. 0: never said."""
    in_place: bool = True
    """Surviving workers keep their processes over a change of generation, where the script runs under `regrow.in_place`."""
    in_place_gpus: bool = False
    """They do with GPUs too, where it was never run."""
    gasp: bool = True
    """Workers that are killed in a warm restart leave their newest state in memory before (on CPUs)."""
    priority: int = 0


class RankProgress(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One worker's progress word as its agent reads it from shared memory."""

    rank: int
    started_step: int
    applied_step: int
    phase: str
    age_seconds: float
    """Since the word last changed, by the agent's monotonic clock."""


class WorkerAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """A rank on a node."""

    rank: int
    local_rank: int
    device_uuid: str = ""


class RestorePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that all ranks of a generation load. Decided once, by the leader."""

    step: int
    directory: str
    record_digest: str = ""
    generation: int = 0
    samples: int = 0


class TierRates(msgspec.Struct, frozen=True, kw_only=True):
    """Failures a second of a job by the tier that they need, for the interval of each tier."""

    memory: float
    """Of which the nodes' memory might be enough."""
    storage: float
    """After which the job did not go on from memory."""


class TierInterval(msgspec.Struct, frozen=True, kw_only=True):
    """How often a tier is saved to, and why."""

    tier: Literal["memory", "storage"]
    interval_seconds: float
    """0: never, now."""
    rule: str
    """What set it (docs/checkpoint-format.md, intervals)."""
    reason: str
    stall_seconds: float = 0.0
    safe_seconds: float = 0.0
    """From the snapshot until the tier has it."""
    failures_per_second: float = 0.0


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One agreed set of members and mesh."""

    job: str
    epoch: int
    generation: int
    mesh: MeshShape
    world_size: int
    nodes: tuple[str, ...]
    """Members in rank order: stable members keep their relative order."""
    global_batch: int = 0
    micro_batch: int = 1
    micro_batches: tuple[int, ...] = ()
    """Micro-batches a step per data-parallel replica; they sum to global_batch / micro_batch."""
    layers_per_stage: tuple[int, ...] = ()
    restore: RestorePoint | None = None
    committing_node: str = ""
    commit_address: str = ""
    """host:port of the committing agent's peer port."""
    restart_count: int = 0
    reason: str = ""
    save_interval_seconds: float = 0.0
    failures_per_second: float = 0.0
    tier_rates: TierRates | None = None
    """Failures by what they need; None: all of them need storage."""
    in_place: bool = False
    """Members keep workers that can change their generation; others are killed and forked anew."""
    memory: bool = False
    """What nodes have in memory may be restored where it continues `restore`: the leader does not want an older state."""
    gasp: int = 0
    """Workers that are killed leave their newest state behind, and what those of this generation or a later one left may be taken up.
    0: nothing may, an older state is wanted."""


class WorkerExit(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker ended. Exactly one of exit_code and signal is meaningful (signal > 0: killed by it)."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int = 0
    signal: int = 0
    declared_end: bool = False
    """True when the worker library said that training reached its end before the process exited with 0."""
    torn_down: bool = False
    """True when we killed it: never evidence against a node or the program."""
    error: str = ""
    """The last traceback or torch elastic's error file, at most 8 KiB."""
    oom_killed: bool = False
    oom_counted: bool = False
    """Out-of-memory kills could be counted here: with signal 9 and `oom_killed` false, somebody sent it."""
    said: str = ""
    """Class of the first cause in its last lines, as `regrow health --classify` has it; `unknown`: symptoms alone, a victim;
    empty: nothing was said."""
    said_action: str = ""
    last_step: int = -1


class HealthVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's health probe concluded. `action` is one of none, watch, restart_app, reset, reboot, replace."""

    state: Literal["healthy", "degraded", "unhealthy", "unknown"] = "unknown"
    action: str = "none"
    reason: str = ""
    device_uuids: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    incident: str = ""


# --- worker -> agent -------------------------------------------------------------------------------------------


class WorkerHello(_Message, frozen=True, kw_only=True, tag="worker_hello"):
    """First line on REGROW_SOCKET, again after each reconnection."""

    version: int = PROTOCOL_VERSION
    job: str
    generation: int
    rank: int
    pid: int
    level: int = 1
    """Level of adoption 1..3."""


class WorkerPhase(_Message, frozen=True, kw_only=True, tag="worker_phase"):
    """A rank passed a phase: imported, rendezvous, model, restored, first_step, finished."""

    generation: int
    rank: int
    phase: str
    step: int = -1
    seconds: float = 0.0
    """Duration of the phase by the worker's own monotonic clock."""
    detail: dict[str, Any] = {}


class ReplayVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a repeated micro-step showed. All ranks of a generation come to the same one."""

    verdict: Literal["agree", "diverged", "skipped"]
    suspects: tuple[int, ...] = ()
    """With `diverged`: who was wrong again when the work was repeated. Empty: the mismatch is real, its owner is not known."""
    once: tuple[int, ...] = ()
    """Ranks whose result was wrong once and right in every repetition: not an accusation yet."""
    reason: str = ""
    tensor: str = ""
    """First parameter whose gradient differed on the rank that it is about."""
    repaired: bool = False
    """The right gradient took the place of the wrong one before it was used."""
    buddy: bool = False
    """Repeated on another device too."""


class DigestEvidence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Beside a digest."""

    places: str = ""
    """Three 64-bit words in hex of the tensors that the digest is of: their keyed digests, each times its number from 1; the sums of
    their blocks; these weighted with the blocks' numbers. Where one tensor differs, those of two ranks tell which and where."""
    names: tuple[str, ...] = ()
    """The numbers' names, from 1, when they are new, of the first replica's ranks."""
    sizes: tuple[int, ...] = ()
    """Bytes of this rank's part of each of them."""
    received: dict[int, str] = {}
    """{owner's rank: first of its parameters that arrived otherwise in an all-gather than the owner had it at rest}."""
    receivers: int = 0
    """Ranks that received the same, the owner included."""


AT_REST = "rest"
"""In place of a digest that there is nobody to compare with."""


class StepReport(_Message, frozen=True, kw_only=True, tag="step"):
    """A rank applied a step. Loss fields only from ranks that know it."""

    generation: int
    rank: int
    step: int
    loss: float | None = None
    samples: int = 0
    """Samples consumed by the whole job after this step."""
    learning_rate: float | None = None
    grad_norm: float | None = None
    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    """Own compute time before synchronisation."""
    tokens: int = 0
    digest: str = ""
    """64-bit digest of parameters and optimizer state after this step, hex; empty: not taken at this step; AT_REST: nothing that this
    rank holds is replicated, it is only compared with itself before the next update."""
    copy_digest: str = ""
    """"<k>/<hex>" where shards are held in copies: replicas whose numbers are equal modulo k hold the same bytes (HSDP)."""
    evidence: DigestEvidence | None = None
    at_rest_mismatch: str = ""
    """Name of the first tensor whose bytes changed between two steps, when that was seen."""
    nonfinite: str = ""
    """What was infinite or NaN on this rank: "loss", "grad_norm", or the first parameter whose own gradient was so before
    any reduction. JSON has no NaN: `loss` and `grad_norm` are then null."""
    nonfinite_again: bool | None = None
    """Was it so again when the same work was repeated on this rank? None: not repeated."""
    replay: ReplayVerdict | None = None
    """Of the micro-step that was repeated in this step, if one was."""


class SaveReport(_Message, frozen=True, kw_only=True, tag="save"):
    """What became of a save on this rank: snapshot or skipped, with the measured stall."""

    generation: int
    rank: int
    step: int
    outcome: Literal["snapshot", "skipped", "failed"]
    stall_seconds: float = 0.0
    reason: str = ""
    tiers: tuple[TierInterval, ...] = ()
    """Of rank 0, after the save: how often each tier is saved to."""


class RestoreFailed(_Message, frozen=True, kw_only=True, tag="restore_failed"):
    """This rank could not load the restore point: damaged or missing. The leader takes an older one."""

    generation: int
    rank: int
    step: int
    problem: str


class WorkerWatch(_Message, frozen=True, kw_only=True, tag="worker_watch"):
    """First line of a second connection: this worker can change its generation in place, and waits here for the order to. Or it can
    leave its state behind (`gasps`)."""

    job: str
    generation: int
    rank: int
    pid: int
    changing: bool = False
    """It has come out of its last step and is on its way into this generation; not there yet."""
    in_place: bool = True
    gasps: bool = False
    """It answers a `Gasp`."""


FromWorker = WorkerHello | WorkerPhase | StepReport | SaveReport | RestoreFailed | WorkerWatch

# --- agent -> worker -------------------------------------------------------------------------------------------


class Control(_Message, frozen=True, kw_only=True, tag="control"):
    """Orders that take effect at a step boundary that all ranks agree on."""

    save: bool = False
    stop_after_save: bool = False
    save_interval_seconds: float | None = None
    failures_per_second: float | None = None
    tier_rates: TierRates | None = None
    inject: dict[str, Any] = {}
    """Chaos only: {"kind": "flip_bit"|"nan"|"hang"|"slow", ...}; honoured when the job runs with chaos enabled."""


class Regroup(_Message, frozen=True, kw_only=True, tag="regroup"):
    """The generation is over: join the next one in this process. Sent on the connection of `WorkerWatch`."""

    generation: int
    """The next one."""
    env: dict[str, str]
    """The whole environment of the worker in it."""
    log: str
    """File that gets its stdout and stderr from now on."""


class Gasp(_Message, frozen=True, kw_only=True, tag="gasp"):
    """This process is about to be killed: leave the state behind. Sent on the connection of `WorkerWatch`."""

    generation: int
    """That is over."""


ToWorker = Control | Regroup | Gasp

# --- writer -> agent -> committing agent -----------------------------------------------------------------------


class ShardFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of one rank, durable on storage."""

    rank: int
    name: str
    size_bytes: int
    digest: str


class ShardsDurable(_Message, frozen=True, kw_only=True, tag="shards_durable"):
    """One folded message a node: all shards of this node's ranks for one step are on storage and synced."""

    job: str
    epoch: int
    generation: int
    step: int
    node: str
    directory: str
    ranks: tuple[int, ...]
    world_size: int
    samples: int = 0
    files: tuple[ShardFile, ...] = ()
    manifest: str = ""
    """Name of the node's manifest file in the directory."""
    manifest_digest: str = ""
    write_seconds: float = 0.0
    num_bytes: int = 0


class ShardsFailed(_Message, frozen=True, kw_only=True, tag="shards_failed"):
    """A node could not make its shards durable; the save is void for all ranks."""

    job: str
    generation: int
    step: int
    node: str
    reason: str


class PairCheck(_Message, frozen=True, kw_only=True, tag="pair_check"):
    """A node asks another one to exchange known bytes with it before it joins. What follows on the connection: agent/exchange.py."""

    node: str
    nonce: str
    num_bytes: int


PeerMessage = ShardsDurable | ShardsFailed | PairCheck

# --- agent -> supervisor ---------------------------------------------------------------------------------------


class RunningGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent has running, told when it connects: the leader adopts it without touching the workers."""

    job: str
    epoch: int
    generation: int
    workers: tuple[WorkerAssignment, ...] = ()
    exits: tuple[WorkerExit, ...] = ()
    """Exits that no leader acknowledged."""
    spec: GenerationSpec | None = None
    job_spec: JobSpec | None = None
    """What the user asked for: a store that lost it is rebuilt from here."""


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """First line of an agent on the beat connection."""

    version: int = PROTOCOL_VERSION
    cluster: str
    node: str
    incarnation: str
    address: str
    """Host under which this node's ports can be reached by its peers."""
    peer_address: str
    slots: int
    devices: tuple[Device, ...] = ()
    hardware_id: str = ""
    """Chassis serial or, without one, a machine id: what quarantine is keyed by when no GPU UUID is known."""
    capabilities: tuple[str, ...] = ()
    highest_epoch: int = 0
    highest_generation: int = 0
    running: RunningGeneration | None = None
    spare_store: str = ""
    """host:port of a TCPStore that nobody has used yet, served by a child of this node's shim."""
    health: HealthVerdict = HealthVerdict()
    boot_id: str = ""


class Beat(_Message, frozen=True, kw_only=True, tag="beat"):
    """Sent every 0.5 s. Liveness and progress; never an event by itself."""

    seq: int
    generation: int = 0
    progress: tuple[RankProgress, ...] = ()
    spare_store: str = ""
    cpu_seconds: dict[int, float] = {}
    """CPU time used so far by workers whose progress word is quiet, or who have none: {rank: seconds}."""
    memory_ratio: float = 0.0
    """Memory in use on the node's fullest GPU, as a share; 0: not known."""


IN_PLACE_PHASE = "in_place"
"""The phase that says that all workers of a node can change their generation in place."""


GASPING_PHASE = "gasping"
"""The phase that says that a worker has begun to leave its state behind; its seconds are what that is expected to take."""
GASPED_PHASE = "gasped"
"""The phase that says that it has done so (its step), or has nothing to leave (-1)."""
LOST_PEER_PHASE = "lost_peer"
"""The phase that says that a worker which goes on in place has lost a peer and waits for the order: nobody's end tells of it."""
REPLICAS_PHASE = "replicas"
"""The phase that says which parts of the state nobody else has: what the loss of a rank would cost."""


class GenerationPhase(_Message, frozen=True, kw_only=True, tag="generation_phase"):
    """All workers of this node passed a phase: fenced, stopped, started, in_place, rendezvous, restored, first_step, finished."""

    job: str
    generation: int
    phase: str
    step: int = -1
    seconds: float = 0.0
    detail: dict[str, Any] = {}


class WorkersExited(_Message, frozen=True, kw_only=True, tag="workers_exited"):
    """One or more workers of a node ended."""

    job: str
    generation: int
    exits: tuple[WorkerExit, ...]


class NodeSteps(_Message, frozen=True, kw_only=True, tag="node_steps"):
    """Step reports of one step, folded over the node's ranks."""

    job: str
    generation: int
    step: int
    reports: tuple[StepReport, ...]


class HealthChanged(_Message, frozen=True, kw_only=True, tag="health_changed"):
    """The node's verdict changed."""

    verdict: HealthVerdict


class CheckpointChanged(_Message, frozen=True, kw_only=True, tag="checkpoint_changed"):
    """A checkpoint of this job moved to another state as this agent sees it."""

    job: str
    generation: int
    step: int
    state: Literal["snapshot", "durable", "committed", "pending", "failed", "skipped"]
    directory: str = ""
    record_digest: str = ""
    samples: int = 0
    stall_seconds: float = 0.0
    write_seconds: float = 0.0
    num_bytes: int = 0
    reason: str = ""
    tiers: tuple[TierInterval, ...] = ()


class RestoreRefused(_Message, frozen=True, kw_only=True, tag="restore_refused"):
    """A rank of this node could not load the restore point."""

    job: str
    generation: int
    rank: int
    step: int
    problem: str


class StartRefused(_Message, frozen=True, kw_only=True, tag="start_refused"):
    """This agent did not start a generation: fenced by a higher token, or the node cannot run it."""

    job: str
    generation: int
    reason: str
    fenced: bool = False
    node_unusable: bool = False


class Leaving(_Message, frozen=True, kw_only=True, tag="leaving"):
    """This node goes away in an orderly manner (SIGTERM, drain). Only this node: never the whole job."""

    reason: str
    notice_seconds: float = 0.0


class Output(_Message, frozen=True, kw_only=True, tag="output"):
    """Evidence kept for people: stacks of a hung rank, the last lines of a log."""

    job: str
    generation: int
    rank: int
    kind: str
    text: str


class PeersProbed(_Message, frozen=True, kw_only=True, tag="peers_probed"):
    """Which peers' hosts answered on the data network, and which did not."""

    job: str
    generation: int
    reached: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()


FromAgent = (
    Hello
    | Beat
    | GenerationPhase
    | WorkersExited
    | NodeSteps
    | HealthChanged
    | CheckpointChanged
    | RestoreRefused
    | StartRefused
    | Leaving
    | Output
    | PeersProbed
)

# --- supervisor -> agent ---------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True, kw_only=True, tag="welcome"):
    """The leader accepts a node."""

    version: int = PROTOCOL_VERSION
    epoch: int
    leader: str
    beat_seconds: float = 0.5


class Refused(_Message, frozen=True, kw_only=True, tag="refused"):
    """The leader does not accept a node (duplicate name, too old, quarantined hardware is accepted but not used)."""

    reason: str
    retry: bool = True
    leading: bool = True
    """False: it does not lead. Who does is in the next leader record; until then there is no hurry to ask again."""


class Action(_Message, frozen=True, kw_only=True):
    """What every order carries: its id (epoch, seq). Orders are idempotent; one with a lower epoch is refused."""

    epoch: int
    seq: int


class StartGeneration(Action, frozen=True, kw_only=True, tag="start_generation"):
    """Kill what runs of older generations of this job, then start these workers. Members only."""

    spec: GenerationSpec
    job_spec: JobSpec
    workers: tuple[WorkerAssignment, ...]
    group_rank: int
    master_address: str
    """host:port of the TCPStore of this generation."""


class StopGeneration(Action, frozen=True, kw_only=True, tag="stop_generation"):
    """Kill the workers of this and all lower generations of the job: SIGTERM and grace only when grace_seconds > 0."""

    job: str
    generation: int
    grace_seconds: float = 0.0
    reason: str = ""


class RequestSave(Action, frozen=True, kw_only=True, tag="request_save"):
    """Save at the next step boundary that all ranks agree on; then go on, or stop."""

    job: str
    generation: int
    stop_after: bool = False
    reason: str = ""


class SetInterval(Action, frozen=True, kw_only=True, tag="set_interval"):
    """New inputs of the checkpoint interval controller."""

    job: str
    generation: int
    failures_per_second: float
    tier_rates: TierRates | None = None
    save_interval_seconds: float = 0.0
    """0: the worker library computes it from its own measurements and the failure rate."""


class CollectStacks(_Message, frozen=True, kw_only=True, tag="collect_stacks"):
    """Dump the stacks of all ranks of this node and send them as Output."""

    job: str
    generation: int


class ProbePeers(_Message, frozen=True, kw_only=True, tag="probe_peers"):
    """Try to reach these peers on the data network and tell with PeersProbed: the generation does not move."""

    job: str
    generation: int
    peers: dict[str, str]
    """{node: host:port of its peer port}."""


class Acknowledge(_Message, frozen=True, kw_only=True, tag="acknowledge"):
    """The leader has folded these exits; the agent may forget them."""

    job: str
    generation: int
    ranks: tuple[int, ...]


class ReleaseNode(Action, frozen=True, kw_only=True, tag="release_node"):
    """The node may leave now: nothing of it is in use (answer to Leaving, or the end of a drain)."""

    reason: str = ""


class ClearHealth(Action, frozen=True, kw_only=True, tag="clear_health"):
    """An operator says that the node is repaired: the agent ends what it holds against it. What still holds is found again."""

    by: str = ""


ToAgent = (
    Welcome
    | Refused
    | StartGeneration
    | StopGeneration
    | RequestSave
    | SetInterval
    | CollectStacks
    | ProbePeers
    | Acknowledge
    | ReleaseNode
    | ClearHealth
)

# --- records in etcd -------------------------------------------------------------------------------------------


class MetaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """/meta"""

    store_incarnation: str
    least_writer_version: int = PROTOCOL_VERSION


class LeaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """/leader, leased."""

    supervisor: str
    epoch: int
    beat_address: str
    http_address: str
    version: int = PROTOCOL_VERSION


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """/nodes/<node>, leased."""

    node: str
    incarnation: str
    address: str
    peer_address: str
    slots: int
    devices: tuple[Device, ...] = ()
    hardware_id: str = ""
    capabilities: tuple[str, ...] = ()
    metrics_address: str = ""
    """host:port of the agent's /metrics as peers can reach it; empty: it serves none."""
    failure_domain: str = ""
    """What fails together with this node: rack, power, switch; empty: not known."""
    copies_address: str = ""
    """host:port where writers of other nodes reach this node's checkpoint writer; empty: not at all."""
    version: int = PROTOCOL_VERSION


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """/jobs/<job>/generation: the fence of the data path. A commit compares this key's mod_revision."""

    number: int
    epoch: int
    mesh: MeshShape
    committing_node: str
    num_members: int
    members_hash: str
    spec: GenerationSpec | None = None
    version: int = PROTOCOL_VERSION


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """/jobs/<job>/checkpoints/<step>: committed."""

    step: int
    generation: int
    epoch: int
    directory: str
    record_digest: str
    samples: int = 0
    num_bytes: int = 0
    evidence: tuple[str, ...] = ()
    """Names of what has verified it: replica_consistent, read_back, replay_clean."""
    damaged: str = ""
    version: int = PROTOCOL_VERSION


class StatusRecord(msgspec.Struct, frozen=True, kw_only=True):
    """/jobs/<job>/status/<node>, leased: what a node runs, written by its agent on change."""

    node: str
    incarnation: str
    job: str
    epoch: int
    generation: int
    stage: str
    """starting, running, stopping, stopped, ended."""
    workers: dict[int, str] = {}
    """By rank: running, finished, failed, torn_down."""
    applied_step: int = -1
    """Lowest step that a local rank had applied when this was written."""
    version: int = PROTOCOL_VERSION


class CommandRecord(msgspec.Struct, frozen=True, kw_only=True):
    """/jobs/<job>/command: what an operator wants; holds over a supervisor restart."""

    command: Literal["run", "stop", "save-and-stop", "pause", "abort"] = "run"
    by: str = ""
    version: int = PROTOCOL_VERSION


class EventRecord(msgspec.Struct, frozen=True, kw_only=True):
    """/events/<mark>: an entry of the journal, written in the transaction of the change that it is about."""

    kind: str
    at: float
    """Unix seconds of who wrote it: for people."""
    epoch: int = 0
    """Term of the leader that decided; of a checkpoint: of the leader of its generation."""
    reason: str = ""
    job: str = ""
    node: str = ""
    generation: int = 0
    version: int = PROTOCOL_VERSION


def checkpoint_mark(job: str, generation: int, step: int, *, gone: bool = False) -> str:
    """Name of the journal's entry for a checkpoint that was committed, or (`gone`) removed: the same for agents and supervisors."""
    return f"checkpoints/{job}/{generation}/{step}" + ("/gone" if gone else "")


def checkpoint_event(job: str, record: CheckpointRecord, at: float, *, gone: bool = False) -> EventRecord:
    """The journal's entry for a checkpoint that was committed, or (`gone`) removed; `at` in Unix seconds."""
    return EventRecord(
        kind="checkpoint_gone" if gone else "checkpoint_moved",
        at=at,
        epoch=record.epoch,
        reason=f"checkpoint of step {record.step}: {'removed' if gone else 'committed'}",
        job=job,
        generation=record.generation,
    )


class Unknown(msgspec.Struct, frozen=True):
    """A message of a type that this version does not know. Never an error: logged and left alone."""

    kind: str


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_encoder = msgspec.json.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One line of JSON with its newline."""
    return _encoder.encode(message) + b"\n"


def decode(data: bytes, kind: Any) -> Any:
    """Read one message of the union or struct `kind`.

    Returns:
        The message, or `Unknown` when the tag is one that this version does not have.

    Raises:
        msgspec.ValidationError: known type, wrong content.
        msgspec.DecodeError: not JSON, or too long.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise msgspec.DecodeError(f"message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(data)
    except msgspec.ValidationError:
        tag = msgspec.json.decode(data)
        name = tag.get("type") if isinstance(tag, dict) else None
        if isinstance(name, str) and name not in _tags(kind):
            return Unknown(name)
        raise


def _tags(kind: Any) -> set[str]:
    members = getattr(kind, "__args__", (kind,))
    return {str(member.__struct_config__.tag) for member in members if hasattr(member, "__struct_config__")}
