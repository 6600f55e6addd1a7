"""From step reports of nodes to completed steps of the job, and digests to compare. One object a generation."""

from __future__ import annotations

import logging
import statistics

import msgspec

from regrow import wire
from regrow.ids import MeshShape
from regrow.supervisor.core import events as e
from regrow.supervisor.core import sdc
from regrow.supervisor.stragglers import Stragglers

log = logging.getLogger("regrow.supervisor")

_OPEN_STEPS = 512
"""Reports of steps that never complete are dropped beyond this many."""


class _Open:
    """What is known of a step that is not complete."""

    __slots__ = (
        "again",
        "digests",
        "evidence",
        "first_at",
        "grad_norm",
        "learning_rate",
        "loss",
        "nonfinite",
        "num_nodes",
        "replay",
        "samples",
        "seconds",
        "tokens",
    )

    def __init__(self, at: float) -> None:
        self.first_at = at
        self.num_nodes = 0
        self.loss: float | None = None
        self.learning_rate: float | None = None
        self.grad_norm: float | None = None
        self.samples = 0
        self.tokens = 0
        self.seconds: list[float] = []
        self.digests: dict[int, str] = {}
        self.evidence: dict[int, wire.DigestEvidence] = {}
        self.nonfinite: dict[int, str] = {}
        self.again: list[int] = []
        self.replay: wire.ReplayVerdict | None = None


class Steps:
    """Counts which nodes applied which step. A node that cannot be heard does not hold the count up: the step of the others
    could not have completed without it."""

    def __init__(self, job: str, generation: int, node_ranks: dict[str, tuple[int, ...]], mesh: MeshShape | None = None) -> None:
        """`mesh`: which ranks hold the same, to say where they differ."""
        self._mesh = mesh
        self._names: dict[int, wire.DigestEvidence] = {}
        self.job = job
        self.generation = generation
        self._ranks = node_ranks
        self._stragglers = Stragglers()
        self._world = sum(len(ranks) for ranks in node_ranks.values())
        self._applied: dict[str, int] = {}
        self._base: int | None = None
        self._completed: int | None = None
        self._completed_at: float | None = None
        self._unheard: set[str] = set()
        self._waiting: set[str] = set(node_ranks)
        """Heard nodes that have not applied the step after the completed one."""
        self._open: dict[int, _Open] = {}

    @property
    def completed(self) -> int | None:
        """Highest step that every rank applied."""
        return self._completed

    def reported(self, node: str, message: wire.NodeSteps, now: float) -> list[e.Event]:
        """A node's reports of one step."""
        if node not in self._ranks:
            return []
        if self._base is None:
            self._base = message.step - 1
            self._completed = self._base
        step = self._open.setdefault(message.step, _Open(now))
        found: list[e.Event] = []
        times = {one.rank: min(one.compute_seconds, one.step_seconds) for one in message.reports if one.step_seconds > 0}
        for slow in self._stragglers.report(message.step, times) if times else ():
            log.warning("straggler job=%s generation=%d: %s", self.job, self.generation, slow.text)
        for report in message.reports:
            self._take(step, report)
            if report.replay is not None:
                found += self._replayed(step, report, report.replay, now)
            if report.at_rest_mismatch:
                found.append(
                    e.AtRestMismatch(
                        at=now, job=self.job, generation=self.generation, rank=report.rank, step=report.step, tensor=report.at_rest_mismatch
                    )
                )
        if len(step.digests) == self._world:
            where = self._located(step)
            found.append(
                e.DigestsReported(at=now, job=self.job, generation=self.generation, step=message.step, digests=step.digests, located=where)
            )
            step.digests = {}
        return found + self._advance(node, message.step, now)

    def _located(self, step: _Open) -> str:
        """Where the digests of a step differ; empty when they do not."""
        mesh, digests = self._mesh, step.digests
        if mesh is None or sdc.vote(mesh, digests).verdict != "diverged":
            return ""
        named: dict[int, wire.DigestEvidence] = {}
        for rank, one in step.evidence.items():
            told = self._names.get(rank % mesh.replica_size)
            named[rank] = one if told is None else msgspec.structs.replace(one, names=told.names, sizes=told.sizes)
        return sdc.located(mesh, digests, named)

    def words(self, node: str, progress: tuple[wire.RankProgress, ...], now: float) -> list[e.Event]:
        """Progress words of a beat: they fill in for reports that were lost."""
        if self._base is None or node not in self._ranks or len(progress) < len(self._ranks[node]):
            return []
        return self._advance(node, min(word.applied_step for word in progress), now)

    def heard(self, node: str, now: float, *, reachable: bool) -> list[e.Event]:
        """A member can (not) be heard."""
        if node not in self._ranks or reachable == (node not in self._unheard):
            return []
        if reachable:
            self._unheard.discard(node)
            if self._completed is None or self._applied.get(node, -1) <= self._completed:
                self._waiting.add(node)
            return []
        self._unheard.add(node)
        self._waiting.discard(node)
        return self._complete(now)

    def _take(self, step: _Open, report: wire.StepReport) -> None:
        if report.loss is not None:
            step.loss = report.loss
            step.learning_rate = report.learning_rate if report.learning_rate is not None else step.learning_rate
            step.grad_norm = report.grad_norm if report.grad_norm is not None else step.grad_norm
        step.samples = max(step.samples, report.samples)
        step.tokens = max(step.tokens, report.tokens)
        if report.step_seconds > 0:
            step.seconds.append(report.step_seconds)
        if report.digest:
            step.digests[report.rank] = report.copy_digest or report.digest
        if report.evidence is not None:
            step.evidence[report.rank] = report.evidence
            if report.evidence.names:
                self._names[report.rank] = report.evidence
        if report.nonfinite:
            step.nonfinite[report.rank] = report.nonfinite
            if report.nonfinite_again:
                step.again.append(report.rank)

    def _replayed(self, step: _Open, report: wire.StepReport, verdict: wire.ReplayVerdict, now: float) -> list[e.Event]:
        """All ranks tell the same verdict: it is said once. A mismatch at once, the rest when the step is complete."""
        known, step.replay = step.replay, verdict
        if verdict.verdict != "diverged" or known == verdict:
            return []
        return [self._judged(report.step, verdict, now)]

    def _judged(self, step: int, verdict: wire.ReplayVerdict, now: float) -> e.ReplayJudged:
        return e.ReplayJudged(at=now, job=self.job, generation=self.generation, step=step, verdict=verdict)

    def _advance(self, node: str, applied: int, now: float) -> list[e.Event]:
        if applied <= self._applied.get(node, -1):
            return []
        self._applied[node] = applied
        if self._completed is not None and applied > self._completed:
            self._waiting.discard(node)
        return self._complete(now)

    def _complete(self, now: float) -> list[e.Event]:
        if self._waiting or self._completed is None:
            return []
        heard = [name for name in self._ranks if name not in self._unheard]
        if not heard or any(name not in self._applied for name in heard):
            return []
        reached = min(self._applied[name] for name in heard)
        found: list[e.Event] = []
        while self._completed < reached:
            step = self._completed + 1
            if step not in self._open and reached - step > _OPEN_STEPS:
                step = reached
            open_step = self._open.get(step)
            if open_step is not None and open_step.nonfinite:
                found.append(
                    e.NonFiniteSeen(
                        at=now, job=self.job, generation=self.generation, step=step, ranks=open_step.nonfinite, again=tuple(open_step.again)
                    )
                )
            blamed = sdc.blame(open_step.evidence) if open_step is not None else None
            if blamed is not None:
                found.append(
                    e.ReceivedWrong(at=now, job=self.job, generation=self.generation, rank=blamed.rank, step=step, reason=blamed.reason)
                )
            if open_step is not None and open_step.replay is not None and open_step.replay.verdict != "diverged":
                found.append(self._judged(step, open_step.replay, now))
            found.append(self._event(step, now))
            self._completed = step
            self._completed_at = now
        self._waiting = {name for name in heard if self._applied[name] <= self._completed}
        self._forget()
        return found

    def _event(self, step: int, now: float) -> e.StepsCompleted:
        assert self._completed is not None
        known = self._open.get(step) or _Open(now)
        seconds = statistics.median(known.seconds) if known.seconds else 0.0
        if not known.seconds and self._completed_at is not None:
            seconds = now - self._completed_at
        return e.StepsCompleted(
            at=now,
            job=self.job,
            generation=self.generation,
            step=step,
            num_steps=step - self._completed,
            step_seconds=seconds,
            loss=known.loss,
            samples=known.samples,
            tokens=known.tokens,
            learning_rate=known.learning_rate,
            grad_norm=known.grad_norm,
            slow={rank: one.excess_ratio for rank, one in self._stragglers.current.items()},
        )

    def _forget(self) -> None:
        assert self._completed is not None
        done = self._completed
        for step in [step for step in self._open if step < done - 2 or (step <= done and not self._open[step].digests)]:
            del self._open[step]
        while len(self._open) > _OPEN_STEPS:
            del self._open[min(self._open)]
