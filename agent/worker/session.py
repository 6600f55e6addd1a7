"""The half of Regrow inside the training process.

    run = regrow.attach()
    plan = run.batches(num_samples=len(data))
    state = run.train_state(model=model, optimizer=optimizer, scheduler=scheduler)
    state.restore()
    for step in run.steps(1000):
        for samples in plan.step(step):
            ...
        optimizer.step()
        run.complete(step, loss=loss)

Started without a supervisor the same script is a job of its own: one process, or torchrun's world.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from regrow import wire
from regrow.agent import became
from regrow.agent.progress import ProgressWriter, parse_location
from regrow.agent.worker import environment as environments
from regrow.agent.worker import failure, regroup
from regrow.agent.worker.binding import BoundState, bind, replaying
from regrow.agent.worker.cadence import Cadence
from regrow.agent.worker.chaos import Faults
from regrow.agent.worker.control import ControlVector, group_all_reduce
from regrow.agent.worker.data import BatchPlan, Recipe
from regrow.agent.worker.environment import Defaults, WorkerEnvironment
from regrow.agent.worker.groups import Groups, pick_device
from regrow.agent.worker.link import AgentLink
from regrow.agent.worker.ports import Measures
from regrow.agent.worker.regroup import GenerationChanged, in_place
from regrow.agent.worker.replay_judge import DEFAULT_RATE
from regrow.agent.worker.steps import StepLoop
from regrow.ckpt import exchange
from regrow.ckpt.retention import check_metric
from regrow.ids import MeshShape

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from regrow.agent.worker.replay import Replay

__all__ = ["GenerationChanged", "Run", "attach", "in_place"]

_log = logging.getLogger("regrow.worker")

_current: Run | None = None


class Run:
    """One worker's view of its generation. Made by `attach`."""

    def __init__(self, environment: WorkerEnvironment, device: torch.device, groups: Groups, link: AgentLink, loop: StepLoop) -> None:
        self._environment = environment
        self._groups = groups
        self._link = link
        self._loop = loop
        self.plans: list[BatchPlan] = []
        """The plans that `batches` made; a restore moves them to their position."""
        self._model_began = time.perf_counter()
        self.device = device
        """This rank's torch device."""

    # --- who and where ----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Index of this worker in the generation, not stable across generations."""
        return self._environment.rank

    @property
    def local_rank(self) -> int:
        """Index among the workers of this node."""
        return self._environment.local_rank

    @property
    def world_size(self) -> int:
        """Workers in the generation."""
        return self._environment.world_size

    @property
    def spec(self) -> wire.GenerationSpec:
        """The generation as the leader decided it, or as made up for a standalone run."""
        return self._environment.spec

    @property
    def job_spec(self) -> wire.JobSpec:
        """What the user asked for."""
        return self._environment.job_spec

    @property
    def environment(self) -> WorkerEnvironment:
        """Everything that the environment says."""
        return self._environment

    @property
    def supervised(self) -> bool:
        """False: no agent, the script runs by itself."""
        return self._environment.supervised

    @property
    def mesh_shape(self) -> MeshShape:
        """Sizes of the parallel axes."""
        return self._environment.spec.mesh

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place on each axis: {"dp", "pp", "cp", "tp"}."""
        return self.mesh_shape.coordinates(self.rank)

    @property
    def mesh(self) -> DeviceMesh:
        """torch DeviceMesh with dimensions ("dp", "pp", "tp"), with "cp" before "tp" when above 1. Collective on first use."""
        return self._groups.mesh(self.mesh_shape)

    # --- the batch --------------------------------------------------------------------------------------------

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all replicas; the same in every generation. 0: not stated."""
        return self._environment.spec.global_batch

    @property
    def micro_batch(self) -> int:
        """Samples of one forward pass."""
        return self._environment.spec.micro_batch

    @property
    def local_micro_batches(self) -> int:
        """Micro-batches of this rank's replica in one step. Replicas may differ by one."""
        counts = self._environment.spec.micro_batches
        return counts[self.coordinates["dp"]] if counts else 0

    @property
    def seed(self) -> int:
        """Seed of the job."""
        return self._environment.job_spec.seed

    def batches(self, *, num_samples: int, seed: int | None = None, drop_last: bool = False) -> BatchPlan:
        """The samples of each step for this rank's replica: ``plan.step(step)`` gives a `data.Batch`.

        Args:
            num_samples: size of the data set.
            seed: of the order; the job's seed by default.
            drop_last: leave out the samples of an epoch that do not fill a batch. False: that batch goes on into the next epoch.

        Raises:
            ConfigurationError: no global batch is stated, or it does not fit the data set.
        """
        spec = self._environment.spec
        recipe = Recipe(
            num_samples=num_samples,
            seed=self.seed if seed is None else seed,
            global_batch=spec.global_batch,
            micro_batch=spec.micro_batch,
            drop_last=drop_last,
        )
        plan = BatchPlan(recipe, spec.micro_batches, self.coordinates["dp"], base_step=self._loop.step, base_samples=self._loop.samples)
        self.plans.append(plan)
        return plan

    @property
    def control_group(self) -> Any:
        """The gloo group of our own messages: nothing of ours queues among the user's collectives. None in a world of one."""
        return self._groups.control

    @property
    def exchange(self) -> exchange.Exchange:
        """All ranks' bytes to all ranks."""
        return exchange.over(self._groups.control) if self.world_size > 1 else exchange.alone

    # --- the state --------------------------------------------------------------------------------------------

    def train_state(
        self,
        *,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        data: Any = None,
        extra: dict[str, Any] | None = None,
        digest_every: int = 0,
        digest_budget: float = 0.0,
        **options: Any,
    ) -> BoundState:
        """Bind the training state to this run: what is saved, restored, digested.

        Args:
            model: a module, or a list of modules (the pipeline stages of this rank) with global names.
            optimizer: a torch optimizer, or a list of them.
            scheduler: an object with state_dict and load_state_dict.
            data: an object with state_dict and load_state_dict, for loaders that have a state; `run.batches` needs none.
            extra: more such objects, by name.
            digest_every: digest of parameters and optimizer state every so many steps, with the check at rest; 0: never.
            digest_budget: share of the step time that digests may cost, like 0.005. Then each step looks at a part only, in turn,
                and at everything before a save.
            options: passed on to `regrow.ckpt.state.TrainState`: aliases, generators, facts, back_pressure, wait_seconds.

        Without a checkpoint folder nothing is saved; digest, check at rest and chaos work all the same.
        """
        self._loop.passed("model", time.perf_counter() - self._model_began)
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data, "extra": extra, **options}
        return bind(self, self._loop, self._link, self.exchange, digest_every=digest_every, digest_budget=digest_budget, **objects)

    def restored(self, step: int, samples: int | None = None, seconds: float = 0.0, *, saved: bool = True) -> None:
        """Go on after completed step `step` with `samples` consumed. `BoundState.restore` calls it; so does a script that
        restores by itself."""
        self._loop.restored(step, step * self.global_batch if samples is None else samples, seconds, saved=saved)
        for plan in self.plans:
            plan.rebase(self._loop.step, self._loop.samples)

    # --- the loop ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The last step that this rank completed."""
        return self._loop.step

    @property
    def samples(self) -> int:
        """Samples that the job has consumed in completed steps."""
        return self._loop.samples

    @property
    def stopped(self) -> bool:
        """True when the loop ended early because all ranks agreed to save and stop: skip what belongs to the end of training."""
        return self._loop.stopped

    def steps(self, total: int) -> Iterator[int]:
        """Step numbers from the one after the restored step to `total`. Reaching the end declares success."""
        return self._loop.steps(total)

    def complete(
        self,
        step: int,
        *,
        loss: SupportsFloat | None = None,
        learning_rate: float | None = None,
        grad_norm: SupportsFloat | None = None,
        tokens: int = 0,
        compute_seconds: float | None = None,
    ) -> None:
        """The update of `step` is applied. Reports, agrees with the other ranks, saves when it is due. Call it once a step.

        Args:
            loss: of the whole step, only on ranks that know it. A tensor is read, which waits for a GPU.
            grad_norm: of the whole model.
            tokens: of the whole job in this step.
            compute_seconds: own compute before synchronisation; else what `computed` marked, else this process's CPU time.

        Raises:
            ConfigurationError: not the step that `steps` gave out.
            OperationalError: the last checkpoint of the job could not be made durable.
        """
        numbers = Measures.told(loss, learning_rate, grad_norm, tokens=tokens, compute_seconds=compute_seconds)
        self._loop.complete(step, numbers)

    def metric(self, name: str, value: SupportsFloat) -> None:
        """How good the state is, like a held-out loss: for `--keep-best` and `ckpt ls`. Between the update and `complete`, on a rank
        that knows it; it goes into the records of this step's save and of later ones. `loss` of `complete` is one by itself."""
        self._loop.measured(check_metric(name), float(value))

    def computed(self) -> None:
        """Mark that this rank's own compute of the step is done and synchronisation follows: straggler detection reads it."""
        self._loop.computed()

    def replay(self, model: Any, *, rate: float = DEFAULT_RATE, units: int = 0, buddy: bool = True) -> Replay:
        """Repeat sampled micro-steps and compare their gradients: ``loss = replay(compute, *inputs)`` instead of ``compute(*inputs)``.

        Args:
            model: a module or a list of modules: whose gradients `compute` leaves, before any reduction over replicas.
            rate: share of steps of which one micro-step is repeated.
            units: calls in a step, at least and on every rank; 0: one for each micro-batch of the shortest replica.
            buddy: half of the times on another replica; False: a replica cannot do another's work, its shapes differ.
        """
        return replaying(self, self._loop, model, rate=rate, units=units, buddy=buddy)

    def before_update(self) -> None:
        """The optimizer is about to write. Called by itself for torch optimizers given to `train_state`; others call it."""
        self._loop.before_update()

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Publish that this rank is in phase `name` ("eval", ...), which has a time limit of its own."""
        before = self._loop.current_phase
        self._loop.phase(name)
        try:
            yield
        finally:
            self._loop.phase(before)

    def request_save(self, *, stop: bool = False) -> None:
        """Ask for a save at the next boundary that all ranks agree on. One rank's call is enough; `stop` ends the loop after it."""
        self._loop.request(save=True, stop=stop)

    def finish(self) -> None:
        """Declare the end of training for a loop that is left early on purpose, on all ranks. Collective."""
        self._loop.finish()

    def close(self) -> None:
        """Give back sockets and process groups. Called at exit."""
        global _current  # noqa: PLW0603
        self._link.drain(1.0)
        self._link.close()
        self._groups.close()
        if _current is self:
            _current = None


def attach(
    *,
    global_batch: int = 0,
    micro_batch: int = 0,
    seed: int | None = None,
    mesh: str | MeshShape | None = None,
    checkpoint: str = "",
    level: int = 1,
) -> Run:
    """Join the generation that this process was started for. A second call returns the same run.

    Args:
        global_batch: samples a step. It, micro_batch, seed and mesh are for runs that do not state them: a job's own win, or are refused.
        checkpoint: folder of checkpoints for a run that no job gives one.
        level: of adoption, 1 to 3 (docs/concepts.md), told to the agent.

    Raises:
        ConfigurationError: an environment that contradicts itself or the script.
        OperationalError: the rendezvous failed.
    """
    global _current  # noqa: PLW0603
    if _current is not None:
        return _current
    began = time.perf_counter()
    asked = Defaults(
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=seed,
        checkpoint=checkpoint,
        mesh=MeshShape.parse(mesh) if isinstance(mesh, str) else mesh,
    )
    environment = environments.read(defaults=asked)
    progress = ProgressWriter(*parse_location(environment.progress), generation=environment.generation) if environment.progress else None
    greeting = wire.WorkerHello(job=environment.job, generation=environment.generation, rank=environment.rank, pid=os.getpid(), level=level)
    link = AgentLink(environment.socket, greeting)
    faults = Faults(enabled=environment.chaos, rank=environment.rank)
    loop = StepLoop(environment, link, progress, Cadence(environment.job_spec.checkpoint, environment.spec), faults)
    hook = failure.UncaughtHook(
        lambda error: _last_words(error, environment, loop, link), lambda error: regroup.await_the_end(error, environment, link)
    )
    if environment.progress:
        failure.register_stacks(Path(parse_location(environment.progress)[0]).parent, environment.rank)
    loop.phase("rendezvous")
    loop.passed("imported", became.seconds())
    device = pick_device(environment.local_rank)
    groups = Groups(environment, device)
    groups.rendezvous()
    if groups.control is not None:
        loop.use_control(ControlVector(group_all_reduce(groups.control)), groups.control_seconds)
    loop.phase("model")
    loop.passed("rendezvous", time.perf_counter() - began)
    _current = Run(environment, device, groups, link, loop)
    failure.stop_on_sigterm(lambda: loop.request(save=True, stop=True))
    # Registered first, so run last: the interpreter's final collections, 1.5 CPU-seconds, then have nothing to walk.
    atexit.register(gc.freeze)
    atexit.register(_current.close)
    loop.check = regroup.watch(environment, lambda: _leave(hook))
    return _current


def _leave(hook: failure.UncaughtHook) -> None:
    """Take the run apart, so that `attach` can join the next generation."""
    hook.remove()
    failure.leave_sigterm()
    if _current is not None:
        atexit.unregister(_current.close)
        _current.close()


def _last_words(error: BaseException, environment: WorkerEnvironment, loop: StepLoop, link: AgentLink) -> None:
    if environment.error_file:
        document = failure.error_document(
            error, rank=environment.rank, step=loop.started, generation=environment.generation, node=environment.node
        )
        failure.write_error_file(environment.error_file, document)
    link.drain(0.5)
