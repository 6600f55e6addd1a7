"""State of the node machine, what can happen to it, and what it wants done. Plain data (pure)."""

from __future__ import annotations

from typing import Literal

import msgspec

from regrow import wire
from regrow.ids import Token

_change = msgspec.structs.replace


class Fences(msgspec.Struct, frozen=True, kw_only=True):
    """What this node has seen, written down with fsync before it acts on it. Whoever orders with less is refused."""

    epoch: int = 0
    generations: dict[str, int] = {}
    """Highest generation that was ordered to start, by job."""
    stopped: dict[str, int] = {}
    """Highest generation that was ordered to stop, by job: it may not be started afterwards."""
    unusable: str = ""
    """Why no worker may be started here until the host was rebooted."""
    unusable_boot: str = ""
    unusable_pids: dict[int, int] = {}
    """Processes that could not be killed: {pid: start time}."""

    def highest(self, job: str = "") -> int:
        """Highest generation seen of a job, or of all jobs."""
        if job:
            return max(self.generations.get(job, 0), self.stopped.get(job, 0))
        return max([0, *self.generations.values(), *self.stopped.values()])


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """One generation's workers on this node."""

    order: wire.StartGeneration
    stage: Literal["waiting", "starting", "running", "stopping", "stopped", "ended"] = "waiting"
    ordered_at: float = 0.0
    pids: dict[int, int] = {}
    phases: dict[str, frozenset[int]] = {}
    """Ranks that passed a phase."""
    phase_seconds: dict[str, float] = {}
    told: dict[str, wire.GenerationPhase] = {}
    """Phases that all ranks passed, as told; told again to a new leader."""
    exits: dict[int, wire.WorkerExit] = {}
    kept: dict[int, int] = {}
    """{rank: rank in the generation before} of workers that are to go on in this one, in their processes."""
    before: int = 0
    """The generation that they were kept of."""
    regroup_deadline: float | None = None
    """When those of them that did not say hello are replaced."""
    changing: frozenset[int] = frozenset()
    """Ranks of them that have come out of their last step."""
    regroup_last: bool = False
    """Those that had come out got more time, and this is the end of it."""
    watched: frozenset[int] = frozenset()
    """Ranks that can change their generation in place."""
    gasps: frozenset[int] = frozenset()
    """Ranks that can leave their state behind before they are killed."""
    gasp_began: float | None = None
    """When they were asked to."""
    acknowledged: frozenset[int] = frozenset()
    attached: frozenset[int] = frozenset()
    """Ranks that use the worker library. The others are judged by their exit status alone."""
    steps: dict[int, dict[int, wire.StepReport]] = {}
    saves: dict[int, dict[int, wire.SaveReport]] = {}
    pending_save: wire.Control | None = None
    interval: wire.Control | None = None
    kill_deadline: float | None = None
    term_deadline: float | None = None

    @property
    def spec(self) -> wire.GenerationSpec:
        """The generation."""
        return self.order.spec

    @property
    def job(self) -> str:
        """Name of the job."""
        return self.order.spec.job

    @property
    def generation(self) -> int:
        """Number of the generation."""
        return self.order.spec.generation

    @property
    def token(self) -> Token:
        """Its fence."""
        return Token(self.order.epoch, self.generation)

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks on this node."""
        return frozenset(worker.rank for worker in self.order.workers)

    @property
    def live(self) -> frozenset[int]:
        """Ranks that may run: started, or being started, and not known to have ended."""
        if self.stage in ("waiting", "stopped"):
            return frozenset()
        return self.ranks - self.exits.keys()


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """This node wants to go away."""

    reason: str
    deadline: float


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the node machine knows."""

    node: str
    fences: Fences = Fences()
    connected: bool = False
    current: Local | None = None
    following: Local | None = None
    """Ordered, and waiting for the end of `current`."""
    leaving: Leave | None = None
    quitting: bool = False
    alone_since: float | None = None
    """Since when there is no leader; None while there is one."""
    slots: int = 0
    """Workers that may run here; 0: any number."""
    kill_limit_seconds: float = 10.0
    regroup_seconds: float = 2.0
    """A worker that is to go on in place and is neither in its new generation nor on its way within this time is stuck: it is
    replaced by a fork. One that is on its way (out of its last step) has `regroup_factor` times as long: machines are slow at times."""
    regroup_factor: float = 5.0
    static_seconds: float = 7200.0
    """Workers go on for so long without a leader."""


# --- what happens ------------------------------------------------------------------------------------------------


class Ordered(msgspec.Struct, frozen=True):
    """The leader said something."""

    message: wire.Action | wire.CollectStacks | wire.Acknowledge


class Connected(msgspec.Struct, frozen=True):
    """A leader accepted us."""

    epoch: int


class Disconnected(msgspec.Struct, frozen=True):
    """No leader now."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The shim started the workers of a generation."""

    job: str
    generation: int
    pids: dict[int, int]
    detail: dict[str, object] = {}


class StartFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The workers could not be started."""

    job: str
    generation: int
    reason: str


class Exited(msgspec.Struct, frozen=True, kw_only=True):
    """Workers ended, with all evidence that could be found. `attached`: they used the worker library."""

    job: str
    generation: int
    exits: tuple[wire.WorkerExit, ...]
    attached: frozenset[int] = frozenset()
    lost: bool = False
    """They died with their shim; when we were stopping them, so much the better."""


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that were to be replaced had come out of their step before they could be killed: they go on."""

    job: str
    generation: int
    ranks: dict[int, int]
    """{rank: rank in the generation before}."""


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that starts found this generation with the shim that an earlier agent left."""

    order: wire.StartGeneration
    pids: dict[int, int]


class Said(msgspec.Struct, frozen=True):
    """A worker said something."""

    message: wire.WorkerHello | wire.WorkerPhase | wire.StepReport | wire.SaveReport | wire.RestoreFailed | wire.WorkerWatch


class LeaveAsked(msgspec.Struct, frozen=True, kw_only=True):
    """SIGTERM, SIGINT or SIGHUP came."""

    reason: str
    notice_seconds: float


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


Event = Ordered | Connected | Disconnected | Started | StartFailed | Exited | Moved | Adopted | Said | LeaveAsked | Tick

# --- what is to be done ------------------------------------------------------------------------------------------


class Persist(msgspec.Struct, frozen=True):
    """Write the fences, synced, before anything that follows in the list."""

    fences: Fences


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """Signal the groups of this and older generations of the job."""

    job: str
    generation: int
    signal: int


class Launch(msgspec.Struct, frozen=True):
    """Start the workers."""

    order: wire.StartGeneration
    before: int = 0
    """The generation that workers are kept of."""
    kept: dict[int, int] = {}
    """{rank: rank in the generation before} of workers that go on in their processes."""
    pids: dict[int, int] = {}
    """{rank: pid} of these."""


class Replace(msgspec.Struct, frozen=True):
    """Kill what runs as these ranks of the generation and start them anew: they did not change over in time."""

    order: wire.StartGeneration
    ranks: frozenset[int]
    before: int = 0
    """The generation that they hang in; evidence is where its stacks are kept."""
    kept: dict[int, int] = {}
    """{rank: rank in the generation before}."""
    pids: dict[int, int] = {}
    """{rank: pid}."""
    changing: frozenset[int] = frozenset()
    """Ranks of them that had come out of their last step, and did not join in the time that they got for it."""


class Forget(msgspec.Struct, frozen=True, kw_only=True):
    """The shim may drop ended generations."""

    job: str
    generation: int


class Send(msgspec.Struct, frozen=True):
    """Tell the leader."""

    message: msgspec.Struct


class ToWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """Tell workers of the generation; `ranks` None: all."""

    generation: int
    control: wire.Control
    ranks: frozenset[int] | None = None


class AskGasp(msgspec.Struct, frozen=True, kw_only=True):
    """Ask workers to leave their state behind: {rank: pid}."""

    generation: int
    pids: dict[int, int]


class DumpStacks(msgspec.Struct, frozen=True, kw_only=True):
    """Collect the stacks of all live workers."""

    job: str
    generation: int
    pids: dict[int, int]


class Quit(msgspec.Struct, frozen=True, kw_only=True):
    """The agent ends, and with it shim and workers of this node."""

    code: int
    reason: str


Effect = Persist | Kill | Launch | Replace | Forget | Send | ToWorkers | AskGasp | DumpStacks | Quit
Outcome = tuple[NodeState, tuple[Effect, ...]]
