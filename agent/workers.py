"""From the shim's word that a worker ended to all evidence about it, one after the other, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from regrow.agent import exits
from regrow.agent import machine as m
from regrow.agent.layout import NodePaths
from regrow.agent.progress import Progress, read_progress
from regrow.agent.protocol import GenerationState, WorkerState
from regrow.agent.sockets import WorkerSocket
from regrow.wire import WorkerExit

_LAST_LINES_SECONDS = 0.1
"""A dead worker's lines are read to their end first; its helpers may hold the connection open longer than this."""


class _Ended(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    generation: int
    workers: tuple[WorkerState, ...]
    lost: str = ""


class ExitReader:
    """Reports `machine.Exited`, in the order in which the shim told of the ends."""

    def __init__(
        self,
        paths: NodePaths,
        socket: WorkerSocket,
        report: Callable[[m.Exited], None],
        kernel_lines: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._paths = paths
        self._socket = socket
        self._report = report
        self._kernel_lines = kernel_lines
        self._queue: asyncio.Queue[_Ended] = asyncio.Queue()
        self._oom_kills: dict[tuple[str, int], exits.OomKills] = {}

    def begin(self, job: str, generation: int) -> None:
        """A generation starts: OOM kills are counted from here."""
        self._oom_kills = {(job, generation): exits.count_oom_kills()}

    def ended(self, job: str, generation: int, workers: tuple[WorkerState, ...]) -> None:
        """Workers ended and were reaped."""
        if workers:
            self._queue.put_nowait(_Ended(job=job, generation=generation, workers=workers))

    def lost(self, state: GenerationState, reason: str) -> None:
        """The shim died: its live workers died with it."""
        workers = tuple(worker for worker in state.workers if worker.status is None)
        if workers:
            self._queue.put_nowait(_Ended(job=state.job, generation=state.generation, workers=workers, lost=reason))

    async def run(self) -> None:
        """Read and report until cancelled."""
        while True:
            item = await self._queue.get()
            for worker in item.workers:
                await self._socket.until_ended(item.generation, worker.rank, _LAST_LINES_SECONDS)
            self._report(await asyncio.to_thread(self._read, item, exits.oom_kills_of(self._kernel_lines())))

    def _read(self, item: _Ended, named: frozenset[int]) -> m.Exited:
        words = {word.slot: word for word in read_progress(self._paths.progress(item.job, item.generation))}
        found = tuple(self._describe(item, worker, words.get(worker.local_rank), named) for worker in item.workers)
        attached = frozenset(
            worker.rank for worker in item.workers if (word := words.get(worker.local_rank)) is not None and word.sequence > 0
        )
        return m.Exited(job=item.job, generation=item.generation, exits=found, attached=attached, lost=bool(item.lost))

    def _describe(self, item: _Ended, worker: WorkerState, word: Progress | None, named: frozenset[int]) -> WorkerExit:
        if item.lost:
            return exits.lost_with_shim(worker, item.lost, word)
        before = self._oom_kills.get((item.job, item.generation), exits.OomKills())
        killed, counted = exits.was_oom(before, exits.count_oom_kills())
        return exits.describe(
            worker,
            error_file=self._paths.error_file(item.job, item.generation, worker.rank),
            progress=word,
            oom_killed=worker.pid in named or (not named and killed),
            oom_counted=counted,
        )
