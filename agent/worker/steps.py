"""The step boundary: what is published, agreed, saved and reported after each optimizer step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from regrow import wire
from regrow.agent.progress import ProgressWriter
from regrow.agent.worker.cadence import Cadence
from regrow.agent.worker.control import ControlVector, Words
from regrow.agent.worker.environment import WorkerEnvironment
from regrow.agent.worker.link import AgentLink
from regrow.agent.worker.ports import Keeper, Live, Measures, NoWatch, Repeats, Watch
from regrow.errors import ConfigurationError, OperationalError

if TYPE_CHECKING:
    from regrow.agent.worker.chaos import Faults

_log = logging.getLogger("regrow.worker")

DURABLE_SECONDS = 300.0
"""How long the end of a job waits for the writer to make the last snapshot durable."""


class StepLoop:
    """Position of this rank in the job, and the boundary after each step."""

    def __init__(
        self, environment: WorkerEnvironment, link: AgentLink, progress: ProgressWriter | None, cadence: Cadence, faults: Faults
    ) -> None:
        self._environment = environment
        self._link = link
        self._progress = progress
        self._cadence = cadence
        self._control = ControlVector()
        self._cost_us = 0
        self.keeper: Keeper | None = None
        self.watch: Watch = NoWatch()
        self.live: Live | None = None
        self.repeats: Repeats | None = None
        self.faults = faults
        self.check: Callable[[], None] = lambda: None
        """Called at each boundary; raises GenerationChanged when this generation is over."""
        self.step = 0
        self.samples = 0
        self.started = 0
        self.total = 0
        self.stopped = False
        self.finished = False
        self.num_skipped_saves = 0
        self._want_save = False
        self._want_stop = False
        self._damaged = False
        self._doubtful = False
        self._num_applied = 0
        self._last_saved = -1
        self._began = time.perf_counter()
        self._began_cpu = time.process_time()
        self._computed: float | None = None
        self._synced_step = 0
        self._nonfinite = ""
        self._nonfinite_again: bool | None = None
        self._found: wire.ReplayVerdict | None = None
        self._last_exchange = (0, time.perf_counter())

    # --- position ---------------------------------------------------------------------------------------------

    def use_control(self, control: ControlVector, cost_seconds: float) -> None:
        """Agree through this vector from now on; `cost_seconds` is the measured cost of one exchange."""
        self._control = control
        self._cost_us = int(cost_seconds * 1e6)

    def restored(self, step: int, samples: int, seconds: float, *, saved: bool = True) -> None:
        """Go on after completed step `step`; `saved`: it is on storage."""
        self.step, self.samples = step, samples
        self._last_saved = step if saved and step else -1
        self._last_exchange = (step, time.perf_counter())  # else the steps of earlier generations pass for this one's, and are short
        self._cadence.started_at(step, seconds)

    def request(self, *, save: bool = False, stop: bool = False) -> None:
        """Ask for a save, or a save and a stop, at the next boundary that all ranks agree on. Safe in a signal handler."""
        self._want_save |= save
        self._want_stop |= stop

    def phase(self, name: str) -> None:
        """Publish the phase that this rank is in."""
        if self._progress is not None:
            self._progress.publish(phase=name)
        self.faults.entered(name, self.started)

    @property
    def current_phase(self) -> str:
        """The phase last published."""
        return self._progress.phase if self._progress is not None else "step"

    def passed(self, phase: str, seconds: float = 0.0, **detail: Any) -> None:
        """Tell the agent that a phase is over."""
        environment = self._environment
        self._link.send(
            wire.WorkerPhase(
                generation=environment.generation, rank=environment.rank, phase=phase, step=self.step, seconds=seconds, detail=detail
            ),
            keep=True,
        )

    # --- the loop ---------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """Yield the steps that are left, then declare the end. Stops early when all ranks agreed to."""
        self.total = total
        while self.step < total and not self.stopped:
            self._begin(self.step + 1)
            yield self.started
            if self.step != self.started:
                raise ConfigurationError(
                    f"step {self.started} was not completed",
                    where="run.steps()",
                    hint="call run.complete(step, ...) after the optimizer step",
                )
        self.finish()

    def _begin(self, step: int) -> None:
        self.check()
        self.started = step
        self._began, self._began_cpu, self._computed = time.perf_counter(), time.process_time(), None
        if self._progress is not None:
            self._progress.publish(started_step=step)
        self.phase("step" if self._num_applied else "first_step")

    def computed(self) -> None:
        """Own compute of this step is done, synchronisation follows."""
        self._before_sync(own=True)
        self._computed = time.perf_counter() - self._began

    def measured(self, name: str, value: float) -> None:
        """How good the state is after the update of the step that was begun last; for the records of its save and of later ones."""
        if self.keeper is not None:
            self.keeper.measured(name, value, max(self.started, self.step))

    def before_update(self) -> None:
        """The optimizer is about to write. Safe to call more than once a step."""
        self._before_sync(own=False)
        if self.live is not None:
            self.live.updating()
        self.watch.before_update()

    def _before_sync(self, *, own: bool) -> None:
        """`own`: gradients are this rank's own still, so what is not finite was made here."""
        if self._synced_step == self.started:
            return
        self._synced_step = self.started
        self.faults.before_sync(self.started, time.perf_counter() - self._began)
        self._nonfinite, self._nonfinite_again = self.watch.before_sync() if own else "", None
        if self._nonfinite and self.repeats is not None:
            self._nonfinite_again = self.repeats.non_finite_again()
            if self._nonfinite_again:
                self._nonfinite = self.repeats.producer or self._nonfinite
        if self._nonfinite_again is False:
            rank, name = self._environment.rank, self._nonfinite
            reason = f"the gradient of {name} on rank {rank} was not finite, and finite when the same work was repeated"
            self._found = wire.ReplayVerdict(verdict="diverged", once=(rank,), reason=reason, tensor=name, repaired=True)
            self._nonfinite = ""

    def complete(self, step: int, measures: Measures) -> None:
        """The boundary after `step`: the update is applied."""
        if step != self.started or self.step == step:
            raise ConfigurationError(
                f"complete({step}) does not follow the step {self.started} that run.steps() gave out",
                where="run.complete()",
                hint="call it once a step, after the optimizer step",
            )
        seconds = time.perf_counter() - self._began
        self.step = step
        if measures.loss is not None:
            self.measured("loss", measures.loss)
        self.samples += self._environment.spec.global_batch
        if self._progress is not None:
            self._progress.publish(applied_step=step)
        self._cadence.stepped(seconds)
        self._hear()
        agreed = self._control.agreed() if self._control.due(step) or step == self.total else None
        self._report(step, measures, seconds, agreed)
        if agreed is not None:
            self._boundary(step, agreed)
        self.watch.resting(step)
        if self.live is not None:
            self.live.resting(step, self.samples)
        self._num_applied += 1
        if self._num_applied == 1:
            self.passed("first_step", seconds)

    def _report(self, step: int, measures: Measures, seconds: float, agreed: Words | None) -> None:
        if agreed is not None:
            self.watch.agreed_cost(agreed.digest_us, agreed.step_us)
        saves = agreed is not None and bool(agreed.save or agreed.stop or step == self.total)
        digest, mismatch = self.watch.applied(step, whole=saves), self.watch.take_mismatch()
        if self.keeper is not None:
            self.watch.doubt(self.keeper.last_reason())
        nonfinite, self._nonfinite = self._nonfinite or measures.nonfinite or self.watch.poisoned(), ""
        verdict, self._found = self._found or (self.repeats.take_verdict() if self.repeats is not None else None), None
        self._damaged |= bool(mismatch)
        self._doubtful |= bool(nonfinite) or (verdict is not None and verdict.verdict == "diverged" and not verdict.repaired)
        environment = self._environment
        evidence = self.watch.take_evidence(names=environment.rank < environment.spec.mesh.replica_size)
        self._damaged |= evidence is not None and bool(evidence.received)
        compute = measures.compute_seconds if measures.compute_seconds is not None else self._computed
        self._link.send(
            wire.StepReport(
                generation=environment.generation,
                rank=environment.rank,
                step=step,
                loss=measures.loss,
                samples=self.samples,
                learning_rate=measures.learning_rate,
                grad_norm=measures.grad_norm,
                step_seconds=seconds,
                compute_seconds=compute if compute is not None else time.process_time() - self._began_cpu,
                tokens=measures.tokens,
                digest=digest,
                copy_digest=self.watch.take_copies(),
                at_rest_mismatch=mismatch,
                evidence=evidence,
                nonfinite=nonfinite,
                nonfinite_again=self._nonfinite_again if nonfinite else None,
                replay=verdict,
            ),
            droppable=not (
                mismatch
                or nonfinite
                or (evidence is not None and evidence.received)
                or (verdict is not None and verdict.verdict == "diverged")
            ),
        )

    # --- agreement --------------------------------------------------------------------------------------------

    def _boundary(self, step: int, agreed: Words) -> None:
        last = step == self.total
        wait = last or bool(agreed.stop)
        if agreed.save or wait:
            self._save(step, agreed, wait=wait)
        elif agreed.memory and not agreed.busy and not agreed.refuse:
            self._save_in_memory(step)
        if agreed.stop and not last:
            self.stopped = True
        if not wait:
            self._control.start(step, self._words(step))

    def _hear(self) -> None:
        for order in self._link.receive():
            self.request(save=order.save or order.stop_after_save, stop=order.stop_after_save)
            self._cadence.ordered(order)
            if order.inject:
                self.faults.accept(order.inject)

    def _words(self, step: int) -> Words:
        keeper = self.keeper
        decides = self._environment.rank == 0 and keeper is not None
        due = decides and self._cadence.due(step, self._control.period)
        before, then = self._last_exchange
        now = time.perf_counter()
        self._last_exchange = (step, now)
        doubtful, self._doubtful = self._doubtful, False
        return Words(
            save=int(self._want_save or due),
            stop=int(self._want_stop),
            busy=int(keeper is not None and not keeper.ready()),
            refuse=int(self._damaged or doubtful),
            digest_us=int(self.watch.cost_seconds() * 1e6),
            step_us=int((now - then) * 1e6 / max(1, step - before)),
            cost_us=self._cost_us,
            memory=int(decides and self._cadence.memory_due(step, self._control.period)),
        )

    # --- saving -----------------------------------------------------------------------------------------------

    def _save(self, step: int, agreed: Words, *, wait: bool) -> None:
        if self.keeper is None or self._last_saved == step:
            self._want_save = False
            return
        report = self._attempt(step, agreed, wait=wait)
        if report.outcome == "snapshot":
            self._cadence.saved(step, report.stall_seconds)
        if self._environment.rank == 0:
            report = msgspec.structs.replace(report, tiers=self._cadence.tiers())
        self._link.send(report)
        if report.outcome != "snapshot":
            self.num_skipped_saves += 1
            _log.warning("save not taken step=%d outcome=%s reason=%s", step, report.outcome, report.reason)
        else:
            self._want_save = False
            self._last_saved = step
        if wait:
            self._await_durable(step, report)

    def _save_in_memory(self, step: int) -> None:
        """Between checkpoints. While a rank is not able to, nobody does, and none is missed: the next one is due at once."""
        assert self.keeper is not None
        if self._damaged or self._doubtful:
            self.keeper.skip(step, "the state of this rank is not finite, or its memory changed at rest")
            return
        before = self.current_phase
        self.phase("save")
        report = self.keeper.save(step, self.samples, memory=True)
        self.phase(before)
        if report.outcome == "snapshot":
            self._cadence.saved(step, report.stall_seconds, memory=True)
        if (safe_seconds := self.keeper.memory_seconds()) > 0.0:
            self._cadence.remembered(safe_seconds)

    def _attempt(self, step: int, agreed: Words, *, wait: bool) -> wire.SaveReport:
        """All ranks come to the same answer, except for what is known on one rank only: then its shard stays missing and
        nobody commits."""
        environment, keeper = self._environment, self.keeper
        assert keeper is not None
        outcome, reason = "skipped", ""
        if agreed.refuse:
            reason = "a rank refuses: its state is not finite, or its memory changed at rest"
        elif agreed.busy and not wait:
            reason = "a rank has no room for another snapshot: the one before is not durable yet"
        elif self._damaged or self._doubtful:
            outcome, reason = "failed", "the state of this rank is not finite, or its memory changed at rest"
        if reason:
            if outcome == "failed":
                keeper.skip(step, reason)  # others may take part: their writers need not wait for us
            return wire.SaveReport(
                generation=environment.generation,
                rank=environment.rank,
                step=step,
                outcome="failed" if outcome == "failed" else "skipped",
                reason=reason,
            )
        before = self.current_phase
        self.phase("save")
        if wait:
            keeper.wait_durable(step, DURABLE_SECONDS)  # of those before: this one is not skipped for want of room
        write_seconds = keeper.write_seconds()
        if write_seconds > 0.0:
            self._cadence.wrote(write_seconds)
        report = keeper.save(step, self.samples)
        self.phase(before)
        return report

    def _await_durable(self, step: int, report: wire.SaveReport) -> None:
        assert self.keeper is not None
        before = self.current_phase
        self.phase("save")
        durable = report.outcome == "snapshot" and self.keeper.wait_durable(step, DURABLE_SECONDS)
        self.phase(before)
        if not durable:
            reason = report.reason or self.keeper.last_reason() or "the writer did not confirm it in time"
            raise OperationalError(
                f"the checkpoint of step {step} did not become durable: {reason}",
                where=f"rank {self._environment.rank} on {self._environment.node}",
                hint="look at the writer's log on this node; the job goes on from the checkpoint before",
            )

    # --- the end ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Declare that training has reached its end on this rank: after it an exit with 0 is a success.

        A loop that was asked to stop is not at its end: it says "stopped", and an exit with 0 is a success only for who asked.
        """
        if self.finished:
            return
        self.finished = True
        self._control.agreed()
        self._control.start(self.step, Words())
        self._control.agreed()  # a barrier: no rank leaves while a peer still needs its connections
        self.passed("stopped" if self.stopped else "finished")
        if not self.stopped:
            self.phase("finished")
        self._link.drain(2.0)
