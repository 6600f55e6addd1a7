"""Ties the checkpointed state (ckpt.state) to the run: position, reports, digest, exit code of a failed restore."""

from __future__ import annotations

import logging
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from regrow import wire
from regrow.agent.progress import parse_location
from regrow.agent.worker import bequest, gasp, regroup
from regrow.agent.worker.buddy import Ring
from regrow.agent.worker.digest import Digester
from regrow.agent.worker.environment import WorkerEnvironment
from regrow.agent.worker.failure import EXIT_RESTORE_FAILED
from regrow.agent.worker.link import AgentLink
from regrow.agent.worker.live import LiveState
from regrow.agent.worker.replay import Replay
from regrow.agent.worker.replicas import Replicas
from regrow.agent.worker.steps import StepLoop
from regrow.agent.worker.streams import StreamFile
from regrow.agent.worker.watch import StateWatch, digest_key, named_optimizer_state, named_parameters
from regrow.ckpt import catalog
from regrow.ckpt.exchange import Exchange
from regrow.ckpt.manifest import Metric
from regrow.ckpt.place import Place
from regrow.ckpt.state import TrainState
from regrow.errors import ConfigurationError, OperationalError, RegrowError

if TYPE_CHECKING:
    from regrow.agent.worker.session import Run

_log = logging.getLogger("regrow.worker")

_POLL_SECONDS = 0.005


class StateKeeper:
    """What the step boundary asks, answered by a TrainState and the writer behind it."""

    def __init__(self, state: TrainState) -> None:
        self._state = state

    def ready(self) -> bool:
        """Is an arena free?"""
        return self._state.ready()

    def save(self, step: int, samples: int, *, memory: bool = False) -> wire.SaveReport:
        """Copy the state into an arena and hand it to the writer, to be written or (`memory`) kept there."""
        return self._state.save(step, samples, memory=memory)

    def skip(self, step: int, reason: str) -> None:
        """Tell the writer that the step is void."""
        self._state.skip(step, reason)

    def measured(self, name: str, value: float, step: int) -> None:
        """Keep it for the next saves; what is not finite says that the earlier value does not hold any more."""
        if math.isfinite(value):
            self._state.metrics[name] = Metric(value=value, step=step)
        else:
            self._state.metrics.pop(name, None)

    def wait_durable(self, step: int, seconds: float) -> bool:
        """Wait until every snapshot that was handed over has an outcome; True when none of them failed meanwhile."""
        del step
        self._state.join()
        counts = self._state.counts
        failed = counts.not_durable
        end = time.monotonic() + seconds
        while True:
            self._state.ready()
            if counts.durable + counts.remembered + counts.not_durable >= counts.snapshots:
                return counts.not_durable == failed
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_SECONDS)

    def last_reason(self) -> str:
        """Why the newest snapshot that did not become durable did not."""
        return self._state.counts.last_reason

    def memory_seconds(self) -> float:
        """Of the newest snapshot that stays in memory, until it was safe there; 0 while there is none."""
        return self._state.counts.memory_seconds

    def write_seconds(self) -> float:
        """Of the newest durable snapshot; 0 while there is none."""
        return self._state.counts.write_seconds


class BoundState:
    """The training state of this rank. Saving is the step loop's work; a script only calls `restore`."""

    def __init__(self, run: Run, loop: StepLoop, link: AgentLink, inner: TrainState | None) -> None:
        self._run = run
        self._loop = loop
        self._link = link
        self.inner = inner
        """The `regrow.ckpt.state.TrainState`; None for a run that has no checkpoint folder."""
        self.live: LiveState | None = None
        """What survivors of a generation can go on with; None where the process does not change its generation in place."""

    @property
    def step(self) -> int:
        """The last completed step."""
        return self._loop.step

    @property
    def samples(self) -> int:
        """Samples consumed by the job in completed steps."""
        return self._loop.samples

    def restore(self) -> int:
        """Load the checkpoint that the leader chose for this generation. Returns the completed step, 0 for a fresh start.

        Without a supervisor it is the newest one in the checkpoint folder.

        Raises:
            SystemExit: with code 75 when it cannot be loaded; the agent is told, the leader takes an older one.
        """
        self._loop.phase("restore")
        begin = time.perf_counter()
        if self._from_memory(begin):
            return self._loop.step
        point: wire.RestorePoint | None = None
        try:
            point = restore_point(self._run.environment) if self.inner is not None else None
            step = self._load(point)
        except ConfigurationError:
            raise  # the script's fault: an older checkpoint would not help
        except (RegrowError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            if not self._run.supervised or regroup.is_broken_collective(error):
                raise  # a peer died while this rank read: that says nothing of the checkpoint
            self._refuse(point, error)
        seconds = time.perf_counter() - begin
        if point is not None and self.inner is not None:
            self._run.restored(step, self.inner.samples, seconds, saved=not self.inner.recalled)
        loaded = self.inner.loaded if self.inner is not None else None
        sources = {} if loaded is None else loaded.sources()
        stored = point is not None and not (self.inner is not None and self.inner.recalled)
        self._loop.passed("restored", seconds, directory=point.directory if stored and point is not None else "", **sources)
        return step

    def _from_memory(self, begin: float) -> bool:
        """Take up what survivors hold. The same answer on all ranks; False: the disk."""
        held = regroup.take_held()
        environment = self._run.environment
        left = environment.spec.gasp and gasp.wanted(environment)
        if self.live is None or not (environment.spec.in_place or left) or environment.world_size == 1:
            return False
        if held is None and left:
            held = bequest.inherit(gasp.place_of(environment))
        source = self.live.take_up(held, environment.spec, environment.rank, self._run.exchange, self._run.control_group)
        if source is None:
            return False
        if self.inner is not None:
            self.inner.step, self.inner.samples = source.step, source.samples
        seconds = time.perf_counter() - begin
        self._run.restored(source.step, source.samples, seconds, saved=False)
        self.live.resting(source.step, source.samples)
        if left:
            bequest.inherited(gasp.place_of(environment))
        self._loop.passed("restored", seconds, source="memory", from_peers=len(source.givers))
        return True

    def _load(self, point: wire.RestorePoint | None) -> int:
        if point is None or self.inner is None:
            return 0
        step = self.inner.restore(point)
        if step != point.step and not self.inner.recalled:
            raise OperationalError(
                f"holds step {step}, not step {point.step}", where=point.directory, hint="`regrow ckpt verify` says what is wrong with it"
            )
        return step

    def _refuse(self, point: wire.RestorePoint | None, error: Exception) -> NoReturn:
        environment = self._run.environment
        problem = f"{type(error).__name__}: {error}"
        step = point.step if point is not None else 0
        self._link.send(wire.RestoreFailed(generation=environment.generation, rank=environment.rank, step=step, problem=problem), keep=True)
        self._link.drain(2.0)
        sys.stderr.write(f"regrow: rank {environment.rank} cannot restore step {step}: {problem}\n")
        raise SystemExit(EXIT_RESTORE_FAILED) from error


def restore_point(environment: WorkerEnvironment) -> wire.RestorePoint | None:
    """The leader's choice; for a run without a supervisor the newest checkpoint in its folder.

    Raises:
        OperationalError: there are checkpoints, but none that can be restored.
    """
    if environment.supervised or environment.spec.restore is not None:
        return environment.spec.restore
    entry = catalog.decide_restore(environment.checkpoint, fresh_start=environment.job_spec.checkpoint.fresh_start)
    return entry.restore_point() if entry is not None else None


def check_folder(environment: WorkerEnvironment) -> None:
    """Whether the checkpoint folder can be written, before anybody trains for it. A job that goes on from a checkpoint trains in any
    case: its saves fail, loudly and counted, until there is room again.

    Raises:
        ConfigurationError: it cannot, and nothing was saved yet.
    """
    try:
        catalog.check_writable(environment.checkpoint)
    except ConfigurationError as error:
        spec = environment.spec
        if restore_point(environment) is None and not (spec.in_place or spec.gasp):
            raise
        _log.warning("training goes on, saves will fail: %s", error)


def bind(
    run: Run, loop: StepLoop, link: AgentLink, exchange: Exchange, *, digest_every: int, digest_budget: float, **objects: Any
) -> BoundState:
    """Make the TrainState of this run, let the step loop save it, and watch it."""
    environment = run.environment
    watch_state(run, loop, _as_list(objects["model"]), _as_list(objects["optimizer"]), every=digest_every, budget=digest_budget)
    stored = bool(environment.checkpoint) and gasp.wanted(environment)
    live = _live_state(environment, loop, exchange, objects) if regroup.possible() or stored else None
    if not environment.checkpoint or not (environment.writer or environment.world_size == 1):
        if environment.checkpoint and environment.rank == 0:
            _log.warning(
                "no checkpoints: %d processes without a checkpoint writer; start the script with `regrow run`", environment.world_size
            )
        return _with_live(BoundState(run, loop, link, None), live)
    check_folder(environment)
    first = environment.first_rank
    place = Place(
        spec=environment.spec,
        rank=environment.rank,
        node=environment.node,
        local_ranks=tuple(range(first, first + environment.local_world_size)),
        folder=environment.checkpoint,
        node_file=environment.job_spec.checkpoint.node_files,
    )
    facts = {
        "seed": run.seed,
        "batches": [msgspec.to_builtins(plan.recipe) for plan in run.plans],
        **(objects.pop("facts", None) or {}),
    }
    state = TrainState.attach(place, writer=environment.writer or None, exchange=exchange, facts=facts, **objects)
    loop.keeper = StateKeeper(state)
    regroup.give_back_by(state.close)
    return _with_live(BoundState(run, loop, link, state), live)


def _with_live(state: BoundState, live: LiveState | None) -> BoundState:
    state.live = live
    return state


def _live_state(environment: WorkerEnvironment, loop: StepLoop, exchange: Exchange, objects: dict[str, Any]) -> LiveState:
    """Marked by the step loop at each boundary, held by whoever ends the generation."""
    able = not (objects.get("data") or objects.get("extra") or objects.get("generators"))
    kept: StreamFile | None = None
    if able and environment.progress:
        folder = Path(parse_location(environment.progress)[0]).parent.parent  # of the job on this node: all its generations have it
        mesh = f"{environment.spec.mesh} of {environment.world_size}"
        kept = StreamFile(folder / f"streams-{environment.local_rank}", rank=environment.rank, mesh=mesh)
    told = Replicas(environment, exchange, lambda found: loop.passed(wire.REPLICAS_PHASE, **msgspec.structs.asdict(found)))
    wrapped = (objects["model"], objects.get("optimizer"), objects.get("scheduler"), objects.get("aliases"))
    live = LiveState(*wrapped, able=able, kept=kept, replicas=told if environment.supervised else None)
    loop.live = live
    regroup.hold_by(live.hold, live.still)
    return live


def watch_state(run: Run, loop: StepLoop, modules: list[Any], optimizers: list[Any], *, every: int = 0, budget: float = 0.0) -> None:
    """Digest and check at rest by a hook of the first optimizer; tell chaos where the tensors are."""
    loop.faults.bind(lambda: named_parameters(modules), lambda: named_optimizer_state(modules, optimizers))
    digester = Digester(digest_key(run.environment.job, run.seed))
    loop.watch = StateWatch(modules, optimizers, digester, loop.faults, every=every, budget=budget)
    if optimizers and hasattr(optimizers[0], "register_step_pre_hook"):
        optimizers[0].register_step_pre_hook(lambda *_: loop.before_update())


def replaying(run: Run, loop: StepLoop, model: Any, *, rate: float, units: int, buddy: bool) -> Replay:
    """What repeats micro-steps of this run, and tells the step loop what it found."""
    environment = run.environment
    least = min(environment.spec.micro_batches, default=1)
    ring = None
    if buddy and environment.spec.mesh.dp > 1 and run.control_group is not None:
        ring = Ring(environment.rank, environment.spec.mesh, run.control_group, run.device)
    made = Replay(
        _as_list(model),
        rate=rate,
        seed=run.seed,
        rank=environment.rank,
        mesh=environment.spec.mesh,
        units=units or least,
        digester=Digester(digest_key(environment.job, run.seed)),
        exchange=run.exchange,
        ring=ring,
        faults=loop.faults,
        step=lambda: loop.started,
    )
    loop.repeats = made
    return made


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
