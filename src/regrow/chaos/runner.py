"""Runs a plan on a local cluster: injects, watches what the supervisor says, and keeps the ground truth."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from regrow import wire
from regrow.agent.health.fake_nvml.control import FakeNvml
from regrow.chaos.cluster import ChaosCluster
from regrow.chaos.injector import Injector
from regrow.chaos.kinds import Kind
from regrow.chaos.plan import Fault, Plan
from regrow.chaos.score import Card, Shot, card
from regrow.chaos.surroundings import Surroundings
from regrow.errors import ConfigurationError, OperationalError
from regrow.local.cluster import ClusterPlan
from regrow.local.launch import Follower, submit
from regrow.local.live import LiveView
from regrow.supervisor.stats.source import FAULTS, InjectedFault

JOB = "chaos"
_SETTLE_SECONDS = 180.0
_RECOVER_SECONDS = 180.0
_STOP_SECONDS = 20.0
_LOOK_SECONDS = 0.2
_WARM_UP_STEPS = 70
"""A little more than the straggler detector needs in a generation."""


class Runner:
    """One plan, one cluster, one job."""

    def __init__(self, plan: Plan, root: Path, *, plain: bool = True, stay: bool = False) -> None:
        self._plan = plan
        self._stay = stay
        self._root = root.absolute()
        self._plain = plain
        self._random = random.Random(plan.seed)  # noqa: S311 - repeatable, not secret
        self._surroundings = Surroundings(self._root)
        self._cluster = ChaosCluster(
            ClusterPlan(
                root=self._root,
                nodes=plan.cluster.nodes,
                slots=plan.cluster.slots,
                fake_nvml=True,
                env=(("REGROW_AGENT_KERNEL_LOG", str(self._surroundings.kernel_log)),),
            )
        )
        self._injector = Injector(self._cluster, self._surroundings)
        self._shots: list[Shot] = []
        self._seen: dict[str, float] = {}

    async def run(self) -> Card:
        """Run to the end of the plan, with `stay` until SIGINT or SIGTERM, then stop everything.

        Raises:
            OperationalError: the cluster or the job did not come up, or the job ended before the plan.
        """
        self._prepare()
        with LiveView(title=f"chaos {self._plan.name}", plain=self._plain) as view:
            async with self._cluster as cluster:
                view.at(cluster.supervisor_address())
                await submit(cluster.api, self._specification())
                follower = Follower(cluster.api, JOB, view, period_seconds=0.1, seldom_seconds=0.5)
                following = asyncio.create_task(follower.follow())
                began = time.monotonic()
                try:
                    for number, fault in enumerate(self._plan.fault, 1):
                        view.note(f"fault {number} of {len(self._plan.fault)}: {fault.kind}", "bold red")
                        await self._shoot(fault, follower)
                    verdict = await self._judge(cluster, time.monotonic() - began)
                    if self._stay:
                        await _until_interrupted(view)
                    await self._end(cluster, following)
                    return verdict
                finally:
                    self._injector.heal()
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)

    async def _end(self, cluster: ChaosCluster, following: asyncio.Task[dict[str, Any]]) -> None:
        """Stop the job on order: nodes that go while it runs would be one more failure to whoever watches."""
        await cluster.api.post(f"/v1/jobs/{JOB}/stop")
        await asyncio.wait((following,), timeout=_STOP_SECONDS)

    # --- before

    def _prepare(self) -> None:
        if self._root.exists() and any(self._root.iterdir()):
            raise ConfigurationError("the folder is not empty", where=str(self._root), hint="give another --run-dir")
        self._surroundings.prepare()
        for number, node in enumerate(self._cluster.plan.node_names()):
            state = self._cluster.nvml_state(node)
            state.parent.mkdir(parents=True, exist_ok=True)
            fake = FakeNvml(state)
            fake.write(devices=self._plan.cluster.slots, node=number)
            for index in range(self._plan.cluster.slots):  # all nodes read one kernel log: an address names one GPU
                fake.set_device(index, pci_bus_id=f"{number + 1:08X}:{index + 1:02X}:00.0")

    def _specification(self) -> wire.JobSpec:
        job = self._plan.job
        if job.script:
            argv = (str(Path(job.script).absolute()), *job.args)
        elif job.kind == "small":
            argv = (str(Path(__file__).with_name("job.py")), "--steps", str(job.steps * 10), *job.args)
        else:
            import regrow.demo

            script = Path(regrow.demo.__file__).with_name("train_gpt.py")
            argv = (str(script), "--steps", str(job.steps), "--seed", str(self._plan.seed), "--layers", "2", "--seq", "32", *job.args)
        return wire.JobSpec(
            job=JOB,
            argv=argv,
            cwd=str(self._root),
            env={"REGROW_CHAOS": "1", "OMP_NUM_THREADS": "1", "REGROW_STEP_LOG": str(self._root / "steps")},
            nproc_per_node=self._plan.cluster.slots,
            min_nodes=1,
            max_nodes=self._plan.cluster.nodes,
            global_batch=job.global_batch,
            micro_batch=job.micro_batch,
            seed=self._plan.seed,
            checkpoint=wire.CheckpointPolicy(
                path=str(self._root / "checkpoints"), max_interval_seconds=2.0 if job.kind == "small" else 8.0, prior_failures_per_hour=60.0
            ),
            nice=10,
            hang_seconds=job.hang_seconds,
            hang_phase_seconds=job.hang_phase_seconds,
        )

    # --- one fault

    async def _shoot(self, fault: Fault, follower: Follower) -> None:
        try:
            await self._settled(follower, _WARM_UP_STEPS if fault.truth.straggler else 2)
        except OperationalError as error:  # the card says so, and what was seen before is not lost
            never = Shot(kind=fault.kind, at=time.monotonic(), deadline_seconds=0.0, injected=False, detail=str(error), truth=fault.truth)
            self._shots.append(never)
            return
        node, rank = self._target(fault, follower.document)
        known = self._incident_ids(follower.document)
        step = int(follower.document.get("step") or 0)
        at = time.monotonic()
        shot = Shot(
            kind=fault.kind, node=node, rank=rank, at=at, deadline_seconds=fault.deadline_seconds, truth=fault.truth, detail=fault.words
        )
        try:
            if fault.kind == "checkpoint_flip":
                await self._reached(follower, lambda _: self._surroundings.num_checkpoints() >= 2, _SETTLE_SECONDS)
                self._surroundings.flip_newest_checkpoint()
            await self._injector.inject(fault, node, rank)
        except OperationalError as error:
            self._shots.append(msgspec.structs.replace(shot, injected=False, detail=str(error)))
            return
        watching = asyncio.create_task(self._slow_rank(shot)) if fault.truth.straggler else None
        seen = await self._first_incident(fault.truth, fault, follower, known)
        if watching is not None:
            shot = await watching
        self._injector.heal()
        if seen is not None:
            shot = msgspec.structs.replace(shot, seen_at=self._seen[seen["id"]], incident=seen)
            went_on = await self._reached(follower, lambda now: _recovered(now, seen["id"]), _RECOVER_SECONDS)
        else:
            went_on = await self._reached(follower, lambda now: int(now.get("step") or 0) >= step + 2, _RECOVER_SECONDS)
        shot = msgspec.structs.replace(shot, incident=self._now(follower, shot))
        await self._injector.undo(fault, node)
        self._shots.append(msgspec.structs.replace(shot, went_on=went_on))

    @staticmethod
    def _now(follower: Follower, shot: Shot) -> dict[str, Any] | None:
        """The incident as it is now: a leader that comes later does not know those of an earlier term."""
        if shot.incident is None:
            return None
        return next((one for one in follower.document.get("incidents", []) if one["id"] == shot.incident["id"]), shot.incident)

    async def _slow_rank(self, shot: Shot) -> Shot:
        """Whom the supervisor names as slow, until the deadline."""
        while (now := time.monotonic()) < shot.at + shot.deadline_seconds:
            rank = await self._cluster.straggler(JOB)
            if rank is not None:
                return msgspec.structs.replace(shot, slow_rank=rank, seen_at=now)
            await asyncio.sleep(_LOOK_SECONDS)
        return shot

    async def _settled(self, follower: Follower, num_steps: int) -> None:
        generation, step = follower.document.get("generation"), int(follower.document.get("step") or 0)

        def ready(now: dict[str, Any]) -> bool:
            further = int(now.get("step") or 0) >= step + num_steps or (num_steps <= 2 and now.get("generation") != generation)
            saved = (now.get("checkpoint") or {}).get("step") is not None
            return now.get("state") == "running" and saved and further and not _open(now)

        await follower.until(ready, "a running job with a committed checkpoint", _SETTLE_SECONDS)

    def _target(self, fault: Fault, document: dict[str, Any]) -> tuple[str, int]:
        members = {entry["node"]: list(entry["ranks"]) for entry in document.get("nodes", []) if entry.get("ranks")}
        if fault.truth.level == "cluster":
            return "", -1
        if isinstance(fault.rank, int) and fault.truth.level == "worker":
            node = next((name for name, ranks in members.items() if fault.rank in ranks), "")
            return node, fault.rank
        node = self._random.choice(sorted(members)) if fault.node == "any" else fault.node
        if fault.truth.level == "node":
            return node, -1
        return node, self._random.choice(members.get(node) or [-1])

    async def _first_incident(self, truth: Kind, fault: Fault, follower: Follower, known: set[str]) -> dict[str, Any] | None:
        seconds = fault.deadline_seconds if truth.incidents else fault.quiet_seconds

        def fresh(now: dict[str, Any]) -> list[dict[str, Any]]:
            return [one for one in now.get("incidents", []) if one["id"] not in known]

        if not await self._reached(follower, lambda now: bool(fresh(now)), seconds):
            return None
        first = fresh(follower.document)[0]
        self._seen[first["id"]] = time.monotonic()
        return first

    async def _reached(self, follower: Follower, condition: Callable[[dict[str, Any]], bool], seconds: float) -> bool:
        with contextlib.suppress(OperationalError):
            await follower.until(condition, "it", seconds)
            return True
        return False

    # --- after

    async def _judge(self, cluster: ChaosCluster, seconds: float) -> Card:
        document = await cluster.api.get(f"/v1/jobs/{JOB}")
        latest = {one["id"]: one for one in document.get("incidents", [])}
        shots = [
            msgspec.structs.replace(shot, incident=latest.get(shot.incident["id"], shot.incident)) if shot.incident else shot
            for shot in self._shots
        ]
        self._write_truth(shots)
        ours = {shot.incident["id"] for shot in shots if shot.incident}
        stray = len(set(latest) - ours)
        return card(shots, plan=self._plan.name, seed=self._plan.seed, stray_incidents=stray, observed_seconds=seconds)

    def _write_truth(self, shots: list[Shot]) -> None:
        """What was injected, when by the wall clock, and the incident that it led to: `regrow report` counts detection from there."""
        ahead = time.time() - time.monotonic()
        told = [
            InjectedFault(kind=shot.kind, node=shot.node, rank=shot.rank, at=shot.at + ahead, incident=(shot.incident or {}).get("id", ""))
            for shot in shots
            if shot.injected
        ]
        (self._root / FAULTS).write_bytes(msgspec.json.encode(told))

    @staticmethod
    def _incident_ids(document: dict[str, Any]) -> set[str]:
        return {one["id"] for one in document.get("incidents", [])}


async def _until_interrupted(view: LiveView) -> None:
    """The plan is over and its cluster can be looked at."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    try:
        view.note("the plan is over; the cluster stays until Ctrl-C", "bold")
        await asked.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _open(document: dict[str, Any]) -> bool:
    return any(not one.get("recovered") and not one.get("closed") for one in document.get("incidents", []))


def _recovered(document: dict[str, Any], incident: str) -> bool:
    return any(one["id"] == incident and one.get("recovered") for one in document.get("incidents", [])) and not _open(document)
