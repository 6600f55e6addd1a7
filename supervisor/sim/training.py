"""One generation as it really runs: its start, its steps and saves, how it breaks. Ground truth; the leader is told parts of it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from regrow import wire
from regrow.ckpt.interval import Controller, Measured
from regrow.supervisor.sim.pace import Pace, Paces

if TYPE_CHECKING:
    from regrow.supervisor.sim.world import World

STARTING = ("stop", "start", "rendezvous", "restore", "first_step")
"""Phases of a start, in order; names as in telemetry.PHASES."""
TOLD_AS = {"stop": "stopped", "start": "started", "rendezvous": "rendezvous", "restore": "restored"}
"""What agents call the end of each."""


class Save(msgspec.Struct):
    """A snapshot on its way to being committed."""

    step: int
    snapshot_at: float
    due_at: float
    """When its commit reaches the store if nothing is in the way."""
    asked: bool = False


class Run:
    """A generation from its record to its end."""

    def __init__(self, world: World, spec: wire.GenerationSpec, revision: int) -> None:
        self.world = world
        self.spec = spec
        self.number = spec.generation
        self.members = frozenset(spec.nodes)
        self.revision = revision
        self.base = spec.restore.step if spec.restore is not None else 0
        self.state = "ordered"
        """ordered, starting, training, broken (nothing moves, workers may be there), over (a later one took its place)."""
        self.phase = "stop"
        """The phase of the start that it is in."""
        self.waiting = set(spec.nodes)
        """Members that have not begun to start."""
        self.changed_at = world.now
        """Last change of any progress word."""
        self.frozen: int | None = None
        """Highest completed step, once it is broken or over."""
        self.rate = spec.failures_per_second
        self.stuck = -1
        """Rank that hangs; -1: none."""
        self.halted = False
        """Its process does not run, and its agent says so."""
        self.diverged_at: int | None = None
        """First step whose state is wrong on one replica."""
        self.paces: Paces | None = None
        self.saves: deque[Save] = deque()
        self._planned: list[Save] = []
        """Saves at boundaries to come."""
        self._listed = self.base
        """Saves up to this step are in `saves` or settled."""
        self._write = world.setup.save_seconds * world.draw("write_noise") + world.draw("commit")
        self._step_seconds = world.workload.seconds(spec.mesh)

    # --- start

    def joined(self, nodes: list[str]) -> None:
        """These members obeyed the order to start."""
        self.waiting.difference_update(nodes)
        self.changed_at = self.world.now
        if self.state == "ordered":
            self.state = "starting"
            self.world.loop.after(self.world.phase_seconds("stop"), lambda: self._passed("stop"))

    def _passed(self, phase: str) -> None:
        """A phase of the start is over on all members that are there."""
        if self.state != "starting" or self.phase != phase:
            return
        if self.waiting and phase != "stop":
            # a member is missing: the others wait in the rendezvous for it
            self.world.loop.after(0.5, lambda: self._passed(phase))
            return
        world = self.world
        world.accounts.lose(phase, world.now)
        self.changed_at = world.now
        if phase == "restore" and self.base in world.store.damaged:
            world.life.restore_fails(self)
            return
        if phase in TOLD_AS:
            world.life.phase_passed(self, TOLD_AS[phase])
        if phase == "first_step":
            self._train()
            return
        self.phase = STARTING[STARTING.index(phase) + 1]
        following = self.phase
        world.loop.after(world.phase_seconds(following), lambda: self._passed(following))
        world.life.watch_progress(self)

    def _train(self) -> None:
        self.state = "training"
        every = self._every()
        first = Pace(
            start=self.world.now,
            base=self.base,
            seconds=self._step_seconds,
            stall=self.world.setup.stall_seconds,
            every=every,
            next_save=self.base + every,
        )
        self.paces = Paces(first)
        self.world.life.training_began(self)
        self.world.loop.at(first.done_at(self.base + 1), lambda: self.world.life.first_step(self))

    def _every(self) -> int:
        setup = self.world.setup
        measured = Measured(
            stall_seconds=setup.stall_seconds,
            write_seconds=setup.save_seconds,
            restore_seconds=self.world.phase_seconds_at("restore"),
            step_seconds=self._step_seconds,
        )
        controller = Controller.of_policy(self.world.workload.spec.checkpoint)
        if setup.interval_seconds > 0:
            return max(1, controller.apply(setup.interval_seconds, measured, self.rate).steps)
        if setup.stall_seconds == 0:
            return max(1, controller.apply(0.0, measured, self.rate).steps)
        return max(1, controller.choose_at(measured, self.rate).steps)

    # --- steps and saves

    def completed(self, now: float) -> int:
        """Highest step that every rank has applied."""
        if self.frozen is not None:
            return self.frozen
        return self.paces.completed(now) if self.paces is not None else self.base

    def step_done_at(self, step: int) -> float:
        """When a step was (will be) completed."""
        assert self.paces is not None
        return self.paces.done_at(step)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step on this mesh."""
        return self._step_seconds

    def new_rate(self, rate: float) -> None:
        """The leader told another failure rate: the interval may change at the next boundary."""
        self.rate = rate
        every = self._every()
        if self.state == "training" and self.paces is not None and every != self.paces.last.every:
            self._change(every=every, save=False)

    def ask_save(self) -> float | None:
        """Save at the boundary after next (ranks agree one step ahead). Returns when its commit is due; None: it cannot."""
        if self.state != "training" or self.paces is None:
            return None
        return self._change(every=self.paces.last.every, save=True)

    def _change(self, *, every: int, save: bool) -> float:
        assert self.paces is not None
        boundary, start, saved = self.paces.change(self.world.now, lag=1, every=every, save=save)
        due = start + self._write
        if saved:
            self._planned.append(Save(boundary, start, due, save))
        return due

    def list_saves(self, until: float) -> None:
        """Put snapshots up to `until` on their way, in order of their steps."""
        if self.paces is None or self.frozen is not None:
            return
        found = [Save(step, at, at + self._write) for step, at in self.paces.saves(self._listed, until)]
        found += [save for save in self._planned if save.snapshot_at <= until]
        self._planned = [save for save in self._planned if save.snapshot_at > until]
        for save in sorted(found, key=lambda save: save.step):
            if save.step > self._listed:
                self.saves.append(save)
                self._listed = save.step

    # --- end

    def stop(self, state: str, *, lost_shards: bool = False) -> None:
        """Nothing moves any more from now on.

        Args:
            state: broken or over.
            lost_shards: a host is gone with what its writer had not written: saves in flight are void.
        """
        now = self.world.now
        if self.state in ("broken", "over"):
            self.state = "over" if state == "over" else self.state
            return
        self.world.live.remove(self)
        if self.state == "training" and self.paces is not None:
            self.list_saves(now)
            self._account(now)
            self.frozen = self.paces.completed(now)
            self.changed_at = self.paces.done_at(self.frozen)
        else:
            if self.state == "starting":
                self.world.accounts.lose(self.phase, now)
            self.frozen = self.base
        self.state = state
        if lost_shards:
            self.saves.clear()

    def _account(self, now: float) -> None:
        assert self.paces is not None
        self.world.accounts.trained(
            first=self.base,
            last=self.paces.completed(now),
            seconds=self._step_seconds,
            stalls=self.paces.stalls_until(now),
            until=now,
        )

    def finish(self) -> None:
        """The simulation ends here."""
        if self.state == "training":
            self._account(self.world.now)
