"""How runs and hosts live and die, and what the leader hears of it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from regrow import wire
from regrow.supervisor.core import events as e
from regrow.supervisor.sim.models import JOB
from regrow.supervisor.sim.nodes import Node

if TYPE_CHECKING:
    from regrow.supervisor.sim.training import Run, Save
    from regrow.supervisor.sim.world import World

LOST_PEER = "RuntimeError: NCCL error: ncclRemoteError: peer closed"
_RESTORE_FAILED = 75
_SHOWN_RANKS = 8
_PEERS = 2
"""Peers that report the loss: the rest would say the same."""
_REBOOT_SECONDS = 5.0


class Life:
    """Acts on the world; every fact goes to the leader by `World.tell` or its edge."""

    def __init__(self, world: World) -> None:
        self._world = world

    # --- checkpoints

    def settle(self) -> None:
        """Bring saves that are due by now to the store."""
        world = self._world
        for run in list(world.unsettled):
            run.list_saves(world.now)
            while run.saves and run.saves[0].due_at <= world.now:
                if not self._commit(run, run.saves[0]):
                    break
                run.saves.popleft()
            if run is not world.run and not run.saves:
                world.unsettled.remove(run)

    def settle_and_tell(self) -> None:
        """A save that somebody waits for is due."""
        self.settle()
        self._world.leader.post()

    def _commit(self, run: Run, save: Save) -> bool:
        """One save's end. False: it waits for the store."""
        world = self._world
        if world.in_outage(save.due_at):
            if save.asked:
                node = world.nodes[run.spec.committing_node]
                world.tell(
                    node,
                    lambda at: e.CheckpointMoved(
                        at=at, job=JOB, generation=run.number, step=save.step, state="failed", node=node.name, reason="no space"
                    ),
                )
            return True
        if not world.store.up:
            return False
        if not world.nodes[run.spec.committing_node].up:
            return True
        clean = run.diverged_at is None or save.step < run.diverged_at
        at = max(save.due_at, world.store.up_since)
        if world.store.commit(at, run.spec, run.revision, save.step, world.setup.keep, clean=clean) and not clean:
            world.store.corrupt.add(save.step)
        return True

    # --- a run's life

    def phase_passed(self, run: Run, phase: str) -> None:
        """Members tell that they passed a phase; in large clusters one of them for all."""
        world = self._world
        if run is not world.run:
            return
        told = ("fenced", "stopped") if phase == "stopped" else (phase,)
        nodes, number = world.nodes, run.number
        names = (name for name in reversed(run.spec.nodes) if nodes[name].running == number)
        for name in itertools.islice(names, 1) if world.setup.lean else reversed(list(names)):
            node = world.nodes[name]
            node.told = (*node.told, *told)
            for each in told:
                world.tell(
                    node,
                    lambda at, name=name, each=each: e.MemberPhase(at=at, node=name, job=JOB, generation=run.number, phase=each),
                    late=True,
                )

    def training_began(self, run: Run) -> None:
        """Restored and warm: what was beyond the restore point is lost work."""
        world = self._world
        world.accounts.rolled_back(run.base)
        world.accounts.cause = "none"
        world.unsettled.append(run)
        world.num_poisoned += run.base in world.store.corrupt

    def first_step(self, run: Run) -> None:
        """The leader hears of the first step at once, of later ones when it matters."""
        if run is self._world.run and run.state == "training":
            self._world.leader.post()

    def restore_fails(self, run: Run) -> None:
        """A rank finds the restore point damaged."""
        world = self._world
        name = run.spec.nodes[-1]
        self.break_run(run)
        world.tell(
            world.nodes[name],
            lambda at: e.RestoreWasRefused(
                at=at,
                node=name,
                job=JOB,
                generation=run.number,
                rank=run.spec.world_size - 1,
                step=run.base,
                problem="a block's digest is wrong",
            ),
        )
        self.worker_exit(world.nodes[name], exit_code=_RESTORE_FAILED, error="")

    def sdc_seen(self, run: Run, node: Node) -> None:
        """The digests say so. The last vote before was unanimous."""
        world = self._world
        if run is not world.run or run.state != "training" or run.diverged_at is None:
            return
        self.settle()
        done = run.completed(world.now)
        clean = [
            record.step for record in world.store.checkpoints.values() if record.generation == run.number and record.step < run.diverged_at
        ]
        rank = next((worker.rank for worker in world.store.members.get(node.name, ())), 0)
        if (clean and not world.setup.lean) or clean:
            votes = dict.fromkeys(range(run.spec.world_size), "aa")
            world.leader.post(e.DigestsReported(at=world.now, job=JOB, generation=run.number, step=max(clean), digests=votes))
        world.tell(
            node, lambda at: e.AtRestMismatch(at=at, job=JOB, generation=run.number, rank=rank, step=done, tensor="optimizer.exp_avg")
        )

    def break_run(self, run: Run, *, lost_shards: bool = False, stuck: int = -1) -> None:
        """Nothing moves any more: a member is gone, a worker ended, a link is down, or a rank hangs."""
        world = self._world
        if run.state in ("broken", "over"):
            return
        self.settle()
        run.stop("broken", lost_shards=lost_shards)
        run.stuck = stuck
        for save in run.saves:
            world.loop.at(save.due_at, self.settle)
        self.watch_progress(run)

    def watch_progress(self, run: Run) -> None:
        """The leader's stall detector looks at this run."""
        self._world.leader.watch_progress(run)

    def words(self, run: Run) -> tuple[wire.RankProgress, ...]:
        """Progress words that the leader has of a run that stands: a few ranks, with the one that is behind."""
        done = run.completed(self._world.now)
        ranks = list(range(min(_SHOWN_RANKS, run.spec.world_size)))
        if run.stuck >= 0 and run.stuck not in ranks:
            ranks[-1] = run.stuck
        phase = "step" if run.paces is not None else "rendezvous"
        return tuple(
            wire.RankProgress(
                rank=rank,
                started_step=done + (rank != run.stuck),
                applied_step=done,
                phase="stopped" if run.halted and rank == run.stuck else phase,
                age_seconds=self._world.now - run.changed_at,
            )
            for rank in ranks
        )

    # --- workers

    def worker_exit(self, node: Node, *, exit_code: int = 0, signal: int = 0, error: str = "") -> None:
        """A worker of a node ends by itself."""
        world = self._world
        run = world.run
        if run is None or node.running != run.number or not (node.up and node.agent):
            return
        known = {found.rank for found in node.exits}
        rank = next((worker.rank for worker in world.store.members.get(node.name, ()) if worker.rank not in known), None)
        if rank is None:
            return
        found = wire.WorkerExit(
            rank=rank, local_rank=0, pid=1, exit_code=exit_code, signal=signal, error=error, last_step=run.completed(world.now)
        )
        node.exits = (*node.exits, found)
        world.tell(node, lambda at: e.WorkersExited(at=at, node=node.name, job=JOB, generation=run.number, exits=(found,)))

    def peers_fail(self, run: Run, delay: str) -> None:
        """Workers of other nodes lose their peer and end."""
        world = self._world
        names = [name for name in run.spec.nodes if world.nodes[name].running == run.number and world.nodes[name].up]
        for name in world.rng.sample(names, min(_PEERS, len(names))):
            node = world.nodes[name]
            world.loop.after(world.draw(delay), lambda node=node: self._lost_peer(run, node))

    def _lost_peer(self, run: Run, node: Node) -> None:
        if node.running == run.number and run is self._world.run and run.state == "broken":
            self.worker_exit(node, exit_code=1, error=LOST_PEER)

    # --- hosts

    def current(self, node: Node) -> Run | None:
        """The run that this node's workers belong to, when it is the current one and not over."""
        run = self._world.run
        if run is None or node.running != run.number or run.state in ("broken", "over"):
            return None
        return run

    def host_down(self, node: Node) -> None:
        """Power off, kernel panic: nothing says goodbye."""
        world = self._world
        if not node.up:
            return
        self.settle()  # what it committed while it lived
        run = self.current(node)
        waits = world.run if world.run is not None and node.name in world.run.waiting else None
        node.up = node.agent = False
        node.running, node.exits, node.told = 0, (), ()
        world.falls_silent(node)
        if run is not None:
            self.break_run(run, lost_shards=True)
            self.peers_fail(run, "peer_error")
        elif waits is not None and waits.state in ("ordered", "starting"):
            self.watch_progress(waits)

    def host_back(self, node: Node, *, replaced: bool) -> None:
        """It booted again, or another one has its name."""
        node.reboot(replaced=replaced)
        self._world.cut.discard(node.name)
        self._world.greet(node)

    def restart_host(self, node: Node, *, replaced: bool) -> None:
        """An orderly restart at the end of a repair. A member takes its run with it."""
        if not node.up:
            return
        self.processes_end(node, "host restarts")
        self._world.loop.after(_REBOOT_SECONDS, lambda: self.host_back(node, replaced=replaced))

    def leaves(self, node: Node) -> None:
        """The leader released it, or its notice is over."""
        if node.up and node.leaving:
            self.processes_end(node, f"left: {node.leaving}")

    def processes_end(self, node: Node, reason: str) -> None:
        """Agent, workers and writer of a node end together; the kernel closes their connections, so that peers see it at once."""
        self.settle()
        self._world.disconnect(node, reason)
        run = self.current(node)
        node.up = node.agent = False
        node.running, node.exits, node.told = 0, (), ()
        if run is not None:
            self.break_run(run, lost_shards=True)
            self.peers_fail(run, "exit_report")

    def finish(self) -> None:
        """The horizon: account for the time up to here."""
        world = self._world
        self.settle()
        for run in world.live:
            run.finish()
        if not world.training:
            run = world.run
            starting = run is not None and run.state == "starting" and not world.parked
            world.accounts.lose(run.phase if run is not None and starting else "waiting" if world.parked else "detect", world.now)
