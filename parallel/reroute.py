"""Keep the replica of a lost node alive: peers of the lost stage in other replicas run its micro-batches.

An idea from research (ReCycle, https://arxiv.org/abs/2405.14009), evaluated here by playing the step through; the runtime
does not do it. Units of time: one forward pass of a stage = 1, a backward pass 2.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import msgspec

from regrow.parallel import pipeline

MOST_TASKS = 20_000
"""Forward and backward passes of the largest step that is played (about half a second); larger ones are estimated. Ours."""


ROOMS = (0, 2)
"""Micro-batches more that the workers of a crippled replica may hold, while its others are run elsewhere; the best is taken."""


class Rerouted(msgspec.Struct, frozen=True, kw_only=True):
    """A step with lost workers against the same step with all of them."""

    slower: float
    """Length of the step over that without a loss, minus 1."""
    most_in_flight: float
    """Micro-batches whose activations a peer holds at most, over what it holds without a loss."""
    played: bool
    """False: the step is too large to be played and is taken to be as long as with the worst stage's replicas dropped."""


def reroute(dp: int, pp: int, micro_batches: int, lost: Iterable[tuple[int, int]], *, split_backward: bool = False) -> Rerouted | None:
    """What a step of DP x PP workers (each a whole TP group) takes when some of them are lost; None: a stage has no worker left.

    Args:
        dp, pp, micro_batches: replicas, stages, and micro-batches of each replica.
        lost: (replica, stage) of the lost workers.
        split_backward: weight gradients apart from those of activations, to be run in bubbles, as ReCycle does.

    Micro-batches of a lost worker go to the peers of its stage in turn. All replicas with the same load behave alike, so only
    as many as get work are played.
    """
    dead = frozenset(lost)
    if _worst(dead, pp) >= dp:
        return None
    hit = len({replica for replica, _ in dead})
    shown = min(dp, hit + max(1, micro_batches * hit))
    if shown * pp * micro_batches * 2 > MOST_TASKS:
        return Rerouted(slower=dropped(dp, pp, micro_batches, _worst(dead, pp)), most_in_flight=1.0, played=False)
    whole, holds = _Step(shown, pp, micro_batches, frozenset(), split_backward).play()
    broken, more = min(_Step(shown, pp, micro_batches, dead, split_backward, room).play() for room in ROOMS)
    return Rerouted(slower=max(0.0, broken / whole - 1.0), most_in_flight=more / holds, played=True)


def dropped(dp: int, pp: int, micro_batches: int, lost: int) -> float:
    """What the step takes instead when `lost` whole replicas are dropped and the others share their micro-batches: over the
    step without a loss, minus 1. A peer that takes the work of its stage runs as many, so rerouting can gain the bubble at most.
    """
    return (-(-micro_batches * dp // (dp - lost)) + pp - 1) / (micro_batches + pp - 1) - 1.0


def _worst(lost: frozenset[tuple[int, int]], pp: int) -> int:
    return max((sum(1 for _, stage in lost if stage == each) for each in range(pp)), default=0)


class _Step:
    """One step, played task by task: a worker that is free takes the oldest ready backward, else a forward, else a weight
    gradient. Without a loss this is 1F1B (ZB-H1-like when the backward is split)."""

    def __init__(self, dp: int, pp: int, micro_batches: int, dead: frozenset[tuple[int, int]], split: bool, room: int = 0) -> None:
        self._pp = pp
        self._split = split
        self._home: dict[tuple[int, int, int], int] = {}
        for stage in range(pp):
            alive = [replica for replica in range(dp) if (replica, stage) not in dead]
            turn = 0
            for replica in range(dp):
                for index in range(micro_batches):
                    if (replica, stage) not in dead:
                        self._home[replica, stage, index] = replica
                    else:
                        self._home[replica, stage, index] = alive[(replica + 1 + turn) % len(alive)]
                        turn += 1
        crippled, short = {replica for replica, _ in dead}, {stage for _, stage in dead}
        self._caps = {
            (replica, stage): pipeline.in_flight("1f1b", pp, micro_batches, stage=stage)
            + (room if replica in crippled else 1.0 if stage in short else 0.0)
            for replica in range(dp)
            for stage in range(pp)
        }
        self._crippled = crippled
        self._ready: dict[tuple[int, int], list[tuple[int, int, int, int, int]]] = {worker: [] for worker in self._caps}
        """Heaps of (rank of the kind, micro-batch, replica, kind) a worker: 0 backward, 1 forward, 2 weight gradient."""
        self._holds = dict.fromkeys(self._caps, 0)
        self._busy: set[tuple[int, int]] = set()
        self._most = 0.0
        for replica in range(dp):
            for index in range(micro_batches):
                heapq.heappush(self._ready[self._home[replica, 0, index], 0], (1, index, index, replica, 1))

    def play(self) -> tuple[float, float]:
        """(length of the step, most micro-batches held over the plain limit of the stage)."""
        now, running = 0.0, []
        for worker in self._ready:
            self._start(worker, now, running)
        while running:
            now, stage, replica, kind, index, at = heapq.heappop(running)
            worker = (at, stage)
            self._busy.discard(worker)
            woken = self._finish(worker, replica, kind, index)
            for each in (worker, *woken):
                self._start(each, now, running)
        return now, self._most

    def _start(self, worker: tuple[int, int], now: float, running: list[tuple[float, int, int, int, int, int]]) -> None:
        if worker in self._busy:
            return
        heap, kept = self._ready[worker], []
        while heap:
            task = heapq.heappop(heap)
            if task[4] == 1 and self._holds[worker] >= self._caps[worker]:
                kept.append(task)
                continue
            _, _, index, replica, kind = task
            if kind == 1:
                self._holds[worker] += 1
                self._most = max(self._most, self._holds[worker] / (self._pp - worker[1]))
            length = 2.0 if kind == 0 and not self._split else 1.0
            heapq.heappush(running, (now + length, worker[1], replica, kind, index, worker[0]))
            self._busy.add(worker)
            break
        for task in kept:
            heapq.heappush(heap, task)

    def _finish(self, worker: tuple[int, int], replica: int, kind: int, index: int) -> list[tuple[int, int]]:
        stage = worker[1]
        if kind == 1:
            onward = stage + 1 if stage + 1 < self._pp else stage
            return [self._push(replica, onward, index, 1 if onward != stage else 0)]
        if kind == 2:
            return []
        self._holds[worker] -= 1
        if self._split:
            heapq.heappush(self._ready[worker], (2, index, index, replica, 2))
        return [self._push(replica, stage - 1, index, 0)] if stage else []

    def _push(self, replica: int, stage: int, index: int, kind: int) -> tuple[int, int]:
        worker = (self._home[replica, stage, index], stage)
        # Micro-batches of a crippled replica wait for others at each lost stage: they go first where they are guests.
        guest = replica in self._crippled and worker[0] != replica
        heapq.heappush(self._ready[worker], (kind, -1 if guest else index, index, replica, kind))
        return worker
