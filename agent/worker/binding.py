"""Ties the checkpointed state (ckpt.state) to the run: position, reports, digest, exit code of a failed restore."""

from __future__ import annotations

import importlib
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from regrow import wire
from regrow.agent.worker.digest import Digester
from regrow.agent.worker.failure import EXIT_RESTORE_FAILED
from regrow.agent.worker.link import AgentLink
from regrow.agent.worker.steps import StepLoop
from regrow.agent.worker.watch import StateWatch, digest_key, named_optimizer_state, named_parameters
from regrow.errors import RegrowError

if TYPE_CHECKING:
    from regrow.agent.worker.session import Run


class TrainStateLike(Protocol):
    """What the run needs of `regrow.ckpt.state.TrainState`."""

    def ready(self) -> bool:
        """Is there room for a snapshot now? Once true it stays true until the next save."""
        ...

    def save(self, step: int, samples: int) -> wire.SaveReport:
        """Take a snapshot of this rank's part."""
        ...

    def restore(self, point: wire.RestorePoint | None) -> int:
        """Load a checkpoint. Returns its step; 0 for None."""
        ...

    def wait_durable(self, step: int, seconds: float) -> bool:
        """Wait until this rank's part of `step` is on storage."""
        ...

    def write_seconds(self) -> float:
        """Snapshot to durable of the newest one; 0 while there is none."""
        ...


class BoundState:
    """The training state of this rank. Saving is the step loop's work; a script only calls `restore`."""

    def __init__(self, run: Run, loop: StepLoop, link: AgentLink, inner: TrainStateLike) -> None:
        self._run = run
        self._loop = loop
        self._link = link
        self.inner = inner
        """The `regrow.ckpt.state.TrainState`."""

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

        Raises:
            SystemExit: with code 75 when it cannot be loaded; the agent is told, the leader takes an older one.
        """
        run, point = self._run, self._run.spec.restore
        self._loop.phase("restore")
        begin = time.perf_counter()
        try:
            step = self.inner.restore(point)
        except (RegrowError, OSError, ValueError, RuntimeError, KeyError) as error:
            self._refuse(point, error)
        seconds = time.perf_counter() - begin
        run.restored(step, point.samples if point is not None and point.samples else None, seconds)
        self._loop.passed("restored", seconds, directory=point.directory if point is not None else "")
        return step

    def _refuse(self, point: wire.RestorePoint | None, error: Exception) -> NoReturn:
        environment = self._run.environment
        problem = f"{type(error).__name__}: {error}"
        step = point.step if point is not None else 0
        self._link.send(wire.RestoreFailed(generation=environment.generation, rank=environment.rank, step=step, problem=problem), keep=True)
        self._link.drain(2.0)
        sys.stderr.write(f"regrow: rank {environment.rank} cannot restore step {step}: {problem}\n")
        raise SystemExit(EXIT_RESTORE_FAILED) from error


def bind(run: Run, loop: StepLoop, link: AgentLink, model: Any, optimizer: Any, *, digest_every: int, **options: Any) -> BoundState:
    """Make the TrainState of this run, let the step loop save it, and watch it."""
    modules: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    optimizers: list[Any] = [] if optimizer is None else list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    watch_state(run, loop, modules, optimizers, digest_every)
    inner: TrainStateLike = importlib.import_module("regrow.ckpt.state").TrainState(
        model=model, optimizer=optimizer, run=run.environment, **options
    )
    loop.keeper = inner
    return BoundState(run, loop, link, inner)


def watch_state(run: Run, loop: StepLoop, modules: list[Any], optimizers: list[Any], digest_every: int) -> None:
    """Digest and check at rest by hooks of the first optimizer; tell chaos where the tensors are."""
    loop.faults.bind(lambda: named_parameters(modules), lambda: named_optimizer_state(modules, optimizers))
    digester = Digester(digest_key(run.environment.job, run.seed))
    loop.watch = StateWatch(modules, optimizers, digester, loop.faults, digest_every)
    if optimizers and hasattr(optimizers[0], "register_step_pre_hook"):
        optimizers[0].register_step_pre_hook(lambda *_: loop.before_update())
