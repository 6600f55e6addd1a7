"""What the worker library tells its agent, kept for /metrics: the ranks of the running generation only."""

from __future__ import annotations

from typing import Any

from regrow import telemetry, wire
from regrow.telemetry import Page

_PASSED = {"imported": "import", "restored": "restore"}
"""Words for phases that are over, as phases."""
_SOURCES = ("memory", "peers", "storage", "ranks")
_OUTCOMES = ("snapshot", "skipped", "failed")


class WorkerMetrics:
    """The last report of each local rank, and sums over this generation. A new generation starts anew."""

    def __init__(self) -> None:
        self._generation = 0
        self._ranks: dict[int, _Rank] = {}

    def said(self, message: Any) -> None:
        """A line of a worker."""
        if not isinstance(message, wire.StepReport | wire.SaveReport | wire.WorkerPhase):
            return
        if message.generation > self._generation:
            self._generation, self._ranks = message.generation, {}
        if message.generation < self._generation:
            return
        rank = self._ranks.setdefault(message.rank, _Rank())
        match message:
            case wire.StepReport():
                rank.last = message
                rank.num_steps += 1
                rank.num_tokens += message.tokens
                rank.num_nonfinite += bool(message.nonfinite)
            case wire.SaveReport():
                rank.saves[message.outcome] = rank.saves.get(message.outcome, 0) + 1
                rank.stall_seconds += message.stall_seconds
            case wire.WorkerPhase():
                phase = _PASSED.get(message.phase, message.phase)
                if phase in telemetry.WORKER_PHASES:
                    rank.start_seconds[phase] = message.seconds
                for source in _SOURCES:
                    if f"bytes_from_{source}" in message.detail:
                        rank.restored_bytes[source] = int(message.detail[f"bytes_from_{source}"])

    def put(self, page: Page, node: str, job: str, generation: int, progress: tuple[wire.RankProgress, ...]) -> None:
        """Samples of the running generation. A script without the library has progress words at most."""
        for word in progress:
            page.enum("regrow_worker_phase", telemetry.WORKER_PHASES, word.phase, job, node, word.rank)
            page.put("regrow_worker_step", word.applied_step if word.applied_step >= 0 else None, job, node, word.rank)
        if generation != self._generation:
            return
        for number, rank in self._ranks.items():
            who = (job, node, number)
            if rank.last is not None:
                page.put("regrow_worker_step_seconds", rank.last.step_seconds, *who)
                page.put("regrow_worker_compute_seconds", rank.last.compute_seconds, *who)
                page.put("regrow_worker_loss", rank.last.loss, *who)
                page.put("regrow_worker_grad_norm", rank.last.grad_norm, *who)
            for phase, seconds in rank.start_seconds.items():
                page.put("regrow_worker_start_seconds", seconds, *who, phase)
            for source, size in rank.restored_bytes.items():
                page.put("regrow_worker_restored_bytes", size, *who, source)
            page.put("regrow_worker_steps", rank.num_steps, *who)
            page.put("regrow_worker_tokens", rank.num_tokens, *who)
            page.put("regrow_worker_nonfinite", rank.num_nonfinite, *who)
            page.put("regrow_worker_stall_seconds", rank.stall_seconds, *who)
            for outcome in _OUTCOMES:
                page.put("regrow_worker_saves", rank.saves.get(outcome, 0), *who, outcome)


class _Rank:
    """One rank in one generation."""

    def __init__(self) -> None:
        self.last: wire.StepReport | None = None
        self.num_steps = 0
        self.num_tokens = 0
        self.num_nonfinite = 0
        self.stall_seconds = 0.0
        self.saves: dict[str, int] = {}
        self.start_seconds: dict[str, float] = {}
        self.restored_bytes: dict[str, int] = {}
