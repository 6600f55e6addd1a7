"""What an agent tells of itself: greeting, beats, its record in the store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from regrow import wire
from regrow.agent.progress import Progress, read_progress
from regrow.agent.protocol import StoreState
from regrow.agent.roster import cpu_seconds, process_state

if TYPE_CHECKING:
    from regrow.agent.driver import Agent
    from regrow.agent.machine import Local

_QUIET_SECONDS = 1.0
"""The CPU time of a process whose word has not changed for so long is told."""
_STILL_SECONDS = 0.5
"""A word that has not changed for so long makes the agent look whether the process runs at all."""
_NOT_RUNNING = {"T": "stopped", "t": "traced", "Z": "gone", "": "gone"}
"""State letters of /proc/<pid>/stat under which a worker cannot go on, as phases of a beat."""

CAPABILITIES = ("warm_fork", "spare_store", "stacks", "checkpoint_writer")


class NodeView:
    """Composes messages from the agent's parts."""

    def __init__(self, agent: Agent, *, incarnation: str, hardware_id: str, boot_id: str) -> None:
        self._agent = agent
        self.incarnation = incarnation
        self._hardware_id = hardware_id
        self._boot_id = boot_id
        self._stores: dict[str, StoreState] = {}

    # --- stores of the shim

    def set_stores(self, stores: tuple[StoreState, ...]) -> None:
        """All stores that the shim serves."""
        self._stores = {store.address: store for store in stores}

    def note_store(self, store: StoreState, *, ended: bool) -> None:
        """One of them changed."""
        if ended:
            self._stores.pop(store.address, None)
        else:
            self._stores[store.address] = store

    def forget_stores(self) -> None:
        """They died with the shim."""
        self._stores = {}

    @property
    def spare_store(self) -> str:
        """Address of the store that nobody has used; empty when none stands ready."""
        return next((store.address for store in self._stores.values() if not store.generation), "")

    # --- messages

    def hello(self) -> wire.Hello:
        """The greeting on the beat connection."""
        agent, settings = self._agent, self._agent.settings
        fences = agent.state.fences
        return wire.Hello(
            cluster=settings.cluster,
            node=settings.node,
            incarnation=self.incarnation,
            address=settings.address,
            peer_address=agent.checkpoints.peer_address,
            slots=settings.slots,
            devices=agent.health.devices(),
            hardware_id=self._hardware_id,
            capabilities=CAPABILITIES if settings.warm else CAPABILITIES[1:],
            highest_epoch=fences.epoch,
            highest_generation=fences.highest(),
            running=self._running(),
            spare_store=self.spare_store,
            health=agent.health.verdict(),
            boot_id=self._boot_id,
        )

    def _running(self) -> wire.RunningGeneration | None:
        local = self._agent.state.current
        if local is None or local.stage in ("waiting", "stopping", "stopped"):
            return None
        open_exits = tuple(found for rank, found in sorted(local.exits.items()) if rank not in local.acknowledged)
        if not local.live and not open_exits:
            return None
        return wire.RunningGeneration(
            job=local.job,
            epoch=local.order.epoch,
            generation=local.generation,
            workers=local.order.workers,
            exits=open_exits,
            spec=local.spec,
            job_spec=local.order.job_spec,
        )

    def beat(self, seq: int) -> wire.Beat:
        """Liveness and the progress words of the running generation."""
        local = self._agent.state.current
        if local is None or not local.live:
            return wire.Beat(seq=seq, spare_store=self.spare_store)
        sample = self._agent.health.sample()
        words, now = self._words(local), time.monotonic_ns()
        return wire.Beat(
            seq=seq,
            generation=local.generation,
            progress=_told(local, words, now),
            spare_store=self.spare_store,
            cpu_seconds=self._cpu_seconds(local, words, now),
            memory_ratio=sample.memory_ratio() if sample is not None else 0.0,
        )

    def progress(self) -> tuple[wire.RankProgress, ...]:
        """The progress words of the running generation alone; empty without one."""
        local = self._agent.state.current
        return _told(local, self._words(local), time.monotonic_ns()) if local is not None and local.live else ()

    def _words(self, local: Local) -> dict[int, Progress]:
        return {word.slot: word for word in read_progress(self._agent.paths.progress(local.job, local.generation))}

    @staticmethod
    def _cpu_seconds(local: Local, words: dict[int, Progress], now_ns: int) -> dict[int, float]:
        found: dict[int, float] = {}
        for worker in local.order.workers:
            pid = local.pids.get(worker.rank)
            if pid is None or worker.rank not in local.live or not _quiet(words.get(worker.local_rank), now_ns):
                continue
            used = cpu_seconds(pid)
            if used is not None:
                found[worker.rank] = used
        return found

    def status(self) -> wire.StatusRecord | None:
        """What this node runs; None before its first generation. The step is left out: it is no change by itself."""
        local = self._agent.state.current
        if local is None:
            return None
        workers = dict.fromkeys(local.live, "running")
        for rank, found in local.exits.items():
            workers[rank] = "torn_down" if found.torn_down else "finished" if found.declared_end else "failed"
        return wire.StatusRecord(
            node=self._agent.settings.node,
            incarnation=self.incarnation,
            job=local.job,
            epoch=local.order.epoch,
            generation=local.generation,
            stage=local.stage,
            workers=dict(sorted(workers.items())),
        )

    def applied_step(self) -> int:
        """Lowest step that a local rank has applied; -1 for none."""
        steps = [found.applied_step for found in self.progress()]
        return min(steps, default=-1)

    def record(self) -> wire.NodeRecord:
        """This node's value in the store."""
        agent, settings = self._agent, self._agent.settings
        return wire.NodeRecord(
            node=settings.node,
            incarnation=self.incarnation,
            address=settings.address,
            peer_address=agent.checkpoints.peer_address,
            slots=settings.slots,
            devices=agent.health.devices(),
            hardware_id=self._hardware_id,
            capabilities=CAPABILITIES if settings.warm else CAPABILITIES[1:],
            metrics_address=agent.metrics.reachable_at(settings.address),
            failure_domain=settings.failure_domain,
            copies_address=agent.checkpoints.copies_address,
        )


def _told(local: Local, words: dict[int, Progress], now_ns: int) -> tuple[wire.RankProgress, ...]:
    return tuple(
        wire.RankProgress(
            rank=worker.rank,
            started_step=word.started_step,
            applied_step=word.applied_step,
            phase=_phase(word, now_ns),
            age_seconds=word.age_seconds(now_ns),
        )
        for worker in local.order.workers
        if (word := words.get(worker.local_rank)) is not None and word.sequence
    )


def _quiet(word: Progress | None, now_ns: int) -> bool:
    """No word, none written yet, or one that has not changed for a while."""
    return word is None or not word.sequence or word.age_seconds(now_ns) >= _QUIET_SECONDS


def _phase(word: Progress, now_ns: int) -> str:
    """The phase that the worker published; of one that went quiet, whether its process runs at all (SIGSTOP, ptrace, gone)."""
    if word.age_seconds(now_ns) < _STILL_SECONDS or not word.pid:
        return word.phase
    return _NOT_RUNNING.get(process_state(word.pid), word.phase)
